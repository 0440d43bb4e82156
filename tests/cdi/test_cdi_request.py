"""CDI devices in requests: from annotations, volume mounts and variables, in the modes that obey them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.core.errors import OcigpuError, RequestError
from ocigpu.core.settings import Settings
from ocigpu.core.tokens import MAX_TOKENS
from ocigpu.gpus.nvidia.request import MAX_VALUE
from ocigpu.gpus.request import Request, check_without_cdi
from ocigpu.gpus.vendors import parse_request
from ocigpu.hook import run_prestart

DEVICES = "NVIDIA_VISIBLE_DEVICES"
VENDORS = ("nvidia.com", "amd.com", "x.com", "y.com", "notnvidia.com", "k8s.gpu.nvidia.com", "vendor.com")
AUTO = Settings(accept_nvidia_visible_devices_as_volume_mounts=True, cdi_environment_vendors=VENDORS)
CDI = AUTO._replace(mode="cdi")
HOOK = AUTO._replace(mode="hook")
PREFIX = "cdi.k8s.io/"
UUID = "GPU-5f0e3d1c-8a7b-4c6d-9e0f-112233445566"


def config(
    env: dict[str, str] | None = None,
    mounts: tuple[str, ...] = (),
    annotations: Any = None,
    privileged: bool = False,
) -> dict[str, Any]:
    directory = "/var/run/nvidia-container-devices"
    return {
        "process": {
            "env": [f"{name}={value}" for name, value in (env or {}).items()],
            "capabilities": {"bounding": ["CAP_SYS_ADMIN"] if privileged else []},
        },
        "mounts": [{"source": "/dev/null", "destination": f"{directory}/{name}"} for name in mounts],
        **({} if annotations is None else {"annotations": annotations}),
    }


def visible(value: str, **more: str) -> dict[str, Any]:
    return config({DEVICES: value, **more})


def refusal(document: dict[str, Any], settings: Settings) -> str:
    with pytest.raises(RequestError) as caught:
        parse_request(document, settings)
    assert caught.value.code == "OCIGPU-REQ-1"
    assert len(caught.value.render("ocigpu-runtime").splitlines()) <= 2
    return caught.value.message


# --- mode cdi


@pytest.mark.parametrize(
    ("value", "names"),
    [
        pytest.param("0", ["nvidia.com/gpu=0"], id="index"),
        pytest.param("2,0,2, 1,", [f"nvidia.com/gpu={index}" for index in (2, 0, 1)], id="order kept, each once"),
        pytest.param(UUID, [f"nvidia.com/gpu={UUID}"], id="uuid"),
        pytest.param("0:1", ["nvidia.com/gpu=0:1"], id="MIG pair"),
        pytest.param("gpu0", ["nvidia.com/gpu=gpu0"], id="any name that a specification may define"),
        pytest.param("all", ["nvidia.com/gpu=all"], id="all"),
        pytest.param("none", ["nvidia.com/gpu=none"], id="none: an error unless it is defined"),
        pytest.param("0,all", ["nvidia.com/gpu=all"], id="all decides for the list"),
        pytest.param("0,nvidia.com/gpu=0", ["nvidia.com/gpu=0"], id="the same by two names"),
        pytest.param("x.com/a=1,0,y.com/b.c=all", ["x.com/a=1", "nvidia.com/gpu=0", "y.com/b.c=all"], id="both kinds"),
        pytest.param("x.com/a=1,all", ["x.com/a=1", "nvidia.com/gpu=all"], id="all beside a name takes nothing away"),
    ],
)
def test_every_device_becomes_a_name(value: str, names: list[str]) -> None:
    request = parse_request(visible(value), CDI)
    assert (request.selection, list(request.cdi_devices)) == ("cdi", names)
    assert request == Request("cdi", source=request.source, cdi_devices=tuple(names))
    assert request.source.startswith(f"{DEVICES}=")


@pytest.mark.parametrize("value", ["", "void", "0,void", ",", "x.com/a=1,void"])
@pytest.mark.parametrize("settings", [AUTO, CDI], ids=["auto", "cdi"])
def test_nothing_stays_nothing(value: str, settings: Settings) -> None:
    assert parse_request(visible(value), settings) == Request()


def test_the_default_kind_is_a_setting() -> None:
    assert parse_request(visible("1"), CDI._replace(cdi_default_kind="x.com/y")).cdi_devices == ("x.com/y=1",)


def test_an_image_of_the_old_kind_asks_for_all() -> None:
    assert parse_request(config({"CUDA_VERSION": "9.0"}), CDI).cdi_devices == ("nvidia.com/gpu=all",)


@pytest.mark.parametrize(
    "value",
    [
        "MIG-GPU-1/2/3",
        "a b",
        "-0",
        "x.com/=1",
        "=",
        "x.com/a=",
        "x.com/a=b=c",
        "/a=b",
        "1.com/a=b",
        "x/y=\u00e9",
        "a\nb",
    ],
)
def test_what_no_specification_can_define_is_refused(value: str) -> None:
    assert f"{DEVICES}: " in refusal(visible(value), CDI)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param("x.com/a=" + "b" * 600, "longer than 600 characters", id="long name"),
        pytest.param(",".join(map(str, range(MAX_TOKENS + 1))), "more than 4096 devices", id="too many"),
        pytest.param("0," * MAX_VALUE, f"longer than {MAX_VALUE}", id="huge"),
    ],
)
def test_requests_have_bounds(value: str, shown: str) -> None:
    message = refusal(visible(value), CDI)
    assert shown in message
    assert len(message) < 300


def test_variables_of_unprivileged_containers_are_ignored_where_settings_say_so() -> None:
    strict = CDI._replace(accept_nvidia_visible_devices_envvar_when_unprivileged=False)
    request = parse_request(visible("x.com/a=1"), strict)
    assert (request.selection, request.cdi_devices) == ("nothing", ())
    assert f"{DEVICES} ignored" in request.notes[0]
    assert parse_request(config({DEVICES: "0"}, privileged=True), strict).cdi_devices == ("nvidia.com/gpu=0",)
    assert parse_request(config(mounts=("cdi/x.com/a/1",)), strict).cdi_devices == ("x.com/a=1",)


# --- mode auto and mode hook


@pytest.mark.parametrize(
    ("document", "names"),
    [
        pytest.param(visible("nvidia.com/gpu=0"), ("nvidia.com/gpu=0",), id="one"),
        pytest.param(visible("x.com/a=1, y.com/b=2"), ("x.com/a=1", "y.com/b=2"), id="several"),
        pytest.param(config(mounts=("cdi/x.com/a/1",)), ("x.com/a=1",), id="mount"),
        pytest.param(config(annotations={f"{PREFIX}p_d": "x.com/a=1"}), ("x.com/a=1",), id="annotation"),
    ],
)
def test_auto_serves_qualified_names_from_specifications(document: dict[str, Any], names: tuple[str, ...]) -> None:
    request = parse_request(document, AUTO)
    assert (request.selection, request.cdi_devices) == ("cdi", names)
    assert parse_request(document, CDI).cdi_devices == names


@pytest.mark.parametrize("value", ["0", "all", "none", UUID, "0:1"])
def test_auto_leaves_plain_names_to_the_hook(value: str) -> None:
    request = parse_request(visible(value), AUTO)
    assert request == parse_request(visible(value), HOOK)
    assert request.selection != "cdi"


@pytest.mark.parametrize("value", ["0,x.com/a=1", "x.com/a=1,all", "x.com/a=1,MIG-GPU-1/2/3", "x.com/a=1,x/y="])
def test_auto_refuses_half_a_request(value: str) -> None:
    message = refusal(visible(value), AUTO)
    assert "is not a fully qualified CDI device name, but others of the list are" in message


def test_auto_does_not_take_plain_names_from_annotations() -> None:
    message = refusal(config(annotations={f"{PREFIX}p_a": "0"}), AUTO)
    assert message == f'annotation {PREFIX}p_a=0: "0" is not a fully qualified CDI device name'


@pytest.mark.parametrize(
    "document", [visible("x.com/a=1"), config(mounts=("cdi/x.com/a/1",)), visible("0,x.com/a=1")], ids=range(3)
)
def test_mode_hook_has_no_cdi_devices(document: dict[str, Any]) -> None:
    assert '"x.com/a=1" is a CDI device name, and mode hook takes none' in refusal(document, HOOK)


def test_mode_hook_leaves_annotations_to_the_engine() -> None:
    assert parse_request(config(annotations={f"{PREFIX}p_a": "x.com/a=1"}), HOOK) == Request()
    assert parse_request(config({DEVICES: "0"}, annotations={f"{PREFIX}p_a": "x.com/a=1"}), HOOK).devices == ("0",)


def test_nobody_but_the_shim_grants_such_a_request() -> None:
    with pytest.raises(RequestError, match="only ocigpu-runtime provides CDI devices"):
        check_without_cdi(parse_request(visible("x.com/a=1"), AUTO))
    for request in (Request(), parse_request(visible("0"), AUTO)):
        check_without_cdi(request)


@pytest.mark.parametrize("mode", ["auto", "cdi"])
def test_the_prestart_hook_stops_such_a_container_before_it_touches_it(tmp_path: Path, mode: str) -> None:
    """Docker's --gpus starts it without our shim."""
    (tmp_path / "config.json").write_text(json.dumps(visible("x.com/a=1")))
    state = json.dumps({"pid": os.getpid(), "bundle": str(tmp_path)}).encode()
    with pytest.raises(RequestError) as caught:
        run_prestart(state, AUTO._replace(mode=mode))
    assert caught.value.message.startswith(f"{DEVICES}=x.com/a=1: only ocigpu-runtime provides CDI devices")


