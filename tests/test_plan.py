"""The policy: what a request gets on a host.  Bundles of engines are in test_bundles.py, single rules here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.asking import request_from_variables, request_on
from support.jsondiff import render_exactly

from ocigpu.core.actions import AllowDevice, Bind, Link, Node, Plan, RefreshLdCache, Tmpfs, plan_to_json
from ocigpu.core.codes import CODES
from ocigpu.core.errors import HostError, OcigpuError, RequestError
from ocigpu.core.facts import DeviceNode, HostFacts, ImageFacts, facts_from_json
from ocigpu.core.settings import CAPABILITIES, Settings, parse_settings
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import make_plan

HOSTS = Path(__file__).parent / "bundles/hosts"
NAMES = sorted(path.stem for path in HOSTS.glob("*.json"))
SETTINGS = Settings()


def host(name: str) -> HostFacts:
    return facts_from_json(json.loads((HOSTS / f"{name}.json").read_text()))


A100 = host("a100-8")
MIG = host("h100-8-mig")
DRM = host("l4-2-drm")
T4 = host("t4-1")


def plan(facts: HostFacts, devices: str, capabilities: str = "compute,utility", /, **more: str) -> Plan:
    return make_plan(facts, request_on(facts, devices, capabilities, SETTINGS, **more), SETTINGS)


def nodes(made: Plan) -> list[str]:
    return [action.node.container_path for action in made.actions if isinstance(action, Node)]


def targets(made: Plan) -> list[str]:
    return [action.container_path for action in made.actions if isinstance(action, (Bind, Tmpfs, Link))]


# --- nothing, none


def test_a_request_for_nothing_gives_a_plan_without_actions() -> None:
    made = make_plan(HostFacts(), Request(notes=("why",)), SETTINGS)
    assert (made.actions, made.gpus, made.notes) == ((), (), ("why",))


def test_none_gives_driver_files_and_control_nodes_without_a_gpu() -> None:
    made = plan(A100, "none")
    assert nodes(made) == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    assert any(path.endswith("/libcuda.so.1") for path in targets(made))
    assert not any("/proc/driver/nvidia/gpus" in path for path in targets(made))
    assert made.gpus == ()


# --- nodes and rules


@pytest.mark.parametrize("name", NAMES)
def test_every_node_has_exactly_its_rule_and_nothing_else_is_allowed(name: str) -> None:
    """Device policy is never wider than the nodes: no wildcard, no mknod, one rule for a node."""
    made = plan(host(name), "all", "all")
    of_nodes = [(a.node.major, a.node.minor, "rw") for a in made.actions if isinstance(a, Node)]
    assert [(rule.major, rule.minor, rule.access) for rule in made.device_rules()] == of_nodes
    assert len(set(nodes(made))) == len(nodes(made))


def test_eight_gpus_with_all_capabilities_have_twelve_nodes() -> None:
    control = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"]
    assert nodes(plan(A100, "all", "all")) == [f"/dev/{name}" for name in control] + [
        f"/dev/nvidia{i}" for i in range(8)
    ]


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ("utility", {"/dev/nvidiactl"}),
        ("compute", {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}),
        ("video", {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}),
        ("graphics", {"/dev/nvidiactl", "/dev/dri/card0", "/dev/dri/renderD128"}),
        ("display", {"/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/dri/card0", "/dev/dri/renderD128"}),
        ("ngx", {"/dev/nvidiactl"}),
        ("compat32", {"/dev/nvidiactl"}),
    ],
)
def test_capabilities_decide_which_nodes_there_are(capabilities: str, expected: set[str]) -> None:
    assert set(nodes(plan(DRM, "0", capabilities))) == expected | {"/dev/nvidia0"}


def test_only_the_nodes_of_the_granted_gpus_are_made() -> None:
    for made in (plan(DRM, "1", "all"), plan(DRM, DRM.gpus[1].uuid, "all"), plan(DRM, DRM.gpus[1].bus_id, "all")):
        assert {path for path in nodes(made) if path[-1].isdigit()} == {
            "/dev/nvidia1",
            "/dev/dri/card1",
            "/dev/dri/renderD129",
        }
        links = {action.container_path: action.target for action in made.actions if isinstance(action, Link)}
        assert {path: target for path, target in links.items() if path.startswith("/dev")} == {
            "/dev/dri/by-path/pci-0000:02:00.0-card": "../card1",
            "/dev/dri/by-path/pci-0000:02:00.0-render": "../renderD129",
        }


def test_a_gpu_is_found_by_its_index_and_given_by_its_minor() -> None:
    """NVML's index and the N of /dev/nvidiaN may differ."""
    first, second = T4.gpus[0], A100.gpus[5]
    swapped = T4._replace(gpus=(second._replace(index=0), first._replace(index=1)))
    made = plan(swapped, "0", "graphics")
    assert [path for path in nodes(made) if path[-1].isdigit()] == ["/dev/nvidia5"]
    assert made.gpus == (second.uuid,)
    profile = next(a for a in made.actions if isinstance(a, Tmpfs) and "profiles" in a.container_path)
    assert '["EGLVisibleDGPUDevices", 0x20]' in profile.files[0][2]


