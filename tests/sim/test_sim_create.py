import json
import os
import socket
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from support.process import run
from support.product import PublicCopy

from ocigpu.core.errors import OcigpuError
from ocigpu.sim import libraries
from ocigpu.sim.create import create_host, render_config
from ocigpu.sim.libraries import LIBRARIES, library_triplet
from ocigpu.sim.made import describe_host
from ocigpu.system.settings_file import read_settings

VERSION = "550.163.01"
AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs")
CREATE = "import sys; from ocigpu.sim.create import create_host; create_host(sys.argv[1], 2, nodes={nodes})"


def read_dynamic(path: Path) -> tuple[int, str, list[str]]:
    """Return ELF class, SONAME and needed libraries."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        section = next(part for part in elf.iter_sections() if isinstance(part, DynamicSection))
        tags = list(section.iter_tags())
        soname = next(tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME")
        return elf.elfclass, soname, [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]


def everything_below(root: Path) -> list[Path]:
    return [Path(top) / name for top, directories, files in os.walk(root) for name in directories + files]


def libraries_of(host: Path, triplet: str) -> list[Path]:
    return [path for path in everything_below(host / "usr/lib" / triplet) if path.is_file() and not path.is_symlink()]


def test_settings_of_the_host_point_at_it_and_say_that_it_is_simulated(sim_host: Path) -> None:
    assert read_settings(str(sim_host / "config.toml")).simulation_root == str(sim_host)
    assert "SIMULATED" in (sim_host / "config.toml").read_text()


def test_every_library_is_an_elf_object_with_the_drivers_soname(sim_host: Path) -> None:
    sonames = {}
    for path in libraries_of(sim_host, library_triplet()):
        bits, soname, needed = read_dynamic(path)
        assert bits == 64
        assert needed == ["libc.so.6"]
        assert soname == path.name or (path.parent / soname).readlink() == Path(path.name)
        sonames[path.name] = soname
    assert len(sonames) == len(LIBRARIES)
    assert sonames[f"libcuda.so.{VERSION}"] == "libcuda.so.1"
    assert sonames[f"libnvidia-nvvm.so.{VERSION}"] == "libnvidia-nvvm.so.4"
    assert sonames[f"libGLX_nvidia.so.{VERSION}"] == "libGLX_nvidia.so.0"
    assert sonames[f"libnvidia-eglcore.so.{VERSION}"] == f"libnvidia-eglcore.so.{VERSION}"
    assert sonames["libnvidia-egl-gbm.so.1.1.1"] == "libnvidia-egl-gbm.so.1"


def test_libraries_do_not_depend_on_the_libc_version_of_this_machine(sim_host: Path) -> None:
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        with (sim_host / "usr/lib" / library_triplet() / name).open("rb") as file:
            assert ELFFile(file).get_section_by_name(".gnu.version_r") is None


def test_developer_links_are_there(sim_host: Path) -> None:
    directory = sim_host / "usr/lib" / library_triplet()
    assert (directory / "libcuda.so").readlink() == Path("libcuda.so.1")
    assert (directory / "libnvidia-ml.so").readlink() == Path("libnvidia-ml.so.1")
    assert (directory / "libGLX_indirect.so.0").readlink() == Path(f"libGLX_nvidia.so.{VERSION}")
    assert (directory / "gbm/nvidia-drm_gbm.so").resolve() == directory / f"libnvidia-allocator.so.{VERSION}"


def test_tls_library_has_the_drivers_abi_note(sim_host: Path) -> None:
    with (sim_host / "usr/lib" / library_triplet() / f"libnvidia-tls.so.{VERSION}").open("rb") as file:
        (note,) = ELFFile(file).get_section_by_name(".note.ABI-tag").iter_notes()
    assert (note["n_name"], note["n_type"], note["n_desc"]["abi_os"]) == ("GNU", "NT_GNU_ABI_TAG", "ELF_NOTE_OS_LINUX")
    assert [note["n_desc"][f"abi_{part}"] for part in ("major", "minor", "tiny")] == [2, 3, 99]


def test_32_bit_libraries_are_there_or_the_host_says_why_not(sim_host: Path) -> None:
    host = describe_host(str(sim_host))
    libraries = libraries_of(sim_host, "i386-linux-gnu")
    assert len(libraries) == host["libraries_32"]
    assert libraries or any("32-bit" in note for note in host["notes"])
    for path in libraries:
        bits, soname, _ = read_dynamic(path)
        assert bits == 32
        assert soname == path.name or (path.parent / soname).exists()


def test_loader_cache_has_the_libraries_without_the_hosts_prefix(sim_host: Path) -> None:
    cache = (sim_host / "etc/ld.so.cache").read_bytes()
    assert f"\0/usr/lib/{library_triplet()}/libcuda.so.1\0".encode() in cache
    assert bytes(sim_host) not in cache
    assert not (sim_host / "var/cache").exists()


@pytest.mark.root
def test_nodes_have_the_drivers_numbers_and_modes(sim_host: Path) -> None:
    majors = describe_host(str(sim_host))["majors"]
    caps, uvm = majors["nvidia-caps"], majors["nvidia-uvm"]
    expected = {
        "nvidia0": (195, 0, 0o666),
        "nvidia3": (195, 3, 0o666),
        "nvidiactl": (195, 255, 0o666),
        "nvidia-modeset": (195, 254, 0o666),
        "nvidia-uvm": (uvm, 0, 0o666),
        "nvidia-uvm-tools": (uvm, 1, 0o666),
        "nvidia-caps/nvidia-cap1": (caps, 1, 0o400),
        "nvidia-caps/nvidia-cap2": (caps, 2, 0o444),
        "nvidia-caps/nvidia-cap66": (caps, 66, 0o444),
        "nvidia-caps-imex-channels/channel3": (majors["nvidia-caps-imex-channels"], 3, 0o666),
        "nvidia-nvswitchctl": (majors["nvidia-nvswitch"], 255, 0o666),
    }
    for name, numbers in expected.items():
        status = (sim_host / "dev" / name).lstat()
        assert stat.S_ISCHR(status.st_mode)
        assert (os.major(status.st_rdev), os.minor(status.st_rdev), stat.S_IMODE(status.st_mode)) == numbers
    assert not (sim_host / "dev/nvidia4").exists()
    text = (sim_host / "proc/devices").read_text()
    assert f"{uvm} nvidia-uvm\n" in text
    assert f"{caps} nvidia-caps\n" in text


@pytest.mark.root
def test_drm_nodes_belong_to_the_gpus_of_sysfs(sim_host: Path) -> None:
    for number in range(4):
        device = sim_host / f"sys/bus/pci/devices/0000:0{number + 1}:00.0"
        names = sorted(os.listdir(device / "drm"))
        for name, suffix in zip(names, ("card", "render"), strict=True):
            node = sim_host / "dev/dri" / name
            status = node.lstat()
            major_minor = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            assert (device / "drm" / name / "dev").read_text() == major_minor + "\n"
            assert (sim_host / f"dev/dri/by-path/pci-{device.name}-{suffix}").resolve() == node
            assert (sim_host / "sys/class/drm" / name).resolve() == device / "drm" / name


def test_pci_functions_are_gpus_of_the_nvidia_driver(sim_host: Path) -> None:
    device = sim_host / "sys/bus/pci/devices/0000:03:00.0"
    read = {name: (device / name).read_text().strip() for name in ("vendor", "device", "class", "numa_node")}
    assert read == {"vendor": "0x10de", "device": "0x2330", "class": "0x030200", "numa_node": "1"}
    assert (device / "driver").resolve() == sim_host / "sys/bus/pci/drivers/nvidia"
    config = (device / "config").read_bytes()
    assert (config[:4], config[10:12], len(config)) == (b"\xde\x10\x30\x23", b"\x02\x03", 256)
    assert (sim_host / "sys/module/nvidia/initstate").read_text() == "live\n"


def test_driver_files_of_procfs_are_what_the_driver_writes(sim_host: Path) -> None:
    nvidia = sim_host / "proc/driver/nvidia"
    assert (nvidia / "params").read_text().splitlines()[2:6] == [
        "ModifyDeviceFiles: 1",
        "DeviceFileUID: 0",
        "DeviceFileGID: 0",
        "DeviceFileMode: 438",
    ]
    assert f"Kernel Module  {VERSION}  " in (nvidia / "version").read_text()
    information = (nvidia / "gpus/0000:02:00.0/information").read_text()
    assert "GPU UUID: \t GPU-3e7bae99-a144-0b13-42c2-7e10b519f4e0\n" in information
    assert "Device Minor: \t 1\n" in information
    assert "Bus Location: \t 0000:02:00.0\n" in information


def test_capability_files_agree_with_mig_minors(sim_host: Path) -> None:
    capabilities = sim_host / "proc/driver/nvidia/capabilities"
    minors = dict(
        line.split(" ") for line in (sim_host / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    )
    files = {str(path.relative_to(capabilities)) for path in capabilities.rglob("*") if path.is_file()}
    instances = {f"gpu0/mig/gi{gi}{ci}/access" for gi in (7, 8, 1) for ci in ("", "/ci0")}
    assert files == {"mig/config", "mig/monitor", "fabric-imex-mgmt", *instances}
    for name in instances:
        lines = (capabilities / name).read_text().splitlines()
        assert lines == [f"DeviceFileMinor: {minors[name.replace('/mig/', '/')]}", *lines[1:]]
        assert lines[1:] == ["DeviceFileMode: 292", "DeviceFileModify: 1"]
    assert (capabilities / "mig/config").read_text() == "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n"


def test_sockets_refuse_connections_as_those_of_a_stopped_daemon(sim_host: Path) -> None:
    assert (sim_host / "var/run").resolve() == sim_host / "run"
    for name in ("nvidia-persistenced", "nvidia-fabricmanager"):
        path = sim_host / "run" / name / "socket"
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(path))


def test_firmware_and_settings_files_are_there(sim_host: Path) -> None:
    for name in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
        assert (sim_host / "lib/firmware/nvidia" / VERSION / name).stat().st_size == 8192
    for path in everything_below(sim_host):
        if path.suffix == ".json":
            json.loads(path.read_text())
    assert (sim_host / "etc/OpenCL/vendors/nvidia.icd").read_text() == "libnvidia-opencl.so.1\n"
    assert (sim_host / "usr/share/nvidia/nvoptix.bin").is_file()


@pytest.mark.parametrize("count", [1, 64])
def test_host_of_one_and_of_many_gpus(tmp_path: Path, count: int) -> None:
    lines: list[str] = []
    config = create_host(str(tmp_path / "host"), count, "t4", compat32=False, progress=lines.append)
    assert config == str(tmp_path / "host/config.toml")
    assert len(lines) == 3
    assert len([name for name in os.listdir(tmp_path / "host/dev") if name[6:].isdigit()]) == count
    assert len(os.listdir(tmp_path / "host/sys/bus/pci/devices")) == count
    listing = subprocess.run([tmp_path / "host/usr/bin/nvidia-smi", "-L"], capture_output=True, text=True)
    assert len(listing.stdout.splitlines()) == count
    assert listing.stdout.splitlines()[-1].startswith(f"GPU {count - 1}: Tesla T4 (UUID: GPU-")


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    host = tmp_path / "host"
    create_host(
        str(host), 1, "b200", driver_version="580.65.06", dri=False, nodes=False, sockets=False, compat32=False,
        ldcache=False,
    )  # fmt: skip
    assert not (host / "dev/dri").exists()
    assert not (host / "sys/class").exists()
    assert not (host / "etc/ld.so.cache").exists()
    assert not (host / "usr/lib/i386-linux-gnu").exists()
    assert not [path for path in everything_below(host) if path.is_socket()]
    assert (host / "dev/nvidia0").is_file()
    description = describe_host(str(host))
    assert (description["driver_version"], description["cuda_version"]) == ("580.65.06", "13.0")
    assert (description["nodes"], len(description["notes"])) == ("stand-in", 1)
    assert (host / "usr/lib" / library_triplet() / "libnvidia-nscq.so.580.65.06").is_file()


def test_every_user_may_read_all_of_it_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        create_host(str(tmp_path / "host"), 1, "h100", ["0:7g.80gb"])
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(old)
    private = {tmp_path / "host/dev/nvidia-caps/nvidia-cap1"}
    for path in {tmp_path / "host", *everything_below(tmp_path / "host")} - private:
        mode = path.lstat().st_mode
        needed = 0o005 if stat.S_ISDIR(mode) else 0o004
        assert stat.S_ISLNK(mode) or mode & needed == needed, path


@pytest.mark.rest
@pytest.mark.root
def test_ordinary_user_makes_a_host_with_stand_in_files(session_directory: Path, public_copy: PublicCopy) -> None:
    as_nobody = [*AS_NOBODY, "env", f"PYTHONPATH={public_copy.library}", public_copy.python]
    parent = session_directory / "ordinary"
    parent.mkdir()
    os.chown(parent, 65534, 65534)
    done = subprocess.run(
        [*as_nobody, "-B", "-c", CREATE.format(nodes=None), parent / "host"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert describe_host(str(parent / "host"))["nodes"] == "stand-in"
    assert (parent / "host").stat().st_uid == 65534
    assert (parent / "host/etc/ld.so.cache").read_bytes().count(b"libcuda.so.1") >= 1
    listing = subprocess.run([parent / "host/usr/bin/nvidia-smi", "-L"], capture_output=True, text=True)
    assert (listing.returncode, len(listing.stdout.splitlines())) == (0, 2)
    refused = subprocess.run(
        [*as_nobody, "-B", "-c", CREATE.format(nodes=True), parent / "other"],
        capture_output=True,
        text=True,
    )
    assert "Operation not permitted" in refused.stderr
    assert os.listdir(parent) == ["host"]


@pytest.mark.rest
@pytest.mark.root
def test_an_ordinary_user_can_have_every_fault_of_the_driver(session_directory: Path, public_copy: PublicCopy) -> None:
    """What the kernel shows is read-only, also for who has made it."""
    host = session_directory / "ordinary faults/host"
    host.parent.mkdir()
    os.chown(host.parent, 65534, 65534)
    script = (
        "import sys; from ocigpu.sim.create import create_host;"
        "create_host(sys.argv[1], 2, compat32=False, faults=['two-drivers', 'no-uvm-module', 'nouveau'])"
    )
    run([*AS_NOBODY, "env", f"PYTHONPATH={public_copy.library}", public_copy.python, "-B", "-c", script, host])
    assert list(host.glob("usr/lib/*/libcuda.so.570.86.10"))
    assert "nvidia" not in (host / "proc/devices").read_text()
    drivers = [device.joinpath("driver").readlink().name for device in host.glob("sys/bus/pci/devices/*")]
    assert drivers == ["nouveau", "nouveau"]


def refused(directory: Path | str, **more: object) -> OcigpuError:
    with pytest.raises(OcigpuError) as caught:
        create_host(str(directory), 1, **more)
    assert caught.value.code == "OCIGPU-SIM-1"
    return caught.value


def test_directories_that_hold_something_are_refused(tmp_path: Path, sim_host: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "not empty, and not a simulated host" in refused(tmp_path).message
    assert "exists and is not a directory" in refused(tmp_path / "file").message
    assert "a symbolic link" in refused(tmp_path / "link").message
    assert "no directory" in refused(tmp_path / "none/host").message
    assert "not a usable name" in refused("").message
    assert "not a usable name" in refused("a\nb").message
    error = refused(sim_host)
    assert error.message.endswith("already a simulated host")
    assert error.hint == f"remove it first: ocigpu sim remove {sim_host}"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


@pytest.mark.parametrize("version", ["550", "550.x", "../../etc", "550.163.01\n", "1.2.3.4"])
def test_odd_driver_version_is_refused(tmp_path: Path, version: str) -> None:
    assert "driver version" in refused(tmp_path / "host", driver_version=version).message
    assert not os.listdir(tmp_path)


def test_missing_compiler_is_named_with_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    error = refused(tmp_path / "host")
    assert "no C compiler" in error.message
    assert error.hint == "apt-get install gcc libc6-dev"
    assert not os.listdir(tmp_path)


def test_failing_compiler_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin/gcc"
    compiler.write_text("#!/bin/sh\necho 'a.c:1: fatal error: stdio.h: No such file or directory' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    error = refused(tmp_path / "host")
    assert error.message.endswith("fatal error: stdio.h: No such file or directory")
    assert os.listdir(tmp_path) == ["bin"]


@pytest.mark.root
def test_a_full_disk_is_not_taken_for_a_missing_compiler(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=300k tmpfs {small} && "$@"; status=$?; ls {small}; exit $status'
    words = [sys.executable, "-m", "ocigpu.cli", "sim", "create", small / "host", "--gpus", "1"]
    done = run(["unshare", "--mount", "sh", "-c", script, "sh", *words], check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "No space left on device" in done.stderr
    assert done.stderr.splitlines()[-1] == "hint: Make room, or name a directory on another disk: df -h"


@pytest.mark.rest
@pytest.mark.parametrize("model", ["h100", pytest.param("orin", marks=pytest.mark.rest)])
def test_prebuilt_libraries_make_a_whole_host_without_a_compiler(
    tmp_path: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    compiled, placed = tmp_path / "compiled", tmp_path / "placed"
    create_host(str(compiled), 1, model, compat32=False)
    monkeypatch.setattr(libraries, "PREBUILT", prebuilt)
    monkeypatch.setattr(libraries, "find_compiler", lambda: None)
    create_host(str(placed), 1, model)

    def shown(host: Path) -> dict[str, object]:
        found = {path.relative_to(host): path for path in everything_below(host / "usr")}
        return {
            str(name): path.readlink() if path.is_symlink() else read_dynamic(path) if ".so" in path.name else ""
            for name, path in found.items()
        }

    assert shown(placed) == shown(compiled)
    cache = "etc/ld.so.cache"
    assert (placed / cache).read_bytes() == (compiled / cache).read_bytes()
    notes = describe_host(str(placed))["notes"]
    assert notes == describe_host(str(compiled))["notes"] + ["no 32-bit libraries: no C compiler"] * (model == "h100")
    assert run([placed / "usr/bin/nvidia-smi", "-L"]).stdout == run([compiled / "usr/bin/nvidia-smi", "-L"]).stdout


def test_machine_without_32_bit_or_static_linking_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin/gcc"
    compiler.write_text(
        '#!/bin/sh\ncase " $* " in *" -m32 "*|*" -static "*) echo "error: cannot do $1" >&2; exit 1;; esac\n'
        'exec /usr/bin/gcc "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    create_host(str(tmp_path / "host"), 1, "t4")
    description = describe_host(str(tmp_path / "host"))
    assert description["libraries_32"] == 0
    assert len([note for note in description["notes"] if "32-bit" in note or "dynamically" in note]) == 2


def test_empty_directory_is_used(tmp_path: Path) -> None:
    create_host(str(tmp_path), 1, "t4", compat32=False)
    assert (tmp_path / "config.toml").is_file()


@pytest.mark.parametrize("directory", ["/tmp/host", '/tmp/a "b" \\ c', "/tmp/\x7f", "/tmp/\n", "/tmp/gpü"])
def test_settings_are_toml_whatever_the_directory_is_called(directory: str) -> None:
    assert tomllib.loads(render_config(directory)) == {"simulation": {"root": directory}}
