"""What the hooks of a CDI specification do: the policy, on recorded hosts and described containers."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.asking import request_from_variables

from ocigpu.cdi.hook_words import (
    Chmod,
    CreateSymlinks,
    DisableDeviceNodeModification,
    EnableCudaCompat,
    UpdateApplicationProfile,
    UpdateLdCache,
    link_target,
)
from ocigpu.core.actions import Bind, Link, Mode, Node, Plan, RefreshLdCache, TextFile, Tmpfs
from ocigpu.core.facts import HostFacts, facts_from_json
from ocigpu.core.settings import Settings
from ocigpu.entry.cdi_hook_plan import UNUSED, DriverProc, HookFacts, plan_hooks
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.gpus.nvidia.procfs import ProcGpu
from ocigpu.gpus.nvidia.views import PROC_DRIVER, PROFILE_DIRECTORY
from ocigpu.provision.compat import CompatLibrary, CompatNote
from ocigpu.provision.image import ContainerNode
from ocigpu.provision.loader import COMPAT_CONF, LD_SO_CONF, OWN_CONF, LoaderFacts

HOSTS = Path(__file__).parents[1] / "bundles/hosts"
SETTINGS = Settings()
VIEWS = (DisableDeviceNodeModification(), UpdateApplicationProfile())


def host(name: str) -> HostFacts:
    return facts_from_json(json.loads((HOSTS / f"{name}.json").read_text()))


def procfs_of(facts: HostFacts) -> DriverProc:
    """What the host's procfs says, for a host of which facts are recorded."""
    gpus = tuple(ProcGpu(gpu.proc_name, gpu.bus_id, gpu.minor, gpu.uuid) for gpu in facts.gpus if gpu.proc_name)
    capabilities = []
    for path, node in facts.cap_nodes:
        gpu, slash, rest = path.partition("/")
        capabilities.append((f"{gpu}/mig/{rest}" if slash else f"mig/{path}", node.minor))
    majors = dict(facts.majors)
    return DriverProc(
        facts.proc_driver,
        facts.proc_files,
        gpus,
        tuple(capabilities),
        majors.get("nvidia", majors.get("nvidia-frontend", -1)),
        majors.get("nvidia-caps", -1),
    )


def nodes_of(plan: Plan) -> tuple[ContainerNode, ...]:
    nodes = [action.node for action in plan.actions if isinstance(action, Node)]
    prefixes = ("/dev/nvidia-caps/nvidia-cap", "/dev/nvidia")
    return tuple(
        ContainerNode(node.container_path, node.major, node.minor)
        for node in nodes
        if any(node.container_path.removeprefix(prefix).isdigit() for prefix in prefixes)
    )


def without_reasons(actions: Any) -> list[Any]:
    return [action._replace(reason="") for action in actions]


def in_any_order(actions: list[Any]) -> list[Any]:
    """MIG devices are in NVML's order in hook mode, in that of their instances here."""
    ordered = [item._replace(files=tuple(sorted(item.files))) if isinstance(item, Tmpfs) else item for item in actions]
    return sorted(ordered, key=lambda item: item.container_path)


def is_view(action: Any) -> bool:
    return isinstance(action, Bind | Tmpfs) and action.container_path.startswith(("/proc/", PROFILE_DIRECTORY))


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("a100-8", {"NVIDIA_VISIBLE_DEVICES": "all"}),
        ("a100-8", {"NVIDIA_VISIBLE_DEVICES": "3,5", "NVIDIA_DRIVER_CAPABILITIES": "all"}),
        ("a100-8", {"NVIDIA_VISIBLE_DEVICES": "none"}),
        ("h100-8-mig", {"NVIDIA_VISIBLE_DEVICES": "all"}),
        ("h100-8-mig", {"NVIDIA_VISIBLE_DEVICES": "0:0", "NVIDIA_DRIVER_CAPABILITIES": "graphics"}),
        ("h100-8-mig", {"NVIDIA_VISIBLE_DEVICES": "0:0,0:1"}),
        ("h100-8-mig", {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_MIG_CONFIG_DEVICES": "all"}),
        ("h100-8-mig", {"NVIDIA_VISIBLE_DEVICES": "1", "NVIDIA_MIG_MONITOR_DEVICES": "all"}),
        ("l4-2-drm", {"NVIDIA_VISIBLE_DEVICES": "1", "NVIDIA_DRIVER_CAPABILITIES": "display"}),
    ],
)
def test_the_views_of_the_driver_are_those_of_hook_mode(name: str, variables: dict[str, str]) -> None:
    facts = host(name)
    plan = make_plan(facts, request_from_variables(variables, SETTINGS, privileged=True), SETTINGS)
    wanted = without_reasons(filter(is_view, plan.actions))
    commands = [DisableDeviceNodeModification(simulated=facts.simulated)]
    if any(isinstance(action, Tmpfs) and action.container_path == PROFILE_DIRECTORY for action in wanted):
        commands.append(UpdateApplicationProfile())
    made = plan_hooks(commands, HookFacts(nodes=nodes_of(plan), driver_proc=procfs_of(facts)), SETTINGS)
    assert in_any_order(without_reasons(made.actions)) == in_any_order(wanted)
    assert made.simulated == facts.simulated
    assert made.notes == ()


