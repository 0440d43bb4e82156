"""Who has a GPU that is bound to VFIO: real processes with a node really open."""

import json
import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from support.driverless import GPUS, holding, make_driverless, running
from support.process import wait_for

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.gpus.tree import Roots
from ocigpu.gpus.vfio import holders
from ocigpu.gpus.vfio.holders import Holder, read_holders, scan_holders
from ocigpu.sim.create import create_host

FIRST, SECOND = GPUS[:2]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    return make_driverless(tmp_path_factory.mktemp("vfio") / "host", 2, iommufd=True)


@pytest.mark.parametrize("node", ["/dev/vfio/112", "/dev/vfio/devices/vfio0"])
def test_a_process_with_a_node_open_has_the_gpu(roots: Roots, node: str) -> None:
    assert read_holders(FIRST, roots) == ()
    with holding(roots.host + node) as pid:
        assert read_holders(FIRST, roots) == (Holder(pid, "sleep", node),)
        assert read_holders(SECOND, roots) == ()
    assert read_holders(FIRST, roots) == ()


def test_a_virtual_machine_whose_starter_has_ended_still_has_it(roots: Roots) -> None:
    script = 'exec 3<>"$1"; setsid sleep 600 >/dev/null & echo $!'
    made = subprocess.run(["sh", "-c", script, "sh", f"{roots.host}/dev/vfio/113"], stdout=subprocess.PIPE, check=True)
    pid = int(made.stdout)
    try:
        wait_for("the holder", lambda: [one.command for one in read_holders(SECOND, roots)] == ["sleep"])
        assert [one.pid for one in read_holders(SECOND, roots)] == [pid]
    finally:
        os.kill(pid, signal.SIGKILL)
    wait_for("its end", lambda: not read_holders(SECOND, roots))


def test_a_process_whose_first_thread_has_ended_still_has_it(roots: Roots) -> None:
    script = """
import ctypes, sys, threading
node = open(sys.argv[1], "rb")
def later():
    main = threading.main_thread()
    while open(f"/proc/self/task/{main.native_id}/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    print("ended", flush=True)
    threading.Event().wait()
threading.Thread(target=later).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    with running(script, f"{roots.host}/dev/vfio/112") as pid:
        assert [one.pid for one in read_holders(FIRST, roots)] == [pid]


@pytest.mark.root
def test_a_node_is_known_by_its_number_whatever_it_is_called(tmp_path: Path) -> None:
    roots = make_driverless(tmp_path / "host", 1)
    node = Path(f"{roots.host}/dev/vfio/112")
    number = os.stat("/dev/full").st_rdev  # a device that every machine has and that can be opened
    node.unlink()
    os.mknod(node, stat.S_IFCHR | 0o600, number)
    Path(f"{roots.sys}/class/vfio/112/dev").chmod(0o644)
    Path(f"{roots.sys}/class/vfio/112/dev").write_text(f"{os.major(number)}:{os.minor(number)}\n")
    with holding("/dev/full") as pid:
        assert Holder(pid, "sleep", "/dev/vfio/112") in read_holders(FIRST, roots)


@pytest.mark.root
def test_who_only_names_a_node_neither_has_its_gpu_nor_hides_that_he_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user can open a node as a path, and any container make one of its number: that must not quarantine GPUs."""
    roots = make_driverless(tmp_path / "host", 2)
    os.chmod(tmp_path, 0o755)
    for group, minor in (("112", 112), ("113", 113)):
        node = Path(f"{roots.host}/dev/vfio/{group}")
        node.unlink()
        os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(511, minor))
        Path(f"{roots.sys}/class/vfio/{group}/dev").chmod(0o644)
        Path(f"{roots.sys}/class/vfio/{group}/dev").write_text(f"511:{minor}\n")
    monkeypatch.setattr(holders, "DEVICE_FILE", "anon_inode:[eventfd]")
    script = """
import os, sys, threading
node = os.open(sys.argv[1], os.O_PATH)
os.setuid(65534)
device = os.eventfd(0) if sys.argv[2] else None
print("open", flush=True)
threading.Event().wait()
"""
    with running(script, f"{roots.host}/dev/vfio/112", "") as pid:
        assert pid not in [one.pid for one in read_holders(FIRST, roots)]
    with running(script, f"{roots.host}/dev/vfio/113", "device") as pid:
        assert pid in [one.pid for one in read_holders(FIRST, roots)]


