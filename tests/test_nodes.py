"""The host's device nodes and their links: what is planned from what the kernel says, and what is made of it."""

import os
import shutil
import stat
from pathlib import Path

import pytest
from support import requirements

from ocigpu.core.errors import HostError
from ocigpu.core.facts import Permissions
from ocigpu.gpus.nvidia.kmods import load_modules, missing_modules
from ocigpu.gpus.nvidia.nodes import (
    Driver,
    HostNode,
    apply_changes,
    find_changes,
    find_link_changes,
    keep_links,
    plan_nodes,
    read_driver,
)
from ocigpu.gpus.nvidia.procfs import CapabilityNode, ProcGpu
from ocigpu.gpus.tree import Roots

MAJORS = (("nvidia", 195), ("nvidia-uvm", 507), ("nvidia-caps", 236))
GPU = ProcGpu("0000:01:00.0", "00000000:01:00.0", 3)


def planned(driver: Driver, **options: object) -> dict[str, HostNode]:
    return {node.path: node for node in plan_nodes(driver, **options)[0]}


def test_numbers_are_the_kernels_and_permissions_the_drivers() -> None:
    driver = Driver(MAJORS, Permissions(0o660, 10, 44), modeset=True, gpus=(GPU,))
    assert planned(driver) == {
        "/dev/nvidiactl": HostNode("/dev/nvidiactl", 195, 255, 0o660, 10, 44),
        "/dev/nvidia-uvm": HostNode("/dev/nvidia-uvm", 507, 0),
        "/dev/nvidia-uvm-tools": HostNode("/dev/nvidia-uvm-tools", 507, 1),
        "/dev/nvidia-modeset": HostNode("/dev/nvidia-modeset", 195, 254, 0o660, 10, 44),
        "/dev/nvidia3": HostNode("/dev/nvidia3", 195, 3, 0o660, 10, 44),
    }


def test_capabilities_have_their_own_permissions() -> None:
    capabilities = (
        CapabilityNode("mig/config", 1, 0o400, True),
        CapabilityNode("gpu0/mig/gi1/access", 12, 0o444, False),
    )
    nodes = planned(Driver(MAJORS, Permissions(0o660, 10, 44), capabilities=capabilities))
    assert nodes["/dev/nvidia-caps/nvidia-cap1"] == HostNode("/dev/nvidia-caps/nvidia-cap1", 236, 1, 0o400)
    assert nodes["/dev/nvidia-caps/nvidia-cap12"].modify is False


def test_only_control_devices_when_only_they_are_asked_for() -> None:
    driver = Driver(MAJORS, gpus=(GPU,), capabilities=(CapabilityNode("mig/config", 1, 0o400, True),))
    assert list(planned(driver, control_only=True)) == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]


@pytest.mark.parametrize(
    ("driver", "note"),
    [
        (Driver((("nvidia", 195),)), "the kernel module nvidia-uvm is not loaded: CUDA needs its nodes"),
        (Driver(MAJORS), "the kernel module nvidia-modeset is not loaded: only displays need its node"),
        (Driver(MAJORS, gpus=(GPU._replace(minor=-1),)), "GPU 0000:01:00.0 has no usable Device Minor: no node"),
        (Driver(MAJORS, gpus=(GPU._replace(minor=254),)), "GPU 0000:01:00.0 has no usable Device Minor: no node"),
        (
            Driver(MAJORS, gpus=(GPU._replace(excluded=True),)),
            "GPU 0000:01:00.0 is excluded by the driver's configuration: no node",
        ),
    ],
    ids=["no-uvm", "no-modeset", "no-minor", "minor-of-modeset", "excluded"],
)
def test_what_has_no_node_is_told(driver: Driver, note: str) -> None:
    nodes, notes = plan_nodes(driver)
    assert note in notes
    assert len({node.minor for node in nodes if node.major == 195}) == len([n for n in nodes if n.major == 195])


