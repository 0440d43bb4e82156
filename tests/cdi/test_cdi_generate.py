"""Whole specifications of recorded and hand-made hosts: devices, names, "all", what is left out and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.drafts import draft_of
from support.machine import LIBRARIES

from ocigpu.cdi.check import check_spec
from ocigpu.cdi.edits import Draft, DraftDevice, HookOptions, enabled_hooks
from ocigpu.cdi.generate import Generated, assemble, coherent_parts, generate, merge_edits, sort_edits
from ocigpu.core.errors import CdiError, HostError, OcigpuError, RequestError
from ocigpu.core.facts import DeviceNode, FeatureNodes, Gpu, HostFacts, HostFile, Library, facts_from_json
from ocigpu.core.settings import MODES as CONTAINER_MODES
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import VENDORS
from ocigpu.gpus.fingerprint import ANNOTATION
from ocigpu.gpus.nvidia.nvml import NvmlAnswer
from ocigpu.gpus.nvidia.offers import offer_feature, offer_gpus, offer_imex, offer_management
from ocigpu.gpus.offer import MODES, GenerateOptions
from ocigpu.gpus.vendors import find_mode, load_vendor

HOSTS = Path(__file__).parents[1] / "bundles/hosts"
SETTINGS = Settings()
OURS = "/usr/bin/ocigpu-hook"
THEIRS = "/usr/bin/nvidia-cdi-hook"


def host(name: str) -> HostFacts:
    return facts_from_json(json.loads((HOSTS / f"{name}.json").read_text()))


A100 = host("a100-8")
MIG = host("h100-8-mig")
BROKEN = host("broken-gpu")
DRM = host("l4-2-drm")
IMEX = host("h100-4-imex")


def made(facts: HostFacts, hook_path: str = OURS, settings: Settings = SETTINGS, **changes: Any) -> Generated:
    options = GenerateOptions(**changes)
    hook = HookOptions(hook_path, "", enabled_hooks(options))
    return assemble(draft_of(offer_gpus(facts, options, settings), options, hook), options, "source=nvidia")


def names(spec: dict[str, Any]) -> list[str]:
    return [device["name"] for device in spec["devices"]]


def edits_of(spec: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(device["containerEdits"] for device in spec["devices"] if device["name"] == name)
    return found


def node_paths(edits: dict[str, Any]) -> list[str]:
    return [node["path"] for node in edits["deviceNodes"]]


# --- golden


LIBDIR = "/lib/x86_64-linux-gnu"
ROOT = "/root"
READ_ONLY = ["ro", "nosuid", "nodev", "rbind", "rprivate"]


def small_host() -> HostFacts:
    """The host of the vendor's own golden test: one GPU, two libraries, driver 999.88.77 below a root."""

    def library(directory: str, name: str, *capabilities: str) -> Library:
        return Library(f"{ROOT}{directory}/{name}.so.999.88.77", f"{name}.so.999.88.77", f"{name}.so.1", capabilities)

    return HostFacts(
        driver_root=ROOT,
        driver_version="999.88.77",
        source="nvml",
        gpus=(Gpu(0, 0, "GPU-0", "00000000:07:00.0", node=DeviceNode("/dev/nvidia0", f"{ROOT}/dev/nvidia0", 195, 0)),),
        control_nodes=(DeviceNode("/dev/nvidiactl", f"{ROOT}/dev/nvidiactl", 195, 255),),
        libraries=(library(LIBDIR, "libcuda", "compute"), library(f"{LIBDIR}/vdpau", "libvdpau_nvidia", "video")),
        proc_driver="/proc/driver/nvidia",
    )


