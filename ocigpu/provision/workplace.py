"""What every step of provisioning works with: the container's root, its journal, and who does the work."""

import os

from ocigpu.provision.container import LiveContainer
from ocigpu.provision.journal import Journal
from ocigpu.provision.mounts import (
    Mounts,
    MountTarget,
    Source,
    enter_own_proc,
    is_bound,
    read_mnt_id,
    take_source,
)
from ocigpu.system import libc
from ocigpu.system.files import remove_drafts
from ocigpu.system.paths import make_directories, open_parent, split

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from ocigpu.provision.ldconfig import Started


class Workplace:
    """Everything a worker has: the container, its root, the journal, the sources it took from the host."""

    def __init__(
        self,
        container: LiveContainer,
        root_fd: int,
        own_proc_fd: int,
        host_mnt_fd: int,
        host_devices: "AbstractSet[int]",
        journal: Journal,
        mounts: Mounts,
        sources: "dict[tuple[str, str, tuple[str, ...]], Source]",
        make_nodes: bool,
        simulated: bool,
        ldconfig_fd: int,
        backup_fd: int,
    ) -> None:
        self.container = container
        self.root_fd = root_fd
        self.own_proc_fd = own_proc_fd
        self.host_mnt_fd = host_mnt_fd
        self.host_devices = host_devices
        self.journal = journal
        self.mounts = mounts
        self.sources = sources
        self.make_nodes = make_nodes
        self.simulated = simulated
        self.ldconfig_fd = ldconfig_fd
        self.backup_fd = backup_fd
        self.ldconfig: "Started | None" = None
        self.notes: list[str] = []
        self._cleared: set[tuple[int, int]] = set()
        # inside its own user namespace the container's root user is 0; elsewhere it is who the map says
        self.uid, self.gid = (0, 0) if container.join_user else (container.uid, container.gid)

    def parent(self, path: str) -> tuple[int, str]:
        """Return a descriptor of the directory that holds ``path``, made if missing (never below /proc), and a name."""
        if _is_in_proc(path):
            return open_parent(self.root_fd, path)
        *parents, name = split(path)

        def on_create(made: str) -> None:
            self.journal.record("mkdir", made)

        return make_directories(self.root_fd, "/" + "/".join(parents), 0o755, on_create), name

    def clear(self, parent_fd: int) -> None:
        """Remove what starts that were killed have left in a directory; once."""
        status = os.fstat(parent_fd)
        if (key := (status.st_dev, status.st_ino)) not in self._cleared:
            self._cleared.add(key)
            remove_drafts(parent_fd, "..")  # the working directory is our /proc/self

    def source(self, host_path: str, kind: str, options: tuple[str, ...], rdev: int = 0) -> Source:
        """Return something of the host: taken before the namespace was joined, or now."""
        found = self.sources.pop((host_path, kind, options), None)
        if found is not None:
            return found
        away = not self.container.join_user and not self.container.here
        if away:
            libc.setns(self.host_mnt_fd, libc.CLONE_NEWNS)
        try:
            return take_source(host_path, kind, options, self.mounts.new_calls, rdev, self.simulated)
        finally:
            if away:
                libc.setns(self.container.mnt_fd, libc.CLONE_NEWNS)
                enter_own_proc(self.own_proc_fd)

    def mount(self, source: Source, target: MountTarget) -> None:
        """Contain the target, note the mount, make it; nothing if it is there, as a hook that runs twice finds it."""
        if is_bound(source, target):
            return
        under = self.mounts.contain(target)
        mount = read_mnt_id(source.tree_fd) if source.tree_fd >= 0 else 0
        self.journal.record("mount", target.path, under=under, mount=mount)
        self.mounts.attach(source, target)


def _is_in_proc(path: str) -> bool:
    return split(path)[0] == "proc"
