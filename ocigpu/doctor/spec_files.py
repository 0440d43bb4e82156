"""CDI specifications of the host under examination, read and checked."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from ocigpu.cdi.check import Problem, check_spec
from ocigpu.cdi.document import find_lines, read_document
from ocigpu.core.errors import CdiError, printable
from ocigpu.doctor.files import RootFiles
from ocigpu.gpus.fingerprint import ANNOTATION
from ocigpu.system.files import why_untrusted

EXTENSIONS = (".json", ".yaml")
MAX_FILES = 64
MAX_WRONG = 4
DEAD_LINK = "a link to nothing"
_LACKS = {
    "empty-edits": "{where} is missing or empty: it holds deviceNodes, mounts, env or hooks",
    "no-devices": "devices is missing or empty: a list of objects with name and containerEdits",
}


class SpecFile(NamedTuple):
    """One specification: ``path`` on the host, ``directory`` its place in the list; ``problem`` "" when readable.

    ``wrong``: the errors to correct, a sentence with its place each.  ``claimed``: the kind in an unusable file, "" if
    unknown.
    """

    path: str
    directory: int
    spec: dict[str, Any]
    problem: str = ""
    wrong: tuple[str, ...] = ()
    claimed: str = ""

    @property
    def kind(self) -> str:
        return str(self.spec.get("kind", ""))

    @property
    def is_gpu(self) -> bool:
        """Whether its devices are NVIDIA GPUs."""
        return self.kind == "nvidia.com/gpu"

    @property
    def is_ours(self) -> bool:
        return ANNOTATION in self.spec.get("annotations", {})


class Specs(NamedTuple):
    """Directories that are searched, lowest priority first, and the specifications in them."""

    directories: tuple[str, ...]
    files: tuple[SpecFile, ...]

    @property
    def usable(self) -> tuple[SpecFile, ...]:
        return tuple(file for file in self.files if not file.problem)

    @property
    def gpus(self) -> tuple[SpecFile, ...]:
        return tuple(file for file in self.usable if file.is_gpu)


def read_specs(files: RootFiles, named: Iterable[str]) -> Specs:
    """Return the specifications of the directories that the settings and engines name, lowest priority first.

    /var/run is a link to /run: a directory that was named twice counts once.  Raises OSError for a directory that
    cannot be read.
    """
    directories: dict[str, str] = {}
    for directory in named:
        directories.setdefault(files.find(directory) or directory, directory)
    found = []
    for number, directory in enumerate(directories.values()):
        names = [name for name in files.names(directory) if name.endswith(EXTENSIONS)]
        found += [_read(files, f"{directory}/{name}", number) for name in names[:MAX_FILES]]
    return Specs(tuple(directories.values()), tuple(found))


def _read(files: RootFiles, path: str, directory: int) -> SpecFile:
    found = files.find(path)
    if not found:
        return SpecFile(path, directory, {}, DEAD_LINK)
    try:
        data, state = read_document(found)
    except CdiError as failure:
        return SpecFile(path, directory, {}, failure.message.removeprefix(f"read {printable(found, 300)}: "))
    if problem := why_untrusted(state.st_uid, state.st_mode):
        return SpecFile(path, directory, {}, problem)
    checked = check_spec(data)
    if checked.errors:
        wrong = _describe_wrong(found, checked.errors[:MAX_WRONG])
        claimed = str(data.get("kind", "")) if isinstance(data, dict) else ""
        return SpecFile(path, directory, {}, checked.errors[0].text, wrong, claimed)
    return SpecFile(path, directory, checked.spec)


def _describe_wrong(path: str, errors: tuple[Problem, ...]) -> tuple[str, ...]:
    """Return the errors to correct in a file, with the line if known."""
    lines = find_lines(path, [error.where for error in errors])
    texts = []
    for error in errors:
        text = _LACKS.get(error.rule, "").format(where=error.where) or error.text
        texts.append(f"line {lines[error.where]}: {text}" if error.where in lines else text)
    return tuple(texts)