# --- the runtime's own devices


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        pytest.param("runtime.nvidia.com/gpu=0", "0", id="one"),
        pytest.param(
            "runtime.nvidia.com/gpu=1, runtime.nvidia.com/gpu=0,runtime.nvidia.com/gpu=1", "1,0", id="several"
        ),
        pytest.param("runtime.nvidia.com/gpu=all", "all", id="all"),
        pytest.param("runtime.nvidia.com/gpu=none", "none", id="none"),
        pytest.param("runtime.nvidia.com/gpu=void", "void", id="void"),
        pytest.param(f"runtime.nvidia.com/gpu={UUID}", UUID, id="uuid"),
    ],
)
@pytest.mark.parametrize("settings", [AUTO, CDI, HOOK], ids=["auto", "cdi", "hook"])
def test_devices_of_the_runtimes_own_kind_need_no_specification(value: str, plain: str, settings: Settings) -> None:
    request = parse_request(visible(value), settings)
    expected = parse_request(visible(plain), HOOK)
    assert request == expected._replace(source=request.source)
    for document in (
        config(mounts=("cdi/runtime.nvidia.com/gpu/3",)),
        config(mounts=("cdi/runtime.nvidia.com/gpu=3",)),
    ):
        assert parse_request(document, settings).devices == ("3",)
    annotated = parse_request(config(annotations={f"{PREFIX}p_a": value}), settings)
    assert annotated.devices == (() if settings == HOOK else expected.devices)


