import math
import re
from pathlib import Path

import pytest
from support.product import REPOSITORY

from ocigpu.core.errors import OcigpuError
from ocigpu.sim.files import render_mig_minors, render_proc_devices
from ocigpu.sim.models import MODELS, cuda_version_of, find_model, make_gpus
from ocigpu.sim.nodes import Majors, choose_first_card, choose_majors, plan_nodes


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("535.104.05", "12.2"),
        ("550.163.01", "12.4"),
        ("555.42.06", "12.4"),
        ("560.35.03", "12.6"),
        ("565.57.01", "12.7"),
        ("570.133.20", "12.8"),
        ("575.57.08", "12.9"),
        ("580.65.06", "13.0"),
        ("590.48.01", "13.1"),
        ("595.71.05", "13.2"),
        ("610.57.04", "13.3"),
        ("999.1", "13.3"),
        ("470.82.01", "11.8"),
    ],
)
def test_cuda_version_is_that_of_the_nearest_branch_below(driver: str, cuda: str) -> None:
    assert cuda_version_of(driver) == cuda


def test_every_model_can_be_made_and_every_profile_placed() -> None:
    for model in MODELS.values():
        assert make_gpus(model, 1)[0].mig_devices == ()
        for profile in model.mig_profiles:
            (gpu,) = make_gpus(model, 1, [f"0:{profile.name}"])
            assert [device.profile for device in gpu.mig_devices] == [profile]


def test_gpus_are_the_same_every_time_and_all_different() -> None:
    gpus = make_gpus(find_model("h100"), 64)
    assert gpus == make_gpus(find_model("H100"), 64)
    assert len({gpu.uuid for gpu in gpus}) == len({gpu.bus_id for gpu in gpus}) == 64
    assert gpus[0].uuid == "GPU-dce4c047-1c9d-191a-a7ec-6d72e6e57d68"
    assert (gpus[0].bus_id, gpus[63].bus_id) == ("0000:01:00.0", "0000:40:00.0")


def test_mig_devices_get_the_instance_ids_and_minors_of_the_driver() -> None:
    gpus = make_gpus(find_model("a100"), 2, ["1:1g.5gb,2g.10gb,4g.20gb"])
    assert not gpus[0].mig_enabled
    assert gpus[1].mig_enabled
    # gpu1/gi0/access has minor 138 = 3 + 15 instances of 9, as on every host with the driver.
    assert [(device.gpu_instance, device.gi_minor, device.ci_minor) for device in gpus[1].mig_devices] == [
        (7, 138 + 7 * 9, 139 + 7 * 9),
        (3, 138 + 3 * 9, 139 + 3 * 9),
        (1, 138 + 1 * 9, 139 + 1 * 9),
    ]


def test_layout_of_all_gpus_and_of_none_of_the_slices() -> None:
    gpus = make_gpus(find_model("h200"), 3, ["all:7g.141gb"])
    assert all(len(gpu.mig_devices) == 1 for gpu in gpus)
    assert len({gpu.mig_devices[0].uuid for gpu in gpus}) == 3
    (gpu,) = make_gpus(find_model("h200"), 1, ["0:"])
    assert gpu.mig_enabled
    assert gpu.mig_devices == ()


