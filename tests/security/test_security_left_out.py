"""Parts that the operator leaves out of every start, by settings, in every mode."""

import pytest
from security_lab import Attacks

pytestmark = [pytest.mark.root, pytest.mark.engine]

VIEW, PROFILE = " /proc/driver/nvidia ", "/etc/nvidia/nvidia-application-profiles-rc.d"


@pytest.mark.parametrize("mode", ["hook", "spec"])
@pytest.mark.parametrize("part", ["application-profile", "procfs-view", "loader-cache"])
def test_a_part_is_left_out_and_the_others_are_there(attacks: Attacks, part: str, mode: str) -> None:
    outcome = attacks.start(lambda *_: None, mode, settings=f"features.no-{part} = true")
    assert outcome.started, outcome.said
    mounts = outcome.result.stdout
    assert (PROFILE in mounts) is (part != "application-profile")
    if mode == "hook":
        assert (VIEW in mounts) is (part != "procfs-view")
    assert (outcome.bundle / "rootfs/etc/ld.so.cache").exists() is (part != "loader-cache")
    assert "libcuda.so" in mounts
