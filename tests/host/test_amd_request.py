"""AMD_VISIBLE_DEVICES: what a container asks for, what of the host that means, and what it gets."""

from typing import Any

import pytest

from ocigpu.containers.report import read_unanswered
from ocigpu.core.actions import AllowDevice, JoinGroup, Node
from ocigpu.core.errors import HostError, RequestError
from ocigpu.core.facts import DeviceNode
from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import AmdFacts, AmdGpu, describe_host
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import make_plan, parse_request

KFD = DeviceNode("/dev/kfd", "/dev/kfd", 234, 0, 0o660, 0, 105)
UNIQUE = 0xC0FFEE0123456789


def nodes(card: int) -> tuple[DeviceNode, ...]:
    return (
        DeviceNode(f"/dev/dri/card{card}", f"/dev/dri/card{card}", 226, card, 0o660, 0, 44),
        DeviceNode(f"/dev/dri/renderD{128 + card}", f"/dev/dri/renderD{128 + card}", 226, 128 + card, 0o660, 0, 105),
    )


FACTS = AmdFacts(
    gpus=(
        AmdGpu("0000:05:00.0", -1, 0xABC, True, nodes(0)),
        AmdGpu("0000:15:00.0", 0, UNIQUE, True, nodes(1)),
        AmdGpu("0000:15:00.0", 1, UNIQUE, True, nodes(2)),
        AmdGpu("0000:25:00.0", -1, 0, True, ()),
    ),
    kfd=KFD,
)
HOST = describe_host(FACTS)
BOTH = ("nvidia", "amd")


def config(value: str | None, *more: str, privileged: bool = False) -> dict[str, Any]:
    env = [*more, *([f"AMD_VISIBLE_DEVICES={value}"] if value is not None else [])]
    return {"process": {"env": env, "capabilities": {"bounding": ["CAP_SYS_ADMIN"] if privileged else []}}}


def asked(value: str | None, settings: Settings | None = None) -> Request:
    return parse_request(config(value), settings or Settings())


@pytest.mark.parametrize(
    ("value", "selection", "devices"),
    [
        (None, "nothing", ()),
        ("", "nothing", ()),
        ("void", "nothing", ()),
        ("none", "nothing", ()),
        ("0,void", "nothing", ()),
        ("all", "all", ()),
        ("ALL", "all", ()),
        ("0,all", "all", ()),
        ("0", "list", ("0",)),
        (" 1 , 0 ,1,", "list", ("1", "0")),
        ("0-2,5", "list", ("0", "1", "2", "5")),
        ("007", "list", ("7",)),
        ("0xC0FFEE", "list", ("0xc0ffee",)),
        ("0X00C0FFEE", "list", ("0xc0ffee",)),
        ("c0ffee0123456789", "list", ("0xc0ffee0123456789",)),
        ("0xc0ffee0123456789:1", "list", ("0xc0ffee0123456789:1",)),
    ],
)
def test_a_list_of_indices_ranges_and_unique_ids(value: str | None, selection: str, devices: tuple[str, ...]) -> None:
    request = asked(value)
    assert (request.selection, request.devices) == (selection, devices)


