"""The operations inside a container's namespaces, and how each is undone: :data:`OPERATIONS`.

Nothing is decided here; each function carries out its action or raises.  Each effect is recorded in the journal right
before it happens.  Undoing therefore copes with an effect that never happened, and removes only what looks like ours:
an empty file, an empty directory, a node of that number, a link with that target, a file with that content, a mount
that was not there before.  Undoing twice is like undoing once.

Another container on the same root directory may rely on what was made there: on files that it has mounted something
on, on links, on the loader's cache.  Where there is one (:mod:`ocigpu.provision.mounts`), all this stays, as it
stays of a container that ran; what is this container's alone is undone, above all its mounts.

Paths of an image may be anything: each is checked by descriptor.  A new file or link gets a temporary name and is then
renamed over the old one, so a link at that path is replaced and never followed.
"""

import errno

from ocigpu.core.actions import Bind, FinishLdconfig, Link, Mode, Node, RefreshLdCache, StartLdconfig, TextFile, Tmpfs
from ocigpu.core.errors import ApplyError, cause
from ocigpu.core.record import NamedTuple
from ocigpu.provision.mounts import has_neighbours
from ocigpu.provision.operations.files import remove_made, restore_mode, restore_text, set_mode, write_text
from ocigpu.provision.operations.ldconfig import finish_ldconfig, refresh_ld_cache, restore_ld_cache, start_ldconfig
from ocigpu.provision.operations.links import make_link, remove_link
from ocigpu.provision.operations.mounts import bind, cover_with_tmpfs, make_root_read_only, restore_link, unmount
from ocigpu.provision.operations.nodes import make_node
from ocigpu.provision.operations.transaction import Transaction, VolumeError, reason_of
from ocigpu.system.log import step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ocigpu.provision.journal import Entry

_NO_VOLUME = "Mount the volume somewhere else. If it is not mounted there, a link of the image leads into it."


class Operation(NamedTuple):
    """How an action is carried out and undone.

    ``word``: its name in the journal, "" for what notes nothing.  ``do``: None for what others are made of.  ``code``:
    of what goes wrong.  ``lasting``: it stays where another container has the same root directory.
    """

    word: str
    do: "Callable[[Transaction, Any], None] | None"
    undo: "Callable[[Transaction, Entry], None] | None"
    code: str = "OCIGPU-MNT-1"
    lasting: bool = True


OPERATIONS: "dict[Any, Operation]" = {
    Node: Operation("node", make_node, remove_made, "OCIGPU-DEV-3"),
    Bind: Operation("mount", bind, unmount, lasting=False),
    Tmpfs: Operation("mount", cover_with_tmpfs, unmount, lasting=False),
    Link: Operation("link", make_link, remove_link, "OCIGPU-MNT-3"),
    TextFile: Operation("text", write_text, restore_text),
    Mode: Operation("mode", set_mode, restore_mode),
    StartLdconfig: Operation("", start_ldconfig, None, "OCIGPU-LD-1"),
    RefreshLdCache: Operation("cache", refresh_ld_cache, restore_ld_cache, "OCIGPU-LD-1"),
    FinishLdconfig: Operation("", finish_ldconfig, None, "OCIGPU-LD-1"),
    "directory": Operation("mkdir", None, remove_made),
    "file": Operation("file", None, remove_made),
    "draft": Operation("draft", None, remove_made, lasting=False),
    "link in the way": Operation("unlink", None, restore_link),
    "root": Operation("writable", None, make_root_read_only, lasting=False),
}
"""The operations by the steps of a plan, and their parts."""
_UNDO = {operation.word: operation for operation in OPERATIONS.values()}


def take(transaction: Transaction, action: "Any") -> None:
    """Take one step of a plan.  Raises ApplyError naming the step, the call that failed, and the cause."""
    operation = OPERATIONS[type(action)]
    assert operation.do is not None, "a step of a plan"
    begun = len(transaction.journal.entries)
    with step(action):
        try:
            operation.do(transaction, action)
        except (OSError, VolumeError, ApplyError) as error:
            if getattr(action, "optional", False) and not undo(transaction, transaction.journal.entries[begun:]):
                read_only = getattr(error, "errno", 0) == errno.EROFS
                why = "the container's root is read-only" if read_only else reason_of(error)
                transaction.notes.append(f"{action.container_path} was left out: {why}")
                return
            if isinstance(error, ApplyError):
                raise
            message = f"{action.describe()}: {reason_of(error)}"
            if isinstance(error, VolumeError):
                raise ApplyError("OCIGPU-MNT-4", message, _NO_VOLUME) from error
            raise ApplyError(operation.code, message, _hint(error, action), errno=error.errno or 0) from error


def undo(transaction: Transaction, entries: "list[Entry]") -> list[str]:
    """Undo the recorded effects, last entry first; return a line about each that could not be undone."""
    left = []
    lasting = [entry for entry in entries if _UNDO[entry["do"]].lasting]
    shared = bool(lasting) and has_neighbours(transaction.root_fd)
    for entry in reversed(entries):
        try:
            if shared and _UNDO[entry["do"]].lasting and not transaction.is_private(entry):
                continue
            undo_one = _UNDO[entry["do"]].undo
            assert undo_one is not None, "what has a word in the journal"
            with step(f"undo-{entry['do']}", entry["path"]):
                undo_one(transaction, entry)
        except FileNotFoundError:  # the effect never came, or is undone already
            pass
        except OSError as error:
            left.append(cause(error) if error.filename else f"{entry['do']} {entry['path']}: {cause(error)}")
    return left


def _hint(error: OSError, action: "Any") -> str | None:
    path = getattr(action, "container_path", "")
    if error.errno == errno.EROFS:
        return f"The container's root is read-only already: let the image contain {path}, or use a writable root."
    if error.errno == errno.ENOENT and path.startswith("/proc/driver"):
        return "The container's /proc shows no NVIDIA driver: mount a procfs there and do not mask /proc/driver."
    return None
