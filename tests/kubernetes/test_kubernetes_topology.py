"""How GPUs are connected: scores of pairs from NVML, else from the PCI paths of sysfs."""

import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes_lab import host
from support.process import is_alive, wait_for
from support.product import SimulatedHost

from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.hardware import parse_hardware, read_hardware
from ocigpu.gpus.nvidia.topology import GpuPlace, numa_nodes, pair_scores, path_score, read_place, read_places
from ocigpu.gpus.on_node import GpuDetails, Hardware, MigSize, common_clique
from ocigpu.sim.create import create_host
from ocigpu.sim.models import sim_uuid
from ocigpu.system.settings_file import read_settings

ROOT = "pci0000:3a"
SWITCH = (ROOT, "0000:3a:00.0", "0000:3b:00.0")

PATHS: dict[str, tuple[GpuPlace, GpuPlace, int]] = {
    "behind one switch": (
        GpuPlace((*SWITCH, "0000:3c:00.0", "0000:3d:00.0"), 0), GpuPlace((*SWITCH, "0000:3c:04.0", "0000:3e:00.0"), 0),
        50,
    ),
    "two GPUs on a port": (GpuPlace((*SWITCH, "0000:3d:00.0"), 0), GpuPlace((*SWITCH, "0000:3d:01.0"), 0), 50),
    "switches below a switch": (
        GpuPlace((*SWITCH, "0000:3c:00.0", "0000:40:00.0", "0000:41:00.0", "0000:42:00.0"), 0),
        GpuPlace((*SWITCH, "0000:3c:04.0", "0000:50:00.0", "0000:51:00.0", "0000:52:00.0"), 0),
        40,
    ),
    "one host bridge": (
        GpuPlace((ROOT, "0000:3a:00.0", "0000:3b:00.0"), 0), GpuPlace((ROOT, "0000:3a:01.0", "0000:3f:00.0"), 0), 30,
    ),
    "one CPU": (GpuPlace((ROOT, "0000:3b:00.0"), 0), GpuPlace(("pci0000:5d", "0000:5e:00.0"), 0), 20),
    "two CPUs": (GpuPlace((ROOT, "0000:3b:00.0"), 0), GpuPlace(("pci0000:ae", "0000:af:00.0"), 1), 10),
    "NUMA nodes unknown": (GpuPlace((ROOT, "0000:3b:00.0")), GpuPlace(("pci0000:ae", "0000:af:00.0")), 10),
    "nothing known": (GpuPlace(), GpuPlace(), 10),
    "only NUMA nodes known": (GpuPlace((), 1), GpuPlace((), 1), 20),
}  # fmt: skip


@pytest.mark.parametrize(("one", "two", "score"), PATHS.values(), ids=PATHS.keys())
def test_a_pair_is_scored_by_its_paths(one: GpuPlace, two: GpuPlace, score: int) -> None:
    assert path_score(one, two) == path_score(two, one) == score


@pytest.mark.parametrize(("level", "score"), [(0, 60), (10, 50), (20, 40), (30, 30), (40, 20), (50, 10), (99, 20)])
def test_nvml_knows_better_than_paths(level: int, score: int) -> None:
    hardware = Hardware(levels={("a", "b"): level, ("b", "a"): level})
    assert pair_scores({"a": GpuPlace((), 0), "b": GpuPlace((), 0)}, hardware) == {("a", "b"): score, ("b", "a"): score}


def test_nvlinks_count_direct_and_through_switches() -> None:
    places = dict.fromkeys("abcd", GpuPlace())
    details = {
        "a": GpuDetails("a", "00000000:01:00.0", links={"00000000:02:00.0": 2, "00000000:0F:00.0": 4}),
        "b": GpuDetails("b", "00000000:02:00.0", links={"00000000:01:00.0": 2}),
        "c": GpuDetails("c", "00000000:03:00.0", switch_links=18),
        "d": GpuDetails("d", "00000000:04:00.0", switch_links=12),
    }
    scores = pair_scores(places, Hardware(details))
    assert scores["a", "b"] == scores["b", "a"] == 210
    assert scores["c", "d"] == 1210
    assert scores["a", "c"] == scores["b", "d"] == 10
    assert len(scores) == 12


def put_function(root: Path, path: str, numa: str) -> None:
    directory = root / "sys/devices" / path
    directory.mkdir(parents=True)
    (directory / "numa_node").write_text(f"{numa}\n")
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / directory.name).symlink_to(f"../../../devices/{path}")


