"""Settings that leave parts out hold for the hooks of specifications too."""

import pytest

from ocigpu.cdi.hook_words import DisableDeviceNodeModification, UpdateApplicationProfile, UpdateLdCache
from ocigpu.core.actions import RefreshLdCache, TextFile, Tmpfs
from ocigpu.core.settings import Settings
from ocigpu.entry.cdi_hook_plan import DriverProc, HookFacts, plan_hooks
from ocigpu.gpus.nvidia.views import PROC_DRIVER, PROFILE_DIRECTORY
from ocigpu.provision.image import ContainerNode

COMMANDS = [
    DisableDeviceNodeModification(PROC_DRIVER, False),
    UpdateApplicationProfile(),
    UpdateLdCache(("/opt/nvidia",), ""),
]
FACTS = HookFacts(nodes=(ContainerNode("/dev/nvidia0", 195, 0),), driver_proc=DriverProc(PROC_DRIVER, gpu_major=195))


@pytest.mark.parametrize("left", ["", "application_profile", "procfs_view", "loader_cache"])
def test_hooks_do_not_do_what_settings_leave_out(left: str) -> None:
    settings = Settings(**{f"features_no_{left}": True}) if left else Settings()
    actions = plan_hooks(COMMANDS, FACTS, settings).actions
    mounted = {action.container_path for action in actions if isinstance(action, Tmpfs)}
    assert (PROFILE_DIRECTORY in mounted) is (left != "application_profile")
    assert (PROC_DRIVER in mounted) is (left != "procfs_view")
    assert any(isinstance(action, RefreshLdCache | TextFile) for action in actions) is (left != "loader_cache")