@pytest.mark.parametrize(
    "value",
    ["x", "3-1", "-1", "1-", "0-1-2", "0x", "0xg", "0x1:", "0x1:x", "0x11112222333344445", "12345", "GPU-1", "\0"],
)
def test_what_is_none_of_these_stops_the_container(value: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(value)
    assert caught.value.code == "OCIGPU-REQ-1"
    assert "AMD_VISIBLE_DEVICES" in caught.value.message


@pytest.mark.parametrize("value", ["0-9999", "0," * 40_000])
def test_a_list_without_end_stops_the_container(value: str) -> None:
    with pytest.raises(RequestError, match=r"more than|longer than"):
        asked(value)


def test_what_may_be_asked_for_is_the_gates_to_say() -> None:
    closed = Settings(accept_nvidia_visible_devices_envvar_when_unprivileged=False)
    request = asked("0", closed)
    assert request.selection == "nothing"
    assert "AMD_VISIBLE_DEVICES ignored: the container has no CAP_SYS_ADMIN" in request.notes[0]
    assert parse_request(config("0", privileged=True), closed).devices == ("0",)


def test_in_mode_cdi_devices_have_the_names_of_specifications() -> None:
    request = asked("0-1,0xC0FFEE", Settings(mode="cdi"))
    assert request.cdi_devices == ("amd.com/gpu=0", "amd.com/gpu=1", "amd.com/gpu=0xc0ffee")
    assert asked("all", Settings(mode="cdi")).cdi_devices == ("amd.com/gpu=all",)
    with pytest.raises(RequestError, match="environment-vendors"):
        asked("0", Settings(mode="cdi", cdi_environment_vendors=("nvidia.com",)))


def test_two_vendors_are_asked_for_their_own() -> None:
    request = parse_request(config("0", "NVIDIA_VISIBLE_DEVICES=1"), Settings(), here=BOTH.__contains__)
    assert request.vendors == ("nvidia", "amd")
    assert [one.devices for one in request.each] == [("1",), ("0",)]
    assert request.source == "NVIDIA_VISIBLE_DEVICES=1 AMD_VISIBLE_DEVICES=0"
    assert request.selection == "list"
    assert parse_request(config("0", "NVIDIA_VISIBLE_DEVICES=void"), Settings()).vendors == ("amd",)
    assert parse_request(config("none", "NVIDIA_VISIBLE_DEVICES=1"), Settings()).vendors == ("nvidia",)


@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize(("vendor", "other"), [("nvidia", "AMD"), ("amd", "NVIDIA")])
def test_of_two_vendors_the_one_without_a_driver_is_a_note(mode: str, vendor: str, other: str) -> None:
    both, settings = config("0", "NVIDIA_VISIBLE_DEVICES=0"), Settings(mode=mode)
    request = parse_request(both, settings, here=(vendor,).__contains__)
    alone = config("0") if vendor == "amd" else config(None, "NVIDIA_VISIBLE_DEVICES=0")
    expected = parse_request(alone, settings, here=().__contains__)
    assert request._replace(notes=()) == expected
    assert request.notes[0].startswith(f"{other}_VISIBLE_DEVICES=0 ignored: no driver of {other.lower()}.com")
    without = parse_request(both, settings, here=().__contains__)
    assert (without, without.notes) == (parse_request(both, settings, here=BOTH.__contains__), ())
    if mode != "cdi":  # no GPU of the other vendor's is given: then what is missing is not ignored
        without_gpu = parse_request(config("0", "NVIDIA_VISIBLE_DEVICES=none"), settings, here=("nvidia",).__contains__)
        assert (without_gpu.vendors, without_gpu.notes) == (BOTH, ())
    permitting = Settings(mode="cdi", cdi_environment_vendors=("nvidia.com", "nvidia.com/pgpu", "amd.com"))
    given = "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0,nvidia.com/pgpu=0,nvidia.com/gpu.coherent=0"
    kept = config("0", given)  # another driver's
    assert parse_request(kept, permitting, here=("amd",).__contains__).cdi_devices == (
        "nvidia.com/pgpu=0",
        "amd.com/gpu=0",
    )
    coherent = config("0", "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu.coherent=0")
    assert parse_request(coherent, permitting, here=("amd",).__contains__).cdi_devices == ("amd.com/gpu=0",)


@pytest.mark.parametrize(
    ("mode", "asked_of_nvidia", "selection"),
    [
        ("cdi", "1", "cdi"),
        ("spec", "nvidia.com/gpu=1", "cdi"),
        ("spec", "1", "list"),
        ("spec", "void", "list"),
        ("cdi", "runtime.nvidia.com/gpu=1", "list"),  # the runtime's own in every mode: then all are
        ("hook", "none", "list"),
    ],
)
def test_by_cdi_names_all_vendors_are_asked_or_none(mode: str, asked_of_nvidia: str, selection: str) -> None:
    both = config("0", f"NVIDIA_VISIBLE_DEVICES={asked_of_nvidia}")
    request = parse_request(both, Settings(mode=mode), here=BOTH.__contains__)
    assert request.selection == selection
    assert {one.selection for one in request.each} - {"none"} == {selection}
    if selection == "cdi":
        assert request.cdi_devices == ("nvidia.com/gpu=1", "amd.com/gpu=0")


@pytest.mark.parametrize(
    "broken", [{}, {"process": 1}, {"process": {"env": 1}}, {"process": {"env": [1, None, "AMD"]}}]
)
def test_parts_of_the_wrong_type_count_as_absent(broken: dict[str, Any]) -> None:
    assert parse_request(broken, Settings()).selection == "nothing"


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("all", [0, 1, 2]),
        ("1,0", [0, 1]),
        ("0xabc", [0]),
        (f"0x{UNIQUE:x}", [1, 2]),
        (f"0x{UNIQUE:x}:1", [2]),
        ("0,0xABC", [0]),
    ],
)
def test_a_plan_gives_kfd_and_the_nodes_of_each_gpu(value: str, indices: list[int]) -> None:
    plan = make_plan(HOST, asked(value), Settings())
    expected = [KFD, *(node for index in indices for node in nodes(index))]
    assert [action.node for action in plan.actions if isinstance(action, Node)] == expected
    numbers = [(rule.major, rule.minor, rule.access) for rule in plan.actions if isinstance(rule, AllowDevice)]
    assert numbers == [(node.major, node.minor, "rw") for node in expected]
    assert plan.groups() == (44, 105)
    assert list(plan.parts) == [HOST.gpus[index].uuid for index in indices] == list(plan.gpus)
    assert [node.container_path for node in (a.node for a in plan.base if isinstance(a, Node))] == ["/dev/kfd"]