@pytest.mark.parametrize(
    ("model", "layouts", "message"),
    [
        ("h100", ["0:1g.5gb"], 'MIG layout "0:1g.5gb": a NVIDIA H100 80GB HBM3 has no profile "1g.5gb"'),
        ("h100", ["0:,"], 'MIG layout "0:,": a NVIDIA H100 80GB HBM3 has no profile ""'),
        ("t4", ["0:1g.5gb"], 'MIG layout "0:1g.5gb": a Tesla T4 has no MIG'),
        ("h100", ["1g.10gb"], 'MIG layout "1g.10gb": no GPU index'),
        ("h100", ["2:1g.10gb"], 'MIG layout "2:1g.10gb": no GPU "2" of 2, counted from 0'),
        ("h100", ["-1:1g.10gb"], 'MIG layout "-1:1g.10gb": no GPU "-1" of 2, counted from 0'),
        ("h100", ["²:1g.10gb"], 'MIG layout "²:1g.10gb": no GPU "²" of 2, counted from 0'),
        ("h100", ["0:4g.40gb,4g.40gb"], "8 compute slices, and a NVIDIA H100 80GB HBM3 has 7"),
        ("h100", ["0:3g.40gb,3g.40gb,1g.10gb"], "9 memory slices, and a NVIDIA H100 80GB HBM3 has 8"),
        ("h100", ["0:1g.10gb+me,1g.10gb+me"], "do not fit into one NVIDIA H100 80GB HBM3 together"),
        (
            "rtxpro6000",
            ["0:1g.24gb+me.all,1g.24gb"],
            "do not fit into one NVIDIA RTX PRO 6000 Blackwell Server Edition",
        ),
        ("a30", ["0:2g.12gb,4g.24gb"], "6 compute slices, and a NVIDIA A30 has 4"),
        ("h100", ["0:1g.10gb", "0:1g.10gb"], "GPU 0 already has a layout"),
        ("h100", ["all:1g.10gb", "1:1g.10gb"], "GPU 1 already has a layout"),
    ],
)
def test_impossible_layout_is_refused(model: str, layouts: list[str], message: str) -> None:
    with pytest.raises(OcigpuError) as caught:
        make_gpus(find_model(model), 2, layouts)
    assert caught.value.code == "OCIGPU-SIM-1"
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("model", "layout", "starts"),
    [
        ("h100", "1g.10gb,1g.10gb,3g.40gb", [6, 5, 0]),
        ("h100", "2g.20gb,1g.10gb,4g.40gb", [4, 6, 0]),
        ("h100", "3g.40gb,2g.20gb,1g.10gb+me", [4, 2, 1]),
        ("h100", "1g.20gb,1g.20gb,1g.20gb,1g.20gb", [6, 4, 2, 0]),
        ("a30", "1g.6gb,2g.12gb+me,1g.6gb", [3, 0, 2]),
        ("rtxpro6000", "1g.24gb-me,2g.48gb,1g.24gb+gfx", [9, 0, 6]),
    ],
)
def test_profiles_get_places_that_do_not_overlap(model: str, layout: str, starts: list[int]) -> None:
    """Starts are those of the driver, which tries the highest first: order must not make a layout impossible."""
    (gpu,) = make_gpus(find_model(model), 1, [f"0:{layout}"])
    assert [device.start for device in gpu.mig_devices] == starts


def test_profiles_are_named_by_their_share_of_the_memory() -> None:
    """The vendor's programs make the names anew from the sizes: share of the GPU in eighths, of whole GiB."""
    for model in MODELS.values():
        for profile in model.mig_profiles:
            eighths = math.ceil(profile.memory_mib * 8 / model.memory_mib)
            gib = math.floor(math.ceil(model.memory_mib / 1024) * eighths / 8 + 0.5)
            assert profile.name.startswith(f"{profile.compute_slices}g.{gib}gb"), (model.key, profile)


@pytest.mark.parametrize("count", [0, -1, 65])
def test_impossible_number_of_gpus_is_refused(count: int) -> None:
    with pytest.raises(OcigpuError, match="a simulated host has 1 to 64"):
        make_gpus(find_model("h100"), count)


def test_mig_beyond_the_driver_minors_is_refused() -> None:
    with pytest.raises(OcigpuError, match="only the first 32 can have MIG"):
        make_gpus(find_model("h100"), 64, ["all:1g.10gb"])