@pytest.mark.parametrize("other", ["0", "all", "nvidia.com/gpu=0", "x.com/a=1"])
@pytest.mark.parametrize("settings", [AUTO, CDI, HOOK], ids=["auto", "cdi", "hook"])
def test_devices_of_the_runtimes_own_kind_stand_alone(other: str, settings: Settings) -> None:
    message = refusal(visible(f"{other},runtime.nvidia.com/gpu=1"), settings)
    assert message.startswith(f'{DEVICES}: "{other}" beside a device of runtime.nvidia.com/gpu: ')


@pytest.mark.parametrize("value", ["runtime.nvidia.com/gpu=", "runtime.nvidia.com/gpu=x", "runtime.nvidia.com/gpus=0"])
def test_what_is_no_device_of_the_runtimes_own_kind_is_refused(value: str) -> None:
    assert f"{DEVICES}: " in refusal(visible(value), AUTO._replace(cdi_environment_vendors=()))


# --- annotations


@pytest.mark.parametrize(
    ("annotations", "names"),
    [
        pytest.param(
            {f"{PREFIX}p_b": "x.com/a=2", f"{PREFIX}p_a": "x.com/a=1"}, ["x.com/a=1", "x.com/a=2"], id="by key"
        ),
        pytest.param({f"{PREFIX}p_a": "x.com/a=1, x.com/a=2,,x.com/a=1"}, ["x.com/a=1", "x.com/a=2"], id="list"),
        pytest.param({f"{PREFIX}p_a": "0", "other/p_a": "x.com/a=1"}, ["nvidia.com/gpu=0"], id="plain, other prefix"),
        pytest.param({f"{PREFIX}p_a": "all"}, ["nvidia.com/gpu=all"], id="all"),
        pytest.param({f"{PREFIX}p_a": ""}, [], id="empty"),
        pytest.param({f"{PREFIX}p_a": "void"}, [], id="void"),
        pytest.param({f"{PREFIX}p_a": 7, f"{PREFIX}p_b": None}, [], id="of another type"),
        pytest.param([f"{PREFIX}p_a"], [], id="no object"),
        pytest.param({"cdi.k8s.io": "x.com/a=1", "xcdi.k8s.io/p_a": "x.com/a=1"}, [], id="not the prefix"),
    ],
)
def test_annotations_name_devices(annotations: Any, names: list[str]) -> None:
    request = parse_request(config(annotations=annotations), CDI)
    assert list(request.cdi_devices) == names
    assert request.selection == ("cdi" if names else "nothing")


