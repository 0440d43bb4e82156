"""Processes of ours that have given up their rights."""

import ctypes

import pytest

from ocigpu.system.child import Child, drop_rights

PR_GET_DUMPABLE = 3  # include/uapi/linux/prctl.h


@pytest.mark.root
@pytest.mark.parametrize("user", [0, 65534])
def test_who_has_dropped_its_rights_cannot_be_traced(user: int) -> None:
    """A container's root with the host's process numbers has more rights than a process of uid 0 without any."""

    def look(_: int) -> bytes:
        drop_rights(user, user)
        return b"%d" % ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)

    assert Child(look, 10.0).collect(100)[0] == b"0"
