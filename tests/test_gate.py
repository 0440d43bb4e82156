"""What a container may ask for: every source, kind and setting against rules that are said here once more in words."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ocigpu.containers.live import Live, plan_for
from ocigpu.core import gate
from ocigpu.core.actions import Node
from ocigpu.core.errors import RequestError
from ocigpu.core.facts import ImageFacts, facts_from_json
from ocigpu.core.settings import Settings
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request

DEVICES = "NVIDIA_VISIBLE_DEVICES"
KEY = "cdi.k8s.io/plugin_0"
CRI = {"io.kubernetes.cri.container-type": "container"}
CRI_BUNDLE = "/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/0123abcd"
OTHER_BUNDLES = (
    "",
    "io.containerd.runtime.v2.task/k8s.io/0123abcd",
    "/io.containerd.runtime.v2.task/k8s.io",
    "/run/containerd/io.containerd.runtime.v2.task/moby/0123abcd",
    "/run/containerd/io.containerd.runtime.v2.task/default/k8s.io",
    "/var/lib/containers/storage/overlay-containers/0123abcd/userdata",
    "/run/containerd/io.containerd.runtime.v2.task/k8s.io/0123abcd/rootfs",
)
NAMED = {
    "cdi-gpu": ("nvidia.com/gpu=0", "k8s.device-plugin.nvidia.com/gpu=0", "amd.com/gpu=0"),
    "cdi-part": ("nvidia.com/gds=all", "nvidia.com/nvswitch=all", "k8s.device-plugin.nvidia.com/mofed=all"),
    "cdi-imex": ("nvidia.com/imex-channel=0", "k8s.device-plugin.nvidia.com/imex-channel=0"),
    "cdi-other": ("nvidia.com/pgpu=0", "amd.com/vfio=0", "example.com/disk=0", "management.nvidia.com/gpu=all"),
}
LISTED = ("nvidia.com", "k8s.device-plugin.nvidia.com", "amd.com")
"""Vendors of the default settings, which stand for GPUs."""


class Case(NamedTuple):
    """One container and the settings of its host."""

    source: str
    kind: str
    what: str
    settings: Settings
    privileged: bool
    cri: bool

    def document(self) -> dict[str, Any]:
        env, mounts = [], []
        annotations = dict(CRI) if self.cri else {}
        directory = "/var/run/nvidia-container-devices"
        if self.kind == "imex":
            env = [f"{DEVICES}=0"] if self.source == "variable" else []
            mounts = [f"{directory}/0"] if self.source == "mount" else []
        if self.kind == "imex" and self.source == "variable":
            env.append(f"NVIDIA_IMEX_CHANNELS={self.what}")
        elif self.kind == "imex":
            mounts.append(f"{directory}/imex/{self.what}")
        elif self.source == "variable":
            env = [f"{DEVICES}={self.what}"]
        elif self.source == "annotation":
            annotations[KEY] = self.what
        else:
            mounts = [f"{directory}/cdi/{self.what}" if "=" in self.what else f"{directory}/{self.what}"]
        bounding = ["CAP_SYS_ADMIN"] if self.privileged else []
        return {
            "process": {"env": env, "capabilities": {"bounding": bounding}},
            "annotations": annotations,
            "mounts": [{"source": "/dev/null", "destination": path} for path in mounts],
        }

    def expected(self) -> str:
        """Return "granted", "ignored" or "refused", by the words of the documentation and not by the code's table."""
        one = self.settings
        kind = self.what.partition("=")[0]
        vendor = kind.partition("/")[0]
        trusted = self.privileged or (self.source == "annotation" and (one.cdi_engine_filters_annotations or self.cri))
        listed = kind in one.cdi_environment_vendors or (
            vendor in one.cdi_environment_vendors and (self.kind == "cdi-gpu" or vendor == "example.com")
        )
        if self.source == "annotation" and one.mode == "hook":
            return "ignored"
        if self.source == "mount" and not one.accept_nvidia_visible_devices_as_volume_mounts:
            return "ignored"
        if self.source != "mount" and not trusted and not one.accept_nvidia_visible_devices_envvar_when_unprivileged:
            return "ignored"
        if "=" in self.what and one.mode == "hook":
            return "refused"  # there are no specifications in this mode
        if self.source == "annotation" and self.kind == "gpu" and one.mode != "cdi":
            return "refused"  # annotations have names
        if self.kind in ("imex", "cdi-imex") and one.features_ignore_imex_channel_requests:
            return "ignored"
        by_image = self.source != "mount" and not trusted
        if by_image and self.kind in ("cdi-gpu", "cdi-other") and not listed:
            return "refused"
        if by_image and self.kind in ("cdi-part", "cdi-imex") and self.source == "variable" and not listed:
            return "refused"
        return "granted"

    def outcome(self) -> str:
        try:
            request = parse_request(self.document(), self.settings, CRI_BUNDLE if self.cri else OTHER_BUNDLES[-2])
        except RequestError as error:
            return "refused" if error.code == "OCIGPU-REQ-1" else error.code
        if self.kind == "imex":
            asked = request.imex_channels == (0,) or "nvidia.com/imex-channel=0" in request.cdi_devices
            return "granted" if asked else "ignored"
        if request.selection == "nothing":
            assert request == Request(notes=request.notes)
            return "ignored"
        if "=" in self.what:
            assert request.cdi_devices == (self.what,)
        return "granted"


