"""Drivers in directories of their own are found by themselves, if nobody but root can have put them there."""

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from handmade_host import VERSION, HostTree, elf_bytes
from support import layouts
from support.layouts import LAYOUTS, LISTED, MACHINE, LaidOut, find_layout
from support.product import PROGRAMS, SimulatedHost
from support.products import one_in

from ocigpu.cli.front.main import main
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.doctor.driver import check_libraries
from ocigpu.doctor.host import Host
from ocigpu.gpus import tree as module
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.files import read_binaries, read_firmware, read_named_library
from ocigpu.gpus.nvidia.libraries import find_libraries, native_machine
from ocigpu.gpus.tree import Tree, find_roots, settings_digest
from ocigpu.system.settings_file import read_settings

HOMES = {
    "/usr/local/nvidia/lib64": "/usr/local/nvidia/bin",
    "/usr/local/nvidia/lib": "/usr/local/nvidia/bin",
    "/var/lib/nvidia/lib64": "/var/lib/nvidia/bin",
    "/opt/nvidia/lib64": "/opt/nvidia/bin",
    "/opt/nvidia/lib": "/opt/nvidia/bin",
    "/opt/nvidia": "/opt/nvidia/bin",
    f"/usr/lib/nvidia/tesla/{VERSION}": "/usr/libexec/nvidia/tesla/bin",
}
"""Where the libraries are, and nvidia-smi, beside the places in support/layouts.toml."""
FILES = ("binaries", "firmware", "sockets", "configs")
LEFT = {"share": "/usr/share/", "opencl": "/etc/OpenCL/"}
DOCS = Path(__file__).parents[2] / "docs"


def facts_of(host: SimulatedHost, **changed: str) -> HostFacts:
    return read_host_facts(read_settings(str(host.settings))._replace(**changed))


