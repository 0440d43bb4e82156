"""What a container asks for: tables of the rules, and hostile configurations."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.asking import request_from_variables

from ocigpu.core.codes import CODES
from ocigpu.core.errors import OcigpuError, RequestError
from ocigpu.core.settings import Settings
from ocigpu.core.tokens import MAX_IMEX_CHANNEL, MAX_TOKENS, pci_address
from ocigpu.gpus.nvidia.request import (
    MAX_VALUE,
    Request,
    parse_request,
)

ALL_CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
DEVICES = "NVIDIA_VISIBLE_DEVICES"
DEFAULTS = Settings()
NO_ENV = Settings(accept_nvidia_visible_devices_envvar_when_unprivileged=False)
MOUNTS = Settings(accept_nvidia_visible_devices_as_volume_mounts=True)
UUID = "GPU-5f0e3d1c-8a7b-4c6d-9e0f-112233445566"


def ask(settings: Settings = DEFAULTS, /, **variables: str) -> Request:
    return request_from_variables(variables, settings)


def refusal(settings: Settings = DEFAULTS, /, **variables: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ask(settings, **variables)
    assert len(caught.value.render("ocigpu").splitlines()) <= 2
    return caught.value


def attempt(config: dict[str, Any], settings: Settings) -> tuple[Request, OcigpuError | None]:
    try:
        return parse_request(config, settings), None
    except OcigpuError as error:
        return Request(), error


def mounted(*destinations: str, source: str = "/dev/null", env: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "process": {"env": list(env)},
        "mounts": [{"source": source, "destination": destination} for destination in destinations],
    }


# --- device list


@pytest.mark.parametrize(
    ("value", "selection", "devices"),
    [
        pytest.param("all", "all", (), id="all"),
        pytest.param("none", "none", (), id="none"),
        pytest.param("void", "nothing", (), id="void"),
        pytest.param("", "nothing", (), id="empty"),
        pytest.param(",, ,", "nothing", (), id="only commas"),
        pytest.param("0,all", "all", (), id="all later"),
        pytest.param("0,none", "none", (), id="none later"),
        pytest.param("none,all", "none", (), id="none first"),
        pytest.param("all,none", "all", (), id="all first"),
        pytest.param("0,void", "nothing", (), id="void anywhere"),
        pytest.param("all,void", "nothing", (), id="void beats all"),
        pytest.param("0", "list", ("0",), id="one"),
        pytest.param("2,0,1", "list", ("2", "0", "1"), id="order kept"),
        pytest.param("0,0,1", "list", ("0", "1"), id="duplicate"),
        pytest.param(" 0 ,, 1 ", "list", ("0", "1"), id="blanks and empty elements"),
        pytest.param(UUID, "list", (UUID,), id="uuid"),
        pytest.param("GPU-5f0e", "list", ("GPU-5f0e",), id="uuid prefix"),
        pytest.param("MIG-" + UUID[4:], "list", ("MIG-" + UUID[4:],), id="mig uuid"),
        pytest.param(f"MIG-{UUID}/1/0", "list", (f"MIG-{UUID}/1/0",), id="old mig name"),
        pytest.param("0:1", "list", ("0:1",), id="mig pair"),
        pytest.param("0000:3b:00.0", "list", ("0000:3b:00.0",), id="pci short domain"),
        pytest.param("00000000:3B:00.0", "list", ("00000000:3B:00.0",), id="pci long domain"),
        pytest.param("3b:00.0", "list", ("3b:00.0",), id="pci no domain"),
        pytest.param("ALL", "list", ("ALL",), id="upper case is left to selection"),
    ],
)
def test_device_list_says_what_is_selected(value: str, selection: str, devices: tuple[str, ...]) -> None:
    request = ask(**{DEVICES: value})
    assert (request.selection, request.devices) == (selection, devices)
    if selection == "nothing":
        assert request == Request()
    else:
        assert request.source == f"{DEVICES}={value}"
        assert request.capabilities == ("compute", "utility")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param("gpu0", '"gpu0"', id="name"),
        pytest.param("0,-1", '"-1"', id="negative"),
        pytest.param("0x1", '"0x1"', id="hexadecimal"),
        pytest.param("1.0", '"1.0"', id="fraction"),
        pytest.param("٣", '"٣"', id="digit of another script"),
        pytest.param("GPU-", '"GPU-"', id="empty uuid"),
        pytest.param("GPU-xyz", '"GPU-xyz"', id="uuid of other letters"),
        pytest.param(f"MIG-{UUID}/1", f'"MIG-{UUID}/1"', id="mig name without compute instance"),
        pytest.param("0:", '"0:"', id="half a pair"),
        pytest.param("0000:3b:0g.0", '"0000:3b:0g.0"', id="pci of other letters"),
        pytest.param("0 1", '"0 1"', id="space"),
        pytest.param("0\n\x1b[31m", r'"0\n\x1b[31m"', id="control characters"),
        pytest.param("\ud800", r'"\ud800"', id="lone surrogate"),
        pytest.param("../0", '"../0"', id="path"),
        pytest.param("9" * 201, '"' + "9" * 40 + '..."', id="too long"),
        pytest.param(",".join(map(str, range(MAX_TOKENS + 1))), f"more than {MAX_TOKENS}", id="too many"),
        pytest.param("0," * MAX_VALUE, f"longer than {MAX_VALUE}", id="huge"),
    ],
)
def test_garbage_in_the_device_list_is_refused_and_quoted(value: str, shown: str) -> None:
    error = refusal(**{DEVICES: value})
    assert error.code == "OCIGPU-REQ-1"
    assert DEVICES in error.message
    assert shown in error.message
    assert len(error.message) < 1000


def test_cdi_device_name_is_refused_with_its_own_reason() -> None:
    error = refusal(Settings(mode="hook"), **{DEVICES: "nvidia.com/gpu=0"})
    assert error.code == "OCIGPU-REQ-1"
    assert "a CDI device name, and mode hook takes none" in error.message


def test_most_tokens_allowed_are_accepted() -> None:
    assert len(ask(**{DEVICES: ",".join(map(str, range(MAX_TOKENS)))}).devices) == MAX_TOKENS


def test_source_is_escaped_and_short() -> None:
    request = ask(**{DEVICES: "none,\n" + "x" * 1000})
    assert request.source.startswith(f"{DEVICES}=none,\\nxxx")
    assert len(request.source) < 160


def test_last_of_two_equal_variables_counts() -> None:
    config = {"process": {"env": [f"{DEVICES}=all", f"{DEVICES}=1"]}}
    assert parse_request(config, DEFAULTS).devices == ("1",)


def test_large_environment_changes_nothing() -> None:
    env = [f"VAR{i}={'x' * 100}" for i in range(20_000)] + [f"{DEVICES}=0"] + ["NVIDIA_VISIBLE_DEVICES"] * 1000
    assert parse_request({"process": {"env": env}}, DEFAULTS) == ask(**{DEVICES: "0"})


# --- sources


@pytest.mark.parametrize(
    ("variables", "selection", "devices", "source"),
    [
        pytest.param({"A_GPUS": "1"}, "list", ("1",), "A_GPUS=1", id="instead of nothing"),
        pytest.param({"A_GPUS": "1", DEVICES: "all"}, "list", ("1",), "A_GPUS=1", id="instead of the usual one"),
        pytest.param({"A_GPUS": "", DEVICES: "all"}, "nothing", (), "", id="set to empty"),
        pytest.param({"A_GPUS": "", "CUDA_VERSION": "9.0"}, "nothing", (), "", id="set to empty in a legacy image"),
        pytest.param(
            {"B_GPUS": "2,1", "A_GPUS": "1"}, "list", ("1", "2"), "A_GPUS=1 B_GPUS=2,1", id="two in order of settings"
        ),
        pytest.param({DEVICES: "3"}, "list", ("3",), f"{DEVICES}=3", id="none set"),
        pytest.param({"A_GPUS_X": "1"}, "nothing", (), "", id="only a longer name"),
    ],
)
def test_swarm_variables_replace_the_device_list(
    variables: dict[str, str], selection: str, devices: tuple[str, ...], source: str
) -> None:
    request = request_from_variables(variables, Settings(swarm_resource=" A_GPUS, ,B_GPUS"))
    assert (request.selection, request.devices, request.source) == (selection, devices, source)


@pytest.mark.parametrize(
    ("config", "selection", "devices"),
    [
        pytest.param(mounted("/var/run/nvidia-container-devices/0"), "list", ("0",), id="var run"),
        pytest.param(mounted("/run/nvidia-container-devices/0"), "list", ("0",), id="run"),
        pytest.param(mounted("//var/run/./nvidia-container-devices//1/"), "list", ("1",), id="cleaned"),
        pytest.param(
            mounted("/var/run/nvidia-container-devices/1", "/var/run/nvidia-container-devices/1"),
            "list",
            ("1",),
            id="duplicate",
        ),
        pytest.param(mounted("/var/run/nvidia-container-devices/all"), "all", (), id="all"),
        pytest.param(mounted("/var/run/nvidia-container-devices/void"), "nothing", (), id="void"),
        pytest.param(mounted("/var/run/nvidia-container-devices/none"), "none", (), id="none"),
        pytest.param(mounted(f"/run/nvidia-container-devices/MIG-{UUID}/1/0"), "list", (f"MIG-{UUID}/1/0",), id="mig"),
        pytest.param(mounted("/var/run/nvidia-container-devices"), "nothing", (), id="directory itself"),
        pytest.param(mounted("/var/run/nvidia-container-devices-foo/0"), "nothing", (), id="longer name"),
        pytest.param(mounted("/var/run/nvidia-container-devices/../x/0"), "nothing", (), id="leads out"),
        pytest.param(mounted("var/run/nvidia-container-devices/0"), "nothing", (), id="relative"),
        pytest.param(mounted("/var/run/nvidia-container-devices/0\0"), "nothing", (), id="nul"),
        pytest.param(mounted("/var/run/nvidia-container-devices/0", source="/dev/zero"), "nothing", (), id="zero"),
        pytest.param(mounted("/run/nvidia-container-devices/0", source="/dev//x/../null"), "list", ("0",), id="source"),
        pytest.param(
            mounted("/var/run/nvidia-container-devices/0", env=(f"{DEVICES}=all",)),
            "list",
            ("0",),
            id="before variables",
        ),
        pytest.param(mounted("/data", env=(f"{DEVICES}=all",)), "all", (), id="without, the variables count"),
        pytest.param(
            mounted("/run/nvidia-container-devices/imex/3", env=(f"{DEVICES}=all",)), "all", (), id="imex is no device"
        ),
    ],
)
def test_volume_mounts_ask_for_devices(config: dict[str, Any], selection: str, devices: tuple[str, ...]) -> None:
    request = parse_request(config, MOUNTS)
    assert (request.selection, request.devices) == (selection, devices)
    without = parse_request(config, DEFAULTS)
    assert without.selection == ("all" if config["process"]["env"] else "nothing")


def test_volume_mounts_need_no_privilege() -> None:
    settings = MOUNTS._replace(accept_nvidia_visible_devices_envvar_when_unprivileged=False)
    request = parse_request(mounted("/run/nvidia-container-devices/0", env=("NVIDIA_IMEX_CHANNELS=1",)), settings)
    assert request.devices == ("0",)
    assert request.source == "volume mounts below /var/run/nvidia-container-devices"
    assert request.imex_channels == ()
    assert len(request.notes) == 1
    assert "NVIDIA_IMEX_CHANNELS ignored" in request.notes[0]


@pytest.mark.parametrize("name", ["cdi/nvidia.com/gpu/0", "cdi/nvidia.com/gpu=0", "gpu0", "a\nb"])
def test_volume_mounts_of_garbage_are_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(mounted(f"/var/run/nvidia-container-devices/{name}"), MOUNTS._replace(mode="hook"))
    assert caught.value.code == "OCIGPU-REQ-1"


# --- privilege


@pytest.mark.parametrize(
    ("capabilities", "privileged"),
    [
        pytest.param({"bounding": ["CAP_SYS_ADMIN"]}, True, id="bounding"),
        pytest.param(["CAP_CHOWN", "CAP_SYS_ADMIN"], True, id="flat list"),
        pytest.param({"effective": ["CAP_SYS_ADMIN"], "permitted": ["CAP_SYS_ADMIN"]}, False, id="effective only"),
        pytest.param({"bounding": ["CAP_CHOWN"]}, False, id="another"),
        pytest.param({"bounding": "CAP_SYS_ADMIN"}, False, id="text"),
        pytest.param({"bounding": {"CAP_SYS_ADMIN": 1}}, False, id="object"),
        pytest.param([], False, id="empty"),
        pytest.param("CAP_SYS_ADMIN", False, id="capabilities text"),
        pytest.param(None, False, id="absent"),
    ],
)
def test_privileged_is_sys_admin_in_the_bounding_set(capabilities: Any, privileged: bool) -> None:
    config = {"process": {"env": [f"{DEVICES}=0"], "capabilities": capabilities}}
    request = parse_request(config, NO_ENV)
    assert request.selection == ("list" if privileged else "nothing")
    assert len(request.notes) == (0 if privileged else 1)


def test_rights_in_a_user_namespace_of_its_own_are_none_over_the_hosts_devices() -> None:
    namespaces = [{"type": "mount"}]
    process = {"env": [f"{DEVICES}=0"], "capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}
    config = {"process": process, "linux": {"namespaces": namespaces}}
    assert parse_request(config, NO_ENV).selection == "list"
    namespaces.append({"type": "user"})
    assert parse_request(config, NO_ENV).selection == "nothing"


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        pytest.param(
            {DEVICES: "all", "NVIDIA_IMEX_CHANNELS": "0", "NVIDIA_MIG_CONFIG_DEVICES": "all"}, DEVICES, id="list"
        ),
        pytest.param({"CUDA_VERSION": "9.0"}, "CUDA_VERSION", id="legacy image"),
        pytest.param({DEVICES: "garbage!"}, DEVICES, id="garbage is not judged"),
    ],
)
def test_unprivileged_request_is_ignored_with_one_note(variables: dict[str, str], named: str) -> None:
    request = request_from_variables(variables, NO_ENV)
    assert request == Request(notes=request.notes)
    (note,) = request.notes
    assert note.startswith(f"{named} ignored")


@pytest.mark.parametrize("value", ["", "void", ","])
def test_unprivileged_container_that_asks_for_nothing_gets_no_note(value: str) -> None:
    assert ask(NO_ENV, **{DEVICES: value}) == Request()


# --- legacy images and capabilities


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, ("compute", "utility"), id="unset"),
        pytest.param({"NVIDIA_DRIVER_CAPABILITIES": ""}, ("compute", "utility"), id="empty"),
        pytest.param({"NVIDIA_DRIVER_CAPABILITIES": " , "}, ("compute", "utility"), id="commas"),
        pytest.param({"NVIDIA_DRIVER_CAPABILITIES": "all"}, ALL_CAPABILITIES, id="all"),
        pytest.param({"NVIDIA_DRIVER_CAPABILITIES": "video,all"}, ALL_CAPABILITIES, id="all among others"),
        pytest.param({"NVIDIA_DRIVER_CAPABILITIES": "video, display,,video"}, ("display", "video"), id="list"),
        pytest.param({"CUDA_VERSION": "9.0"}, ALL_CAPABILITIES, id="legacy unset"),
        pytest.param(
            {"CUDA_VERSION": "9.0", "NVIDIA_DRIVER_CAPABILITIES": ""}, ("compute", "utility"), id="legacy empty"
        ),
        pytest.param(
            {"CUDA_VERSION": "12.4", "NVIDIA_REQUIRE_CUDA": "cuda>=12.4"}, ("compute", "utility"), id="not legacy"
        ),
        pytest.param({"CUDA_VERSION": ""}, ("compute", "utility"), id="empty version is not legacy"),
    ],
)
def test_driver_capabilities(variables: dict[str, str], expected: tuple[str, ...]) -> None:
    assert ask(**{DEVICES: "0", **variables}).capabilities == expected


def test_supported_capabilities_bound_what_is_given() -> None:
    settings = Settings(supported_driver_capabilities="utility, video")
    assert ask(settings, **{DEVICES: "0"}).capabilities == ("utility",)
    assert ask(settings, **{DEVICES: "0", "NVIDIA_DRIVER_CAPABILITIES": "all"}).capabilities == ("utility", "video")
    error = refusal(settings, **{DEVICES: "0", "NVIDIA_DRIVER_CAPABILITIES": "compute,video"})
    assert error.code == "OCIGPU-REQ-2"
    assert "compute: not permitted" in error.message
    assert error.hint.endswith("utility, video")
    assert ask(Settings(supported_driver_capabilities="all"), CUDA_VERSION="9").capabilities == ALL_CAPABILITIES


@pytest.mark.parametrize("value", ["computer", "compute,none", "COMPUTE", "compute utility", "x" * 70_000, "\x1b"])
def test_unknown_driver_capability_is_refused(value: str) -> None:
    error = refusal(**{DEVICES: "0", "NVIDIA_DRIVER_CAPABILITIES": value})
    assert error.code == "OCIGPU-REQ-2"
    assert "NVIDIA_DRIVER_CAPABILITIES" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("version", "requirement"),
    [
        ("9.0", "cuda>=9.0"),
        ("9", "cuda>=9.0"),
        ("v11.6", "cuda>=11.6"),
        ("9.0.176", "cuda>=9.0"),
        ("12.10.1-rc.1+x", "cuda>=12.10"),
        ("012.04", "cuda>=12.4"),
        ("4294967295.0", "cuda>=4294967295.0"),
    ],
)
def test_legacy_image_asks_for_all_gpus_and_its_cuda_version(version: str, requirement: str) -> None:
    request = ask(CUDA_VERSION=version)
    assert request.selection == "all"
    assert request.source == f"CUDA_VERSION={version} without {DEVICES}"
    assert request.requirements == (("CUDA_VERSION", requirement),)


@pytest.mark.parametrize(
    "version",
    ["9.", "9..0", "9.0.1.5", "-9", "legacy", "9.0.116foo", "4294967296.0", "9" * 5000, "9.0-", "9.0-\n", " 9", "٩.0"],
)
def test_cuda_version_that_cannot_be_understood_is_refused(version: str) -> None:
    error = refusal(CUDA_VERSION=version, **{DEVICES: "0"})
    assert error.code == "OCIGPU-REQ-4"
    assert error.message.startswith("CUDA_VERSION: ")
    assert ask(CUDA_VERSION=version, NVIDIA_DISABLE_REQUIRE="1").requirements == ()


# --- requirements


def test_requirements_are_sorted_and_kept_as_text() -> None:
    request = ask(
        NVIDIA_REQUIRE_DRIVER="driver>=470",
        NVIDIA_REQUIRE_ARCH="",
        NVIDIA_REQUIRE_JETPACK="csv-mounts=all",
        NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS="base-only",
        CUDA_VERSION="9.0",
        **{DEVICES: "0"},
    )
    assert request.requirements == (("CUDA_VERSION", "cuda>=9.0"), ("NVIDIA_REQUIRE_DRIVER", "driver>=470"))


@pytest.mark.parametrize("value", ["1", "t", "T", "TRUE", "true", "True"])
def test_requirements_can_be_disabled(value: str) -> None:
    variables = {DEVICES: "0", "NVIDIA_REQUIRE_CUDA": "nonsense"}
    assert ask(**variables, NVIDIA_DISABLE_REQUIRE=value).requirements == ()
    assert ask(Settings(disable_require=True), **variables).requirements == ()


@pytest.mark.parametrize("value", ["yes", "0", "", "tRUE", " true"])
def test_other_words_do_not_disable_requirements(value: str) -> None:
    variables = {DEVICES: "0", "NVIDIA_REQUIRE_CUDA": "cuda>=1"}
    assert ask(**variables, NVIDIA_DISABLE_REQUIRE=value).requirements == (("NVIDIA_REQUIRE_CUDA", "cuda>=1"),)


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"NVIDIA_REQUIRE_CUDA": "cuda >= 12"}, id="nonsense"),
        pytest.param({"NVIDIA_REQUIRE_CUDA": "cuda>=1 " * 10_000}, id="ten thousand alternatives"),
        pytest.param({"NVIDIA_REQUIRE_CUDA": "x" * (1 << 20)}, id="one mebibyte"),
        pytest.param({f"NVIDIA_REQUIRE_{i}": "cuda>=1 " * 8000 for i in range(20)}, id="too much together"),
        pytest.param({"NVIDIA_REQUIRE_\x1b\n": "?"}, id="control characters in the name"),
    ],
)
def test_requirement_that_cannot_be_understood_is_refused_early(variables: dict[str, str]) -> None:
    error = refusal(**{DEVICES: "0", **variables})
    assert error.code == "OCIGPU-REQ-4"
    assert error.message.isprintable()
    assert len(error.message) < 300


# --- MIG, IMEX, features


@pytest.mark.parametrize("name", ["CONFIG", "MONITOR"])
def test_mig_variables_need_privilege_and_the_word_all(name: str) -> None:
    variable = f"NVIDIA_MIG_{name}_DEVICES"
    field = f"mig_{name.lower()}"
    given_all = {DEVICES: "0", variable: "all"}
    assert getattr(request_from_variables(given_all, DEFAULTS, privileged=True), field) == "all"
    assert getattr(ask(**{DEVICES: "0", variable: ""}), field) == ""
    assert refusal(**given_all).code == "OCIGPU-REQ-5"
    with pytest.raises(RequestError, match=variable) as caught:
        request_from_variables({DEVICES: "0", variable: "0"}, DEFAULTS, privileged=True)
    assert caught.value.code == "OCIGPU-REQ-1"
    assert ask(**{DEVICES: "void", variable: "0"}) == Request()


@pytest.mark.parametrize(
    ("value", "channels"),
    [
        pytest.param("", (), id="empty"),
        pytest.param("none", (), id="none"),
        pytest.param("0,void", (), id="void"),
        pytest.param("5,0,5, 12", (0, 5, 12), id="sorted once"),
        pytest.param("0,,", (0,), id="empty elements"),
        pytest.param(str(MAX_IMEX_CHANNEL), (MAX_IMEX_CHANNEL,), id="last"),
    ],
)
def test_imex_channels(value: str, channels: tuple[int, ...]) -> None:
    assert ask(**{DEVICES: "0", "NVIDIA_IMEX_CHANNELS": value}).imex_channels == channels


@pytest.mark.parametrize(
    "value",
    ["-1", "0x10", "1048576", "01", "1.0", "+1", "1e3", "٣", "0 1", "9" * 10_000, "0," * (1 << 19), "\n\x00", "ALL"],
    ids=lambda value: value[:8].encode("unicode_escape").decode(),
)
def test_imex_garbage_is_refused(value: str) -> None:
    variables = {DEVICES: "0", "NVIDIA_IMEX_CHANNELS": f"{value},2"}
    error = refusal(**variables)
    assert error.code == "OCIGPU-REQ-6"
    assert "NVIDIA_IMEX_CHANNELS" in error.message
    assert ask(Settings(features_ignore_imex_channel_requests=True), **variables).imex_channels == ()
    assert ask(**{**variables, DEVICES: ""}) == Request()


def test_all_imex_channels_from_a_variable_are_ignored_with_a_note() -> None:
    request = ask(**{DEVICES: "0", "NVIDIA_IMEX_CHANNELS": "all"})
    assert request.imex_channels == ()
    assert len(request.notes) == 1


def test_imex_mounts_come_before_the_variable() -> None:
    config = mounted("/run/nvidia-container-devices/imex/3", env=(f"{DEVICES}=0", "NVIDIA_IMEX_CHANNELS=7"))
    assert parse_request(config, MOUNTS).imex_channels == (3,)
    assert parse_request(config, DEFAULTS).imex_channels == (7,)
    with pytest.raises(RequestError, match="all"):
        parse_request(mounted("/run/nvidia-container-devices/imex/all", env=(f"{DEVICES}=0",)), MOUNTS)


def test_features_are_the_variables_that_say_enabled() -> None:
    variables = {"NVIDIA_NVSWITCH": "enabled", "NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "true", "NVIDIA_GDRCOPY": ""}
    assert ask(**{DEVICES: "none", **variables}).features == ("gds", "nvswitch")


# --- hostile documents


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="empty"),
        pytest.param({"process": None}, id="process null"),
        pytest.param({"process": []}, id="process list"),
        pytest.param({"process": {"env": None}}, id="env null"),
        pytest.param({"process": {"env": f"{DEVICES}=all"}}, id="env text"),
        pytest.param({"process": {"env": {DEVICES: "all"}}}, id="env object"),
        pytest.param(
            {"process": {"env": [None, 1, [f"{DEVICES}=all"], DEVICES, "=all", ""]}}, id="env of other things"
        ),
        pytest.param({"mounts": {"destination": 1}}, id="mounts object"),
        pytest.param({"mounts": [None, {}, {"source": 1, "destination": []}, {"source": "/dev/null"}]}, id="mounts"),
    ],
)
def test_parts_of_the_wrong_type_count_as_absent(config: dict[str, Any]) -> None:
    assert parse_request(config, MOUNTS) == Request()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        DEVICES,
        "CUDA_VERSION",
        "NVIDIA_REQUIRE_CUDA",
        "NVIDIA_IMEX_CHANNELS",
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_MIG_CONFIG_DEVICES",
        "NVIDIA_GDS",
        "NVIDIA_DISABLE_REQUIRE",
        "SWARM",
    ]
)
WORDS = st.sampled_from(["all", "none", "void", "0", "1:2", "GPU-aaaa", "enabled", "cuda>=1", ",", " ", "compute", "-"])
VALUES = st.text(max_size=12) | st.lists(WORDS, max_size=5).map(",".join) | st.lists(WORDS, max_size=3).map("".join)
ENTRIES = st.tuples(NAMES, VALUES).map("=".join) | JSON
MOUNT_ENTRIES = JSON | st.fixed_dictionaries(
    {"source": st.just("/dev/null"), "destination": VALUES.map("/run/nvidia-container-devices/".__add__)}
)


@given(
    process=JSON | st.fixed_dictionaries({"env": st.lists(ENTRIES, max_size=8) | JSON, "capabilities": JSON}),
    mounts=JSON | st.lists(MOUNT_ENTRIES, max_size=3),
    settings=st.sampled_from([Settings(), NO_ENV, MOUNTS, Settings(swarm_resource="SWARM")]),
)
def test_any_document_gives_a_request_or_one_clean_error(process: Any, mounts: Any, settings: Settings) -> None:
    request, error = attempt({"process": process, "mounts": mounts}, settings)
    if error:
        assert error.code in CODES
        assert len(error.render("ocigpu").splitlines()) <= 2
        return
    assert (request.selection == "list") == bool(request.devices)
    assert len(set(request.devices)) == len(request.devices)
    assert set(request.capabilities) <= set(ALL_CAPABILITIES)
    if request.selection == "nothing":
        assert request == Request(notes=request.notes)
    else:
        assert request.source.isprintable()


@given(st.lists(st.integers(0, 63), min_size=1, max_size=20))
def test_indices_come_out_once_in_order(indices: list[int]) -> None:
    value = ",".join(map(str, indices))
    assert ask(**{DEVICES: value}).devices == tuple(dict.fromkeys(map(str, indices)))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("3b:00.0", "00000000:3b:00"),
        ("3B:00", "00000000:3b:00"),
        ("0001:3b:1f.7", "00000001:3b:1f"),
        ("00010000:3b:00.0", "00010000:3b:00"),
        ("3b:0", ""),
        ("3b:00.", ""),
        ("3b:00.0.0", ""),
        ("3b:00.g", ""),
        ("1:3b:00.0", ""),
        ("3b", ""),
        ("", ""),
        ("3b:00.0x", ""),
        ("+b:00.0", ""),
    ],
)
def test_pci_address(text: str, address: str) -> None:
    assert pci_address(text) == address
