"""The loader's cache: written by the host's ldconfig in its sandbox, or merged."""

import fcntl
import os
import stat
import time

from ocigpu.core.actions import FinishLdconfig, RefreshLdCache, StartLdconfig
from ocigpu.provision.image_cache import LD_CACHE
from ocigpu.provision.mounts import read_mnt_id
from ocigpu.provision.operations.files import is_same, keep_file, put_back, read_link
from ocigpu.provision.operations.transaction import CannotMergeError, Transaction, VolumeError, reason_of
from ocigpu.system.files import draft_name, remove_ldconfig_draft, replace_file
from ocigpu.system.paths import At, named, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.provision.journal import Entry

MAX_LD_CACHE = 16 << 20
"""A loader cache of an image above this many bytes is not kept, and so not changed."""
LD_CACHE_DRAFT = "/etc/ld.so.cache~"
"""Where ldconfig writes before it renames; one that is killed leaves it there."""


def start_ldconfig(transaction: Transaction, action: StartLdconfig) -> None:
    """Prepare the sandbox for a refresh of the loader's cache: that takes a while, on another core."""
    from ocigpu.provision import ldconfig  # loaded by the parent: nothing is imported in here

    if transaction.supplies.ldconfig_fd >= 0:
        uid, gid = transaction.uid, transaction.gid
        with opened(lock_ldconfig(transaction, fcntl.LOCK_SH)) as fd:
            directories = action.refresh.directories
            transaction.ldconfig = ldconfig.start_ldconfig(fd, transaction.root_fd, directories, uid, gid)


def lock_ldconfig(transaction: Transaction, kind: int = fcntl.LOCK_EX) -> int:
    """Return a descriptor of ldconfig's program with a lock: LOCK_EX waits for the end of those that have LOCK_SH."""
    fd = os.open(f"fd/{transaction.supplies.ldconfig_fd}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, kind)
    return fd


def refresh_ld_cache(transaction: Transaction, action: RefreshLdCache) -> None:
    """Let the host's ldconfig write the loader's cache, or merge it where the plan says so.

    ldconfig is not waited for: :func:`finish_ldconfig`.  A cache that would lie in a volume is a note.  Raises
    CannotMergeError for a cache that cannot be merged: nothing is ready for ldconfig then.
    """
    try:
        _refresh_ld_cache(transaction, action)
    except VolumeError as error:
        stop_ldconfig(transaction)
        text = f"the loader's cache was left out: {reason_of(error)}; libraries are found by their links alone"
        transaction.notes.append(text)


def _refresh_ld_cache(transaction: Transaction, action: RefreshLdCache) -> None:
    if transaction.supplies.ldconfig_fd < 0 and not action.entries:
        _note_no_ldconfig(transaction)
        return
    with transaction.at(LD_CACHE) as at:
        transaction.require_own(at)
        kept = keep_file(at, transaction.supplies.backup_fd, MAX_LD_CACHE)
        if kept is None:
            size = f"{MAX_LD_CACHE >> 20} MiB"
            text = f"{LD_CACHE} of the image is not a regular file of at most {size} and was left alone"
            transaction.notes.append(text)
            stop_ldconfig(transaction)  # it is not waited for
            return
        transaction.clear(at)
        remove_ldconfig_draft(at.fd)
        if action.entries:
            _merge_ld_cache(transaction, action, at, kept)
            return
        if read_mnt_id(at.fd) != transaction.root_id:  # nothing else can be written to in its sandbox
            raise VolumeError(at.path)
    transaction.note("draft", LD_CACHE_DRAFT)
    transaction.note("cache", LD_CACHE, temp=draft_name(), **kept)
    if transaction.ldconfig is None:
        start_ldconfig(transaction, StartLdconfig(action))
    if transaction.ldconfig:
        transaction.ldconfig.go()


def finish_ldconfig(transaction: Transaction, _: FinishLdconfig) -> None:
    """Wait for the ldconfig of :func:`refresh_ld_cache`; what one that failed has left, on a full disk say, goes.

    What it has written knows the driver's libraries, which the next start may have no more: with its time that cache is
    never current, and ldconfig writes it again.
    """
    started, transaction.ldconfig = transaction.ldconfig, None
    if not started:
        return
    warning = started.finish()
    if warning:
        transaction.notes.append(warning)
    try:
        with transaction.own_parent(LD_CACHE) as at:
            if warning:
                remove_ldconfig_draft(at.fd)
            else:
                _set_time(at, 0)
    except OSError:  # the directory no longer exists
        return


def stop_ldconfig(transaction: Transaction) -> None:
    """End an ldconfig that is ready or runs."""
    started, transaction.ldconfig = transaction.ldconfig, None
    if started:
        started.stop()


def _note_no_ldconfig(transaction: Transaction) -> None:
    transaction.notes.append("this host has no ldconfig: the container's loader finds libraries by their links alone")


def _merge_ld_cache(transaction: Transaction, action: RefreshLdCache, at: At, kept: "Entry") -> None:
    """Add the action's entries to the image's cache; raises CannotMergeError."""
    from ocigpu.gpus.libraries.loader_cache import merge_ld_cache  # loaded by the parent: nothing is imported in here

    if kept["kind"] == "link":  # ldconfig replaces it
        raise CannotMergeError
    old, mode, mtime = b"", 0o644, 0
    if kept["kind"] == "file":
        old, mode = os.pread(transaction.supplies.backup_fd, kept["size"], kept["offset"]), kept["mode"]
        mtime = kept["same"][1]
    merged = merge_ld_cache(old, action.entries, os.uname().machine)
    if merged is None:
        raise CannotMergeError
    # For the next start it is not older than the directories that this one has changed, nor than the image's cache was.
    mtime = max(time.time_ns(), mtime)
    if merged == old:
        transaction.note("cache", at.path, temp=draft_name(), ino=kept["same"][0], **kept)
        _set_time(at, mtime)
    else:
        draft = draft_name()
        transaction.note("draft", f"{at.path.rpartition('/')[0]}/{draft}")

        def note(number: int) -> None:
            transaction.note("cache", at.path, temp=draft, ino=number, **kept)

        with named("write", at.path):
            replace_file(at.name, merged, mode, at.fd, mtime_ns=mtime, draft=draft, note=note)


def _set_time(at: At, mtime: int) -> None:
    try:
        os.utime(at.name, ns=(mtime, mtime), dir_fd=at.fd, follow_symlinks=False)
    except OSError:  # a read-only root, or another user's file: the next start may decide otherwise, and is right too
        return


def restore_ld_cache(transaction: Transaction, entry: "Entry") -> None:
    """Put the image's own cache back, unless ldconfig never came to replace it.

    "ino" is the number of a file that was merged: another start may have replaced it.
    """
    backup_fd = transaction.supplies.backup_fd
    with transaction.own_parent(entry["path"]) as at:
        if entry.get("ino") not in (None, at.stat().st_ino):
            return
        if entry["kind"] == "none":
            if stat.S_ISREG(at.stat().st_mode):
                at.unlink()
        elif entry["kind"] == "link":
            if read_link(at) != entry["old"][0]:
                put_back(entry, at, backup_fd)
        elif not is_same(at, entry["same"]):
            put_back(entry, at, backup_fd)