def test_the_vendors_golden_host() -> None:
    """As theirs but for: permissions and fileMode are written, links are one hook, and VDPAU lies beside the others."""
    spec = made(small_host(), THEIRS, vendor="example.com", device_class="device", name_strategies=("index",)).spec
    gpu = {
        "deviceNodes": [
            {"path": "/dev/nvidia0", "hostPath": f"{ROOT}/dev/nvidia0", "fileMode": 0o666, "permissions": "rw"}
        ]
    }

    def hook(*words: str) -> dict[str, Any]:
        arguments = ["nvidia-cdi-hook", *words]
        return {
            "hookName": "createContainer", "path": THEIRS, "args": arguments, "env": ["NVIDIA_CTK_DEBUG=false"],
        }  # fmt: skip

    assert spec == {
        "cdiVersion": "0.6.0",
        "kind": "example.com/device",
        "annotations": {ANNOTATION: "source=nvidia"},
        "devices": [{"name": "0", "containerEdits": gpu}, {"name": "all", "containerEdits": gpu}],
        "containerEdits": {
            "env": [f"NVIDIA_CTK_LIBCUDA_DIR={LIBDIR}", "NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [
                {
                    "path": "/dev/nvidiactl",
                    "hostPath": f"{ROOT}/dev/nvidiactl",
                    "fileMode": 0o666,
                    "permissions": "rw",
                }
            ],
            "hooks": [
                hook(
                    "create-symlinks",
                    *("--link", f"libcuda.so.999.88.77::{LIBDIR}/libcuda.so.1"),
                    *("--link", f"libcuda.so.1::{LIBDIR}/libcuda.so"),
                    *("--link", f"libvdpau_nvidia.so.999.88.77::{LIBDIR}/libvdpau_nvidia.so.1"),
                ),
                hook("enable-cuda-compat", "--host-driver-version=999.88.77"),
                hook("update-ldcache", "--folder", LIBDIR),
                hook("disable-device-node-modification"),
                hook("update-application-profile"),
            ],
            "mounts": [
                {
                    "hostPath": f"{ROOT}{LIBDIR}/libcuda.so.999.88.77",
                    "containerPath": f"{LIBDIR}/libcuda.so.999.88.77",
                    "options": READ_ONLY,
                    "type": "bind",
                },
                {
                    "hostPath": f"{ROOT}{LIBDIR}/vdpau/libvdpau_nvidia.so.999.88.77",
                    "containerPath": f"{LIBDIR}/libvdpau_nvidia.so.999.88.77",
                    "options": READ_ONLY,
                    "type": "bind",
                },
            ],
        },
    }


def test_a_missing_library_is_noted_and_takes_only_its_capability_away() -> None:
    notes = made(small_host()).notes
    assert "libnvidia-ml.so.1 was not found: containers get nothing that only utility needs" in notes


@pytest.mark.parametrize("mode", sorted(CONTAINER_MODES))
def test_a_specification_is_the_same_whatever_way_containers_get_their_gpus(mode: str) -> None:
    settings = Settings(mode=mode, swarm_resource="DOCKER_RESOURCE_GPU")
    assert made(A100, settings=settings).spec == made(A100).spec
    assert made(A100, settings=settings, device_ids=("3",)).spec == made(A100, device_ids=("3",)).spec


def test_a_driver_without_libraries_is_refused() -> None:
    with pytest.raises(HostError) as caught:
        made(small_host()._replace(libraries=()))
    assert caught.value.code == "OCIGPU-LIB-1"


# --- names


@pytest.mark.parametrize(
    ("strategies", "expected"),
    [
        (("index",), ["0", "1", "all"]),
        (("type-index",), ["all", "gpu0", "gpu1"]),
        (("uuid",), [*sorted(gpu.uuid for gpu in DRM.gpus), "all"]),
        (("index", "uuid"), ["0", "1", *sorted(gpu.uuid for gpu in DRM.gpus), "all"]),
    ],
)
def test_gpus_are_named_by_strategy(strategies: tuple[str, ...], expected: list[str]) -> None:
    assert names(made(DRM, name_strategies=strategies).spec) == expected


def test_mig_devices_are_named_by_strategy_and_their_gpus_are_no_devices() -> None:
    parents = [gpu for gpu in MIG.gpus if gpu.mig_devices]
    tokens = [f"{gpu.index}:{mig.index}" for gpu in parents for mig in gpu.mig_devices]
    uuids = [mig.uuid for gpu in parents for mig in gpu.mig_devices]
    spec = made(MIG, name_strategies=("index", "type-index", "uuid")).spec
    assert set(tokens) | {f"mig{token}" for token in tokens} | set(uuids) <= set(names(spec))
    assert not {str(gpu.index) for gpu in parents} & set(names(spec))


def test_a_device_without_a_uuid_has_its_other_names_or_is_reported() -> None:
    facts = DRM._replace(gpus=(DRM.gpus[0]._replace(uuid=""), DRM.gpus[1]))
    assert names(made(facts).spec) == ["0", "1", DRM.gpus[1].uuid, "all"]
    left = made(facts, name_strategies=("uuid",))
    assert names(left.spec) == [DRM.gpus[1].uuid, "all"]
    assert left.skipped == ("GPU 0: it has no name that a CDI device may have",)


# --- which devices


def test_a_mig_device_has_its_gpu_and_its_two_capabilities() -> None:
    gpu = next(gpu for gpu in MIG.gpus if gpu.mig_devices)
    mig = gpu.mig_devices[0]
    expected = {f"/dev/nvidia{gpu.minor}", *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in (mig.gi_minor, mig.ci_minor))}
    assert set(node_paths(edits_of(made(MIG).spec, f"{gpu.index}:{mig.index}"))) == expected


