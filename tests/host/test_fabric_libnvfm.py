"""libnvfm by ctypes, over a library with the real ABI and a manager that is simulated."""

import ctypes
import os
import socket
from pathlib import Path

import pytest
from support import requirements
from support.process import run

from ocigpu.gpus.nvidia.fabric import libnvfm_child as abi
from ocigpu.gpus.nvidia.fabric.libnvfm import LibnvfmFabric, open_fabric, parse_address
from ocigpu.gpus.nvidia.fabric.partitions import FabricError, board_partitions
from ocigpu.sim.fabric import SimulatedManager
from ocigpu.sim.libraries import library_triplet

SINGLES = [(gpu,) for gpu in range(1, 9)]


@pytest.mark.parametrize(
    ("layout", "size", "word", "offsets"),
    [
        (abi.ConnectParams1, 268, 0x0100010C, {"addressInfo": 4, "timeoutMs": 260, "isUnix": 264}),
        (abi.ConnectParams2, 272, 0x02000110, {"isUnix": 264, "addressType": 268}),
        (abi.GpuInfo, 128, 0, {"uuid": 4, "pciBusId": 84, "numNvLinksAvailable": 116, "nvlinkLineRateMBps": 124}),
        (abi.PartitionInfo, 2060, 0, {"isActive": 4, "numGpus": 8, "gpuInfo": 12}),
        (abi.PartitionList, 131852, 0x0102030C, {"numPartitions": 4, "maxNumPartitions": 8, "partitionInfo": 12}),
        (abi.ActivatedList, 264, 0x01000108, {"numPartitions": 4, "partitionIds": 8}),
    ],
)
def test_layouts_are_those_of_the_headers(
    layout: type[ctypes.Structure], size: int, word: int, offsets: dict[str, int]
) -> None:
    assert ctypes.sizeof(layout) == size
    assert {name: getattr(layout, name).offset for name in offsets} == offsets
    if word:
        assert abi.version_word(layout) == word


@pytest.mark.parametrize(
    ("text", "kind", "info"),
    [
        ("tcp:10.1.2.3:7000", 1, "10.1.2.3:7000"),
        ("127.0.0.1", 1, "127.0.0.1:6666"),
        ("127.0.0.1:6666", 1, "127.0.0.1:6666"),
        ("unix:/run/a socket", 2, "/run/a socket"),
        ("/run/fm", 2, "/run/fm"),
        ("vsock:42:6666", 3, "42:6666"),
    ],
)
def test_addresses(text: str, kind: int, info: str) -> None:
    address = parse_address(text)
    assert (address.kind, address.info) == (kind, info)
    assert parse_address(address.text) == address


@pytest.mark.parametrize(
    "text",
    [
        "", "tcp:", "localhost", "tcp:localhost:6666", "tcp:::1", "tcp:1.2.3.4:0", "tcp:1.2.3.4:65536", "tcp:1.2.3.4:x",
        "tcp:1.2.3", "unix:fm", "unix:/a\n", "unix:/" + "a" * 108, "vsock:42", "vsock::6666", "vsock:a:1", "ib:1",
    ],
)  # fmt: skip
def test_addresses_that_the_library_does_not_take_are_refused_first(text: str) -> None:
    with pytest.raises(FabricError) as error:
        parse_address(text)
    assert error.value.code == "OCIGPU-FAB-1"
    assert "\n" not in error.value.render("ocigpu").splitlines()[0]


def test_partitions_of_two_boards(fabric: LibnvfmFabric, manager: SimulatedManager) -> None:
    assert fabric.list_partitions() == board_partitions("hopper")
    manager.start("blackwell", active=[{1, 2}])
    assert fabric.list_partitions() == board_partitions("blackwell", [{1, 2}])


def test_a_set_is_activated_and_deactivated_and_done_already_is_done(
    fabric: LibnvfmFabric, manager: SimulatedManager
) -> None:
    for _ in range(2):
        assert fabric.activate([3, 1]).physical_ids == (1, 3)
        assert manager.active() == [(1, 3)]
    for _ in range(2):
        fabric.deactivate([1, 3])
        assert manager.active() == []


def test_a_conflict_names_the_partitions_in_use(fabric: LibnvfmFabric, manager: SimulatedManager) -> None:
    manager.start(active=[{1, 3}, {2}])
    with pytest.raises(FabricError, match=r"in use: partition 3 \(GPUs 1,3\), partition 8 \(GPU 2\)$") as error:
        fabric.activate([1, 2, 3, 4])
    assert (error.value.code, error.value.status) == ("OCIGPU-FAB-5", -7)
    assert manager.active() == [(1, 3), (2,)]


def test_links_that_cannot_be_trained(fabric: LibnvfmFabric, manager: SimulatedManager) -> None:
    manager.fail({1, 3}, -10)
    with pytest.raises(FabricError, match=r"activate GPUs 1,3: .*trained \(libnvfm -10\)") as error:
        fabric.activate([1, 3])
    assert error.value.code == "OCIGPU-FAB-6"
    manager.fail({1, 3}, -27)
    with pytest.raises(FabricError, match=r"refused \(libnvfm -27\)"):
        fabric.activate([1, 3])
    assert manager.active() == []


def test_partitions_of_virtual_functions_are_listed_and_not_activated(
    fabric: LibnvfmFabric, manager: SimulatedManager
) -> None:
    manager.say("mode 2")
    assert fabric.list_partitions() == board_partitions("hopper")
    with pytest.raises(FabricError, match=r"activate GPUs 1,3: .*not supported in the manager's mode") as error:
        fabric.activate([1, 3])
    assert (error.value.code, manager.active()) == ("OCIGPU-FAB-3", [])