def test_a_device_that_does_not_say_which_it_is_counts_unless_another_group_explains_it(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "DEVICE_FILE", "anon_inode:[eventfd]")
    script = 'import os, threading; fd = os.eventfd(0); print("open", flush=True); threading.Event().wait()'
    with running(script) as pid:
        assert Holder(pid, "python", "anon_inode:[eventfd]") in [
            one._replace(command="python") for one in read_holders(FIRST, roots)
        ]
        monkeypatch.setattr(holders, "device_of", lambda _name: SECOND)
        assert pid not in [one.pid for one in read_holders(FIRST, roots)]
        assert pid in [one.pid for one in read_holders(SECOND, roots)]


def test_what_cannot_be_looked_at_is_said_and_proves_nothing(roots: Roots, tmp_path: Path) -> None:
    real = roots._replace(stand_in=False)
    (tmp_path / "1/ns").mkdir(parents=True)
    (tmp_path / "1/fd").mkdir()
    (tmp_path / "1/task").mkdir()
    (tmp_path / "1/ns/pid").symlink_to(holders.INITIAL_PID_NAMESPACE)
    assert read_holders(FIRST, real, str(tmp_path)) == ()
    (tmp_path / "4242").mkdir()
    (tmp_path / "4242/fd").write_text("")
    assert scan_holders(FIRST, real, str(tmp_path)).unreadable == ("process 4242: Not a directory",)
    with pytest.raises(HostError, match="some processes could not be inspected: process 4242") as raised:
        read_holders(FIRST, real, str(tmp_path))
    assert raised.value.code == "OCIGPU-VFIO-1"
    (tmp_path / "1/ns/pid").unlink()
    (tmp_path / "1/ns/pid").symlink_to("pid:[4026532000]")
    assert "hostPID" in scan_holders(FIRST, real, str(tmp_path)).unreadable[0]


@pytest.mark.parametrize("bdf", ["0000:7f:00.0", "..", "../0000:01:00.0"])
def test_an_address_that_no_function_has_is_an_error(roots: Roots, bdf: str) -> None:
    with pytest.raises(HostError, match="no such function"):
        read_holders(bdf, roots)


def test_the_command_says_who_has_which_and_its_status_tells(roots: Roots, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", f"{roots.host}/config.toml"]
    assert main(["vfio", "holders", *config]) == 0
    assert "nobody" in capsys.readouterr().out
    with holding(f"{roots.host}/dev/vfio/112") as pid:
        assert main(["vfio", "holders", "01:00.0", "--json", *config]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["gpus"] == [{"bdf": FIRST, "holders": [{"pid": pid, "command": "sleep", "path": "/dev/vfio/112"}]}]
    assert main(["vfio", "holders", "0000:c2:00.0", *config]) == 2
    assert 'no GPU "0000:c2:00.0"' in capsys.readouterr().err


@pytest.mark.parametrize("words", [["holders"], ["identify", "--record"]], ids=" ".join)
def test_a_machine_without_a_gpu_is_an_error_and_no_empty_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    create_host(str(tmp_path / "host"), 1, "h100", driver="none", nodes=False)
    for device in (tmp_path / "host/sys/bus/pci/devices").iterdir():
        device.unlink()
    table = ["--table", str(tmp_path / "table")] if "--record" in words else []
    assert main(["vfio", *words, *table, "--config", f"{tmp_path}/host/config.toml"]) == 1
    assert "OCIGPU-VFIO-1: no NVIDIA GPU is on the PCI bus" in capsys.readouterr().err
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("name", ["00000000:02:00.0", "0000:02:00.0", "02:00.0", "0000:02:00"])
def test_a_gpu_is_named_as_any_command_or_the_driver_writes_it(
    roots: Roots, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["vfio", "holders", name, "--json", "--config", f"{roots.host}/config.toml"]) == 0
    assert [gpu["bdf"] for gpu in json.loads(capsys.readouterr().out)["gpus"]] == [SECOND]
