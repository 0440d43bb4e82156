"""Whether somebody else than root or the caller could have written a file, or put another in its place."""

import os
import stat

from ocigpu.system.namespaces import in_initial_user_namespace

TYPE_CHECKING = False

if TYPE_CHECKING:
    pass
else:
    pass


def _trusted_owners() -> tuple[int, ...]:
    """Return root, the caller, and in a user namespace the id that stands for everybody outside it.

    There the host's root shows as the overflow id (user_namespaces(7)); so does every other unmapped user, which is
    why the mode must refuse writing to group and others.
    """
    owners = (0, os.geteuid())
    if in_initial_user_namespace():
        return owners
    with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
        return (*owners, int(file.read()))


def why_untrusted(uid: int, mode: int) -> str:
    """Return why a file of this owner and mode must not decide what root does; "" when only root or we may write it.

    In a user namespace the host's root is known as far as :func:`_trusted_owners` says.
    """
    if uid in _trusted_owners() and not mode & 0o022:
        return ""
    return f"owner {uid}, mode {stat.S_IMODE(mode):04o}: others may write"


def why_replaceable(path: str) -> str:
    """Return why somebody else than root or we could put another file at a path that exists; "" when nobody could.

    By its directory, or by a link; directories further up are their owners' affair.  Raises OSError.
    """
    owners = _trusted_owners()
    paths = [os.path.abspath(path)]
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        if status.st_uid not in owners:
            return f"a link of user {status.st_uid}"
        paths.append(os.path.realpath(path))
    for directory in map(os.path.dirname, paths):
        status = os.stat(directory)
        mode = stat.S_IMODE(status.st_mode)
        # where the sticky bit is set, others may add files but not replace ours: inode(7)
        if status.st_uid not in owners or (mode & 0o022 and not mode & stat.S_ISVTX):
            return f"directory {directory}: owner {status.st_uid}, mode {mode:04o}: others may replace files"
    return ""