def test_a_node_keeps_number_mode_and_owner_of_the_host() -> None:
    node = DeviceNode("/dev/nvidia0", "/dev/nvidia0", 195, 0, 0o660, 0, 44)
    made = plan(T4._replace(gpus=(T4.gpus[0]._replace(node=node),)), "0")
    assert node in [action.node for action in made.actions if isinstance(action, Node)]


def test_uvm_that_is_not_loaded_is_a_note() -> None:
    facts = T4._replace(control_nodes=tuple(n for n in T4.control_nodes if "uvm" not in n.container_path))
    assert plan(facts, "0").notes == ("module nvidia_uvm is not loaded: CUDA will not work (modprobe nvidia-uvm)",)
    assert plan(facts, "0", "utility").notes == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda f: f._replace(control_nodes=()),
            "device major of nvidia is unknown: the kernel module is not loaded",
            id="no control node",
        ),
        pytest.param(
            lambda f: f._replace(gpus=(f.gpus[0]._replace(node=None),)),
            f"GPU 0 ({T4.gpus[0].uuid}): its device number is unknown",
            id="no GPU node",
        ),
    ],
)
def test_a_gpu_without_a_device_number_stops_the_container(
    change: Callable[[HostFacts], HostFacts], message: str
) -> None:
    with pytest.raises(HostError) as caught:
        plan(change(T4), "0")
    assert (caught.value.code, caught.value.message) == ("OCIGPU-DEV-4", message)


# --- MIG


def test_a_mig_device_brings_its_two_capabilities_and_its_parent() -> None:
    mig = MIG.gpus[1].mig_devices[0]
    made = plan(MIG, "1:0")
    assert [path for path in nodes(made) if path[-1].isdigit()] == [
        "/dev/nvidia1",
        f"/dev/nvidia-caps/nvidia-cap{mig.gi_minor}",
        f"/dev/nvidia-caps/nvidia-cap{mig.ci_minor}",
    ]
    assert (made.gpus, made.mig_devices) == ((), (mig.uuid,))
    below = f"/proc/driver/nvidia/capabilities/gpu1/mig/gi{mig.gpu_instance}"
    capabilities = [path for path in targets(made) if "/capabilities/" in path]
    assert capabilities == [f"{below}/access", f"{below}/ci{mig.compute_instance}/access"]


def test_the_tmpfs_has_a_place_for_everything_that_is_mounted_into_it() -> None:
    for made in (plan(MIG, "all"), plan(MIG, "0:0,1:1,3"), plan(MIG, "7", NVIDIA_MIG_CONFIG_DEVICES="all")):
        tmpfs = next(action for action in made.actions if isinstance(action, Tmpfs))
        places = {f"{tmpfs.container_path}/{name}" for name, _, _ in tmpfs.files} | {
            f"{tmpfs.container_path}/{name}" for name in tmpfs.directories
        }
        inside = [path for path in targets(made) if path.startswith("/proc/driver/nvidia/")]
        assert inside
        assert set(inside) <= places
        for name in (*tmpfs.directories, *(name for name, _, _ in tmpfs.files)):
            parent = name.rpartition("/")[0]
            assert not parent or parent in tmpfs.directories[: [*tmpfs.directories, name].index(name)], name