def every_case() -> list[Case]:
    whats = [("gpu", "0"), ("gpu", "all"), ("imex", "0")]
    whats += [(kind, name) for kind, names in NAMED.items() for name in names]
    vendors = (LISTED, (*LISTED, "example.com", "nvidia.com/pgpu", "nvidia.com/gds", "nvidia.com/imex-channel"), ())
    flags = [(False, True)] * 6
    cases = []
    for mode, listed, (env, mounts, filtered, no_imex, privileged, cri) in itertools.product(
        ("auto", "cdi", "hook"), vendors, itertools.product(*flags)
    ):
        settings = Settings(
            mode=mode,
            accept_nvidia_visible_devices_envvar_when_unprivileged=env,
            accept_nvidia_visible_devices_as_volume_mounts=mounts,
            cdi_engine_filters_annotations=filtered,
            features_ignore_imex_channel_requests=no_imex,
            cdi_environment_vendors=listed,
            cdi_default_kind="nvidia.com/gpu" if listed else "example.org/x",
        )
        for source, (kind, what) in itertools.product(("variable", "annotation", "mount"), whats):
            if kind == "imex" and source == "annotation":
                continue  # annotations name devices
            if kind == "imex" and mode == "cdi" and not listed:
                continue  # of another vendor's device nothing of NVIDIA's driver comes along
            if kind == "gpu" and mode == "cdi" and not listed:
                continue  # a plain name of the default kind: that it is listed is another test's
            cases.append(Case(source, kind, what, settings, privileged, cri))
    return cases


def test_every_source_kind_and_setting() -> None:
    cases = every_case()
    assert len(cases) > 15_000
    wrong = [(case, case.outcome()) for case in cases if case.outcome() != case.expected()]
    assert wrong[:3] == []


PARTS = ("GDS", "MOFED", "GDRCOPY", "NVSWITCH")


@pytest.mark.parametrize("mode", ["auto", "cdi"])
@pytest.mark.parametrize("privileged", [False, True])
@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("source", ["variable", "mount", "annotation"])
def test_opt_in_variables_are_obeyed_where_variables_are(
    source: str, accepted: bool, privileged: bool, mode: str
) -> None:
    """Whoever asks for the GPU: the variables are the image's."""
    settings = Settings(
        mode=mode,
        accept_nvidia_visible_devices_envvar_when_unprivileged=accepted,
        accept_nvidia_visible_devices_as_volume_mounts=True,
        cdi_engine_filters_annotations=True,
    )
    what = "nvidia.com/gpu=0" if source == "annotation" else "0"
    document = Case(source, "gpu", what, settings, privileged, False).document()
    document["process"]["env"] += [f"NVIDIA_{name}=enabled" for name in PARTS]
    request = parse_request(document, settings)
    obeyed = accepted or privileged
    if source == "variable" and not obeyed:
        assert request.selection == "nothing"
        return
    parts = {name.lower() for name in PARTS} if obeyed else set()
    if request.selection == "cdi":
        assert set(request.cdi_devices) == {"nvidia.com/gpu=0", *(f"nvidia.com/{name}=all" for name in parts)}
    else:
        assert set(request.features) == parts
    notes = [f"NVIDIA_{name} ignored: the container has no CAP_SYS_ADMIN" for name in PARTS]
    assert all(any(note.startswith(start) for note in request.notes) for start in notes) is not obeyed


