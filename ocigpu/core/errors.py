"""Errors with stable codes.

Shown to a user as two lines at most::

    ocigpu-hook: OCIGPU-DEV-1: no such device "9": GPU indices are 0-7
    hint: ...

Every code is listed in :data:`ocigpu.core.codes.CODES` with its cause and fix.
"""

import errno
import os

from ocigpu import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAKE_NODES = "ocigpu system create-device-nodes"
"""The command that hints suggest for device nodes that the host lacks."""


class OcigpuError(Exception):
    """An error for a user: ``code`` of :data:`ocigpu.core.codes.CODES`, ``message`` of one line."""

    exit_code = 1

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self._hint = hint

    @property
    def hint(self) -> str:
        """What to do about it: the error's own hint, else the code's fix; "" for none."""
        if self._hint is not None:
            return self._hint
        from ocigpu.core.codes import CODES

        return CODES[self.code].fix

    @property
    def line(self) -> str:
        """Code and message."""
        return f"{self.code}: {self.message}"

    def render(self, program: str) -> str:
        """Return the one or two lines shown on standard error, without a final newline."""
        line = f"{program}: {self.code}: {printable(self.message)}"
        return f"{line}\nhint: {self.hint}" if self.hint else line


class UsageError(OcigpuError):
    """A command line of ours that cannot be understood; exit status 2."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__("OCIGPU-ARG-1", message, hint)


class SettingsError(OcigpuError):
    """The operator must act: settings."""


class SpecError(OcigpuError):
    """The engine must act: bundle, config.json or OCI state."""


class RequestError(OcigpuError):
    """The image or pod requests something impossible."""


class HostError(OcigpuError):
    """The host lacks something: driver, node, file."""


class CdiError(OcigpuError):
    """A CDI specification, or a device named by one, cannot be used."""


class ApplyError(OcigpuError):
    """The kernel refused an action; ``errno`` is its number or 0."""

    def __init__(self, code: str, message: str, hint: str | None = None, errno: int = 0) -> None:
        super().__init__(code, message, hint)
        self.errno = errno


REFUSALS = {
    errno.EAGAIN: "start a process",
    errno.ENOMEM: "get memory",
    errno.EMFILE: "open a file",
    errno.ENFILE: "open a file",
    errno.ENOSPC: "write",
    errno.EDQUOT: "write",
    errno.EROFS: "write",
    errno.EIO: "read or write",
}
"""What the system refuses with these error numbers, in code that does not handle them."""

PARTS = {
    "cli": (
        "pydantic",
        "pydantic_core",
        "typer",
        "click",
        "rich",
        "yaml",
        "pynvml",
        "pyroute2",
        "prctl",
        "tomlkit",
        "h11",
    ),
    "kubernetes": ("grpc", "google", "lightkube"),
    "tenants": ("starlette", "uvicorn", "jwt", "cryptography", "sqlalchemy", "alembic"),
    "postgresql": ("psycopg",),
}
"""Parts of an installation, which are extras of the wheel, and their modules: pyproject.toml."""

UNUSABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The errors that reading a document of a closed library, an operator or other code may raise."""


def suggest(word: str, names: "Iterable[str]", most: int = 1, likeness: float = 0.6) -> str:
    """Return "did you mean ...?" with the names most like a word, at most so many; "" when none is."""
    near = find_near(word, names, most, likeness)
    return f"did you mean {' or '.join(near)}?" if near else ""


def find_near(word: str, names: "Iterable[str]", most: int = 1, likeness: float = 0.6) -> list[str]:
    """Return the names most like a word, at most so many, best first, else those with it in them.

    ``likeness``: 0 to 1, that of difflib.
    """
    from difflib import get_close_matches  # 2 ms, and only for refused names

    known = list(names)
    near = get_close_matches(word[:80], known, most, likeness)
    return near or [name for name in known if len(word) > 2 and word in name][:most]