def test_a_mig_device_whose_capability_is_unknown_stops_the_container() -> None:
    with pytest.raises(HostError) as caught:
        plan(MIG._replace(cap_nodes=()), "0:0")
    assert (caught.value.code, caught.value.message) == (
        "OCIGPU-DEV-4",
        "MIG device 0:0: the device of its GPU instance is unknown",
    )


@pytest.mark.parametrize(("variable", "node"), [("CONFIG", "nvidia-cap1"), ("MONITOR", "nvidia-cap2")])
def test_who_manages_mig_gets_the_capability_for_it(variable: str, node: str) -> None:
    extra = {f"NVIDIA_MIG_{variable}_DEVICES": "all"}
    made = plan(MIG, "7", **extra)
    assert f"/dev/nvidia-caps/{node}" in nodes(made)
    assert "/proc/driver/nvidia/capabilities" in targets(made)
    assert not [path for path in nodes(made) if "nvidia-caps" in path and not path.endswith(node)]
    with pytest.raises(HostError) as caught:
        plan(T4._replace(cap_nodes=()), "0", **extra)
    assert (caught.value.code, caught.value.message) == (
        "OCIGPU-DEV-4",
        f"NVIDIA_MIG_{variable}_DEVICES=all: the host has no MIG {variable.lower()} capability",
    )


# --- /proc


def test_the_container_cannot_make_the_driver_create_nodes() -> None:
    tmpfs = next(action for action in plan(T4, "0").actions if isinstance(action, Tmpfs))
    contents = {name: content for name, _, content in tmpfs.files}
    assert "ModifyDeviceFiles: 0\n" in contents["params"]
    assert "ModifyDeviceFiles: 1" not in contents["params"]
    original = next(item.content for item in T4.proc_files if item.name == "params")
    assert len(contents["params"].splitlines()) == len(original.splitlines())


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        ("A: 1\nModifyDeviceFiles: 1\nB: 1\n", "A: 1\nModifyDeviceFiles: 0\nB: 1\n"),
        ("ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0"),
        ("ModifyDeviceFiles: 0\n", "ModifyDeviceFiles: 0\n"),
        ("ModifyDeviceFiles: 11\n", "ModifyDeviceFiles: 11\n"),
        (" ModifyDeviceFiles: 1\n", " ModifyDeviceFiles: 1\n"),
        ("ModifyDeviceFiles: 1 \n", "ModifyDeviceFiles: 1 \n"),
        ('RmMsg: "ModifyDeviceFiles: 1"\n', 'RmMsg: "ModifyDeviceFiles: 1"\n'),
        ("", ""),
    ],
)
def test_only_the_parameter_itself_is_rewritten(params: str, shown: str) -> None:
    files = tuple(file._replace(content=params) if file.name == "params" else file for file in T4.proc_files)
    tmpfs = next(action for action in plan(T4._replace(proc_files=files), "0").actions if isinstance(action, Tmpfs))
    assert {name: content for name, _, content in tmpfs.files}["params"] == shown


def test_a_simulated_host_covers_proc_driver_first_and_a_real_one_never() -> None:
    first = plan(A100, "0").actions[0]
    assert isinstance(first, Bind)
    assert (first.host_path, first.container_path) == ("/sim/proc/driver", "/proc/driver")
    assert "/proc/driver" not in targets(plan(T4, "0"))


def test_a_host_without_proc_is_a_note() -> None:
    made = plan(T4._replace(proc_driver=""), "0")
    assert made.notes == ("the host has no /proc/driver/nvidia: the container gets none",)
    assert not [path for path in targets(made) if path.startswith("/proc")]


# --- files


def test_nothing_is_mounted_writable_but_sockets_and_nothing_can_gain_privileges() -> None:
    for name in NAMES:
        for action in plan(host(name), "all", "all", NVIDIA_GDS="enabled").actions:
            if isinstance(action, Bind):
                assert {"nosuid", "nodev"} <= set(action.options), action
                assert ("ro" in action.options) == (action.kind != "socket"), action


@pytest.mark.parametrize("name", NAMES)
def test_every_path_is_absolute_clean_and_used_once(name: str) -> None:
    made = plan(host(name), "all", "all")
    paths = targets(made)
    assert len(paths) == len(set(paths))
    for path in paths:
        assert path.startswith("/")
        assert not {"", ".", ".."} & set(path.split("/")[1:])