def test_a_gpu_that_is_lost_is_left_out_and_reported() -> None:
    lost = next(gpu for gpu in BROKEN.gpus if gpu.error)
    result = made(BROKEN)
    assert str(lost.index) not in names(result.spec)
    assert len(names(result.spec)) == 2 * (len(BROKEN.gpus) - 1) + 1
    assert len(result.skipped) == 1
    assert f"GPU {lost.index} (" in result.skipped[0]


def test_a_gpu_that_is_lost_is_refused_when_it_is_asked_for() -> None:
    lost = next(gpu for gpu in BROKEN.gpus if gpu.error)
    with pytest.raises(HostError) as caught:
        made(BROKEN, device_ids=(str(lost.index),))
    assert caught.value.code == "OCIGPU-DEV-2"


def test_a_mig_device_without_its_capability_is_left_out_and_reported() -> None:
    gpu = next(gpu for gpu in MIG.gpus if len(gpu.mig_devices) > 1)
    broken = gpu.mig_devices[0]
    rest = tuple((path, node) for path, node in MIG.cap_nodes if node.minor != broken.ci_minor)
    result = made(MIG._replace(cap_nodes=rest))
    assert f"{gpu.index}:{broken.index}" not in names(result.spec)
    assert f"{gpu.index}:{gpu.mig_devices[1].index}" in names(result.spec)
    assert result.skipped[-1].startswith(f"MIG device {gpu.index}:{broken.index}: the device of its compute instance")


def test_a_gpu_with_mig_enabled_and_no_mig_devices_is_left_out_and_refused_by_index() -> None:
    gpu = DRM.gpus[0]._replace(mig_capable=True, mig_enabled=True)
    facts = DRM._replace(gpus=(gpu, DRM.gpus[1]))
    result = made(facts)
    assert names(result.spec) == ["1", DRM.gpus[1].uuid, "all"]
    assert result.skipped == ("left out: GPU 0: MIG is enabled, but there are no MIG devices",)
    with pytest.raises(HostError) as caught:
        made(facts, device_ids=("0",))
    assert caught.value.code == "OCIGPU-DEV-2"


def test_the_index_of_a_gpu_with_mig_devices_means_those_and_not_the_whole_gpu() -> None:
    gpu = next(gpu for gpu in MIG.gpus if gpu.mig_devices)
    result = made(MIG, device_ids=(str(gpu.index),), name_strategies=("index",))
    assert names(result.spec) == [*(f"{gpu.index}:{mig.index}" for mig in gpu.mig_devices), "all"]
    assert any("has MIG enabled" in note for note in result.notes)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (("1",), ["1", "all"]),
        (("1", A100.gpus[1].uuid), ["1", "all"]),
        (("3", "1"), ["1", "3", "all"]),
        ((A100.gpus[5].uuid.lower(), A100.gpus[5].uuid[:12]), ["5", "all"]),
        (("all", "none"), [*map(str, range(8))]),
        (("2", "none", "all"), ["none"]),
        (("none",), ["none"]),
    ],
    ids=["one", "one by two names", "two", "one by parts of its uuid", "all first", "none before all", "none"],
)
def test_ids_choose_devices(ids: tuple[str, ...], expected: list[str]) -> None:
    assert names(made(A100, device_ids=ids, name_strategies=("index",)).spec) == expected


@pytest.mark.parametrize("form", ["index", "uuid", "instances"])
def test_a_mig_device_can_be_chosen_by_index_uuid_and_the_old_form(form: str) -> None:
    gpu = next(gpu for gpu in MIG.gpus if gpu.mig_devices)
    mig = gpu.mig_devices[0]
    old = f"MIG-{gpu.uuid}/{mig.gpu_instance}/{mig.compute_instance}"
    text = {"index": f"{gpu.index}:{mig.index}", "uuid": mig.uuid, "instances": old}[form]
    spec = made(MIG, device_ids=(text,), name_strategies=("index", "type-index", "uuid")).spec
    token = f"{gpu.index}:{mig.index}"
    assert names(spec) == sorted([token, f"mig{token}", mig.uuid, "all"])


def test_none_is_a_device_without_a_gpu() -> None:
    assert edits_of(made(A100, device_ids=("none",)).spec, "none") == {"env": ["NVCT_EMPTY_DEVICE="]}


