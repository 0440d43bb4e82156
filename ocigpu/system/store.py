"""Files that save work from one run to the next: below /run/ocigpu for root, in the user's run directory for others.

The files decide what a container gets, so a file counts only if no user but this process's own can have written it.  A
cache that cannot be used is never an error: the work is done again.
"""

import os
from binascii import crc32

from ocigpu.system.files import lock_file, open_regular, remove_drafts, remove_if_possible, replace_file
from ocigpu.system.namespaces import in_initial_user_namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Sequence

SYSTEM_DIRECTORY = "/run/ocigpu"
MAX_BYTES = 64 << 20
SEAL_BYTES = 9
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_cache(create: bool = False, simulated: str = "") -> int:
    """Return a descriptor of the cache directory, or -1 without a trusted one.

    ``create``: make it (mode 0700) when it is missing.  Root outside of user namespaces has /run/ocigpu, all others
    $XDG_RUNTIME_DIR/ocigpu.  ``simulated``: root of a simulated host; it has a /run of its own, for its owner.
    """
    if simulated:
        return _open_simulated(simulated, create)
    if os.geteuid() == 0 and in_initial_user_namespace():
        path = SYSTEM_DIRECTORY
    else:
        parent = os.environ.get("XDG_RUNTIME_DIR", "")
        if not parent.startswith("/"):
            return -1
        path = f"{parent}/ocigpu"
    return _open(path, create)


def open_lock(name: str, simulated: str = "") -> int:
    """Return a descriptor of a file in the cache directory, to be locked where no other user can lock it.

    -1 without the directory.  ``simulated``: as of open_cache.  Raises OSError.
    """
    directory = open_cache(True, simulated)
    if directory < 0:
        return -1
    try:
        return lock_file(name, directory)
    finally:
        os.close(directory)


def _open_simulated(root: str, create: bool) -> int:
    """Only its owner can remove the host again: others leave nothing in it."""
    try:
        if os.stat(root).st_uid != os.geteuid():
            return -1
        if create:
            _make_directory(f"{root}/run", 0o755)
    except OSError:
        return -1
    return _open(f"{root}/run/ocigpu", create)


def _open(path: str, create: bool) -> int:
    try:
        if create:
            _make_directory(path)
        fd = os.open(path, _DIRECTORY_FLAGS)
    except (OSError, ValueError):
        return -1
    if not _is_closed(fd):
        os.close(fd)
        return -1
    return fd


def _is_closed(directory: int) -> bool:
    """Tell whether only we can have put anything into our directory, and close it to other readers.

    A service manager may have made it for us with the usual mode, 0755.
    """
    status = os.fstat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return False
    if status.st_mode & 0o077:
        try:
            os.fchmod(directory, 0o700)
        except OSError:
            return False
    return True


def _make_directory(path: str, mode: int = 0o700) -> None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:  # what it is, and whose, is seen when it is opened
        return


def _is_ours(status: os.stat_result) -> bool:
    """Tell whether only the user this process runs as can have written it."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def read_cached(directory: int, name: str) -> bytes:
    """Return the content of a file of the cache; nothing for one that is missing, too large or untrusted."""
    try:
        with open_regular(name, directory, os.O_NOFOLLOW) as file:
            status = os.fstat(file.fileno())  # nobody writes to it: a new one takes its place
            return file.read(status.st_size) if _is_ours(status) and status.st_size <= MAX_BYTES else b""
    except OSError:
        return b""


def write_cached(directory: int, name: str, content: bytes, mtime_ns: int | None = None) -> bool:
    """Put a file (mode 0600) into the cache, whole or not at all; returns whether that worked.

    ``mtime_ns``: its time of modification; None: now.
    """
    try:
        replace_file(name, content, 0o600, directory, mtime_ns=mtime_ns)
    except OSError:
        return False
    return True


def read_kept(directory: int, name: str, count: int) -> list[bytes]:
    """Return the parts that :func:`write_kept` has put into a file; [] unless it is whole and their number matches."""
    parts = unseal(read_cached(directory, name)).split(b"\n", count - 1)
    return parts if len(parts) == count else []


def write_kept(
    directory: int, name: str, parts: "Sequence[bytes]", prefix: str, spare: int, wanted: "Container[str]" = ()
) -> bool:
    """Put parts, each but the last of one line, into a file for :func:`read_kept`; tell whether that worked.

    Of others whose names begin with ``prefix`` only ``spare`` stay, and those that are ``wanted``.
    """
    if not write_cached(directory, name, seal(b"\n".join(parts))):
        return False
    prune_cache(directory, prefix, wanted or (name,), spare)
    return True


def seal(body: bytes) -> bytes:
    """Return what to write so that :func:`unseal` sees whether it is whole."""
    return body + b"\n%08x" % crc32(body)


def is_whole(content: bytes) -> bool:
    """Tell whether content ends with the seal of what precedes it, which takes SEAL_BYTES."""
    return content[-SEAL_BYTES:] == b"\n%08x" % crc32(memoryview(content)[:-SEAL_BYTES])


def unseal(content: bytes) -> bytes:
    """Return the body that was sealed; nothing when the content is not whole."""
    return content[:-SEAL_BYTES] if is_whole(content) else b""


def prune_cache(directory: int, prefix: str, wanted: "Container[str]", spare: int) -> None:
    """Remove files whose names begin with ``prefix`` and are not ``wanted``, once there are more than ``spare``.

    Drafts of processes that were killed go in any case.
    """
    remove_drafts(directory)
    try:
        names = [name for name in os.listdir(directory) if name.startswith(prefix) and name not in wanted]
    except OSError:
        return
    if len(names) > spare:
        for name in names:
            remove_if_possible(directory, name)  # else the next prune tries again
