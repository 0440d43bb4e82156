"""``ocigpu mig``: layouts are planned, made, told and put back; files of mig-parted's format."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mig_lab import ABLE, layout, layouts_of, make_mig_host, mig

from ocigpu.core.errors import HostError, SettingsError
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.mig import change_layouts, read_layouts
from ocigpu.gpus.nvidia.mig_layout import (
    GpuChange,
    GpuInstance,
    GpuLayout,
    WantedMig,
    known_places,
    parse_layouts,
    plan_back,
    plan_change,
)
from ocigpu.kubernetes.mig.layouts import parse_layout_file, to_document, wanted_of
from ocigpu.system.settings_file import read_settings


def instance(gpu: GpuLayout, name: str, start: int, gi: int, *uuids: str) -> GpuInstance:
    profile = next(profile for profile in gpu.profiles if profile.name == name)
    return GpuInstance(profile.id, start, (profile.slices,), gi, uuids)


def fits(gpu: GpuLayout, names: tuple[str, ...]) -> bool:
    """Whether so many fit, by trying every start of each, and counting."""
    profiles = [next(profile for profile in gpu.profiles if profile.name == name) for name in names]
    if sum(profile.slices for profile in profiles) > gpu.slices:
        return False
    if any(profiles.count(profile) > profile.most for profile in profiles):
        return False
    for starts in itertools.product(*(profile.starts for profile in profiles)):
        taken = [
            slice_
            for profile, start in zip(profiles, starts, strict=True)
            for slice_ in range(start, start + profile.size)
        ]
        if len(taken) == len(set(taken)):
            return True
    return False


@pytest.mark.parametrize("model", ABLE)
def test_a_layout_is_found_exactly_where_there_is_one(model: str) -> None:
    gpu = layout(model)
    names = [profile.name for profile in gpu.profiles]
    sets = [each for count in range(1, 5) for each in itertools.combinations_with_replacement(names, count)]
    for chosen in random.Random(7).sample(sets, min(len(sets), 300)):
        counts = {name: chosen.count(name) for name in chosen}
        found = plan_change(gpu, WantedMig(True, counts), {})
        assert bool(found.problem) != fits(gpu, chosen), (chosen, found)
        taken = [
            slice_ for one in found.create for slice_ in range(one.start, one.start + gpu.profile(one.profile).size)
        ]
        assert len(taken) == len(set(taken))
        assert all(one.start in gpu.profile(one.profile).starts for one in found.create)


@pytest.mark.parametrize("model", ABLE)
def test_placements_that_nvml_does_not_tell_are_known(model: str) -> None:
    """Without MIG mode."""
    gpu = layout(model)
    told = {profile.id: (profile.size, profile.starts) for profile in gpu.profiles}
    known = {id_: (size, tuple(starts)) for id_, (size, starts) in known_places(gpu.profiles).items()}
    assert {id_: known[id_] for id_ in told} == told


def test_what_is_there_stays_and_what_is_held_is_not_destroyed() -> None:
    gpu = layout()
    there = [instance(gpu, "1g.10gb", 0, 7, "MIG-a"), instance(gpu, "3g.40gb", 4, 2, "MIG-b")]
    gpu = gpu._replace(instances=tuple(there))
    found = plan_change(gpu, WantedMig(True, {"3g.40gb": 1, "2g.20gb": 1}), {})
    assert (found.keep, found.destroy) == ((there[1],), (there[0],))
    assert [one.start for one in found.create] == [2]
    held = plan_change(gpu, WantedMig(True, {"4g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1}), {"MIG-a": "web"})
    assert held.problem == "it would fit, but not beside the instances in use: web uses MIG-a"
    assert not held.changes
    off = plan_change(gpu, WantedMig(False, {}), {"MIG-b": "process 12"})
    assert off.problem == "MIG mode cannot change while process 12 uses MIG-b"


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        ({"3g.40gb": 2, "1g.10gb": 1, "2g.20gb": 1}, "it does not fit; 2 x 3g.40gb would"),
        ({"5g.50gb": 1}, "no profile '5g.50gb': the GPU supports 1g.10gb, "),
        ({"4c.3g.40gb": 1}, "no profile '4c.3g.40gb': the GPU supports 1g.10gb, "),
        ({"0c.3g.40gb": 1}, "no profile '0c.3g.40gb': the GPU supports 1g.10gb, "),
        ({"1g.10gb": 1000}, "1000 of 1g.10gb are more than it can hold"),
        ({"1g.10gb": 8}, "it does not fit; 7 x 1g.10gb would"),
    ],
)
def test_what_does_not_fit_is_said_with_what_would(devices: dict[str, int], problem: str) -> None:
    assert plan_change(layout(), WantedMig(True, devices), {}).problem.startswith(problem)


def test_compute_instances_share_a_gpu_instance() -> None:
    found = plan_change(layout(), WantedMig(True, {"1c.3g.40gb": 4, "2c.3g.40gb": 1, "1g.10gb": 0}), {})
    assert {one.cis for one in found.create} == {(2, 1), (1, 1, 1)}


def test_a_gpu_without_mig() -> None:
    gpu = layout()._replace(mode=None, pending=None, profiles=())
    assert plan_change(gpu, WantedMig(True, {}), {}).problem == "it has no MIG mode"
    assert not plan_change(gpu, WantedMig(False, {}), {}).changes


@given(st.lists(st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb"]), max_size=4), st.data())
def test_a_way_back_is_exact(names: list[str], data: st.DataObject) -> None:
    empty = layout()
    before = plan_change(empty, WantedMig(True, {name: names.count(name) for name in names}), {})
    was = empty._replace(instances=tuple(one._replace(gi=n) for n, one in enumerate(before.create)))
    count = data.draw(st.integers(0, len(was.instances)))
    now = was._replace(instances=was.instances[:count])
    back = plan_back(now, was)
    assert {*back.keep, *(one._replace(gi=-1) for one in back.create)} >= {*was.instances[:count]}
    assert len(back.keep) + len(back.create) == len(was.instances)
    assert not back.destroy


# files


FILE = """
version: v1
mig-configs:
  all-disabled: [{devices: all, mig-enabled: false}]
  some:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 2, 2g.20gb: 1}}
  - {device-filter: "0x233010DE", devices: [1], mig-enabled: true, mig-devices: {}}
  - {device-filter: ["0x20B010DE", "0x233010DE:0x16C110DE"], devices: [2], mig-enabled: false}