def test_an_unknown_id_is_refused_by_name() -> None:
    with pytest.raises(RequestError) as caught:
        made(A100, device_ids=("99",))
    assert (caught.value.code, caught.value.message) == (
        "OCIGPU-DEV-1",
        'no such device "99" (--device-id): this host has GPUs 0-7',
    )


@pytest.mark.parametrize(
    ("all_device", "text"),
    [(True, '"all": invalid device, empty device edits'), (False, "invalid spec, no devices")],
)
def test_a_host_without_gpus_keeps_the_texts_that_programs_look_for(all_device: bool, text: str) -> None:
    with pytest.raises(CdiError) as caught:
        made(A100._replace(gpus=()), all_device=all_device)
    assert caught.value.code == "OCIGPU-CDI-7"
    assert text in caught.value.message
    assert "this host has no GPUs" in caught.value.message


def test_a_gpu_without_a_node_is_described_by_its_number() -> None:
    gpu = A100.gpus[0]
    assert gpu.node is not None
    facts = A100._replace(gpus=(gpu._replace(node=gpu.node._replace(host_path="")),))
    (node,) = edits_of(made(facts).spec, "0")["deviceNodes"]
    assert (node["path"], node["type"], node["major"], node["minor"]) == ("/dev/nvidia0", "c", 195, 0)
    assert "hostPath" not in node


def test_a_gpu_whose_number_is_unknown_is_left_out() -> None:
    facts = A100._replace(gpus=(A100.gpus[0]._replace(node=None), A100.gpus[1]))
    result = made(facts, name_strategies=("index",))
    assert names(result.spec) == ["1", "all"]
    assert "its device number is unknown" in result.skipped[0]


# --- all, order, version


def test_all_has_every_device_once_and_no_hook_of_its_own() -> None:
    spec = made(DRM).spec
    assert node_paths(edits_of(spec, "all")) == [
        *("/dev/nvidia0", "/dev/nvidia1", "/dev/dri/card0", "/dev/dri/card1"),
        *("/dev/dri/renderD128", "/dev/dri/renderD129"),
    ]
    assert set(edits_of(spec, "all")) <= {"deviceNodes", "additionalGids"}
    (hook,) = spec["containerEdits"]["hooks"]
    assert hook["args"].count("--device-link") == 4


def test_with_another_hook_program_all_links_to_nodes_are_one_process() -> None:
    spec = made(DRM, THEIRS).spec
    link = "../card1::/dev/dri/by-path/pci-0000:02:00.0-card"
    assert link in edits_of(spec, "1")["hooks"][0]["args"]
    (hook,) = edits_of(spec, "all")["hooks"]
    assert hook["args"][:2] == ["nvidia-cdi-hook", "create-symlinks"]
    assert hook["args"].count("--link") == 4
    assert all(link not in entry["args"] for entry in spec["containerEdits"]["hooks"])


def test_all_can_be_left_out() -> None:
    assert names(made(DRM, all_device=False, name_strategies=("index",)).spec) == ["0", "1"]


@pytest.mark.parametrize(
    ("newest", "version", "left_out"),
    [
        ("", "0.7.0", []),
        ("1.0.0", "0.7.0", []),
        ("0.6.0", "0.6.0", ["additionalGids"]),
        ("0.5.0", "0.5.0", ["additionalGids", "annotations"]),
    ],
)
def test_an_older_version_leaves_out_what_is_only_information(newest: str, version: str, left_out: list[str]) -> None:
    gpus = tuple(
        gpu._replace(drm_nodes=tuple(node._replace(gid=44, mode=0o660) for node in gpu.drm_nodes)) for gpu in DRM.gpus
    )
    result = made(DRM._replace(gpus=gpus), max_version=newest)
    assert result.spec["cdiVersion"] == version
    text = json.dumps(result.spec)
    assert [name for name in ("additionalGids", "annotations") if f'"{name}"' not in text] == left_out
    assert [all(name in note for name in left_out) for note in result.notes if "left out" in note] == (
        [True] if left_out else []
    )


def test_a_version_that_is_too_old_for_the_devices_is_refused() -> None:
    with pytest.raises(CdiError) as caught:
        made(DRM, max_version="0.4.0")
    assert caught.value.code == "OCIGPU-CDI-7"
    assert "needs CDI 0.5.0" in caught.value.message


def test_equal_entries_are_merged_and_groups_are_sorted() -> None:
    first = {"env": ["A=1", "B=2"], "deviceNodes": [{"path": "/dev/a", "minor": 1}], "additionalGids": [105, 44]}
    second = {"env": ["B=2", "C=3"], "deviceNodes": [{"minor": 1, "path": "/dev/a"}], "additionalGids": [44]}
    assert merge_edits([first, second, first]) == {
        "env": ["A=1", "B=2", "C=3"],
        "deviceNodes": [{"path": "/dev/a", "minor": 1}],
        "additionalGids": [44, 105],
    }


