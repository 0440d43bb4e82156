"""Symbolic links.  A file of the image at the path of one is covered and never removed."""

import os
import stat

from ocigpu.core.actions import Link
from ocigpu.core.errors import ApplyError, quoted
from ocigpu.provision import mounts
from ocigpu.provision.inside import is_of_kernel
from ocigpu.provision.mounts import MountTarget, Source
from ocigpu.provision.operations.files import make_old_link, read_link, read_old_link
from ocigpu.provision.operations.transaction import Transaction, unusable
from ocigpu.system.files import draft_name
from ocigpu.system.paths import At, open_in_root, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.provision.journal import Entry

_COVER_OPTIONS = ("ro", "nosuid", "nodev")


def make_link(transaction: Transaction, action: Link) -> None:
    """Make a symbolic link, replacing another one; a file of the image is covered by the link's target."""
    with transaction.at(action.container_path) as at:
        found, old = at.find(), None
        if found is not None:
            if stat.S_ISREG(found.st_mode):
                _cover_with_target(transaction, action, at)
                return
            if not stat.S_ISLNK(found.st_mode):
                raise unusable(action.describe(), at.path, found, "OCIGPU-MNT-3")
            old = read_old_link(at)
            if old[0] == action.target:
                if transaction.is_own(at.fd):
                    transaction.clear(at)
                return
        transaction.require_own(at)
        if old is not None:
            transaction.clear(at)
        draft = at.beside(draft_name())
        transaction.note("draft", f"{at.path.rpartition('/')[0]}/{draft.name}")
        draft.symlink(action.target)
        inode = draft.stat().st_ino
        transaction.note("link", at.path, target=action.target, old=old, temp=draft.name, ino=inode)
        draft.rename(at.name)


def _cover_with_target(transaction: Transaction, action: Link, at: At) -> None:
    """Mount the link's target, inside the container, over the image's own file of that name.

    That file would win otherwise; it is not removed, because what is removed could not be put back if we are killed.
    """
    where = os.path.join(at.path[: at.path.rindex("/") + 1], action.target)
    with opened(open_in_root(transaction.root_fd, where, os.O_PATH)) as fd:
        source = Source(at.path, -1, _COVER_OPTIONS, os.fstat(fd))
        if not stat.S_ISREG(source.status.st_mode):
            raise unusable(action.describe(), where, source.status, "OCIGPU-MNT-3")
        if is_of_kernel(fd):
            raise ApplyError("OCIGPU-MNT-3", f"{action.describe()}: {quoted(where)} leads to a file of the kernel")
        with MountTarget(at, at.open()) as target:
            if os.path.samestat(os.fstat(target.fd), source.status):
                return  # covered by a hook before this one, or the same file by a second name
            tree_fd = mounts.clone(fd, _COVER_OPTIONS, where) if transaction.supplies.new_calls else -1
            transaction.mount(target, tree_fd, lambda: mounts.bind_by_name(fd, source, target))


def remove_link(transaction: Transaction, entry: "Entry") -> None:
    """Take our link away, or put the image's back.

    "temp" is the name ours had before it was moved into place, "ino" its number: another start may have replaced it.
    """
    with transaction.own_parent(entry["path"]) as at:
        draft = at.beside(entry["temp"])
        if read_link(draft) == entry["target"]:
            draft.unlink()
        if entry.get("ino") not in (None, at.stat().st_ino) or read_link(at) != entry["target"]:
            return
        if entry["old"] is None:
            at.unlink()
        else:
            make_old_link(draft, entry["old"])
            draft.rename(at.name)
