"""Which user namespace this process is in."""

import os

PROC_USER_INIT_INO = 0xEFFFFFFD
"""Inode number of the initial user namespace, fixed since Linux 3.8 (include/linux/proc_ns.h)."""


def in_initial_user_namespace() -> bool:
    """Tell whether this process is in the initial user namespace, where root is the machine's root."""
    try:
        return os.stat("/proc/self/ns/user").st_ino == PROC_USER_INIT_INO
    except FileNotFoundError:  # a kernel without user namespaces
        return True