@pytest.mark.parametrize(
    ("source", "privileged", "filtered", "bound"),
    [
        ("variable", False, False, True),
        ("variable", False, True, True),
        ("variable", True, False, False),
        ("annotation", False, False, True),
        ("annotation", False, True, False),
        ("annotation", True, False, False),
        ("mount", False, False, False),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "cdi"])
def test_what_an_image_names_may_give_it_no_more_than_the_driver_capabilities_of_the_settings(
    source: str, privileged: bool, filtered: bool, bound: bool, mode: str
) -> None:
    settings = Settings(
        mode=mode,
        supported_driver_capabilities="utility,compute",
        accept_nvidia_visible_devices_as_volume_mounts=True,
        cdi_engine_filters_annotations=filtered,
    )
    case = Case(source, "cdi-gpu", "nvidia.com/gpu=0", settings, privileged, False)
    assert parse_request(case.document(), settings).capabilities == (("compute", "utility") if bound else ())
    everything = settings._replace(supported_driver_capabilities="all")
    assert parse_request(case.document(), everything).capabilities == ()
    nothing = settings._replace(supported_driver_capabilities="")
    assert parse_request(case.document(), nothing).capabilities == (("none",) if bound else ())
    more = case.document()
    more["process"]["env"].append("NVIDIA_DRIVER_CAPABILITIES=graphics")
    with pytest.raises(RequestError, match="not permitted on this host"):
        parse_request(more, settings)


@pytest.mark.parametrize("bundle", OTHER_BUNDLES)
def test_only_containerds_directory_vouches_for_annotations(bundle: str) -> None:
    """What an image writes, under Podman for instance, says nothing of who filters it."""
    settings = Settings(accept_nvidia_visible_devices_envvar_when_unprivileged=False)
    document = {"annotations": {**CRI, KEY: "nvidia.com/gpu=0", "io.kubernetes.cri.sandbox-id": "0123abcd"}}
    request = parse_request(document, settings, bundle)
    assert (request.selection, len(request.notes)) == ("nothing", 1)
    assert request.notes[0].startswith(f"annotation {KEY}=nvidia.com/gpu=0 ignored: the container has no CAP_SYS_ADMIN")
    assert parse_request(document, settings, CRI_BUNDLE).cdi_devices == ("nvidia.com/gpu=0",)
    del document["annotations"]["io.kubernetes.cri.container-type"]
    assert parse_request(document, settings, CRI_BUNDLE).selection == "nothing"


@pytest.mark.parametrize(
    ("name", "of_plugins"),
    [
        pytest.param("nvidia-device-plugin_5f0e3d1c-8a7b-4c6d-9e0f-112233445566", True, id="NVIDIA's device plugin"),
        pytest.param("vendor.class_gpu-0", True, id="of the specification"),
        pytest.param("p_d", True, id="short"),
        pytest.param("a" * 30 + "_" + "b" * 32, True, id="63"),
        pytest.param("a" * 31 + "_" + "b" * 32, False, id="64"),
        pytest.param("x", False, id="no device"),
        pytest.param("_x", False, id="no plugin"),
        pytest.param("x_", False, id="empty device"),
        pytest.param("-a_b", False, id="first"),
        pytest.param("a_b.", False, id="last"),
        pytest.param("a_b/c", False, id="slash"),
        pytest.param("a_b c", False, id="blank"),
        pytest.param("a_b\n", False, id="line"),
        pytest.param("é_b", False, id="another letter"),
        pytest.param("", False, id="empty"),
    ],
)
def test_keys_of_annotations_are_those_of_device_plugins(name: str, of_plugins: bool) -> None:
    assert gate.is_plugin_key(name) is of_plugins
    request = parse_request({"annotations": {f"cdi.k8s.io/{name}": "nvidia.com/gpu=0"}}, Settings())
    assert bool(request.cdi_devices) is of_plugins
    assert [note.isprintable() for note in request.notes] == ([] if of_plugins else [True])