def test_imex_channels_are_made_where_the_driver_has_them() -> None:
    driver = Driver((*MAJORS, ("nvidia-caps-imex-channels", 505)))
    assert planned(driver, imex_channels=(7,))["/dev/nvidia-caps-imex-channels/channel7"].major == 505
    assert plan_nodes(Driver(MAJORS), (7,))[1][-1] == (
        "the driver has no nvidia-caps-imex-channels: no node for IMEX channels"
    )


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """A host that is not simulated, below a directory: procfs and sysfs are files."""
    driver = tmp_path / "proc/driver/nvidia"
    (driver / "gpus/0000:01:00.0").mkdir(parents=True)
    (driver / "gpus/0000:01:00.0/information").write_text("Bus Location: 0000:01:00.0\nDevice Minor: 3\n")
    (driver / "params").write_text("ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 44\nDeviceFileMode: 432\n")
    (driver / "capabilities/mig").mkdir(parents=True)
    (driver / "capabilities/mig/config").write_text("DeviceFileMode: 256\nDeviceFileModify: 1\n")
    (tmp_path / "proc/driver/nvidia-caps").mkdir()
    (tmp_path / "proc/driver/nvidia-caps/mig-minors").write_text("config 1\nmonitor 2\n")
    (tmp_path / "proc/devices").write_text(
        "Character devices:\n195 nvidia-frontend\n507 nvidia-uvm\n236 nvidia-caps\n\nBlock devices:\n  8 sd\n"
    )
    (tmp_path / "dev").mkdir()
    return Roots(str(tmp_path), str(tmp_path), str(tmp_path / "proc"), str(tmp_path / "sys"), stand_in=False)


def test_the_driver_is_read_from_procfs(roots: Roots) -> None:
    driver = read_driver(roots)
    assert driver.permissions == Permissions(0o660, 0, 44)
    assert [gpu.minor for gpu in driver.gpus] == [3]
    assert driver.capabilities == (CapabilityNode("mig/config", 1, 0o400, True),), "its minor is that of mig-minors"
    assert (driver.modify, driver.modeset) == (True, False)
    initstate = Path(roots.sys) / "module/nvidia_modeset/initstate"
    initstate.parent.mkdir(parents=True)
    initstate.write_text("live\n")
    assert read_driver(roots).modeset, "older drivers do not show it in /proc/devices"


def test_without_a_driver_nothing_is_guessed(roots: Roots) -> None:
    Path(roots.proc, "devices").write_text("Character devices:\n507 nvidia-uvm\n")
    with pytest.raises(HostError, match="it is not loaded") as caught:
        read_driver(roots)
    assert caught.value.code == "OCIGPU-HOST-1"


@pytest.fixture
def make(roots: Roots) -> Roots:
    requirements.require(requirements.root())
    return roots


def apply_all(roots: Roots) -> list[str]:
    """Do what there is to do; returns what was done, but for what was kept."""
    driver = read_driver(roots)
    nodes, _ = plan_nodes(driver)
    changes = find_changes(nodes, roots)
    apply_changes(changes)
    links = find_link_changes(nodes, driver, roots, f"{roots.dev}/dev/char")
    apply_changes(links)
    return [f"{c.what} {c.path.removeprefix(roots.dev)}" for c in (*changes, *links) if c.what != "keep"]


def number(roots: Roots, name: str) -> tuple[int, int, int, int]:
    status = os.lstat(f"{roots.dev}/dev/{name}")
    assert stat.S_ISCHR(status.st_mode)
    return os.major(status.st_rdev), os.minor(status.st_rdev), stat.S_IMODE(status.st_mode), status.st_gid


def test_nodes_and_links_are_made_once(make: Roots) -> None:
    old = os.umask(0o077)
    try:
        assert len(apply_all(make)) == 10
    finally:
        os.umask(old)
    assert number(make, "nvidiactl") == (195, 255, 0o660, 44)
    assert number(make, "nvidia3") == (195, 3, 0o660, 44)
    assert number(make, "nvidia-uvm-tools") == (507, 1, 0o666, 0)
    assert number(make, "nvidia-caps/nvidia-cap1") == (236, 1, 0o400, 0)
    assert os.readlink(f"{make.dev}/dev/char/236:1") == "../nvidia-caps/nvidia-cap1"
    assert stat.S_IMODE(os.stat(f"{make.dev}/dev/nvidia-caps").st_mode) == 0o755
    os.unlink(f"{make.dev}/dev/char/195:3")
    os.symlink(f"{make.dev}/dev/nvidia3", f"{make.dev}/dev/char/195:3")  # as NVIDIA's tool makes them
    assert apply_all(make) == []
    assert not [name for name in os.listdir(f"{make.dev}/dev") if name.startswith(".ocigpu")]


