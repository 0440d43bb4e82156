"""Actions of a plan as containerEdits."""

from typing import TYPE_CHECKING, Any

import pytest

from ocigpu.cdi.edits import DEFAULT_HOOKS, HookOptions, edits_from_actions, enabled_hooks
from ocigpu.cdi.hook_words import HOOK_NAMES, EnableCudaCompat
from ocigpu.core.actions import AllowDevice, Bind, Link, Node, RefreshLdCache, Tmpfs
from ocigpu.core.config_json import HOOK_ENVIRONMENT
from ocigpu.core.facts import DeviceNode
from ocigpu.gpus.offer import GenerateOptions

if TYPE_CHECKING:
    from ocigpu.core.actions import Action

OURS = HookOptions("/opt/ocigpu/ocigpu-hook", enabled=HOOK_NAMES, proc_driver="/proc/driver/nvidia")
THEIRS = OURS._replace(path="/usr/bin/nvidia-cdi-hook")
GPU = DeviceNode("/dev/nvidia0", "/dev/nvidia0", 195, 0)
CARD = DeviceNode("/dev/dri/card1", "/dev/dri/card1", 226, 1, 0o660, 0, 44)
PROC = Tmpfs("/proc/driver/nvidia", 0o555, (), (), "")
PROFILE = Tmpfs("/etc/nvidia/nvidia-application-profiles-rc.d", 0o555, (), (), "")
CACHE = RefreshLdCache("", ("/usr/lib64",), "")
LIBRARY_LINK = Link("/usr/lib64/libcuda.so.1", "libcuda.so.550.163.01", "")
CARD_LINK = Link("/dev/dri/by-path/pci-0000:07:00.0-card", "../card1", "")


def allow(node: DeviceNode, access: str = "rw") -> AllowDevice:
    return AllowDevice(node.major, node.minor, access, "")


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (GPU, {"path": "/dev/nvidia0", "fileMode": 0o666, "permissions": "rw"}),
        (
            GPU._replace(host_path="/root/dev/nvidia0"),
            {"path": "/dev/nvidia0", "hostPath": "/root/dev/nvidia0", "fileMode": 0o666, "permissions": "rw"},
        ),
        (
            GPU._replace(host_path=""),
            {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 0o666, "permissions": "rw"},
        ),
        (CARD, {"path": "/dev/dri/card1", "fileMode": 0o660, "permissions": "rw", "gid": 44}),
        (
            GPU._replace(uid=7, gid=8),
            {"path": "/dev/nvidia0", "fileMode": 0o666, "permissions": "rw", "uid": 7, "gid": 8},
        ),
    ],
    ids=["the host's", "below a root", "missing on the host", "of a group", "of a user"],
)
def test_a_node_has_its_number_only_where_the_host_has_no_node(node: DeviceNode, expected: dict[str, Any]) -> None:
    edits = edits_from_actions([Node(node, ""), allow(node)])
    assert edits["deviceNodes"] == [expected]


def test_access_is_that_of_the_device_rule() -> None:
    edits = edits_from_actions([Node(GPU, ""), allow(GPU, "r")])
    assert edits["deviceNodes"][0]["permissions"] == "r"


@pytest.mark.parametrize(
    ("mode", "gid", "expected"),
    [(0o660, 44, [44]), (0o664, 44, [44]), (0o662, 44, [44]), (0o666, 44, None), (0o660, 0, None)],
)
def test_the_users_get_a_nodes_group_where_only_the_group_may_use_it(
    mode: int, gid: int, expected: list[int] | None
) -> None:
    node = CARD._replace(mode=mode, gid=gid)
    assert edits_from_actions([Node(node, "")]).get("additionalGids") == expected
    assert "additionalGids" not in edits_from_actions([Node(node, "")], additional_gids=False)


def test_a_mount_has_the_plans_options_and_those_of_a_bind_mount() -> None:
    bind = Bind("/root/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi", ("ro", "nosuid", "nodev"), "")
    assert edits_from_actions([bind]) == {
        "mounts": [
            {
                "hostPath": "/root/usr/bin/nvidia-smi",
                "containerPath": "/usr/bin/nvidia-smi",
                "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
                "type": "bind",
            }
        ]
    }


def test_what_lies_below_proc_is_the_hooks_work_and_no_mount() -> None:
    bind = Bind("/proc/driver/nvidia/gpus/0", "/proc/driver/nvidia/gpus/0", (), "", "directory")
    assert "mounts" not in edits_from_actions([PROC, bind], OURS)