def test_nodes_and_mounts_are_in_order_of_depth_then_path() -> None:
    edits = {
        "deviceNodes": [{"path": "/dev/dri/card0"}, {"path": "/dev/nvidia1"}, {"path": "/dev//nvidia0"}],
        "mounts": [{"containerPath": "/usr/lib/x/../y"}, {"containerPath": "/usr/b"}, {"containerPath": "/usr/a/"}],
    }
    assert sort_edits(edits) == {
        "deviceNodes": [{"path": "/dev//nvidia0"}, {"path": "/dev/nvidia1"}, {"path": "/dev/dri/card0"}],
        "mounts": [{"containerPath": "/usr/a/"}, {"containerPath": "/usr/b"}, {"containerPath": "/usr/lib/x/../y"}],
    }


def test_a_device_loses_what_every_container_gets_unless_that_is_all_it_has() -> None:
    node = {"path": "/dev/kfd"}
    devices = (
        DraftDevice("a", {"env": ["A=1"], "deviceNodes": [node]}),
        DraftDevice("b", {"deviceNodes": [dict(node)]}),
    )
    options = GenerateOptions(all_device=False)
    spec = assemble(Draft("x", "v.com", "c", devices, {"deviceNodes": [node]}), options, "source=x").spec
    assert [device["containerEdits"] for device in spec["devices"]] == [{"env": ["A=1"]}, {"deviceNodes": [node]}]


def test_the_hosts_of_64_gpus_with_seven_mig_devices_each_are_described_in_one_go() -> None:
    """Every device of 448 is there, each with its own nodes."""
    template = next(gpu for gpu in MIG.gpus if gpu.mig_devices)
    gpus, caps = [], []
    for index in range(64):
        migs = []
        for number in range(7):
            minor = 1000 + index * 14 + number * 2
            for offset in (0, 1):
                path = f"/dev/nvidia-caps/nvidia-cap{minor + offset}"
                caps.append((f"gpu{index}/gi{number}/{offset}", DeviceNode(path, path, 509, minor + offset)))
            uuid = f"MIG-{index:08x}-0000-0000-0000-{number:012x}"
            migs.append(template.mig_devices[0]._replace(index=number, uuid=uuid, gi_minor=minor, ci_minor=minor + 1))
        path = f"/dev/nvidia{index}"
        gpus.append(
            template._replace(
                index=index,
                minor=index,
                uuid=f"GPU-{index}",
                mig_devices=tuple(migs),
                node=DeviceNode(path, path, 195, index),
            )
        )
    spec = made(MIG._replace(gpus=tuple(gpus), cap_nodes=tuple(caps))).spec
    assert len(spec["devices"]) == 64 * 7 * 2 + 1
    assert len(edits_of(spec, "all")["deviceNodes"]) == 64 * 15
    assert node_paths(edits_of(spec, "63:6")) == [
        "/dev/nvidia63",
        *(f"/dev/nvidia-caps/nvidia-cap{1000 + 63 * 14 + 12 + offset}" for offset in (0, 1)),
    ]


# --- hooks and flags


def test_disabling_all_hooks_leaves_none() -> None:
    assert "hooks" not in made(A100, disabled_hooks=("all",)).spec["containerEdits"]


def test_no_additional_gids_is_a_feature_flag() -> None:
    gpu = DRM.gpus[0]._replace(drm_nodes=(DRM.gpus[0].drm_nodes[0]._replace(gid=44, mode=0o660),))
    facts = DRM._replace(gpus=(gpu,))
    assert edits_of(made(facts).spec, "0")["additionalGids"] == [44]
    edits = edits_of(made(facts, feature_flags=("no-additional-gids-for-device-nodes",)).spec, "0")
    assert "additionalGids" not in edits
    assert edits["deviceNodes"][1]["gid"] == 44


def test_sockets_can_be_left_out_by_a_feature_flag() -> None:
    def sockets(spec: dict[str, Any]) -> list[str]:
        return [m["containerPath"] for m in spec["containerEdits"]["mounts"] if m["containerPath"].endswith("socket")]

    assert sockets(made(A100).spec)
    assert not sockets(made(A100, feature_flags=("disable-ipc-discoverer",)).spec)