@pytest.mark.parametrize(("capability", "soname"), [("compute", "libcuda.so.1"), ("utility", "libnvidia-ml.so.1")])
def test_a_capability_without_its_library_stops_the_container(capability: str, soname: str) -> None:
    facts = T4._replace(libraries=tuple(item for item in T4.libraries if item.soname != soname or item.bits == 32))
    with pytest.raises(HostError) as caught:
        plan(facts, "0", f"{capability},compat32")
    assert (caught.value.code, caught.value.message) == (
        "OCIGPU-LIB-1",
        f"{soname} of driver 550.163.01 was not found below / (needed by {capability})",
    )
    plan(facts, "0", "ngx")


def test_a_driver_without_any_library_stops_every_container() -> None:
    """A driver container that is not up, or a wrong driver.root: not only for compute and utility."""
    facts = T4._replace(libraries=())
    with pytest.raises(HostError) as caught:
        plan(facts, "0", "graphics")
    assert (caught.value.code, caught.value.message) == (
        "OCIGPU-LIB-1",
        "no library of driver 550.163.01 was found below /",
    )


def test_libraries_go_where_the_image_wants_them() -> None:
    image = ImageFacts("/usr/lib/x86_64-linux-gnu", "/usr/lib/i386-linux-gnu", stale_cache="it is old")
    request = request_from_variables(
        {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "all"}, SETTINGS, privileged=True
    )
    made = make_plan(T4, request, SETTINGS, image)
    libraries = [a for a in made.actions if isinstance(a, (Bind, Link)) and ".so" in a.container_path]
    assert libraries
    directories = {"/".join(action.container_path.split("/")[:4]) for action in libraries}
    assert directories == {image.library_dir, image.library_dir32}
    assert made.actions[-1] == RefreshLdCache(
        "",
        (image.library_dir, image.library_dir32),
        "the container's loader finds libraries in its cache; ldconfig writes it: it is old",
    )


@pytest.mark.parametrize(
    ("way", "stale", "compat", "merged", "why"),
    [
        ("auto", "", "", True, "the image's is extended: it is current"),
        ("auto", "it is old", "", False, "ldconfig writes it: it is old"),
        ("auto", "", "/compat", False, "ldconfig writes it: the image has CUDA compatibility libraries"),
        ("merge", "it is old", "", True, 'the image\'s is extended: loader-cache is "merge"'),
        ("merge", "", "/compat", False, "ldconfig writes it: the image has CUDA compatibility libraries"),
        ("ldconfig", "", "", False, 'ldconfig writes it: loader-cache is "ldconfig"'),
    ],
)
def test_the_plan_decides_who_makes_the_loader_cache(way: str, stale: str, compat: str, merged: bool, why: str) -> None:
    settings = parse_settings({"loader-cache": way})
    request = request_from_variables({"NVIDIA_VISIBLE_DEVICES": "0"}, settings)
    image = ImageFacts(stale_cache=stale, compat_dir=compat)
    for mode in ("hook", "spec"):
        made = make_plan(T4, request, settings, image, mode)
        (action,) = [action for action in made.actions if isinstance(action, RefreshLdCache)]
        assert bool(action.entries) is (merged and mode == "hook")
        if mode == "hook":
            assert action.reason == f"the container's loader finds libraries in its cache; {why}"
            assert not any(isinstance(a, RefreshLdCache) and a.entries for a in made.without_merge().actions)


def test_settings_that_say_ldconfig_mean_it_after_an_upgrade() -> None:
    assert parse_settings({}).loader_cache == "auto"
    assert parse_settings({"loader-cache": "ldconfig"}).loader_cache == "ldconfig"


@pytest.mark.parametrize("libc", ["musl", ""])
def test_an_image_without_glibc_has_no_loader_cache(libc: str) -> None:
    request = request_from_variables({"NVIDIA_VISIBLE_DEVICES": "0"}, SETTINGS)
    made = make_plan(T4, request, SETTINGS, ImageFacts(libc=libc))
    assert not any(isinstance(action, RefreshLdCache) for action in made.actions)