def parts_of(facts: HostFacts, layout: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names of the driver's files that a host has, without those that a host of this layout has not."""
    found = {kind: [item.container_path for item in getattr(facts, kind)] for kind in FILES}
    left = [start for kind, start in LEFT.items() if not layout[kind]]
    shared = [
        path.replace(f"_icd.{MACHINE}.", "_icd.")
        for path in found["configs"]
        if path.startswith(("/usr/share", "/etc"))
    ]
    modules = [path.rpartition("/")[2] for path in found["configs"] if path.endswith("_drv.so") or "libglx" in path]
    found["configs"] = sorted(path for path in shared if not path.startswith(tuple(left)))
    found["modules"] = sorted({name.partition(".so")[0] for name in modules if layout["xorg"]})
    bits = (64, 32) if layout["libraries32"] else (64,)
    return found | {"libraries": [f"{item.bits} {item.name}" for item in facts.libraries if item.bits in bits]}


@pytest.mark.parametrize("cache", ["", "/none"], ids=["as it is", "no loader's cache"])
@pytest.mark.parametrize("name", one_in(3, LISTED))
def test_the_whole_driver_of_a_system_is_found(name: str, cache: str, laid_out: LaidOut) -> None:
    """Nothing is missing that is found where NVIDIA's packages for Debian put it."""
    layout, host = find_layout(name), laid_out(name)
    facts = facts_of(host, **({"driver_ldcache": cache} if cache else {}))
    assert (facts.source, facts.driver_version, facts.notes) == ("nvml", layouts.VERSION, ())
    assert [gpu.uuid for gpu in facts.gpus] == list(host.gpus)
    assert parts_of(facts, layout) == parts_of(facts_of(laid_out("debian")), layout)
    for item in (*facts.libraries, *facts.binaries):
        assert Path(item.host_path).read_bytes().startswith(b"\x7fELF"), f"{item.host_path} does not run elsewhere"


def test_a_driver_root_is_one_of_the_simulated_host(laid_out: LaidOut) -> None:
    """As of the machine that it stands for, and for ocigpu doctor --root; firmware is the kernel's, outside of it."""
    host = laid_out("talos-glibc")
    facts = facts_of(host, driver_root="/usr/local/glibc")
    assert facts.driver_root == f"{host.directory}/usr/local/glibc"
    found, expected = (parts_of(one, find_layout("debian-11")) for one in (facts, facts_of(host)))
    assert found == expected
    assert {os.path.dirname(item.host_path) for item in facts.firmware} == {
        f"{host.directory}/usr/lib/firmware/nvidia/{layouts.VERSION}"
    }


@pytest.mark.parametrize("name", one_in(3, LAYOUTS))
def test_list_and_plan_tell_what_there_is(
    name: str, laid_out: LaidOut, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = laid_out(name)
    monkeypatch.setenv("OCIGPU_CONFIG", str(host.settings))
    status = main(["list", "--json"])
    listed = capsys.readouterr()
    if name == "jetson":  # its own lists name the files
        assert main(["plan", "--devices", "all", "--json"]) == 0
        assert "libcuda.so.1.1" in capsys.readouterr().out
        return
    if name not in LISTED:
        assert status != 0
        assert "Install the driver" not in listed.err
        assert "ocigpu cdi generate --mode" in listed.err
        return
    assert (status, [gpu["uuid"] for gpu in json.loads(listed.out)["gpus"]]) == (0, list(host.gpus))
    assert main(["plan", "--devices", "all", "--json"]) == 0
    binds = [item for item in json.loads(capsys.readouterr().out)["actions"] if item["action"] == "bind"]
    assert {"nvidia-smi", f"libcuda.so.{layouts.VERSION}"} <= {os.path.basename(bind["host_path"]) for bind in binds}
    assert [bind["host_path"] for bind in binds if not bind["host_path"].startswith(f"{host.directory}/")] == []


NAMED = {
    '{"ICD": {"library_path": "/usr/lib64/libGLX_nvidia.so.0"}}': "/usr/lib64/libGLX_nvidia.so.0",
    '{"format": "1", "layers": [{"name": "a"}, {"library_path": "/l/libGLX_nvidia.so.0"}]}': "/l/libGLX_nvidia.so.0",
    '{"ICD": {"library_path": "libGLX_nvidia.so.0"}}': "",
    '{"ICD": {"library_path": "/usr/lib64/libother.so.0"}}': "",
    '{"ICD": {"library_path": "/usr/../libGLX_nvidia.so.0"}}': "",
    '{"ICD": {"library_path": 7}}': "",
    '{"ICD": []}': "",
    "[]": "",
    "{": "",
    "": "",
}


@pytest.mark.parametrize(("text", "path"), NAMED.items())
def test_a_library_that_a_file_names_by_its_path_is_the_drivers(text: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "icd.json").write_text(text)
    assert read_named_library(str(tmp_path / "icd.json")) == path
    (tmp_path / "nvidia.icd").write_text("/usr/lib64/libnvidia-opencl.so.1\n")
    assert read_named_library(str(tmp_path / "nvidia.icd")) == "/usr/lib64/libnvidia-opencl.so.1"


def test_the_documentation_names_every_system_with_its_settings() -> None:
    rows = []
    for name in LAYOUTS:
        layout = find_layout(name, triplet="TRIPLET")
        settings = "<br>".join(f"`{key} = {json.dumps(value)}`" for key, value in layout["settings"].items())
        rows.append(f"| {layout['name']} | `{layout['root']}{layout['where']}` | {settings or 'none'} |\n")
    assert "".join(rows) in (DOCS / "ENGINES.md").read_text(), "".join(rows)


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


def put_driver(host: HostTree, libraries: str, programs: str) -> None:
    for name in ("libcuda.so", "libnvidia-ml.so"):
        host.write(f"{libraries}/{name}.{VERSION}", elf_bytes(f"{name}.1"))
    host.write(f"{programs}/nvidia-smi", "#!/bin/sh\n", 0o755)


def found(host: HostTree) -> list[str]:
    paths, _ = find_libraries(Tree(str(host.root)), "/etc/ld.so.cache", VERSION, native_machine())
    return sorted({os.path.dirname(path) for path in paths})


@pytest.mark.parametrize("libraries", HOMES)
def test_a_driver_in_a_directory_of_its_own_is_found_without_the_loaders_cache(libraries: str, host: HostTree) -> None:
    put_driver(host, libraries, HOMES[libraries])
    assert found(host) == [libraries]
    (smi,) = read_binaries(Tree(str(host.root)))
    assert (smi.host_path, smi.container_path) == (f"{host.root}{HOMES[libraries]}/nvidia-smi", "/usr/bin/nvidia-smi")


def test_firmware_beside_the_libraries_is_found(host: HostTree) -> None:
    name = f"nvidia/{VERSION}/gsp_ga10x.bin"
    host.write(f"/home/kubernetes/bin/nvidia/firmware/{name}", "x")
    (image,) = read_firmware((Tree(str(host.root)),), VERSION, f"{host.root}/sys")
    assert (image.host_path, image.container_path) == (
        f"{host.root}/home/kubernetes/bin/nvidia/firmware/{name}",
        f"/lib/firmware/{name}",
    )


def test_the_usual_places_go_first(host: HostTree) -> None:
    put_driver(host, "/usr/lib64", "/usr/bin")
    put_driver(host, "/opt/nvidia/lib64", "/opt/nvidia/bin")
    paths, _ = find_libraries(Tree(str(host.root)), "/etc/ld.so.cache", VERSION, native_machine())
    assert [os.path.dirname(path) for path in paths[:2]] == ["/usr/lib64", "/usr/lib64"]
    assert read_binaries(Tree(str(host.root)))[0].host_path == f"{host.root}/usr/bin/nvidia-smi"


@pytest.mark.root
@pytest.mark.parametrize("place", ["/home/kubernetes", "/home/kubernetes/bin", "/home/kubernetes/bin/nvidia/lib64"])
@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_what_others_may_have_written_is_passed_over(place: str, how: str, host: HostTree) -> None:
    """A user called kubernetes, a directory that everybody may write, a link into one."""
    home = "/home/kubernetes/bin/nvidia"
    put_driver(host, f"{home}/lib64", f"{home}/bin")
    path = host.root / place.lstrip("/")
    if how == "owner":
        os.chown(path, 1000, 1000)
    elif how == "mode":
        path.chmod(0o777)
    else:
        aside = host.root / "tmp" / path.name
        aside.parent.mkdir()
        aside.parent.chmod(0o1777)
        path.rename(aside)
        path.symlink_to(f"/tmp/{path.name}")
    assert found(host) == []
    is_above = not place.endswith("lib64")
    assert [one.host_path for one in read_binaries(Tree(str(host.root)))] == [] or not is_above
    if is_above and how != "link":
        host.write("/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  x\n")
        (finding,) = check_libraries(Host(str(host.root)))
        assert (finding.severity, finding.evidence[1].path) == ("error", f"{host.root}{home}")
        assert "passed over" in finding.evidence[1].found


def test_the_doctor_says_what_it_found_where(host: HostTree) -> None:
    put_driver(host, "/opt/nvidia/lib64", "/opt/nvidia/bin")
    host.write("/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  x\n")
    (finding,) = check_libraries(Host(str(host.root)))
    seen = {one.path: one.found for one in finding.evidence}
    assert finding.severity == "ok"
    assert seen[f"{host.root}/opt/nvidia/lib64"] == "libraries of the driver"
    assert seen[f"{host.root}/opt/nvidia/bin/nvidia-smi"] == "nvidia-smi"


# the root of a driver container


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostTree:
    """A driver container's root where the host's would be; the host has no libraries in the usual places."""
    host = HostTree(tmp_path / "run/nvidia/driver")
    put_driver(host, "/usr/lib64", "/usr/bin")
    (host.root / "usr/lib64/libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{VERSION}")
    monkeypatch.setattr(module, "CONTAINER_ROOT", str(host.root))
    owned = Tree.owned
    monkeypatch.setattr(Tree, "owned", lambda _, path: owned(Tree(str(tmp_path)), path.removeprefix(str(tmp_path))))
    return host


def test_a_driver_container_is_found_without_a_setting(container: HostTree) -> None:
    assert find_roots(Settings()).driver == str(container.root)
    assert find_roots(Settings(driver_root="/elsewhere")).driver == "/elsewhere"


def test_what_was_made_of_a_driver_container_is_stale_when_it_goes(container: HostTree) -> None:
    before = settings_digest(Settings())
    assert before == settings_digest(Settings(driver_root=str(container.root)))
    container.root.rename(container.root.with_name("gone"))
    assert settings_digest(Settings()) != before


def test_the_hosts_own_driver_goes_before_a_container(container: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    own = container.root.parent / "libnvidia-ml.so.1"
    own.symlink_to("libnvidia-ml.so.gone")
    monkeypatch.setattr(module, "_NVML", (str(own), *module._NVML))
    assert find_roots(Settings()).driver == str(container.root), "a link that leads nowhere is no driver"
    own.with_name("libnvidia-ml.so.gone").touch()
    assert find_roots(Settings()).driver == ""


@pytest.mark.root
def test_a_driver_container_that_others_may_have_written_is_none(container: HostTree) -> None:
    os.chown(container.root, 1000, 1000)
    assert find_roots(Settings()).driver == ""


def test_a_container_without_a_driver_is_none(container: HostTree) -> None:
    (container.root / "usr/lib64/libnvidia-ml.so.1").unlink()
    assert find_roots(Settings()).driver == ""


STAGE = 'mkdir -p /run/nvidia/driver && mount --bind "$1" /run/nvidia/driver && exec "$2" list --json'


@pytest.mark.root
def test_the_gpus_of_a_driver_container_are_listed_by_a_host_without_settings(simulated_host: SimulatedHost) -> None:
    """A simulated host's files below /run/nvidia/driver, in a mount namespace of its own: its NVML is asked there."""
    root = os.path.dirname(simulated_host.settings)
    environment = {**os.environ}
    environment.pop("OCIGPU_CONFIG", None)
    made = [path for path in ("/run/nvidia/driver", "/run/nvidia") if not os.path.exists(path)]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", STAGE, "sh", root, PROGRAMS / "ocigpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    for path in made:
        with contextlib.suppress(OSError):
            os.rmdir(path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["driver_root"] == "/run/nvidia/driver"
    assert [gpu["uuid"] for gpu in data["gpus"]] == list(simulated_host.gpus)