A100 = procfs_of(host("a100-8"))
GPU5 = ContainerNode("/dev/nvidia5", 195, 5)


def shown(plan: Plan) -> list[str]:
    return [action.container_path.removeprefix(PROC_DRIVER) for action in plan.actions if isinstance(action, Bind)]


def test_a_node_counts_by_its_number_and_not_by_its_name() -> None:
    facts = HookFacts(
        nodes=(ContainerNode("/dev/nvidia0", 195, 5), ContainerNode("/dev/nvidia1", 240, 1)), driver_proc=A100
    )
    plan = plan_hooks(VIEWS, facts, SETTINGS)
    assert shown(plan) == [f"/gpus/{A100.gpus[5].name}"]
    (profile,) = [action for action in plan.actions if getattr(action, "container_path", "") == PROFILE_DIRECTORY]
    assert isinstance(profile, Tmpfs)
    assert '"EGLVisibleDGPUDevices", 0x20]' in profile.files[0][2]


def test_nodes_show_no_capability_of_a_driver_without_devices_for_capabilities() -> None:
    """Its files in procfs are what gives the right; the image may have nodes of any number."""
    proc = A100._replace(caps_major=-1, capabilities=(("mig/config", 1), ("gpu5/mig/gi1/access", 30)))
    nodes = tuple(ContainerNode(f"/dev/nvidia-caps/nvidia-cap{minor}", 1, minor) for minor in (1, 30))
    assert shown(plan_hooks(VIEWS, HookFacts(nodes=nodes, driver_proc=proc), SETTINGS)) == []


def test_without_a_gpu_the_view_is_empty_and_there_is_no_profile() -> None:
    plan = plan_hooks(VIEWS, HookFacts(driver_proc=A100), SETTINGS)
    (view,) = plan.actions
    assert isinstance(view, Tmpfs)
    assert (view.container_path, view.directories) == (PROC_DRIVER, ())
    assert "ModifyDeviceFiles: 0" in {name: text for name, _, text in view.files}["params"]


def test_without_a_driver_in_procfs_there_is_a_note_and_no_view() -> None:
    plan = plan_hooks([DisableDeviceNodeModification()], HookFacts(nodes=(GPU5,)), SETTINGS)
    assert plan.actions == ()
    assert plan.notes == ("the host has no /proc/driver/nvidia: the container gets none",)


def test_links_are_made_as_they_are_written_and_links_to_devices_where_there_is_one() -> None:
    commands = [
        CreateSymlinks(
            (("libcuda.so.1", "/lib/libcuda.so"), ("libcuda.so.1", "/lib/libcuda.so")),
            (("../card0", "/dev/dri/by-path/a-card"), ("../card1", "/dev/dri/by-path/b-card")),
        ),
        Chmod(0o755, ("/dev/dri",)),
    ]
    plan = plan_hooks(commands, HookFacts(device_targets=("/dev/dri/card1",)), SETTINGS)
    assert without_reasons(plan.actions) == [
        Link("/lib/libcuda.so", "libcuda.so.1", ""),
        Link("/dev/dri/by-path/b-card", "../card1", "", optional=True),
        Mode("/dev/dri", 0o755, ""),
    ]


