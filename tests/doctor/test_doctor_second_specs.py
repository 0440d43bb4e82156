"""A second CDI specification: what is no conflict, and whose file the doctor leaves alone."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from doctor.conftest import Broken, bad, examine
from support.fixtures import Run

from ocigpu.cdi.document import read_document
from ocigpu.core.settings import DEFAULT_PATH
from ocigpu.doctor.findings import Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.system import check_simulated
from ocigpu.sim.faults import SPEC


def findings(root: Path, name: str) -> list[Finding]:
    return [item for item in examine(root) if item.name == name and item.is_bad]


def other(path: Path, kind: str, name: str, **edits: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    device = {"name": name, "containerEdits": edits or {"env": ["A=b"]}}
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": [device]}))


def test_a_second_specification_is_no_conflict(broken: Broken) -> None:
    """Another kind, and another device of the same kind, which brings a variable and no GPU."""
    root = broken()
    other(root / "etc/cdi/site.json", "nvidia.com/gpu", "compatible")
    other(root / "etc/cdi/acme.json", "acme.example/gpu", "0")
    assert bad(examine(root)) == set()


def test_a_link_to_the_specification_is_no_second_one(broken: Broken) -> None:
    root = broken()
    (root / "etc/cdi").mkdir()
    (root / "etc/cdi/nvidia.yaml").symlink_to("/" + SPEC)
    assert findings(root, "cdi-duplicate") == []


@pytest.mark.root
def test_a_specification_of_another_kind_is_never_overwritten(broken: Broken, run: Run) -> None:
    root = broken()
    hook = {"hookName": "createContainer", "path": "/opt/gone", "args": ["gone"]}
    path = root / "etc/cdi/acme.json"
    other(path, "acme.example/gpu", "0", hooks=[hook])
    before = path.read_bytes()
    (found,) = findings(root, "cdi-hook-missing")
    assert (found.safe, found.fixes[0].startswith("# have the maker of ")) == ((), True)
    run("doctor", "--root", root, "--fix", "--yes")
    assert path.read_bytes() == before


@pytest.mark.root
def test_a_stale_second_specification_is_put_away_and_not_written_over_the_first(broken: Broken, run: Run) -> None:
    root = broken()
    path = root / "etc/cdi/site.json"
    node = {"path": "/dev/nvidia0", "hostPath": "/dev/nvidia77"}
    other(path, "nvidia.com/gpu", "mine", deviceNodes=[node])
    (found,) = findings(root, "cdi-stale")
    assert found.fixes[0].startswith("mv --backup=numbered ")
    run("doctor", "--root", root, "--fix", "--yes")
    assert bad(examine(root)) == set()
    assert not path.exists()
    assert read_document(str(root / SPEC))[0]["kind"] == "nvidia.com/gpu"


def test_a_specification_of_a_driver_that_is_gone_is_removed_and_not_written_again(broken: Broken) -> None:
    root = broken()
    for directory in ("proc/driver", "sys/module/nvidia", "usr/lib"):
        shutil.rmtree(root / directory)
    (found,) = findings(root, "cdi-stale")
    assert (found.safe, found.fixes) == ((), (f"rm '{root}/{SPEC}'",))
    subprocess.run(found.fixes[0], shell=True, check=True)  # as people type it
    assert findings(root, "cdi-stale") == []


@pytest.mark.root
def test_the_systems_settings_that_are_a_simulated_hosts_are_removed_and_own_ones_changed(broken: Broken) -> None:
    settings, its = Path(DEFAULT_PATH), broken() / "config.toml"
    try:
        shutil.copyfile(its, settings)
        (same,) = check_simulated(Host())
        settings.write_text(its.read_text() + "# mine\n")
        (other,) = check_simulated(Host())
    finally:
        settings.unlink()
    assert same.fixes == (f"# for real GPUs: rm {DEFAULT_PATH}",)
    assert other.fixes == ("# for real GPUs: ocigpu config unset simulation.root",)


@pytest.mark.root
def test_a_specification_of_ours_that_names_a_deleted_file_is_written_again(broken: Broken, run: Run) -> None:
    """The fingerprint knows the driver's version, not each of its files; runc refuses the mount."""
    root = broken()
    (library,) = root.glob("usr/lib/*/libnvidia-opencl.so.[1-9]*.*")
    library.unlink()
    (found,) = findings(root, "cdi-stale")
    assert found.text.endswith(f"it names a file that does not exist: {library}")
    assert run(*shlex.split(found.fixes[0])[1:])[0] == 0
    assert bad(examine(root)) == set()


def test_a_file_that_another_kinds_specification_names_and_that_is_gone_is_found(broken: Broken) -> None:
    root = broken()
    path = root / "etc/cdi/acme.json"
    other(path, "acme.example/gpu", "0", mounts=[{"hostPath": "/opt/gone", "containerPath": "/opt/gone"}])
    (found,) = findings(root, "cdi-stale")
    assert (found.severity, found.text.endswith("does not exist: /opt/gone")) == ("warning", True)
    subprocess.run(found.fixes[0].partition("do without: ")[2], shell=True, check=True)
    assert bad(examine(root)) == set()


def test_two_specifications_of_ours_are_no_conflict(broken: Broken) -> None:
    """Packages keep one in /var/run/cdi; ENGINES.md writes one into /etc/cdi for those without."""
    root = broken()
    spec = json.loads(json.dumps(read_document(str(root / SPEC))[0]))
    path = root / "etc/cdi/nvidia.json"
    path.parent.mkdir()
    path.write_text(json.dumps(spec))
    assert bad(examine(root)) == set()
    del spec["annotations"]
    path.write_text(json.dumps(spec))
    assert bad(examine(root)) == set(), "it says the same"
    spec["containerEdits"]["env"] = ["A=b"]
    path.write_text(json.dumps(spec))
    assert bad(examine(root)) == {"cdi-duplicate"}


@pytest.mark.root
def test_a_specification_with_the_numbers_of_another_boot_is_found(broken: Broken, run: Run) -> None:
    """NVIDIA's toolkit writes numbers, and that of nvidia-uvm is any: cuInit then fails with 999 (its issue 1934)."""
    root = broken()
    (root / SPEC).unlink()
    path = root / "etc/cdi/nvidia.yaml"
    nodes = [
        {"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255},
        {"path": "/dev/nvidia-uvm", "type": "c", "major": 235},
    ]
    other(path, "nvidia.com/gpu", "all", deviceNodes=[*nodes, {"path": "/dev/nvidia0"}])
    (found,) = findings(root, "cdi-stale")
    assert found.text.endswith("it gives /dev/nvidia-uvm the number 235:0, and the driver has 510:0")
    assert run(*shlex.split(found.fixes[0])[1:])[0] == 0
    assert bad(examine(root)) == set()