def coherent(facts: HostFacts, **changes: Any) -> dict[str, tuple[str, str, list[str]]]:
    """Return version, kind and devices of the specifications for GPUs with coherent memory and for those without."""
    options = GenerateOptions(name_strategies=("index",), **changes)
    made = draft_of(offer_gpus(facts, options, SETTINGS), options, HookOptions(OURS))
    parts = coherent_parts(made, options, "source=nvidia")
    specs = [(part.suffix, part.generated.spec) for part in parts]
    return {suffix: (spec["cdiVersion"], spec["kind"], names(spec)) for suffix, spec in specs}


MIXED = A100._replace(gpus=(A100.gpus[0]._replace(coherent=True), *A100.gpus[1:3]))


@pytest.mark.parametrize(
    ("facts", "changes", "expected"),
    [
        pytest.param(
            MIXED, {},
            {
                ".coherent": ("0.6.0", "nvidia.com/gpu.coherent", ["0", "all"]),
                ".noncoherent": ("0.6.0", "nvidia.com/gpu.noncoherent", ["1", "2", "all"]),
            },
            id="both",
        ),
        pytest.param(
            MIXED, {"device_class": "x", "vendor": "y.org", "device_ids": ("0",), "all_device": False},
            {".coherent": ("0.6.0", "y.org/x.coherent", ["0"])},
            id="one, of another kind",
        ),
        pytest.param(MIXED._replace(source="procfs"), {}, {}, id="nobody knows without NVML"),
        pytest.param(
            MIG._replace(gpus=tuple(gpu for gpu in MIG.gpus if gpu.mig_devices)), {}, {}, id="not of MIG devices"
        ),
    ],
)  # fmt: skip
def test_gpus_can_be_sorted_by_coherent_memory(
    facts: HostFacts, changes: dict[str, Any], expected: dict[str, tuple[str, str, list[str]]]
) -> None:
    assert coherent(facts, **changes) == expected


def test_kinds_by_memory_need_cdi_0_6() -> None:
    with pytest.raises(CdiError) as caught:
        coherent(MIXED, max_version="0.5.0")
    assert "needs CDI 0.6.0" in caught.value.message


def test_only_permitted_capabilities_are_described() -> None:
    """What hook mode may not give, a specification does not give either."""
    spec = made(A100, settings=Settings(supported_driver_capabilities="utility")).spec
    paths = [mount["containerPath"] for mount in spec["containerEdits"]["mounts"]]
    assert any("libnvidia-ml.so" in path for path in paths)
    assert not any("libcuda.so" in path for path in paths)
    assert node_paths(spec["containerEdits"]) == ["/dev/nvidiactl"]


def test_the_ldconfig_that_was_named_is_told_to_the_hook() -> None:
    (hook,) = made(A100, settings=SETTINGS._replace(ldconfig="/opt/ldconfig")).spec["containerEdits"]["hooks"]
    at = hook["args"].index("--ldconfig-path")
    assert hook["args"][at + 1] == "/opt/ldconfig"


# --- the other modes


def management(facts: HostFacts, **changes: Any) -> dict[str, Any]:
    options = GenerateOptions(mode="management", **changes)
    hook = HookOptions(OURS, "", enabled_hooks(options))
    return assemble(draft_of(offer_management(facts, options, SETTINGS), options, hook), options, "source=nvidia").spec


def test_management_is_one_device_with_every_node() -> None:
    spec = management(MIG)
    assert (spec["kind"], names(spec)) == ("nvidia.com/gpu", ["all"])
    listed = set(node_paths(edits_of(spec, "all")))
    expected = {node.container_path for node in MIG.control_nodes} | {f"/dev/nvidia{gpu.minor}" for gpu in MIG.gpus}
    expected |= {node.container_path for node in (*(node for _, node in MIG.cap_nodes), *MIG.imex_nodes)}
    assert listed == expected
    assert "deviceNodes" not in spec["containerEdits"]


def test_management_has_all_libraries_of_the_driver_and_no_other_file_for_graphics() -> None:
    """The vendor's: *.so.VERSION of each directory; no EGL platform library, X module or configuration file."""
    spec, version = management(A100), A100.driver_version
    everything = {mount["containerPath"] for mount in made(A100).spec["containerEdits"]["mounts"]}
    mounted = {mount["containerPath"] for mount in spec["containerEdits"]["mounts"]}
    library = {path for path in everything if path.endswith(f".so.{version}") and "/xorg/" not in path}
    assert library <= mounted
    names = {path.rpartition("/")[2].partition(".so")[0] for path in mounted}
    assert {"libGLX_nvidia", "libnvidia-glcore", "libnvidia-eglcore", "libnvidia-rtcore", "libnvoptix"} <= names
    left = everything - mounted
    assert {"libnvidia-egl-gbm.so.1.1.1", "nvidia_drv.so", "10_nvidia.json"} <= {
        path.rpartition("/")[2] for path in left
    }
    (hook,) = spec["containerEdits"]["hooks"]
    assert f"libGLX_nvidia.so.{version}::{LIBRARIES}/libGLX_nvidia.so.0" in hook["args"]
    assert "nvidia-drm_gbm.so" not in " ".join(hook["args"])


