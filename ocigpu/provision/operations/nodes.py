"""Device nodes: made, or where that is not possible the host's is mounted."""

import os
import stat

from ocigpu.core.actions import Node
from ocigpu.core.errors import MAKE_NODES, ApplyError
from ocigpu.provision.operations.mounts import mount_on_file
from ocigpu.provision.operations.transaction import Transaction, unusable
from ocigpu.system.paths import At, named, opened

_NODE_OPTIONS = ("ro", "nosuid", "noexec")
"""Flags of a bind-mounted node.  Reading and writing the device is not "ro"'s business; changing its mode is."""
_SPARE_NODES = ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
"""For profilers and for graphics: CUDA works without."""


def make_node(transaction: Transaction, action: Node) -> None:
    """Make a device node; where that is not possible, mount the host's."""
    node, rdev = action.node, os.makedev(action.node.major, action.node.minor)
    with transaction.at(node.container_path) as at:
        found = at.find()
        if found is not None and stat.S_ISCHR(found.st_mode) and found.st_rdev == rdev:
            return  # the runtime made it, or the image has it
        if found is not None and (not stat.S_ISREG(found.st_mode) or found.st_size):
            raise unusable(action.describe(), node.container_path, found)
        if found is None:
            if not transaction.is_own(at.fd):
                _leave_to_host(transaction, action)
                return
            if transaction.make_nodes and not os.fstatvfs(at.fd).f_flag & os.ST_NODEV:
                transaction.note("node", node.container_path, rdev=rdev)
                try:
                    at.mknod(stat.S_IFCHR | node.mode, rdev)
                except PermissionError:  # mounted, then
                    pass
                else:
                    _set_owner(action, at, rdev)
                    return
        if not node.host_path:
            raise ApplyError(
                "OCIGPU-DEV-3",
                f"{action.describe()}: mknod is not possible for this container and the host has no node to mount",
                f"Make it on the host: {MAKE_NODES}"
                if node.container_path.startswith("/dev/nvidia")
                else f"Make it on the host: {node.container_path}",
            )
        if found is None:
            transaction.note("file", node.container_path)
            at.create(0o444)
        mount_on_file(transaction, transaction.source(node.host_path, "node", _NODE_OPTIONS, rdev), at)


def _set_owner(action: Node, at: At, rdev: int) -> None:
    """Set owner and mode of a new node to those of the plan."""
    node = action.node
    with opened(at.open()) as fd:
        made = os.fstat(fd)
        if not stat.S_ISCHR(made.st_mode) or made.st_rdev != rdev:
            raise unusable(action.describe(), node.container_path, made)
        # by the descriptor's own name: a process that shares the directory may have replaced the path
        if (made.st_uid, made.st_gid) != (node.uid, node.gid):
            with named("chown", at.path):
                os.chown(f"fd/{fd}", node.uid, node.gid)
        if stat.S_IMODE(made.st_mode) != node.mode or made.st_uid != node.uid:
            with named("chmod", at.path):
                os.chmod(f"fd/{fd}", node.mode)


def _leave_to_host(transaction: Transaction, action: Node) -> None:
    """Make nothing in a volume, where it would stay: for optional nodes a note is enough."""
    path = action.node.container_path
    if path in _SPARE_NODES:
        transaction.notes.append(f"{path} was left out: its directory is the host's, which has no such node")
        return
    raise ApplyError(
        "OCIGPU-DEV-3",
        f"{action.describe()}: its directory is a volume of the host, which has no such node",
        f"Make it on the host ({MAKE_NODES}), or give the container a /dev of its own.",
    )