"""


def test_entries_are_about_the_gpus_that_they_match() -> None:
    gpus = [layout()._replace(number=number) for number in range(4)]
    gpus[3] = layout("t4")._replace(number=3, mode=None, pending=None)
    layouts = parse_layout_file(FILE, "a.yaml")
    found = {gpu.number: wanted for gpu, wanted in wanted_of(layouts.select("some"), gpus)}
    assert found == {0: WantedMig(True, {"1g.10gb": 2, "2g.20gb": 1}), 1: WantedMig(True, {}), 2: WantedMig(False, {})}
    assert [gpu.number for gpu, _ in wanted_of(layouts.select("all-disabled"), gpus)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "version"),
        ("a: [", "not YAML"),
        ("version: v2\nmig-configs: {a: [{devices: all, mig-enabled: false}]}", "version: "),
        ("version: v1\nmig-configs: {}", "mig-configs: "),
        ("version: v1\nmig-configs: {a: []}", "mig-configs.a: "),
        ("version: v1\nmig-configs: {a: [{devices: all}]}", "mig-configs.a.0.mig-enabled: "),
        ("version: v1\nmig-configs: {a: [{devices: some, mig-enabled: false}]}", "mig-configs.a.0.devices"),
        ("version: v1\nmig-configs: {a: [{devices: [-1], mig-enabled: false}]}", "mig-configs.a.0.devices"),
        ("version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true}]}", "mig-devices is missing"),
        (
            "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false, mig-devices: {x: 1}}]}",
            "mig-devices without mig-enabled",
        ),
        (
            "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {x: 0}}]}",
            "every count is 0",
        ),
        (
            "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {x: -1}}]}",
            "mig-configs.a.0.mig-devices.x: ",
        ),
        (
            "version: v1\nmig-configs: {a: [{device-filter: 0x20B010DE, devices: all, mig-enabled: false}]}",
            "mig-configs.a.0.device-filter",
        ),
        ("version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false, mig: 1}]}", "mig-configs.a.0.mig: "),
        (
            "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false, mig_devices: {}}]}",
            "mig-configs.a.0.mig_devices: unknown key: did you mean mig-devices?",
        ),
        ("version: v1\nmig-configs: {a: 3}", 'mig-configs.a: "3" is not a list'),
        ("version: v1\nmig-configs: {a: [{devices: ['0'], mig-enabled: true}]}", '"0" is not the number of a GPU'),
        ("version: v1\nmig-configs: {a: [{devices: all, mig-enabled: on it}]}", '"on it" is neither true nor false'),
        (
            "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {x: 1.5}}]}",
            '"1.5" is not a whole number',
        ),
        (
            "version: v1\nmig-configs: {a: [{device-filter: A100, devices: all, mig-enabled: false}]}",
            '"A100" is not the PCI id of a device, such as 0x20B210DE',
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_the_place(text: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_layout_file(text, "a.yaml")
    assert caught.value.code == "OCIGPU-MIG-1"
    assert str(caught.value).startswith("a.yaml: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not re.search("[Ii]nput|valid|literal|Field|permitted", str(caught.value)), "no words of a library"


def test_entries_that_contradict_each_other_are_refused() -> None:
    text = "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}, "
    text += "{devices: [0], mig-enabled: true, mig-devices: {}}]}"
    with pytest.raises(SettingsError, match="GPU 0: entries of the layout contradict each other"):
        list(wanted_of(parse_layout_file(text, "a.yaml").select(""), [layout()]))


def test_what_nvml_says_is_not_believed() -> None:
    for document in ([{"number": 0}], {"a": 1}, [1], "x"):
        with pytest.raises(ValueError, match="validation error"):
            parse_layouts(document)


def test_an_export_says_all_where_it_can_as_the_vendors_does() -> None:
    """Judged against the vendor's export of the same hosts."""
    a100, h100, t4 = (
        layout("a100", mode=0),
        layout("h100", mode=1),
        layout("a100", mode=0)._replace(device_id=0x1EB810DE),
    )
    t4 = t4._replace(mode=None, profiles=())
    cut = h100._replace(instances=(instance(h100, "4g.40gb", 0, 1), instance(h100, "3g.40gb", 4, 2)))
    cut = cut._replace(
        instances=tuple(one._replace(cis=(each,)) for one, each in zip(cut.instances, (2, 3), strict=True))
    )
    off: dict[str, Any] = {"mig-enabled": False, "mig-devices": {}}
    devices = {"mig-enabled": True, "mig-devices": {"2c.4g.40gb": 1, "3g.40gb": 1}}
    h100_only = {"device-filter": "0x233010DE"}
    for gpus, entries in (
        ((), []),
        ((a100, a100), [{"devices": "all", **off}]),
        ((a100, t4), [{"devices": "all", **off}]),
        ((cut, h100), [{"devices": [0], **devices}, {"devices": [1], **devices, "mig-devices": {}}]),
        (
            (a100, cut, t4, cut),
            [
                {"device-filter": ["0x1EB810DE", "0x20B010DE"], "devices": "all", **off},
                {**h100_only, "devices": "all", **devices},
            ],
        ),
        (
            (cut, h100, a100),
            [
                {**h100_only, "devices": [0], **devices},
                {**h100_only, "devices": [1], **devices, "mig-devices": {}},
                {"device-filter": "0x20B010DE", "devices": "all", **off},
            ],
        ),
    ):
        document = to_document([gpu._replace(number=number) for number, gpu in enumerate(gpus)], "x")
        assert document == {"version": "v1", "mig-configs": {"x": entries}}