@pytest.mark.parametrize(
    ("line", "code"),
    [("mode 0", "OCIGPU-FAB-3"), ("down", "OCIGPU-FAB-2"), ("restarted 1", "OCIGPU-FAB-7")],
)
def test_managers_that_give_no_list(fabric: LibnvfmFabric, manager: SimulatedManager, line: str, code: str) -> None:
    manager.say(line)
    for request in (fabric.list_partitions, lambda: fabric.activate([1]), lambda: fabric.deactivate([1])):
        with pytest.raises(FabricError) as error:
            request()
        assert error.value.code == code


def test_a_manager_that_was_restarted_is_told_what_was_active(fabric: LibnvfmFabric, manager: SimulatedManager) -> None:
    manager.start(active=[{1, 3}, {2}])
    known = fabric.list_partitions()
    manager.restart()
    assert manager.active() == []
    assert fabric.restore([[3, 1], [2]], known) == known
    assert manager.active() == [(1, 3), (2,)]
    manager.restart(since=1_000_000)  # longer than a minute ago
    with pytest.raises(FabricError) as error:
        fabric.restore([[2]], known)
    assert error.value.code == "OCIGPU-FAB-2"
    assert "down" in manager.lines()


def test_a_library_that_knows_the_first_parameters_only(fabric: LibnvfmFabric, manager: SimulatedManager) -> None:
    manager.say("old")
    assert len(fabric.list_partitions()) == 15
    assert fabric.activate([8]).is_active


@pytest.mark.parametrize("address", ["tcp:10.0.0.1:6666", "unix:/run/fm.sock", "vsock:42:6666"])
def test_the_manager_is_found_at_its_address_only(
    fabric_host: Path, fabric: LibnvfmFabric, manager: SimulatedManager, address: str
) -> None:
    manager.say(f"listens {address}")
    assert len(open_fabric(address, simulation=str(fabric_host)).list_partitions()) == 15
    with pytest.raises(FabricError) as error:
        fabric.list_partitions()
    assert error.value.code == "OCIGPU-FAB-2"


def test_a_manager_that_does_not_answer_ends_at_the_deadline(fabric_host: Path, manager: SimulatedManager) -> None:
    manager.say("slow 600")
    library = str(fabric_host / "usr/lib" / library_triplet() / "libnvfm.so.1")
    waiting = LibnvfmFabric(parse_address("127.0.0.1"), [library], str(fabric_host), list_seconds=0.1)
    with pytest.raises(FabricError, match="no answer within") as error:
        waiting.list_partitions()
    assert error.value.code == "OCIGPU-FAB-2"


LIST = "#include <unistd.h>\nint fmGetSupportedFabricPartitions(void *handle, unsigned *list) "
SOURCES = {
    "crash": (LIST + "{ return *(volatile int *)0; }", "FAB-8", "signal 11"),
    "many": (LIST + "{ list[1] = 65; return 0; }", "FAB-8", "65 partitions"),
    "gpus": (LIST + "{ list[1] = 1; list[5] = 17; return 0; }", "FAB-8", "17 GPUs"),
    "none": (LIST + "{ list[1] = 1; return 0; }", "FAB-8", "none"),
    "lack": ("", "FAB-1", "no function fmGetSupportedFabricPartitions"),
    "noise": (LIST + '{ write(1, "{}", 2); return -9; }', "FAB-2", "libnvfm -9"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_library_that_misbehaves_is_one_error(tmp_path: Path, name: str) -> None:
    requirements.require(requirements.compiler())
    source, code, words = SOURCES[name]
    common = (
        "int fmLibInit(void) { return -7; }\n"
        "int fmConnect(void *p, void **h) { *h = p; return 0; }\nint fmDisconnect(void *h) { return 0; }\n"
    )
    (tmp_path / "fm.c").write_text(source + "\n" + common)
    run(["cc", "-shared", "-fPIC", "-w", "-o", tmp_path / "fm.so", tmp_path / "fm.c"])
    with pytest.raises(FabricError, match=words) as error:
        open_fabric("127.0.0.1", str(tmp_path / "fm.so"), str(tmp_path)).list_partitions()
    assert error.value.code == f"OCIGPU-{code}"


@pytest.mark.root
def test_the_library_has_the_rights_of_the_sockets_owner_or_none(work_directory: Path) -> None:
    requirements.require(requirements.compiler())
    source = (
        "#include <unistd.h>\nint fmLibInit(void) { return 0; }\n"
        "int fmGetSupportedFabricPartitions(void) { return 0; }\n"
        "int fmConnect(void) { return setuid(0) ? -(int)getuid() : -2; }\n"
    )
    (work_directory / "fm.c").write_text(source)
    run(["cc", "-shared", "-fPIC", "-w", "-o", work_directory / "fm.so", work_directory / "fm.c"])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{work_directory}/fm.sock")
        os.chown(f"{work_directory}/fm.sock", 4321, 4321)
        for address, user in ((f"unix:{work_directory}/fm.sock", 4321), ("127.0.0.1", 65534)):
            with pytest.raises(FabricError, match=rf"refused \(libnvfm -{user}\)"):
                open_fabric(address, str(work_directory / "fm.so")).list_partitions()


def test_there_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(FabricError, match=r"load libnvfm: .*No such file") as error:
        open_fabric("127.0.0.1", str(tmp_path / "libnvfm.so.1"), str(tmp_path)).list_partitions()
    assert error.value.code == "OCIGPU-FAB-1"