@pytest.mark.parametrize("kind", ["example.com/disk", "example.com/gpu", "nvidia.com/mig", "nvidia.com/gpu"])
def test_the_default_kind_lists_itself_and_nothing_else_of_its_vendor(kind: str) -> None:
    settings = Settings(mode="cdi", cdi_default_kind=kind, cdi_environment_vendors=())
    assert parse_request({"process": {"env": [f"{DEVICES}=0"]}}, settings).cdi_devices == (f"{kind}=0",)
    vendor = kind.partition("/")[0]
    for other in {f"{vendor}/gpu", f"{vendor}/other", f"{vendor}/pgpu", f"{vendor}/gpu.other"} - {kind}:
        for document in ({"process": {"env": [f"{DEVICES}={other}=0"]}}, {"annotations": {KEY: f"{other}=0"}}):
            with pytest.raises(RequestError, match="the image may have written this"):
                parse_request(document, settings)


def test_an_annotation_that_is_not_obeyed_leaves_the_other_ways_as_they_are() -> None:
    settings = Settings(
        accept_nvidia_visible_devices_envvar_when_unprivileged=False,
        accept_nvidia_visible_devices_as_volume_mounts=True,
    )
    document = Case("mount", "gpu", "1", settings, False, False).document()
    document["annotations"] = {KEY: "nvidia.com/gpu=all"}
    document["process"]["env"] = [f"{DEVICES}=all"]
    request = parse_request(document, settings)
    assert (request.devices, len(request.notes)) == (("1",), 1)


@pytest.mark.parametrize("accepted", [False, True])
def test_a_gpu_that_is_attached_brings_no_more_than_the_image_may_ask_for(accepted: bool) -> None:
    settings = Settings(accept_nvidia_visible_devices_envvar_when_unprivileged=accepted)
    document: dict[str, Any] = {
        "process": {"env": ["NVIDIA_GDS=enabled", "NVIDIA_IMEX_CHANNELS=0"]},
        "linux": {"namespaces": [{"type": "mount"}]},
    }
    facts = facts_from_json(json.loads((Path(__file__).parent / "bundles/hosts/h100-4-imex.json").read_text()))
    nobody: Any = SimpleNamespace(bundle="")
    live = Live(nobody, nobody, document, settings, facts, ImageFacts(), nobody)
    nodes = {
        action.node.container_path
        for action in plan_for(live, [facts.gpus[1].uuid]).actions
        if isinstance(action, Node)
    }
    assert "/dev/nvidia1" in nodes
    assert {"/dev/nvidia-fs0", "/dev/nvidia-caps-imex-channels/channel0"} & nodes == (
        {"/dev/nvidia-fs0", "/dev/nvidia-caps-imex-channels/channel0"} if accepted else set()
    )


def test_the_gate_has_every_kind_and_source_once() -> None:
    assert set(gate.RULES) == set(gate.KINDS)
    for sources in gate.RULES.values():
        assert set(sources) <= set(gate.SOURCES)
        assert {letter for letters in sources.values() for letter in letters} <= set(gate.CONDITIONS)
    assert all("label" not in sources for sources in gate.RULES.values()), "no label is read anywhere"


def test_the_page_on_security_has_the_table_as_it_is() -> None:
    """``python -m ocigpu.core.gate`` prints it."""
    assert gate.render_table() in (Path(__file__).parents[1] / "docs/SECURITY.md").read_text()