def count(number: int, noun: str) -> str:
    """Return e.g. "1 GPU", "2 GPUs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def how_to_install(part: str) -> str:
    """Return how to install a part into this installation.

    Never by a name on a package index: there it is not ours.
    """
    place = os.path.abspath(__file__)
    if place.startswith("/usr/lib/ocigpu/"):
        package = "ocigpu" if part == "cli" else "ocigpu-kubernetes"
        more = ", and the distribution's libpq (Debian: libpq5)" if part == "postgresql" else ""
        return f"Install the package {package} of the same release, from its file{more}."
    if "/lib/ocigpu/versions/" in place:
        more = "" if part == "cli" else " WITH_KUBERNETES=1"
        return f"In a clone of this version: make install{more}."
    wheel = find_wheel(f"{os.path.dirname(os.path.dirname(os.path.dirname(place)))}/ocigpu-{__version__}.dist-info")
    if wheel:
        return f"Install it again with that part: pip install '{wheel}[{part}]'"
    wheel = f"./ocigpu-{__version__}-py3-none-any.whl"
    return f"Where the file of this release's wheel is, install it with that part: pip install '{wheel}[{part}]'"


def find_wheel(about: str) -> str:
    """Return the file or directory that pip installed from, by its record (PEP 610), "" if it is not there now.

    ``about``: the directory of that record, direct_url.json.
    """
    import json

    try:
        with open(f"{about}/direct_url.json", encoding="utf-8") as file:
            scheme, _, path = json.load(file)["url"].partition("://")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    plain = not {"%", "'"} & set(path)  # pip writes "%20" for a space
    return path if scheme == "file" and plain and os.path.exists(path) else ""


def as_own_error(error: BaseException) -> OcigpuError:
    """Return an unexpected error as one of ours.

    OCIGPU-INT-4 when the machine is out of something or a disk fails, OCIGPU-PART-1 when a part was not installed,
    OCIGPU-INT-3 when something of Python's own is missing, else OCIGPU-INT-1, a defect.
    """
    if isinstance(error, OcigpuError):
        return error
    if isinstance(error, MemoryError):
        error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if isinstance(error, OSError) and error.errno in REFUSALS:
        where = f" {error.filename}" if isinstance(error.filename, str) else ""
        return OcigpuError("OCIGPU-INT-4", f"{REFUSALS[error.errno]}{where}: {error.strerror}")
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("ocigpu"):
        part = next((part for part, names in PARTS.items() if error.name.partition(".")[0] in names), "")
        if part:
            what = f"{part}: the module {error.name} is not installed"
            return OcigpuError("OCIGPU-PART-1", what, how_to_install(part))
        return OcigpuError("OCIGPU-INT-3", f"the Python module {error.name} is not installed")
    return OcigpuError("OCIGPU-INT-1", f"{type(error).__name__}: {error}")


class OsErrorAs:
    """A block whose OSErrors become errors of ours: "WHAT: No such file or directory".

    ``with OsErrorAs(HostError, "OCIGPU-MIG-3", f"write {path}"): ...``; ``hint`` as of the error.
    """

    def __init__(self, kind: type[OcigpuError], code: str, what: str, hint: str | None = None) -> None:
        self._kind, self._code, self._what, self._hint = kind, code, what, hint

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, OSError):
            raise self._kind(self._code, f"{self._what}: {error.strerror or error}", self._hint) from error


def cause(error: OSError) -> str:
    """Return what failed and why: "open_tree /usr/lib/libcuda.so.1: Operation not permitted".

    Wrappers of system calls have put the call's name before the path (:mod:`ocigpu.system.libc`).
    """
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if isinstance(error.filename, str) and error.filename else text


def reason_of(error: BaseException) -> str:
    """Return why something failed, in one line without numbers of errors, which libraries put before or wrap up.

    Those of TLS have a name in capitals (ssl.SSLError.reason) or a text of their own (verify_message).
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError):
            if text := getattr(found, "verify_message", ""):
                return printable(text, 300)
            if getattr(found, "library", ""):
                return printable(str(getattr(found, "reason", "")).replace("_", " ").lower(), 300)
            if found.strerror:
                return printable(cause(found), 300)
        found = found.__cause__ or found.__context__
    return printable(str(error), 300) or type(error).__name__


def printable(text: str, limit: int = 2000) -> str:
    """Return text with control characters escaped and at most ``limit`` characters: text of an image may be hostile."""
    if len(text) > limit:
        text = text[:limit] + "..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def quoted(text: str, limit: int = 120) -> str:
    """Return text of foreign origin in double quotes, escaped and shortened, for use inside a message."""
    return '"' + printable(text, limit) + '"'