def test_a_file_of_the_image_stays_where_there_is_nothing_to_show_instead() -> None:
    links = (("../libx.so.1", "/lib/gbm/x.so"), ("liby.so.2", "/lib/liby.so.1"), ("libx.so.1.2", "/lib/libx.so.1"))
    facts = HookFacts(kept_files=("/lib/gbm/x.so", "/lib/liby.so.1"))
    alone = plan_hooks([CreateSymlinks(links[:2])], facts, SETTINGS)
    assert alone.actions == ()
    assert alone.notes[1] == "/lib/liby.so.1 stays the image's file: liby.so.2 does not exist"
    plan = plan_hooks([CreateSymlinks(links)], facts, SETTINGS)  # one of the links makes the other's target
    assert without_reasons(plan.actions) == [
        Link("/lib/libx.so.1", "libx.so.1.2", ""),
        Link("/lib/gbm/x.so", "../libx.so.1", "", optional=True),
    ]
    assert len(plan.notes) == 1


@pytest.mark.parametrize(
    ("target", "path", "found"),
    [
        ("../card0", "/dev/dri/by-path/x", "/dev/dri/card0"),
        ("card0", "/dev/dri/x", "/dev/dri/card0"),
        ("/dev/dri/card0", "/x/y", "/dev/dri/card0"),
        ("../../../../../dev/null", "/x/y", "/dev/null"),
    ],
)
def test_where_a_link_to_a_device_leads(target: str, path: str, found: str) -> None:
    assert link_target(target, path) == found


# the loader


COMPAT = "/usr/local/cuda-12.9/compat"
LIBRARY = CompatLibrary(COMPAT, (575, 57, 8), CompatNote((12, 9), (535, 550, 570, 575)))
SUITS, DOES_NOT = EnableCudaCompat("550.163.01"), EnableCudaCompat("580.1")
FOLDERS = UpdateLdCache(("/usr/lib64", "/opt/nvidia"))
SEARCHED = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
OWN = TextFile(OWN_CONF, 0o644, "/opt/nvidia\n", "", optional=True)
USED = TextFile(COMPAT_CONF, 0o644, f"{COMPAT}\n", "", optional=True)
INCLUDE = TextFile(LD_SO_CONF, 0o644, "include /etc/ld.so.conf.d/*.conf\n", "", only_if_missing=True, optional=True)


def cache(*directories: str, ldconfig: str = "") -> RefreshLdCache:
    return RefreshLdCache(ldconfig, directories, "")