def test_places_are_read_from_sysfs(tmp_path: Path) -> None:
    put_function(tmp_path, f"{ROOT}/0000:3a:00.0/0000:3b:00.0", "1")
    put_function(tmp_path, "pci10000:00/10000:00:00.0/10000:01:00.0", "-1")
    sys = f"{tmp_path}/sys"
    assert read_place(sys, "00000000:3b:00.0") == GpuPlace((ROOT, "0000:3a:00.0", "0000:3b:00.0"), 1)
    wide = ("pci10000:00", "10000:00:00.0", "10000:01:00.0")
    assert read_place(sys, "00000000:99:00.0") == read_place(sys, "") == GpuPlace()
    gpu = host("t4-1").gpus[0]
    places = read_places(sys, [gpu._replace(uuid="a", bus_id="00000000:3b:00.0"), gpu._replace(uuid="b", bus_id="")])
    assert numa_nodes(places) == {"a": 1}
    assert read_place(sys, "00010000:01:00.0") == GpuPlace(wide)


def test_what_nvml_said_becomes_records() -> None:
    gpu = {
        "uuid": "GPU-1", "bus_id": "00000000:01:00.0", "memory_mib": 81559, "clique": "c.1", "switch_links": 18,
        "links": {"00000000:02:00.0": 2}, "migs": {"MIG-1": {"memory_mib": 9728, "gi_slices": 1}},
    }  # fmt: skip
    found = parse_hardware({"gpus": [gpu], "levels": [["GPU-1", "GPU-2", 50]]})
    migs = {"MIG-1": MigSize(memory_mib=9728, gi_slices=1)}
    expected = GpuDetails("GPU-1", "00000000:01:00.0", 81559, "c.1", 18, {"00000000:02:00.0": 2}, migs)
    assert found == Hardware({"GPU-1": expected}, {("GPU-1", "GPU-2"): 50, ("GPU-2", "GPU-1"): 50})


# --- the simulated host's NVML, which knows memory and MIG, but no connections


def test_a_host_tells_memory_and_mig_sizes(mig_host: SimulatedHost) -> None:
    facts = read_host_facts(read_settings(str(mig_host.settings)))
    found = read_hardware(facts)
    assert found.problem == ""
    assert {uuid: gpu.memory_mib for uuid, gpu in found.gpus.items()} == {gpu.uuid: 40960 for gpu in facts.gpus}
    sizes = found.gpus[facts.gpus[0].uuid].migs
    assert list(sizes) == [mig.uuid for mig in facts.gpus[0].mig_devices]
    assert [size.gi_slices for size in sizes.values()] == [3, 1]
    assert all(size.memory_mib and size.multiprocessors for size in sizes.values())
    one, two = (gpu.uuid for gpu in facts.gpus)
    assert (found.levels, found.gpus[two].migs) == ({(one, two): 50, (two, one): 50}, {})


@pytest.mark.parametrize(
    ("model", "links", "switch_links", "clique"),
    [
        ("a100", 4, 0, ""),
        ("h100", 0, 18, ""),
        ("gb200", 0, 18, f"{sim_uuid('', 'gb200')[1:]}.1"),
        ("t4", 0, 0, ""),
    ],
)
def test_a_host_tells_its_connections(tmp_path: Path, model: str, links: int, switch_links: int, clique: str) -> None:
    """Three GPUs: one is alone on its socket, the two others share one."""
    create = {"nodes": False, "dri": False, "compat32": False, "ldcache": False}
    facts = read_host_facts(read_settings(create_host(str(tmp_path / "host"), 3, model, **create)))
    found = read_hardware(facts)
    assert found.problem == ""
    alone, *pair = facts.gpus
    assert {found.levels[alone.uuid, gpu.uuid] for gpu in pair} == {50}
    assert found.levels[pair[0].uuid, pair[1].uuid] == 40
    for gpu in facts.gpus:
        others = {other.bus_id: links for other in facts.gpus if other != gpu and links}
        here = found.gpus[gpu.uuid]
        assert (here.links, here.switch_links, here.clique) == (others, switch_links, clique)


@pytest.fixture(scope="module")
def rack_node(session_directory: Path) -> Path:
    """The settings of a node of an NVL72 rack, in a clique of its own."""
    create = {"nodes": False, "dri": False, "compat32": False, "ldcache": False}
    clique = "6c9a6fb6-5a4d-4d2e-8b1a-0d7f5c3e2a10.7"
    return Path(create_host(str(session_directory / "rack node"), 2, "gb200", clique=clique, **create))


@pytest.mark.parametrize(
    ("fault", "clique", "problem"),
    [
        ("", "6c9a6fb6-5a4d-4d2e-8b1a-0d7f5c3e2a10.7", ""),
        ("fabric 0", "", ""),
        ("fabric 1", "", "NVLink fabric: the registration has not begun"),
        ("fabric 2", "", "NVLink fabric: the registration is under way"),
        ("fabric 3 999", "", "NVLink fabric: the registration failed with status 999"),
        ("fabric 9", "", "NVLink fabric: state 9"),
    ],
)
def test_a_host_tells_its_clique_or_why_it_is_unknown(rack_node: Path, fault: str, clique: str, problem: str) -> None:
    (rack_node.parent / "faults").write_text(f"{fault}\n")
    found = read_hardware(read_host_facts(read_settings(str(rack_node))))
    assert [(gpu.clique, gpu.fabric_problem) for gpu in found.gpus.values()] == [(clique, problem)] * 2
    assert common_clique(found.gpus.values()) == (clique, problem)