def test_groups_can_be_left_to_others() -> None:
    plan = make_plan(HOST, asked("0"), Settings(features_no_additional_gids_for_device_nodes=True))
    assert not any(isinstance(action, JoinGroup) for action in plan.actions)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("9", RequestError, 'no such device "9" (AMD_VISIBLE_DEVICES=9): this host has AMD GPUs 0 to 3'),
        ("0x1", RequestError, 'no such device "0x1"'),
        ("3", HostError, 'GPU 3 (0000:25:00.0) was requested by "3": it has no nodes below /dev/dri'),
    ],
)
def test_a_device_that_cannot_be_given_is_an_error(value: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make_plan(HOST, asked(value), Settings())
    assert text in str(caught.value)


def test_all_of_no_gpus_is_an_error() -> None:
    with pytest.raises(HostError, match="this host has no AMD GPU"):
        make_plan(describe_host(AmdFacts(kfd=KFD)), asked("all"), Settings())


def test_without_kfd_there_is_a_note() -> None:
    plan = make_plan(describe_host(FACTS._replace(kfd=None)), asked("0"), Settings())
    assert "the host has no /dev/kfd: ROCm will not work in containers" in plan.notes


def test_a_request_for_nothing_is_a_plan_for_nothing() -> None:
    assert make_plan(HOST, asked("none"), Settings()).actions == ()


@pytest.mark.parametrize("name", ["amd.com/gpu=0", "nvidia.com/gpu.coherent=0"])
def test_what_nobody_has_answered_is_asked_for_by_cdi_names_of_any_vendor(name: str) -> None:
    variable = "NVIDIA_VISIBLE_DEVICES" if name.startswith("nvidia") else "AMD_VISIBLE_DEVICES"
    asking = config(None, f"{variable}={name.removeprefix('amd.com/gpu=')}")
    assert read_unanswered(asking, "", Settings(mode="cdi"), []).cdi_devices == (name,)
    other = config(None, "NVIDIA_VISIBLE_DEVICES=nvidia.com/pgpu=0")
    permitting = Settings(mode="cdi", cdi_environment_vendors=("nvidia.com/pgpu",))
    assert read_unanswered(other, "", permitting, []) == Request()