@pytest.mark.parametrize(
    ("commands", "loader", "wanted"),
    [
        pytest.param(
            [FOLDERS], LoaderFacts(searched=SEARCHED), [OWN, cache("/usr/lib64", "/opt/nvidia")], id="folders"
        ),
        pytest.param(
            [FOLDERS],
            LoaderFacts(searched=(*SEARCHED, "/opt/nvidia")),
            [cache("/usr/lib64", "/opt/nvidia")],
            id="folders that are searched anyway",
        ),
        pytest.param(
            [FOLDERS],
            LoaderFacts(searched=(*SEARCHED, "/opt/nvidia"), has_own_conf=True),
            [OWN._replace(content=UNUSED), cache("/usr/lib64", "/opt/nvidia")],
            id="a file of an earlier start",
        ),
        pytest.param(
            [FOLDERS],
            LoaderFacts(searched=SEARCHED, has_conf=False),
            [INCLUDE, OWN, cache("/usr/lib64", "/opt/nvidia")],
            id="no ld.so.conf",
        ),
        pytest.param(
            [UpdateLdCache(("/opt/a b", "/opt/#x", "/opt/y "))],
            LoaderFacts(searched=SEARCHED),
            [OWN._replace(content="/opt/a b\n"), cache("/opt/a b", "/opt/#x", "/opt/y ")],
            id="names that the file cannot hold",
        ),
        pytest.param(
            [UpdateLdCache(("/b",), "/sbin/ldconfig"), UpdateLdCache(("/a", "/b"))],
            LoaderFacts(searched=("/a", "/b")),
            [cache("/b", "/a", ldconfig="/sbin/ldconfig")],
            id="twice",
        ),
        pytest.param(
            [SUITS, FOLDERS],
            LoaderFacts(searched=SEARCHED),
            [USED, OWN, cache(COMPAT, "/usr/lib64", "/opt/nvidia")],
            id="compatibility libraries come first",
        ),
        pytest.param(
            [FOLDERS, SUITS],
            LoaderFacts(searched=SEARCHED),
            [USED, OWN, cache(COMPAT, "/usr/lib64", "/opt/nvidia")],
            id="whatever the order of the words",
        ),
        pytest.param([SUITS], LoaderFacts(has_conf=False), [INCLUDE, USED], id="a process of its own"),
        pytest.param(
            [FOLDERS],
            LoaderFacts(searched=SEARCHED, has_compat_conf=True, compat_directories=(COMPAT,)),
            [OWN, cache(COMPAT, "/usr/lib64", "/opt/nvidia")],
            id="after a process of its own",
        ),
        pytest.param(
            [DOES_NOT, FOLDERS],
            LoaderFacts(searched=SEARCHED, has_compat_conf=True, compat_directories=(COMPAT,)),
            [USED._replace(content=UNUSED), OWN, cache("/usr/lib64", "/opt/nvidia")],
            id="no longer with this driver",
        ),
        pytest.param([DOES_NOT], LoaderFacts(), [], id="compatibility libraries that do not suit"),
        pytest.param([SUITS, FOLDERS], LoaderFacts(libc=""), [], id="no loader"),
        pytest.param([SUITS], LoaderFacts(libc="musl", musl_file="/etc/m", musl_text="/lib\n"), [], id="musl"),
        pytest.param(
            [FOLDERS],
            LoaderFacts(libc="musl", musl_file="/etc/m", musl_text="/lib:/usr/lib64\n"),
            [TextFile("/etc/m", 0o644, "/lib:/usr/lib64\n/opt/nvidia\n", "", optional=True)],
            id="musl with a path file",
        ),
        pytest.param(
            [FOLDERS],
            LoaderFacts(libc="musl", musl_file="/etc/m", musl_text="/lib"),
            [TextFile("/etc/m", 0o644, "/lib\n/usr/lib64\n/opt/nvidia\n", "", optional=True)],
            id="musl with an unfinished line",
        ),
        pytest.param(
            [FOLDERS],
            LoaderFacts(libc="musl", musl_file="/etc/m", musl_text="/usr/lib64\n/opt/nvidia\n"),
            [],
            id="musl that knows the folders",
        ),
        pytest.param(
            [FOLDERS],
            LoaderFacts(searched=SEARCHED, musl_file="/etc/m", musl_text="/lib\n"),
            [
                TextFile("/etc/m", 0o644, "/lib\n/usr/lib64\n/opt/nvidia\n", "", optional=True),
                OWN,
                cache("/usr/lib64", "/opt/nvidia"),
            ],
            id="Alpine with glibc",
        ),
    ],
)
def test_what_the_loader_is_told(commands: list[Any], loader: LoaderFacts, wanted: list[Any]) -> None:
    plan = plan_hooks(commands, HookFacts(loader=loader, compat=LIBRARY), SETTINGS)
    assert without_reasons(plan.actions) == wanted
    assert plan.notes == ()


def test_a_path_file_that_is_no_text_is_left_alone() -> None:
    facts = HookFacts(loader=LoaderFacts(libc="musl", musl_file="/etc/ld-musl-x86_64.path"))
    plan = plan_hooks([FOLDERS], facts, SETTINGS)
    assert plan.actions == ()
    assert plan.notes == (
        "/etc/ld-musl-x86_64.path of the image is a link, or not a text of at most 64 KiB, and was left alone",
    )


def test_settings_decide_on_compatibility_libraries_and_name_ldconfig() -> None:
    facts = HookFacts(loader=LoaderFacts(searched=("/usr/lib64", "/opt/nvidia")), compat=LIBRARY)
    plan = plan_hooks([SUITS, FOLDERS], facts, Settings(cuda_compat_mode="disabled", ldconfig="/own/ldconfig"))
    assert without_reasons(plan.actions) == [cache("/usr/lib64", "/opt/nvidia", ldconfig="/own/ldconfig")]


def test_the_specification_names_ldconfig_before_the_settings_do() -> None:
    plan = plan_hooks([UpdateLdCache(("/a",), "/spec/ldconfig")], HookFacts(), Settings(ldconfig="/own/ldconfig"))
    assert plan.actions[-1] == plan.actions[-1]._replace(ldconfig="/spec/ldconfig")


def test_nothing_asked_for_is_nothing_done() -> None:
    assert plan_hooks([], HookFacts(), SETTINGS).actions == ()
    assert plan_hooks([CreateSymlinks(), Chmod(), UpdateApplicationProfile()], HookFacts(), SETTINGS).actions == ()