def test_what_is_wrong_is_put_right(make: Roots) -> None:
    apply_all(make)
    dev = Path(make.dev, "dev")
    os.chmod(dev / "nvidiactl", 0o600)
    for name in ("nvidia-uvm", "nvidia3", "char/195:3", "char/507:0"):
        os.unlink(dev / name)
    os.mknod(dev / "nvidia-uvm", stat.S_IFCHR | 0o666, os.makedev(511, 0))  # of the driver before
    (dev / "nvidia3").write_text("")  # what an engine makes of a missing node
    (dev / "char/507:0").symlink_to("../null")
    (dev / "char/511:0").symlink_to("../nvidia-uvm")
    (dev / "char/511:9").symlink_to("../something-else")
    assert apply_all(make) == [
        "correct /dev/nvidiactl",
        "replace /dev/nvidia-uvm",
        "replace /dev/nvidia3",
        "replace /dev/char/507:0",
        "make /dev/char/195:3",
        "remove /dev/char/511:0",
    ]
    assert number(make, "nvidia-uvm") == (507, 0, 0o666, 0)
    assert number(make, "nvidia3") == (195, 3, 0o660, 44)
    assert number(make, "nvidiactl")[2] == 0o660
    assert os.readlink(dev / "char/507:0") == "../nvidia-uvm"
    assert os.path.lexists(dev / "char/511:9"), "a link that is not about our nodes"


def test_a_node_of_the_driver_that_nobody_planned_has_a_link_too(make: Roots) -> None:
    apply_all(make)
    dev = Path(make.dev, "dev")
    os.mknod(dev / "nvidia9", stat.S_IFCHR | 0o666, os.makedev(195, 9))
    os.mknod(dev / "nvidia-old", stat.S_IFCHR | 0o666, os.makedev(400, 1))  # not of a loaded driver
    os.mknod(dev / "nvidia-twin", stat.S_IFCHR | 0o666, os.makedev(195, 3))
    assert apply_all(make) == ["make /dev/char/195:9"]
    assert os.readlink(dev / "char/195:3") == "../nvidia3"


def test_nodes_are_left_alone_where_the_driver_says_so(make: Roots) -> None:
    apply_all(make)
    os.unlink(f"{make.dev}/dev/nvidia3")
    os.chmod(f"{make.dev}/dev/nvidiactl", 0o600)
    params = Path(make.proc, "driver/nvidia/params")
    params.write_text(params.read_text().replace("ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0"))
    assert apply_all(make) == ["leave /dev/nvidiactl", "leave /dev/nvidia3"]
    assert number(make, "nvidiactl")[2] == 0o600


def test_a_node_that_a_link_leads_to_is_as_good(make: Roots) -> None:
    apply_all(make)
    dev = Path(make.dev, "dev")
    os.rename(dev / "nvidia3", dev / "elsewhere")
    (dev / "nvidia3").symlink_to("/dev/elsewhere")  # within the driver root
    assert apply_all(make) == []
    os.unlink(dev / "elsewhere")
    assert apply_all(make) == ["replace /dev/nvidia3"]


def test_what_cannot_be_replaced_is_an_error_with_its_path(make: Roots) -> None:
    os.makedirs(f"{make.dev}/dev/nvidiactl/kept")
    with pytest.raises(HostError, match=r"replace .*/dev/nvidiactl: Directory not empty") as caught:
        apply_all(make)
    assert caught.value.code == "OCIGPU-DEV-5"
    assert os.listdir(f"{make.dev}/dev") == ["nvidiactl"], "nothing half made is left"
    os.rmdir(f"{make.dev}/dev/nvidiactl/kept")  # dockerd makes an empty one for "-v /dev/nvidiactl"
    apply_all(make)
    assert stat.S_ISCHR(os.lstat(f"{make.dev}/dev/nvidiactl").st_mode)