@pytest.mark.parametrize(
    ("model", "clique", "message"),
    [
        ("h100", "1", 'clique "1": a NVIDIA H100 80GB HBM3 has no multi-node NVLink'),
        ("gb200", "-1", 'clique "-1": not a number'),
        ("gb200", "1000000000", "not a number"),
        ("gb200", "6c9a6fb6.1", "or the cluster's UUID, a dot and a number"),
    ],
)
def test_an_impossible_clique_is_refused(model: str, clique: str, message: str) -> None:
    with pytest.raises(OcigpuError) as raised:
        make_gpus(MODELS[model], 1, clique=clique)
    assert message in raised.value.message


def test_the_page_for_ci_names_every_model() -> None:
    text = (
        (REPOSITORY / "docs/CI.md").read_text().split("Models, as `--model` takes them:")[1].partition(". `ocigpu")[0]
    )
    assert re.findall(r"`(\w+)`", text) == [*MODELS]


def test_every_model_says_where_its_figures_come_from() -> None:
    text = (REPOSITORY / "ocigpu/sim/models.toml").read_text()
    assert re.findall(r"^\[models\.(\w+)\]\n# \w", text, re.MULTILINE) == [*MODELS]


def test_unknown_model_is_refused_with_the_list_of_models() -> None:
    with pytest.raises(OcigpuError, match='model "k80" is unknown') as caught:
        find_model("k80")
    assert (
        caught.value.hint
        == "models: t4, a10, a30, a100, l4, l40s, h100, h200, b200, b300, gh200, gb200, rtxpro6000, rtx3090, "
        "rtx4090, rtx5090, gb10, orin, thor, mi300x, mi355x"
    )


def test_mig_minors_list_every_possible_instance() -> None:
    minors = dict(line.split(" ") for line in render_mig_minors().splitlines())
    assert len(minors) == 2 + 32 * 15 * 9
    assert sorted(map(int, minors.values())) == list(range(1, len(minors) + 1))
    assert minors["gpu0/gi0/access"] == "3"
    assert minors["gpu0/gi0/ci0/access"] == "4"
    assert minors["gpu1/gi0/access"] == "138"
    assert minors["gpu31/gi14/ci7/access"] == "4322"


def test_majors_are_the_first_of_the_dynamic_range() -> None:
    (gpu,) = make_gpus(find_model("h100"), 1)
    (old,) = make_gpus(find_model("a100"), 1)
    assert choose_majors(gpu, "/nonexistent") == Majors(510, 509, 508, 507, 506)
    assert choose_majors(old, "/nonexistent") == Majors(510, 509, 508, 0, 0)


def test_majors_in_use_are_left_alone(tmp_path: Path) -> None:
    devices = tmp_path / "devices"
    devices.write_text("Character devices:\n  1 mem\n509 other\n510 nvidia-uvm\n\nBlock devices:\n508 loop\n")
    (gpu,) = make_gpus(find_model("a100"), 1)
    assert choose_majors(gpu, str(devices)) == Majors(508, 507, 506, 0, 0)


def test_cards_of_this_machine_are_left_alone(tmp_path: Path) -> None:
    assert choose_first_card(str(tmp_path / "none")) == 0
    for name in ("card0", "card1", "renderD128", "by-path"):
        (tmp_path / name).touch()
    assert choose_first_card(str(tmp_path)) == 2
    gpus = make_gpus(find_model("h100"), 64)
    numbers = {node.minor for node in plan_nodes(gpus, Majors(510, 509, 508, 0, 0), 2, dri=True) if node.major == 226}
    assert numbers == {*range(2, 64), *range(130, 192)}


def test_proc_devices_names_every_major_once() -> None:
    lines = render_proc_devices(Majors(510, 509, 508, 507, 0)).partition("\n\n")[0].splitlines()
    majors = [tuple(line.split()) for line in lines[1:]]
    assert lines[0] == "Character devices:"
    assert len(set(majors)) == len(majors)
    assert [int(major) for major, _ in majors] == sorted(int(major) for major, _ in majors)
    assert {("195", "nvidia"), ("510", "nvidia-uvm"), ("509", "nvidia-caps")} <= set(majors)
    assert not [name for _, name in majors if name == "nvidia-nvswitch"]