@pytest.mark.parametrize("value", ["/dev/null", "vendor3.com=device3", "x.com/a=1,/dev/null", "x.com/a=1 x.com/a=2"])
@pytest.mark.parametrize("settings", [AUTO, CDI], ids=["auto", "cdi"])
def test_one_device_of_an_annotation_that_has_no_name_refuses_all(value: str, settings: Settings) -> None:
    assert f"annotation {PREFIX}p_a=" in refusal(
        config(annotations={f"{PREFIX}p_b": "x.com/a=1", f"{PREFIX}p_a": value}), settings
    )


def test_prefixes_of_annotations_are_a_setting() -> None:
    annotations = {"a.b/p_x": "x.com/a=1", "c/p_x": "x.com/a=2", f"{PREFIX}p_x": "x.com/a=3"}
    for prefixes, names in ((("c/", "a.b/"), ("x.com/a=1", "x.com/a=2")), ((), ())):
        settings = CDI._replace(cdi_annotation_prefixes=prefixes)
        assert parse_request(config(annotations=annotations), settings).cdi_devices == names


def test_annotations_come_first_then_mounts_then_variables() -> None:
    mounts, env, annotations = ("cdi/x.com/a/mount",), {DEVICES: "x.com/a=env"}, {f"{PREFIX}p_a": "x.com/a=note"}
    first = parse_request(config(env, mounts, annotations), AUTO)
    assert first.cdi_devices == ("x.com/a=note",)
    (note,) = first.notes
    assert note == (
        f"volume mounts below /var/run/nvidia-container-devices, {DEVICES} ignored:"
        f" annotation {PREFIX}p_a=x.com/a=note comes first"
    )
    second = parse_request(config(env, mounts), AUTO)
    assert (second.cdi_devices, second.notes) == (("x.com/a=mount",), ())
    assert parse_request(config(env), AUTO).cdi_devices == ("x.com/a=env",)


@pytest.mark.parametrize("env", [{}, {DEVICES: "void"}, {DEVICES: ""}])
def test_there_is_no_note_where_nothing_else_is_asked_for(env: dict[str, str]) -> None:
    assert parse_request(config(env, annotations={f"{PREFIX}p_a": "x.com/a=1"}), AUTO).notes == ()


