"""Device nodes of any driver: number, permissions and host path, from the node itself where there is one."""

import os
import stat

from ocigpu.core.facts import DeviceNode, Permissions
from ocigpu.gpus.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_CARD = Permissions(0o660)
_UNCHANGED = Permissions()


class NodeReader:
    """Reads nodes below a device root; ``notes`` collects irregularities."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.notes: list[str] = []

    def read(self, path: str, major: int, minor: int, permissions: Permissions = _UNCHANGED) -> DeviceNode:
        """Return the node that belongs at ``path``; ``host_path`` is "" when there is none with this number."""
        status = self._status(path)
        if status is not None and stat.S_ISREG(status.st_mode):
            return DeviceNode(path, self.tree.find(path), major, minor, *permissions)
        if status is not None:
            number = (os.major(status.st_rdev), os.minor(status.st_rdev))
            if number == (major, minor):
                return self._existing(path, status)
            self.notes.append(
                f"{self.tree.host(path)} is device {number[0]}:{number[1]}, not {major}:{minor}: not used"
            )
        return DeviceNode(path, "", major, minor, *permissions)

    def read_existing(self, path: str) -> DeviceNode | None:
        """Return the character device at ``path`` whatever its number, None when there is none."""
        status = self._status(path)
        return self._existing(path, status) if status is not None and stat.S_ISCHR(status.st_mode) else None

    def _status(self, path: str) -> os.stat_result | None:
        try:
            status = os.lstat(self.tree.find(path))  # read through the tree, which records every path read, used or not
        except OSError:
            return None
        usable = stat.S_ISCHR(status.st_mode) or (self.tree.stand_in and stat.S_ISREG(status.st_mode))
        return status if usable else None

    def _existing(self, path: str, status: os.stat_result) -> DeviceNode:
        return DeviceNode(
            path,
            self.tree.find(path),
            os.major(status.st_rdev),
            os.minor(status.st_rdev),
            stat.S_IMODE(status.st_mode) & 0o777,
            status.st_uid,
            status.st_gid,
        )

    def read_drm(self, numbers: "Iterable[tuple[str, int, int]]") -> tuple[DeviceNode, ...]:
        """Return the nodes below /dev/dri with these (name, major, minor), which sysfs lists for a GPU."""
        return tuple(
            self.read(f"/dev/dri/{name}", major, minor, _CARD if name.startswith("card") else _UNCHANGED)
            for name, major, minor in numbers
        )