ALL: "list[Action]" = [LIBRARY_LINK, CARD_LINK, CACHE, PROC, PROFILE, Node(CARD, ""), allow(CARD)]


def test_our_hook_does_everything_in_one_process() -> None:
    hook = OURS._replace(config="/etc/x.toml", compat=EnableCudaCompat("550.163.01"))
    assert edits_from_actions(ALL, hook)["hooks"] == [
        {
            "hookName": "createContainer",
            "path": "/opt/ocigpu/ocigpu-hook",
            "args": [
                *("ocigpu-hook", "--config", "/etc/x.toml"),
                *("create-symlinks", "--link", "libcuda.so.550.163.01::/usr/lib64/libcuda.so.1"),
                *("--device-link", "../card1::/dev/dri/by-path/pci-0000:07:00.0-card", "+"),
                *("enable-cuda-compat", "--host-driver-version=550.163.01", "+"),
                *("update-ldcache", "--folder", "/usr/lib64", "+"),
                *("disable-device-node-modification", "+", "update-application-profile", "+"),
                *("chmod", "--mode", "755", "--path", "/dev/dri"),
            ],
            "env": HOOK_ENVIRONMENT,
        }
    ]


@pytest.mark.parametrize(
    ("path", "lead"),
    [
        ("/usr/bin/nvidia-cdi-hook", ["nvidia-cdi-hook"]),
        ("/usr/bin/nvidia-ctk", ["nvidia-ctk", "hook"]),
        ("/x/other", ["other"]),
    ],
)
def test_another_program_gets_an_entry_for_each_hook_in_the_vendors_words(path: str, lead: list[str]) -> None:
    entries = edits_from_actions(ALL, THEIRS._replace(path=path, config="/etc/x.toml"))["hooks"]
    assert [entry["args"] for entry in entries] == [
        [
            *(*lead, "create-symlinks", "--link", "libcuda.so.550.163.01::/usr/lib64/libcuda.so.1"),
            *("--link", "../card1::/dev/dri/by-path/pci-0000:07:00.0-card"),
        ],
        [*lead, "update-ldcache", "--folder", "/usr/lib64"],
        [*lead, "disable-device-node-modification"],
        [*lead, "update-application-profile"],
        [*lead, "chmod", "--mode", "755", "--path", "/dev/dri"],
    ]
    assert {tuple(entry["env"]) for entry in entries} == {("NVIDIA_CTK_DEBUG=false",)}


def test_a_simulated_host_tells_the_hook_where_its_proc_is() -> None:
    bind = Bind("/sim/proc/driver", "/proc/driver", (), "", "directory")
    (entry,) = edits_from_actions([bind, PROC], OURS._replace(proc_driver="/sim/proc/driver/nvidia"))["hooks"]
    assert entry["args"][1:] == [
        *("disable-device-node-modification", "--driver-proc", "/sim/proc/driver/nvidia", "--simulated"),
    ]


def test_hooks_without_work_are_not_written_even_when_enabled() -> None:
    """No create-symlinks without a link, no chmod without a folder, no loader cache without libraries."""
    hook = OURS._replace(compat=EnableCudaCompat("550.163.01"))
    assert edits_from_actions([Node(GPU, ""), allow(GPU)], hook).keys() == {"deviceNodes"}


NO_CHMOD = list(DEFAULT_HOOKS)


@pytest.mark.parametrize(
    ("disabled", "enabled", "expected"),
    [
        ((), (), NO_CHMOD),
        (("enable-cuda-compat",), (), [name for name in NO_CHMOD if name != "enable-cuda-compat"]),
        (("all",), (), []),
        (("all",), ("update-ldcache",), ["update-ldcache"]),
        ((), ("chmod",), [*NO_CHMOD, "chmod"]),
        (("chmod", "create-symlinks"), ("create-symlinks",), NO_CHMOD),
    ],
    ids=["default", "one off", "all off", "all but one off", "chmod on", "on wins"],
)
def test_hooks_are_enabled_and_disabled_by_name(
    disabled: tuple[str, ...], enabled: tuple[str, ...], expected: list[str]
) -> None:
    options = GenerateOptions(disabled_hooks=disabled, enabled_hooks=enabled)
    assert list(enabled_hooks(options)) == expected