def test_links_are_kept_as_devices_come_and_go(make: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roots, "host", str(tmp_path / "host"))  # this machine's /dev/char stays as it is
    roots = make
    assert keep_links(roots) == ""
    link = tmp_path / "host/dev/char/195:255"
    assert os.readlink(link) == f"{roots.dev}/dev/nvidiactl"
    link.unlink()
    assert keep_links(roots) == ""
    assert link.is_symlink()
    shutil.rmtree(link.parent)
    link.parent.write_text("")
    assert "dev/char" in keep_links(roots)
    assert keep_links(roots._replace(stand_in=True)) == ""
    shutil.rmtree(f"{roots.proc}")
    assert keep_links(roots) == "", "without a driver there is nothing to say"


def test_links_of_a_driver_root_lead_there(roots: Roots, tmp_path: Path) -> None:
    driver = read_driver(roots)
    nodes, _ = plan_nodes(driver, control_only=True)
    changes = find_link_changes(nodes, driver, roots, str(tmp_path / "char"))
    assert changes[0].target == f"{roots.dev}/dev/nvidiactl"


def add_gpu(roots: Roots) -> None:
    device = Path(roots.sys, "bus/pci/devices/0000:01:00.0")
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")


MODPROBE = """\
#!/bin/sh
echo "$# $1 $PATH" >> /log
case $1 in {refused}) echo "modprobe: ERROR: no $1" >&2; exit 1;; esac
name=$(echo "$1" | tr - _)
mkdir -p "/sys/module/$name" && echo live > "/sys/module/$name/initstate"
"""


def make_modprobe(roots: Roots, refused: str) -> None:
    """Put a shell and a modprobe into the driver root, which is entered by chroot."""
    requirements.require(requirements.programs("busybox"))
    directory = Path(roots.driver, "sbin")
    directory.mkdir()
    Path(roots.driver, "bin").mkdir()
    for name in ("bin/sh", "sbin/tr", "sbin/mkdir"):
        shutil.copy(str(requirements.find_program("busybox")), f"{roots.driver}/{name}")
    (directory / "modprobe").write_text(MODPROBE.format(refused=refused))
    (directory / "modprobe").chmod(0o755)


def test_modules_are_loaded_by_the_driver_roots_modprobe(make: Roots) -> None:
    add_gpu(make)
    make_modprobe(make, "nothing")
    assert missing_modules(make) == ["nvidia", "nvidia-uvm", "nvidia-modeset"]
    assert load_modules(make, "/sbin/modprobe") == (["nvidia", "nvidia-uvm", "nvidia-modeset"], [])
    assert Path(make.driver, "log").read_text().splitlines()[1] == "1 nvidia-uvm /sbin"
    assert load_modules(make, "/nothing") == ([], []), "what is loaded is not loaded again"


def test_a_host_can_do_without_modeset_and_not_without_uvm(make: Roots) -> None:
    add_gpu(make)
    make_modprobe(make, "nvidia-modeset")
    loaded, notes = load_modules(make, "/sbin/modprobe")
    assert loaded == ["nvidia", "nvidia-uvm"]
    assert notes == ["nvidia-modeset could not be loaded (modprobe: ERROR: no nvidia-modeset): only displays need it"]
    os.unlink(f"{make.sys}/module/nvidia_uvm/initstate")
    Path(make.driver, "sbin/modprobe").write_text(MODPROBE.format(refused="nvidia-uvm"))
    with pytest.raises(HostError, match="modprobe nvidia-uvm: modprobe: ERROR: no nvidia-uvm") as caught:
        load_modules(make, "/sbin/modprobe")
    assert caught.value.code == "OCIGPU-HOST-4"
    with pytest.raises(HostError, match="No such file or directory"):
        load_modules(make, "/sbin/nothing")


def test_without_a_gpu_no_module_is_loaded(roots: Roots) -> None:
    with pytest.raises(HostError, match="no NVIDIA GPU") as caught:
        load_modules(roots)
    assert caught.value.code == "OCIGPU-HOST-1"
    assert load_modules(roots._replace(stand_in=True)) == ([], [])
