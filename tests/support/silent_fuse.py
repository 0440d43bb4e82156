"""A file system in user space (FUSE) that never answers, over a directory of a process's mount namespace.

Arguments: the process's id, the directory.  Prints a line once it is mounted; gone when this process ends.
"""

import os
import sys
import time

from ocigpu.system import libc


def main(pid: str, path: str) -> None:
    fuse_fd = os.open("/dev/fuse", os.O_RDWR)
    namespace_fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    root_fd = os.open(f"/proc/{pid}/root", os.O_RDONLY)
    libc.setns(namespace_fd, libc.CLONE_NEWNS)
    os.fchdir(root_fd)
    os.chroot(".")
    # linux/fuse.h: nobody reads the kernel's first request, so every other waits (fs/fuse/inode.c, fuse_parse_param)
    libc.mount("silent", path, "fuse", 0, f"fd={fuse_fd},rootmode=40000,user_id=0,group_id=0,allow_other")
    print("mounted", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