def test_gpus_in_different_cliques_have_none_in_common() -> None:
    one, two = GpuDetails("GPU-1", clique="c.1"), GpuDetails("GPU-2", clique="c.2")
    assert common_clique([one, one]) == ("c.1", "")
    assert common_clique([]) == ("", "")
    assert common_clique([one, two]) == ("", "NVLink fabric: the GPUs are in different cliques: c.1, c.2")
    assert common_clique([one, GpuDetails("GPU-3")])[1].endswith("different cliques: none, c.1")


@pytest.mark.parametrize(
    ("faults", "seconds", "problem"),
    [("hang\n", 2.0, "NVML did not answer within 2 s"), ("init 9\n", 20.0, "Driver Not Loaded")],
)
def test_a_host_whose_nvml_fails_has_a_problem(
    mig_host: SimulatedHost, faults: str, seconds: float, problem: str
) -> None:
    facts = read_host_facts(read_settings(str(mig_host.settings)))
    path = mig_host.directory / "faults"
    path.write_text(faults)
    try:
        found = read_hardware(facts, seconds)
    finally:
        path.unlink()
    assert problem in found.problem
    assert not found.gpus


def test_a_question_to_nvml_that_hangs_ends_with_the_process_that_asked(mig_host: SimulatedHost) -> None:
    code = (
        "import sys; from ocigpu.gpus.nvidia.discover import read_host_facts\n"
        "from ocigpu.system.settings_file import read_settings\n"
        "from ocigpu.gpus.nvidia.hardware import read_hardware\n"
        "facts = read_host_facts(read_settings(sys.argv[1])); input(); read_hardware(facts)"
    )
    path = mig_host.directory / "faults"
    asking = subprocess.Popen([sys.executable, "-c", code, mig_host.settings], stdin=subprocess.PIPE)
    children = Path(f"/proc/{asking.pid}/task/{asking.pid}/children")
    try:
        path.write_text("hang\n")
        assert asking.stdin
        asking.stdin.write(b"\n")
        asking.stdin.close()
        wait_for("its question", lambda: children.read_text().split())
        child = int(children.read_text().split()[0])
        wait_for("the library", lambda: "libnvidia-ml" in Path(f"/proc/{child}/maps").read_text())
    finally:
        asking.kill()
        asking.wait()
        path.unlink()
    wait_for("the end of the question", lambda: not is_alive(child))


def test_a_lost_gpu_hides_no_other(mig_host: SimulatedHost) -> None:
    facts = read_host_facts(read_settings(str(mig_host.settings)))
    path = mig_host.directory / "faults"
    path.write_text("lost 1\n")
    try:
        found = read_hardware(facts)
    finally:
        path.unlink()
    assert found.problem == ""
    assert found.gpus[facts.gpus[0].uuid].memory_mib == 40960


def test_a_host_without_nvml_has_a_problem() -> None:
    assert read_hardware(host("t4-1")._replace(libraries=())).problem == "the host has no NVML library"
    gone = host("t4-1").libraries[0]._replace(soname="libnvidia-ml.so.1", bits=64, host_path="/nonexistent/libx.so")
    assert "/nonexistent/libx.so" in read_hardware(host("t4-1")._replace(libraries=(gone,))).problem


@pytest.mark.root
@pytest.mark.parametrize("nodes", [True, False], ids=["with nodes", "without"])
def test_a_driver_root_with_nodes_is_entered(session_directory: Path, nodes: bool) -> None:
    """The library is found by its path below the driver root, links meant for it included."""
    root = session_directory / "driver-root"
    (root / "opt").mkdir(parents=True, exist_ok=True)
    (root / "opt/nvml.so").write_bytes(b"no library")
    (root / "nvml.so").unlink(missing_ok=True)
    (root / "nvml.so").symlink_to("/opt/nvml.so")
    recorded = host("t4-1")
    library = recorded.libraries[0]._replace(soname="libnvidia-ml.so.1", bits=64, host_path=f"{root}/nvml.so")
    node = recorded.control_nodes[0]._replace(host_path=f"{root if nodes else ''}/dev/nvidiactl")
    found = read_hardware(
        recorded._replace(driver_root=str(root), simulated=False, libraries=(library,), control_nodes=(node,))
    )
    assert ("/nvml.so: file too short" if nodes else f"{root}/nvml.so: cannot open") in found.problem