def test_every_soname_link_points_beside_itself_to_a_library_that_is_there() -> None:
    for name in NAMES:
        made = plan(host(name), "all", "all")
        present = set(targets(made))
        for action in made.actions:
            if isinstance(action, Link) and ".so" in action.container_path:
                directory = action.container_path.rpartition("/")[0]
                target = action.target
                while target.startswith("../"):
                    directory, target = directory.rpartition("/")[0], target[3:]
                assert f"{directory}/{target}" in present, action


def test_32_bit_libraries_come_with_compat32_only() -> None:
    assert not [path for path in targets(plan(T4, "0", "compute,utility,video,graphics")) if "lib32" in path]
    assert "/usr/lib32/libcuda.so.550.163.01" in targets(plan(T4, "0", "compute,compat32"))


# --- as a whole


def test_facts_notes_reach_the_plan() -> None:
    assert plan(T4._replace(notes=("a", "b")), "0").notes == ("a", "b")


@pytest.mark.parametrize("name", NAMES)
def test_every_action_has_a_reason_and_one_line(name: str) -> None:
    made = plan(host(name), "all", "all", NVIDIA_GDS="enabled", NVIDIA_GDRCOPY="enabled")
    for action in made.actions:
        assert action.reason
        assert len(action.describe().splitlines()) == 1
    first = json.loads(json.dumps(plan_to_json(made)))["actions"][0]
    if name.startswith("mi300x"):
        assert first["action"] == "node"
    else:  # a GPU directory of procfs comes before all
        assert first["action"] == ("bind" if made.simulated else "tmpfs")


TOKENS = [
    "0",
    "1",
    "7",
    "0:0",
    "1:1",
    "all",
    "none",
    "GPU-8e7f",
    "00000000:01:00.0",
    "9",
    MIG.gpus[0].mig_devices[0].uuid,
]


@given(
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4),
    st.lists(st.sampled_from([*CAPABILITIES, "all"]), max_size=4),
    st.dictionaries(
        st.sampled_from(["NVIDIA_GDS", "NVIDIA_IMEX_CHANNELS", "NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_REQUIRE_CUDA"]),
        st.sampled_from(["enabled", "all", "0", "cuda>=12.0", "cuda>=99"]),
        max_size=2,
    ),
)
def test_same_input_gives_the_same_plan_or_an_error_of_ours(
    name: str, devices: list[str], capabilities: list[str], more: dict[str, str]
) -> None:
    results: list[Any] = []
    for _ in range(2):
        try:
            made = plan(host(name), ",".join(devices), ",".join(capabilities), **more)
        except OcigpuError as error:
            results.append((error.code in CODES, error.message))
        else:
            assert all(isinstance(rule, AllowDevice) for rule in made.device_rules())
            results.append(render_exactly(plan_to_json(made)))
    assert results[0] == results[1]
    assert isinstance(results[0], str) or results[0][0]


def test_a_requirement_is_checked_for_the_parents_of_mig_devices_too() -> None:
    with pytest.raises(RequestError) as caught:
        plan(MIG, "0:1", NVIDIA_REQUIRE_ARCH="arch>=10.0")
    assert caught.value.code == "OCIGPU-REQ-3"


@pytest.mark.parametrize(("profile", "given"), [("1g.10gb", False), ("1g.10gb+gfx", True)])
def test_a_mig_device_has_its_gpus_drm_nodes_only_with_graphics_in_its_profile(profile: str, given: bool) -> None:
    """They are nodes of the whole GPU, and without that attribute (NVML's +gfx) of no use."""
    parent = MIG.gpus[0]
    drm = (DeviceNode("/dev/dri/card0", "/dev/dri/card0", 226, 0), DeviceNode("/dev/dri/renderD128", "", 226, 128))
    mig = parent.mig_devices[0]._replace(profile=profile)
    facts = MIG._replace(gpus=(parent._replace(drm_nodes=drm, mig_devices=(mig,)),))
    made = plan(facts, f"{parent.index}:{mig.index}", "all")
    assert [path for path in (*nodes(made), *targets(made)) if path.startswith("/dev/dri/")] == (
        ["/dev/dri/card0", "/dev/dri/renderD128"]
        + [f"/dev/dri/by-path/pci-{parent.bus_id[4:]}-{kind}" for kind in ("card", "render")]
        if given
        else []
    )