def test_management_has_the_channels_of_imex_and_gpus_with_errors() -> None:
    assert "/dev/nvidia-caps-imex-channels/channel0" in node_paths(edits_of(management(IMEX), "all"))
    lost = next(gpu for gpu in BROKEN.gpus if gpu.error and gpu.node)
    assert f"/dev/nvidia{lost.minor}" in node_paths(edits_of(management(BROKEN), "all"))


def test_management_has_a_gpu_for_a_display_only_which_all_leaves_out() -> None:
    facts = DRM._replace(gpus=(DRM.gpus[0]._replace(model="NVIDIA DGX Display"), DRM.gpus[1]))
    assert names(made(facts, name_strategies=("index",)).spec) == ["1", "all"]
    assert names(made(facts, name_strategies=("index",), device_ids=("0",)).spec) == ["0", "all"]
    assert {"/dev/nvidia0", "/dev/nvidia1"} <= set(node_paths(edits_of(management(facts), "all")))


def test_management_sees_the_hosts_procfs_unless_the_hook_is_asked_for() -> None:
    name = "disable-device-node-modification"
    (hook,) = management(A100)["containerEdits"]["hooks"]
    assert name not in hook["args"]
    assert "update-application-profile" not in hook["args"]
    (hook,) = management(A100, enabled_hooks=(name,))["containerEdits"]["hooks"]
    assert name in hook["args"]


def test_management_without_a_loaded_driver_says_what_programs_look_for() -> None:
    with pytest.raises(CdiError) as caught:
        management(A100._replace(control_nodes=()))
    assert caught.value.message.startswith("no NVIDIA device nodes found")


def feature(mode: str, facts: HostFacts) -> Generated:
    options = GenerateOptions(mode=mode)
    return assemble(draft_of(offer_feature(facts, options), options), options, "source=nvidia")


def char(path: str) -> DeviceNode:
    return DeviceNode(path, path, 240, 0)


GDS = FeatureNodes(
    "gds",
    (char("/dev/nvidia-fs0"),),
    (HostFile("/run/udev", "/run/udev", (), "directory"), HostFile("/etc/cufile.json", "/etc/cufile.json")),
)


def test_gpudirect_storage_needs_no_driver_and_no_gpu() -> None:
    spec = feature("gds", HostFacts(features=(GDS,))).spec
    assert (spec["kind"], names(spec)) == ("nvidia.com/gds", ["all"])
    assert edits_of(spec, "all") == {
        "deviceNodes": [{"path": "/dev/nvidia-fs0", "fileMode": 0o666, "permissions": "rw"}],
        "mounts": [
            {"hostPath": path, "containerPath": path, "options": READ_ONLY, "type": "bind"}
            for path in ("/etc/cufile.json", "/run/udev")
        ],
    }
    assert spec["containerEdits"] == {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}


@pytest.mark.parametrize("mode", ["gds", "mofed", "gdrcopy", "nvswitch"])
def test_a_feature_that_the_host_lacks_keeps_the_text_that_programs_look_for(mode: str) -> None:
    with pytest.raises(CdiError) as caught:
        feature(mode, HostFacts())
    assert caught.value.message == (
        f'generate nvidia.com/{mode}: failed add device "all": invalid device, empty device edits'
        f" (this host has no device for {mode})"
    )


def imex(*ids: str) -> dict[str, Any]:
    options = GenerateOptions(mode="imex", device_ids=ids)
    return assemble(draft_of(offer_imex(IMEX, options), options), options, "source=nvidia").spec


def test_imex_channels_are_devices_named_by_number() -> None:
    channels = sorted(node.minor for node in IMEX.imex_nodes)
    spec = imex("all")
    assert (spec["kind"], names(spec)) == ("nvidia.com/imex-channel", [*map(str, channels), "all"])
    assert node_paths(edits_of(spec, "0")) == ["/dev/nvidia-caps-imex-channels/channel0"]
    assert names(imex(f"channel{channels[0]}", str(channels[0]))) == [str(channels[0]), "all"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", 'invalid channel ID "x": not a number'),
        ("1048576", "invalid channel ID 1048576: must be in the range [0, 1048575]"),
        ("77", "IMEX channel 77 not found at /dev/nvidia-caps-imex-channels/channel77"),
    ],
)
def test_a_channel_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(CdiError) as caught:
        imex(text)
    assert caught.value.message == message