# on a simulated host, by its NVML


@pytest.fixture
def host(session_directory: Path, work_directory: Path) -> Path:
    return make_mig_host(work_directory / "host", 2, "h100")


@pytest.mark.root
def test_a_file_is_planned_made_asserted_and_exported(host: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = host / "a.yaml"
    file.write_text(FILE)
    asked = ("-f", str(file), "-c", "some")
    assert mig(host, capfd, "assert", *asked, "--valid-config") == (0, "", "")
    assert mig(host, capfd, "assert", *asked)[0] == 1
    status, out, _ = mig(host, capfd, "plan", *asked, "--json")
    first = json.loads(out)["gpus"][0]
    assert (status, first["change-mode"], len(first["create"])) == (0, True, 3)
    assert mig(host, capfd, "plan", *asked)[1].endswith("made: 3; nothing was changed\n")
    assert layouts_of(host)[0].mode == 0
    assert mig(host, capfd, "apply", *asked)[1].endswith("made: 3; done\n")
    assert mig(host, capfd, "assert", *asked)[0] == 0
    again = mig(host, capfd, "apply", *asked)[1]
    assert "kept: 3; done" in again
    status, out, _ = mig(host, capfd, "export")
    current = yaml.safe_load(out)["mig-configs"]["current"]
    assert current[0] == {"devices": [0], "mig-enabled": True, "mig-devices": {"1g.10gb": 2, "2g.20gb": 1}}
    assert current[1] == {"devices": [1], "mig-enabled": True, "mig-devices": {}}
    file.write_text(out)
    assert mig(host, capfd, "assert", "-f", str(file))[0] == 0
    modes = mig(host, capfd, "apply", "-f", str(file), "-m")
    assert "nothing to do" in modes[1]


@pytest.mark.root
def test_what_cannot_be_changes_nothing(host: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = host / "a.yaml"
    entries = (
        "[{devices: [0], mig-enabled: true, mig-devices: {}}, {devices: [1], mig-enabled: true, mig-devices: {%s}}]"
    )
    file.write_text("version: v1\nmig-configs: {a: " + entries % "4g.40gb: 2" + "}")
    status, out, err = mig(host, capfd, "apply", "-f", str(file))
    assert (status, out) == (1, "")
    assert err.startswith("ocigpu: OCIGPU-MIG-2: GPU 1: it does not fit; 1 x 4g.40gb would\n")
    assert [gpu.mode for gpu in layouts_of(host)] == [0, 0]
    status, out, _ = mig(host, capfd, "plan", "-f", str(file))
    assert status == 1
    assert "! it does not fit" in out
    for words, code in (
        (("-f", f"{file}.no"), "MIG-1: read "),
        (("-f", str(file), "-c", "b"), "MIG-1: "),
        (("-c", "b"), "MIG-1: "),
    ):
        status, _, err = mig(host, capfd, "plan", *words)
        assert status == 1
        assert err.startswith(f"ocigpu: OCIGPU-{code}")


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.parametrize("mode", [0, 1])
def test_a_failure_half_way_puts_all_back(host: Path, capfd: pytest.CaptureFixture[str], mode: int) -> None:
    """NVML refuses the last step: what was destroyed comes back at its place, what was made goes, the mode too."""
    if mode:
        assert mig(host, capfd, "apply", "-c", "all-balanced")[0] == 0
    facts = read_host_facts(read_settings(str(host / "config.toml")))
    before = read_layouts(facts)

    def plan(gpus: Any) -> list[GpuChange]:
        changes = [plan_change(gpu, WantedMig(True, {"1g.10gb": 7}), {}) for gpu in gpus]
        if all(gpu.mode for gpu in gpus):
            wrong = changes[1].create[-1]._replace(start=7)
            changes[1] = changes[1]._replace(create=(*changes[1].create[:-1], wrong))
        return changes

    with pytest.raises(HostError) as caught:
        change_layouts(facts, before, plan)
    assert caught.value.code == "OCIGPU-MIG-3"
    assert str(caught.value) == "GPU 1: make 1g.10gb at 7: Invalid Argument (all is as it was before)"
    places = [sorted((one.kind, one.start) for one in gpu.instances) for gpu in read_layouts(facts)]
    assert places == [sorted((one.kind, one.start) for one in gpu.instances) for gpu in before]
    assert [gpu.mode for gpu in read_layouts(facts)] == [mode, mode]


def test_a_mode_that_waits_for_a_reset_is_told_and_can_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ampere: NVML accepts the mode, which is pending then. Setting the present one again takes that back."""
    state = layout("a100", mode=0)

    def ask(verb: str, _facts: Any, _seconds: float, text: str = "", *, parse: Any) -> Any:
        nonlocal state
        if verb == "mig-layout":
            return parse([state._asdict() | {"profiles": [profile._asdict() for profile in state.profiles]}])
        for _, step in json.loads(text):
            state = state._replace(pending=step["mode"])
        return parse({"done": 1, "error": ""})

    monkeypatch.setattr("ocigpu.gpus.nvidia.mig.ask", ask)

    def plan(enabled: bool) -> Any:
        return lambda gpus: [plan_change(gpu, WantedMig(enabled, {}), {}) for gpu in gpus]

    facts: Any = None
    with pytest.raises(HostError) as caught:
        change_layouts(facts, [state], plan(True), reset=False)
    assert caught.value.code == "OCIGPU-MIG-4"
    assert "nvidia-smi --gpu-reset -i 0000:01:00.0" in str(caught.value.hint)
    assert (state.mode, state.pending) == (0, 1)
    change_layouts(facts, [state], plan(False))
    assert (state.mode, state.pending) == (0, 0)


def test_a_pending_mode_destroys_nothing_that_is_wanted() -> None:
    gpu = layout()
    there = instance(gpu, "3g.40gb", 4, 2, "MIG-b")
    found = plan_change(gpu._replace(instances=(there,), pending=0), WantedMig(True, {"3g.40gb": 1}), {"MIG-b": "web"})
    assert (found.mode, found.keep, found.destroy, found.problem) == (1, (there,), (), "")