def test_the_source_is_escaped_and_short() -> None:
    annotations = {f"{PREFIX}p_{letter}": "x.com/a\n=1," * 100 for letter in "abcdefgh"}
    message = refusal(config(annotations=annotations), AUTO)
    assert message.startswith(f"annotation {PREFIX}p_a=x.com/a\\n=1,x.com")
    assert len(message) < 700


# --- volume mounts


@pytest.mark.parametrize(
    ("mounts", "names"),
    [
        pytest.param(("cdi/x.com/a/1",), ("x.com/a=1",), id="slashes"),
        pytest.param(("cdi/x.com/a=1",), ("x.com/a=1",), id="equals"),
        pytest.param(("cdi/x.com/b/0:1", "cdi/x.com/a=1", "cdi/x.com/b=0:1"), ("x.com/b=0:1", "x.com/a=1"), id="once"),
        pytest.param(("0", "cdi/x.com/a/1"), ("nvidia.com/gpu=0", "x.com/a=1"), id="plain ones beside"),
    ],
)
def test_volume_mounts_name_devices(mounts: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert parse_request(config(mounts=mounts), CDI).cdi_devices == names
    assert parse_request(config(mounts=mounts), Settings(mode="cdi")) == Request(), "only where they are accepted"


@pytest.mark.parametrize(
    "name", ["cdi/x", "cdi/x.com/a", "cdi/x.com/a/b/c", "cdi/x.com/a/b=c", "cdi/x.com/a=", "cdi/a\nb"]
)
@pytest.mark.parametrize("settings", [AUTO, CDI, HOOK], ids=["auto", "cdi", "hook"])
def test_mounts_of_garbage_are_refused(name: str, settings: Settings) -> None:
    assert "does not name a CDI device" in refusal(config(mounts=(name,)), settings)


# --- opt-in parts and IMEX channels


def test_opt_in_parts_are_devices_of_their_own_kinds() -> None:
    env = {f"NVIDIA_{name}": "enabled" for name in ("NVSWITCH", "GDRCOPY", "MOFED", "GDS")}
    request = parse_request(visible("0", **env, NVIDIA_IMEX_CHANNELS="7,0"), CDI)
    assert request.cdi_devices == (
        "nvidia.com/gpu=0",
        "nvidia.com/gds=all",
        "nvidia.com/mofed=all",
        "nvidia.com/gdrcopy=all",
        "nvidia.com/nvswitch=all",
        "nvidia.com/imex-channel=0",
        "nvidia.com/imex-channel=7",
    )
    assert parse_request(visible("nvidia.com/gpu=0", NVIDIA_GDS="enabled"), AUTO).cdi_devices == (
        "nvidia.com/gpu=0",
        "nvidia.com/gds=all",
    )
    assert parse_request(visible("0", NVIDIA_GDS="yes"), CDI).cdi_devices == ("nvidia.com/gpu=0",)


def test_imex_channels_follow_their_own_rules() -> None:
    both = config({DEVICES: "0", "NVIDIA_IMEX_CHANNELS": "1"}, mounts=("imex/5",))
    assert parse_request(both, CDI).cdi_devices == ("nvidia.com/gpu=0", "nvidia.com/imex-channel=5")
    ignored = CDI._replace(features_ignore_imex_channel_requests=True)
    assert parse_request(both, ignored).cdi_devices == ("nvidia.com/gpu=0",)
    with pytest.raises(RequestError) as caught:
        parse_request(visible("0", NVIDIA_IMEX_CHANNELS="x"), CDI)
    assert caught.value.code == "OCIGPU-REQ-6"


@pytest.mark.parametrize(
    ("value", "count"), [("x.com/a=1", 1), ("notnvidia.com/gpu=0", 1), ("k8s.gpu.nvidia.com/claim=a", 2)]
)
def test_parts_of_nvidias_driver_go_with_nvidias_devices_only(value: str, count: int) -> None:
    assert len(parse_request(visible(value, NVIDIA_GDS="enabled"), AUTO).cdi_devices) == count


def test_what_an_image_says_of_the_driver_is_read_for_specifications_too() -> None:
    env = {"NVIDIA_DRIVER_CAPABILITIES": "video", "NVIDIA_REQUIRE_CUDA": "cuda>=12"}
    for document, settings in ((visible("0", **env), CDI), (visible("nvidia.com/gpu=0", **env), AUTO)):
        request = parse_request(document, settings)
        assert request.cdi_devices == ("nvidia.com/gpu=0",)
        assert request.requirements == (("NVIDIA_REQUIRE_CUDA", "cuda>=12"),)
        assert request.capabilities == (), "what a specification gives is the specification's"
    for variable, code in (("NVIDIA_DRIVER_CAPABILITIES", "OCIGPU-REQ-2"), ("NVIDIA_REQUIRE_CUDA", "OCIGPU-REQ-4")):
        with pytest.raises(RequestError) as caught:
            parse_request(visible("0", **{variable: "nonsense"}), CDI)
        assert caught.value.code == code
        of_others = parse_request(visible("x.com/a=1", **{variable: "nonsense"}), CDI)
        assert of_others == Request("cdi", source=of_others.source, cdi_devices=("x.com/a=1",))
    request = parse_request(visible("0", NVIDIA_MIG_CONFIG_DEVICES="all"), CDI)
    assert request.notes == ("NVIDIA_MIG_CONFIG_DEVICES ignored: CDI specifications have no device for it",)


words = st.lists(
    st.sampled_from(["0", "x.com/a=1", "all", "void", "", "a b", "y.com/b=all", "=", "cdi/x", "\u00e9/="]), max_size=5
)
values = st.builds(",".join, words) | st.text(max_size=20)


@given(
    st.dictionaries(
        st.sampled_from([DEVICES, "NVIDIA_GDS", "NVIDIA_IMEX_CHANNELS"]), values.filter(lambda text: "\0" not in text)
    ),
    st.lists(values, max_size=3),
    st.dictionaries(
        st.sampled_from([f"{PREFIX}p_a", f"{PREFIX}p_b", "x"]), values | st.integers() | st.none(), max_size=3
    ),
    st.sampled_from([AUTO, CDI, HOOK]),
)
def test_any_request_is_understood_or_refused(
    env: dict[str, str], mounts: list[str], annotations: dict[str, Any], settings: Settings
) -> None:
    from ocigpu.core.cdi_names import is_qualified

    try:
        request = parse_request(config(env, tuple(mounts), annotations), settings)
    except OcigpuError:
        request = Request()
    assert (request.selection == "cdi") == bool(request.cdi_devices)
    assert all(map(is_qualified, request.cdi_devices))
    assert len(set(request.cdi_devices)) == len(request.cdi_devices)
    assert settings != HOOK or not request.cdi_devices


@pytest.mark.parametrize("settings", [Settings(), Settings(mode="cdi")], ids=["auto", "cdi"])
@pytest.mark.parametrize("way", ["variable", "annotation"])
def test_what_an_image_can_write_names_devices_of_some_vendors_only(settings: Settings, way: str) -> None:
    """A specification of another vendor may hold anything."""
    names = ("nvidia.com/gpu=0", "example.com/disk=0")
    text = ",".join(names)
    document = config({DEVICES: text}) if way == "variable" else config(annotations={"cdi.k8s.io/plugin_x": text})
    assert '"example.com/disk=0": the image may have written this' in refusal(document, settings)
    for listed in ("example.com", "example.com/disk"):
        permitted = settings._replace(cdi_environment_vendors=("nvidia.com", listed))
        assert parse_request(document, permitted).cdi_devices == names
    assert refusal(document, settings._replace(cdi_environment_vendors=("nvidia.com", "example.com/disc")))
    assert parse_request(document, settings._replace(cdi_default_kind="example.com/disk")).cdi_devices == names
    filtered = settings._replace(cdi_engine_filters_annotations=True)
    if way == "annotation":
        assert parse_request(document, filtered).cdi_devices == names
    else:
        assert refusal(document, filtered)
    document["process"]["capabilities"] = {"bounding": ["CAP_SYS_ADMIN"]}
    assert parse_request(document, settings).cdi_devices == names
