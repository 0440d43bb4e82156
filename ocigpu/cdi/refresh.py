"""A specification on disk brought up to date with the host: written only when its content would be another."""

import fcntl
import json
import os

from ocigpu.cdi.document import read_document
from ocigpu.cdi.draft import GenerateOptions
from ocigpu.cdi.generate import Generated, generate
from ocigpu.cdi.write import target_of, write_spec
from ocigpu.errors import CdiError, OcigpuError
from ocigpu.host.fingerprint import stale_reasons
from ocigpu.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:
    from ocigpu.record import NamedTuple

DEFAULT_OUTPUT = "/var/run/cdi/nvidia.yaml"
"""Below /run, as with the vendor's service: after a reboot no engine finds the specification of before."""


class Refreshed(NamedTuple):
    """``changed``: whether the file was written; ``reasons``: why, a sentence each; the rest are the generator's."""

    path: str
    changed: bool
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def refresh(options: GenerateOptions, settings: Settings, path: str = DEFAULT_OUTPUT) -> Refreshed:
    """Generate the specification and write it to ``path`` (mode 0644) unless the file says the same already.

    What is compared is the parsed content, so an equal file is left alone whoever formatted it, and nobody who watches
    it is woken.  One refresh works in a directory at a time.  Needs the right to write there.  Raises the generator's
    error when there is nothing to write: the file stays, and the message says whether it is stale.  Raises CdiError
    OCIGPU-CDI-8 when it cannot be written.
    """
    target, form = target_of(path)
    lock = _lock_directory(os.path.dirname(target) or ".")
    try:
        before, reasons = _read_before(target, settings)
        try:
            generated = generate(options, settings)
        except OcigpuError as error:
            raise _keep_file(error, target, reasons) from error
        changed = before != _as_read(generated)
        if changed:
            write_spec(generated.spec, target, form)
            reasons = reasons or ("its content has changed",)
        return Refreshed(target, changed, reasons if changed else (), generated.notes, generated.skipped)
    finally:
        if lock >= 0:
            os.close(lock)


def _lock_directory(directory: str) -> int:
    """Return a descriptor that holds a lock on the directory until it is closed, -1 when there is no such directory.

    Then there is no file to protect yet, and writing makes the directory.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise CdiError("OCIGPU-CDI-8", f"open {directory}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        os.close(fd)
        raise CdiError("OCIGPU-CDI-8", f"lock {directory}: {error.strerror}") from error
    return fd


def _read_before(path: str, settings: Settings) -> "tuple[Any, tuple[str, ...]]":
    """Return the content of the file, None without a usable one, and why it does not fit the host any more."""
    if not os.path.lexists(path):
        return None, ("there was no file",)
    try:
        data, _ = read_document(path)
    except CdiError as error:
        return None, (f"the file could not be used: {error.message}",)
    annotations = data.get("annotations") if isinstance(data, dict) else None
    return data, stale_reasons(annotations, settings) if isinstance(annotations, dict) else ()


def _as_read(generated: Generated) -> "Any":
    """Return the specification as a reader of its file gets it: tuples are lists then."""
    return json.loads(json.dumps(generated.spec))


def _keep_file(error: OcigpuError, path: str, reasons: tuple[str, ...]) -> OcigpuError:
    """Return the generator's error with what that means for the file on disk."""
    if not os.path.lexists(path):
        return error
    state = f", and is stale: {'; '.join(reasons)}" if reasons else ""
    return OcigpuError(error.code, f"{error.message}; {path} was left as it was{state}", error.hint)
