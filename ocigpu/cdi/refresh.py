"""A specification on disk brought up to date with the host: written only when its content would be another."""

import os
from typing import Any, NamedTuple

from ocigpu.cdi.document import read_document
from ocigpu.cdi.generate import Generated, Part, generate_host, generate_within
from ocigpu.cdi.versions import is_older, parse_version
from ocigpu.cdi.write import DEFAULT_OUTPUT, target_of, with_suffix, write_spec
from ocigpu.core import rawjson
from ocigpu.core.errors import CdiError, OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import stale_reasons
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.system.files import lock
from ocigpu.system.store import open_lock

ANNOTATED, LOWEST = "0.6.0", "0.5.0"
"""Our files need the first, for their annotation; without it the second (generate.py)."""
_LOCK = "refresh.lock"


class RefreshedSpec(NamedTuple):
    """``changed``: whether the file was written; ``reasons``: why, a sentence each; the rest are the generator's.

    ``beside``: other files that were written.
    """

    path: str
    changed: bool
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


def refresh(
    options: GenerateOptions, settings: Settings, path: str = DEFAULT_OUTPUT, newest: str = ""
) -> RefreshedSpec:
    """Generate the specification and write it to ``path`` (mode 0644) unless the file's content is equal.

    The parsed contents are compared, so an equal file in another format stays, and its watchers are not woken.  If the
    options name no newest version, it is the file's, if that was lowered, else ``newest``, the version that the engines
    read.  One refresh works at a time.  Needs the right to write there.  Raises the generator's error when it has
    nothing to write: the file stays, and the message states whether it is stale.  Raises CdiError OCIGPU-CDI-8 when it
    cannot be written.  Further requested specifications, and those of other vendors' GPUs, are written beside it.
    """
    target, form = target_of(path)
    lock = _take_lock()
    try:
        before, reasons = _read_before(target, settings)
        try:
            (_, generated), *others = generate_for(before, options, settings, newest)
        except OcigpuError as error:
            raise _keep_file(error, target, reasons) from error
        changed = before != _as_read(generated)
        if changed:
            write_spec(generated.spec, target, form)
            reasons = reasons or ("its content has changed",)
        pairs = [(with_suffix(target, suffix), other) for suffix, other in others]
        old = {file: other for file, other in pairs if _read_before(file, settings)[0] != _as_read(other)}
        for file, other in old.items():
            write_spec(other.spec, file, form)
        beside = tuple(old)
        return RefreshedSpec(target, changed, reasons if changed else (), generated.notes, generated.skipped, beside)
    finally:
        if lock >= 0:
            os.close(lock)


def _take_lock() -> int:
    """Return a descriptor that holds the lock of all refreshes until it is closed, -1 without a place for it.

    The lock is in our own directory: every user who may read a directory of specifications could lock that directory.
    """
    fd = -1
    try:
        fd = open_lock(_LOCK)
        if fd >= 0:
            lock(fd)
    except OSError:  # a file system that is full, read-only or without locks: then each of two may write, whole files
        if fd >= 0:
            os.close(fd)
        return -1
    return fd


def _read_before(path: str, settings: Settings) -> tuple[Any, tuple[str, ...]]:
    """Return the content of the file, None without a usable one, and why it does not fit the host any more."""
    if not os.path.lexists(path):
        return None, ("there was no file",)
    try:
        data, _ = read_document(path)
    except CdiError as error:
        return None, (f"the file could not be used: {error.message}",)
    annotations = data.get("annotations") if isinstance(data, dict) else None
    return data, stale_reasons(annotations, settings) if isinstance(annotations, dict) else ()


def generate_for(before: Any, options: GenerateOptions, settings: Settings, newest: str) -> tuple[Part, ...]:
    """Generate for a file with this content (None: no file) and engines that read ``newest`` ("": unknown)."""
    return generate_within(_lower(before, newest), options, settings, generate_host)


def _lower(before: Any, newest: str) -> str:
    """Return the newest version for a file: the former file's if it was lowered, else ``newest``."""
    version = parse_version(str(before.get("cdiVersion"))) if isinstance(before, dict) else ""
    if not version or not is_older(version, ANNOTATED) or (newest and is_older(newest, version)):
        return newest
    return version if is_older(LOWEST, version) else LOWEST


def _as_read(generated: Generated) -> Any:
    """Return the specification as a reader of its file gets it: tuples are lists then."""
    return rawjson.parse(rawjson.dump(generated.spec))


def _keep_file(error: OcigpuError, path: str, reasons: tuple[str, ...]) -> OcigpuError:
    """Return the generator's error with what that means for the file on disk."""
    if not os.path.lexists(path):
        return error
    state = f", and is stale: {'; '.join(reasons)}" if reasons else ""
    return OcigpuError(error.code, f"{error.message}; {path} is unchanged{state}", error.hint)