# --- a live directory tree


def tree_settings(root: Path) -> Settings:
    return Settings(simulation_root=str(root))


def test_a_mode_without_a_driver_reads_only_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/null").touch()
    for mode, text in (("gds", "empty device edits"), ("imex", "empty device edits"), ("nvml", "no NVIDIA driver")):
        with pytest.raises(OcigpuError) as caught:
            generate(GenerateOptions(mode=mode), tree_settings(tmp_path))
        assert text in caught.value.message
    with pytest.raises(CdiError) as refused:
        generate(GenerateOptions(mode="management"), tree_settings(tmp_path))
    assert refused.value.message.startswith("no NVIDIA device nodes found: no NVIDIA driver")


def test_the_platform_decides_the_mode(tmp_path: Path) -> None:
    settings = tree_settings(tmp_path)
    assert find_mode("auto", "", settings)[0] == "nvml"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36")
    assert find_mode("auto", "", settings)[0] == "csv"
    (tmp_path / "usr/lib/wsl/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/wsl/lib/libdxcore.so").touch()
    assert find_mode("auto", "", settings)[0] == "wsl"


def answer(*models: str) -> NvmlAnswer:
    gpus = (Gpu(index, index, f"GPU-{index}", "00000000:01:00.0", model) for index, model in enumerate(models))
    return NvmlAnswer(gpus=tuple(gpus))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(None, "csv", id="no NVML"),
        pytest.param(NvmlAnswer("NVML cannot be initialised"), "csv", id="a useless NVML"),
        pytest.param(answer("Orin (nvgpu)"), "csv", id="integrated"),
        pytest.param(answer("NVIDIA Thor", "NVIDIA RTX 6000"), "csv", id="integrated and discrete"),
        pytest.param(answer("NVIDIA A100-PCIE-40GB"), "nvml", id="discrete, at the address of integrated ones"),
    ],
)
def test_a_tegra_system_with_discrete_gpus_alone_is_like_any_other_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: NvmlAnswer | None, expected: str
) -> None:
    monkeypatch.setattr("ocigpu.gpus.tegra.facts.ask_nvml", lambda _: said)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36")
    assert find_mode("auto", "", tree_settings(tmp_path))[0] == expected


@pytest.mark.parametrize("vendor", ["amd", "amd.com", "AMD"])
def test_the_vendor_amd_is_another_source(vendor: str, tmp_path: Path) -> None:
    with pytest.raises(CdiError) as caught:
        generate(GenerateOptions(vendor=vendor), tree_settings(tmp_path))
    assert "no AMD GPU" in caught.value.message


def test_every_mode_has_a_source() -> None:
    vendors = [load_vendor(name) for name in VENDORS]
    by_kind = {mode for vendor in vendors if vendor.kinds for mode in vendor.modes}  # asked for by --vendor
    assert {*MODES} - {"auto"} == {mode for vendor in vendors for mode in vendor.modes} - by_kind
    assert "amd" in by_kind


def test_what_is_generated_is_valid_without_a_warning() -> None:
    for facts in (A100, MIG, DRM, BROKEN):
        for hook in (OURS, THEIRS):
            assert check_spec(made(facts, hook).spec).problems == ()


@pytest.mark.parametrize(
    ("mode", "hint"),
    [("gds", "modprobe nvidia-fs"), ("gdrcopy", "modprobe gdrdrv"), ("mofed", "uverbs"), ("nvswitch", "NVSwitches")],
)
def test_a_mode_without_devices_says_what_they_need(mode: str, hint: str) -> None:
    options = GenerateOptions(mode=mode)
    with pytest.raises(CdiError) as caught:
        assemble(Draft("nvidia", "nvidia.com", mode, (DraftDevice("all", {}),), {}), options, "")
    assert hint in caught.value.hint


def test_a_version_that_is_too_old_for_the_devices_says_which_one_is_not() -> None:
    node = {"deviceNodes": [{"path": "/dev/a", "hostPath": "/dev/b"}]}
    with pytest.raises(CdiError) as caught:
        assemble(
            Draft("nvidia", "x.com", "gpu", (DraftDevice("a", node),), {}), GenerateOptions(max_version="0.4.0"), "f"
        )
    assert caught.value.hint == "Leave --max-version out, or raise it to 0.5.0."
