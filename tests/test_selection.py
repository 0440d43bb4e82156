"""From tokens to GPUs and MIG devices of a host."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.core.errors import HostError, OcigpuError, RequestError
from ocigpu.core.facts import Gpu, HostFacts, MigDevice
from ocigpu.gpus.nvidia.selection import select_devices
from ocigpu.gpus.request import Request, Selection


def gpu(index: int, *, mig: int = 0, mig_enabled: bool = False, error: str = "") -> Gpu:
    uuid = f"GPU-{index:04x}aaaa-1111-2222-3333-444455556666"
    devices = tuple(
        MigDevice(i, f"MIG-{index:02x}{i:02x}bbbb-1111-2222-3333-444455556666", "1g.10gb", i + 7, 0, 10 * i, 10 * i + 1)
        for i in range(mig)
    )
    bus_id = f"00000000:{0x3A + index:02x}:00.0"
    enabled = mig_enabled or mig > 0
    return Gpu(index, index, uuid, bus_id, mig_capable=enabled, mig_enabled=enabled, mig_devices=devices, error=error)


HOST = HostFacts(gpus=tuple(gpu(index) for index in range(4)))
MIXED = HostFacts(gpus=(gpu(0), gpu(1, mig=3), gpu(2, mig_enabled=True), gpu(3, error="fallen off the bus")))
NOTHING = HostFacts(notes=("no NVIDIA driver is loaded",))


def wanting(*tokens: str, **fields: Any) -> Request:
    return Request("list", tokens, "NVIDIA_VISIBLE_DEVICES=" + ",".join(tokens))._replace(**fields)


def wanting_all(**fields: Any) -> Request:
    return Request("all", source="NVIDIA_VISIBLE_DEVICES=all")._replace(**fields)


def shown(selection: Selection) -> list[str]:
    return [str(each.index) for each in selection.gpus] + [f"{g.index}:{m.index}" for g, m in selection.mig_devices]


def refusal(request: Request, facts: HostFacts) -> OcigpuError:
    with pytest.raises(OcigpuError) as caught:
        select_devices(request, facts)
    assert caught.value.message.isprintable()
    return caught.value


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param(["0"], ["0"], id="index"),
        pytest.param(["3", "0"], ["3", "0"], id="order asked for"),
        pytest.param([gpu(2).uuid], ["2"], id="uuid"),
        pytest.param([gpu(2).uuid.upper()], ["2"], id="uuid in upper case"),
        pytest.param(["GPU-0002"], ["2"], id="uuid prefix"),
        pytest.param(["gpu-0002AAAA-11"], ["2"], id="longer prefix in another case"),
        pytest.param(["3b:00.0"], ["1"], id="pci without domain"),
        pytest.param(["0000:3B:00.0"], ["1"], id="pci short domain"),
        pytest.param(["00000000:3b:00"], ["1"], id="pci without function"),
        pytest.param(["3b:00.7"], ["1"], id="pci another function"),
        pytest.param(["1", gpu(1).uuid, "3b:00.0", "GPU-0001", "1"], ["1"], id="one gpu spelled five ways"),
    ],
)
def test_gpus_are_found_by_every_name(tokens: list[str], expected: list[str]) -> None:
    selection = select_devices(wanting(*tokens), HOST)
    assert shown(selection) == expected
    assert selection.notes == ()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param(["1:0"], ["1:0"], id="pair"),
        pytest.param(["1:2", "1:0"], ["1:2", "1:0"], id="order asked for"),
        pytest.param([MIXED.gpus[1].mig_devices[1].uuid], ["1:1"], id="uuid"),
        pytest.param(["mig-0102"], ["1:2"], id="uuid prefix"),
        pytest.param([f"MIG-{gpu(1).uuid}/8/0"], ["1:1"], id="old name"),
        pytest.param(["1:1", f"MIG-{gpu(1).uuid}/8/0", "MIG-0101"], ["1:1"], id="one device spelled three ways"),
        pytest.param(["0", "1:1"], ["0", "1:1"], id="with a whole gpu"),
    ],
)
def test_mig_devices_are_found_by_every_name(tokens: list[str], expected: list[str]) -> None:
    selection = select_devices(wanting(*tokens), MIXED)
    assert shown(selection) == expected
    assert selection.notes == ()


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        pytest.param("9", 'no such device "9" (NVIDIA_VISIBLE_DEVICES=9): this host has GPUs 0-3', id="index"),
        pytest.param("01", "no leading zeros", id="leading zero"),
        pytest.param("9" * 200, "this host has GPUs 0-3", id="long index"),
        pytest.param("GPU-ffff", "this host has GPUs 0-3", id="uuid prefix"),
        pytest.param("GPU-000", "at least 4 digits", id="short prefix"),
        pytest.param("GPU----", "at least 4 digits", id="dashes only"),
        pytest.param("GPU-0002aaaa-1111-2222-3333-4444555566667", "this host has GPUs", id="longer than a uuid"),
        pytest.param("0001:3b:00.0", "this host has GPUs 0-3", id="another pci domain"),
        pytest.param("0:0", "this host has no MIG devices", id="pair"),
        pytest.param("MIG-0101", "this host has no MIG devices", id="mig uuid"),
        pytest.param(f"MIG-{gpu(0).uuid}/1/0", "this host has no MIG devices", id="old mig name"),
    ],
)
def test_unknown_device_is_refused(token: str, expected: str) -> None:
    error = refusal(wanting("0", token)._replace(source=f"NVIDIA_VISIBLE_DEVICES={token}"), HOST)
    assert isinstance(error, RequestError)
    assert error.code == "OCIGPU-DEV-1"
    assert expected in error.message


@pytest.mark.parametrize("token", ["1:3", "MIG-0199", f"MIG-{gpu(1).uuid}/8/1", f"MIG-{gpu(1).uuid}/1/0"])
def test_unknown_mig_device_is_refused_with_those_that_exist(token: str) -> None:
    error = refusal(wanting(token), MIXED)
    assert error.code == "OCIGPU-DEV-1"
    assert error.message.endswith("this host has MIG devices 1:0, 1:1, 1:2")


@pytest.mark.parametrize("token", ["ALL", "None", "VOID"])
def test_words_in_another_case_are_explained(token: str) -> None:
    error = refusal(wanting(token), HOST)
    assert error.code == "OCIGPU-DEV-1"
    assert error.hint == f"Write it in lower case: {token.lower()}"


def test_ambiguous_prefix_lists_the_matches() -> None:
    twins = HostFacts(gpus=(gpu(0), gpu(1)._replace(uuid="GPU-0000aaab-1111-2222-3333-444455556666")))
    error = refusal(wanting("GPU-0000"), twins)
    assert error.code == "OCIGPU-DEV-1"
    assert all(each.uuid in error.message for each in twins.gpus)
    assert shown(select_devices(wanting("GPU-0000aaab"), twins)) == ["1"]


def test_instance_number_of_an_old_mig_name_is_no_prefix() -> None:
    big = gpu(0, mig=4)  # GPU instances 7, 8, 9 and 10
    assert shown(select_devices(wanting(f"MIG-{big.uuid}/10/0"), HostFacts(gpus=(big,)))) == ["0:3"]
    assert refusal(wanting(f"MIG-{big.uuid}/1/0"), HostFacts(gpus=(big,))).code == "OCIGPU-DEV-1"


def test_decimal_pair_means_a_mig_device_before_a_pci_address() -> None:
    facts = HostFacts(gpus=(gpu(10, mig=12), gpu(1)._replace(bus_id="00000000:10:11.0")))
    assert shown(select_devices(wanting("10:11"), facts)) == ["10:11"]
    assert shown(select_devices(wanting("10:11.0"), facts)) == ["1"]
    assert shown(select_devices(wanting("10:11"), HostFacts(gpus=facts.gpus[1:]))) == ["1"]


def test_host_without_gpus_accepts_no_list() -> None:
    error = refusal(wanting("anything"), NOTHING)
    assert error.code == "OCIGPU-DEV-1"
    assert error.message.endswith("this host has no GPUs (no NVIDIA driver is loaded)")


def test_gpu_with_an_error_is_refused_by_name_and_leaves_others_alone() -> None:
    error = refusal(wanting("3"), MIXED)
    assert isinstance(error, HostError)
    assert error.code == "OCIGPU-DEV-2"
    assert "GPU 3" in error.message
    assert "fallen off the bus" in error.message
    assert shown(select_devices(wanting("0"), MIXED)) == ["0"]
    broken_mig = HostFacts(gpus=(gpu(0, mig=1)._replace(error="in reset"),))
    assert refusal(wanting("0:0"), broken_mig).code == "OCIGPU-DEV-2"


def test_whole_gpu_with_mig_gives_its_mig_devices() -> None:
    selection = select_devices(wanting("1:1", "1"), MIXED)
    assert shown(selection) == ["1:1", "1:0", "1:2"]
    assert selection.notes == ("GPU 1 has MIG enabled: the container gets its 3 MIG devices",)


def test_gpu_with_mig_but_no_mig_devices_cannot_be_given() -> None:
    error = refusal(wanting("2"), MIXED)
    assert error.code == "OCIGPU-DEV-2"
    assert "no MIG devices" in error.message


@pytest.mark.parametrize("field", ["mig_config", "mig_monitor"])
def test_who_configures_mig_gets_the_gpu_without_mig_devices(field: str) -> None:
    assert shown(select_devices(wanting("2", **{field: "all"}), MIXED)) == ["2"]
    assert shown(select_devices(wanting_all(**{field: "all"}), MIXED)) == ["0", "2", "1:0", "1:1", "1:2"]
    error = refusal(wanting("1:0", **{field: "all"}), MIXED)
    assert error.code == "OCIGPU-REQ-1"
    assert f"NVIDIA_{field.upper()}_DEVICES" in error.message


def test_all_gives_gpus_and_mig_devices_and_notes_what_is_left_out() -> None:
    selection = select_devices(wanting_all(), MIXED)
    assert shown(selection) == ["0", "1:0", "1:1", "1:2"]
    assert selection.notes == (
        "left out: GPU 3 (fallen off the bus)",
        "left out: GPU 2: MIG is enabled, but there are no MIG devices",
    )
    assert [each.index for each in selection.every_gpu()] == [0, 1]


@pytest.mark.parametrize("model", ["DGX Display", "NVIDIA DGX Display"])
def test_all_leaves_out_a_gpu_for_a_display_only_which_its_index_gives(model: str) -> None:
    facts = HOST._replace(gpus=(HOST.gpus[0], HOST.gpus[1]._replace(model=model), *HOST.gpus[2:]))
    selection = select_devices(wanting_all(), facts)
    assert (shown(selection), selection.notes) == (["0", "2", "3"], ())
    assert shown(select_devices(wanting("1"), facts)) == ["1"]


def test_many_failed_gpus_make_one_short_note() -> None:
    facts = HostFacts(gpus=(gpu(0), *(gpu(index, error="x" * 5000) for index in range(1, 60))))
    (note,) = select_devices(wanting_all(), facts).notes
    assert "and 51 more" in note
    assert len(note) < 2000


@pytest.mark.parametrize(
    ("facts", "code", "expected"),
    [
        pytest.param(NOTHING, "OCIGPU-DEV-1", "this host has no GPUs", id="no gpu"),
        pytest.param(HostFacts(gpus=MIXED.gpus[3:]), "OCIGPU-DEV-2", "fallen off the bus", id="all failed"),
        pytest.param(HostFacts(gpus=MIXED.gpus[2:3]), "OCIGPU-DEV-2", "no MIG devices", id="all empty"),
        pytest.param(
            HostFacts(gpus=(gpu(0)._replace(model="DGX Display"),)), "OCIGPU-DEV-2", "left out: GPU 0: for a display",
            id="all displays",
        ),
    ],
)  # fmt: skip
def test_all_of_nothing_is_an_error(facts: HostFacts, code: str, expected: str) -> None:
    error = refusal(wanting_all(), facts)
    assert isinstance(error, HostError)
    assert error.code == code
    assert expected in error.message


@pytest.mark.parametrize("selection", ["none", "nothing"])
def test_none_gives_no_gpu_even_on_a_host_without(selection: str) -> None:
    assert select_devices(Request(selection), HOST) == Selection()
    assert select_devices(Request(selection), NOTHING) == Selection()


def test_indices_with_holes_are_shown_as_ranges() -> None:
    facts = HostFacts(gpus=tuple(gpu(index) for index in (0, 2, 3, 7)))
    assert refusal(wanting("1"), facts).message.endswith("this host has GPUs 0, 2-3, 7")
    assert refusal(wanting("1"), HostFacts(gpus=(gpu(0),))).message.endswith("this host has GPU 0")


TOKENS = st.sampled_from(["0", "1", "2", "3", "1:0", "1:9", "GPU-0000", "GPU-00", "3a:00.0", "MIG-0101", "ALL", "01"])


def attempt(request: Request) -> tuple[Selection, OcigpuError | None]:
    try:
        return select_devices(request, MIXED), None
    except OcigpuError as error:
        return Selection(), error


@given(st.lists(TOKENS | st.text(max_size=10), max_size=8).map(tuple))
def test_any_tokens_give_distinct_healthy_devices_or_one_clean_error(tokens: tuple[str, ...]) -> None:
    selection, error = attempt(Request("list", tokens, "X"))
    if error:
        assert error.code in ("OCIGPU-DEV-1", "OCIGPU-DEV-2")
        assert error.message.isprintable()
        return
    names = shown(selection)
    assert len(names) == len(set(names))
    assert not any(each.error for each in selection.every_gpu())
    assert bool(names) == bool(tokens)


def test_without_nvml_the_index_of_a_mig_device_is_refused_unless_it_is_the_only_one() -> None:
    """The order of procfs is not that of NVML: the container would get another device than the one asked for."""
    facts = HostFacts(gpus=(gpu(0, mig=2), gpu(1, mig=1)), source="procfs")
    error = refusal(wanting("0:1"), facts)
    assert (error.code, "NVML did not answer" in error.message) == ("OCIGPU-DEV-2", True)
    assert shown(select_devices(wanting("1:0", f"MIG-{gpu(0).uuid}/8/0", "0"), facts)) == ["1:0", "0:1", "0:0"]
    assert shown(select_devices(wanting("0:1"), facts._replace(source="nvml"))) == ["0:1"]
