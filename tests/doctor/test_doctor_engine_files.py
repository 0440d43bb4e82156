"""What the doctor says of engines' files, and that its words fit the release and the file."""

import json
import shutil
from pathlib import Path

import pytest
from doctor.conftest import Broken, examine
from support.fixtures import Run
from support.process import run


def set_release(root: Path, package: str, release: str) -> None:
    status = root / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True, exist_ok=True)
    status.write_text(f"Package: {package}\nStatus: install ok installed\nVersion: {release}\n\n")


@pytest.mark.parametrize(("release", "named"), [("4.3.1+ds1-8", True), ("4.6.0", False), ("5.4.2", False)])
def test_podman_before_4_6_takes_no_cdi_name_in_its_configuration(broken: Broken, release: str, named: bool) -> None:
    root = broken()
    (root / "etc/containers").mkdir(exist_ok=True)
    (root / "etc/containers/containers.conf").write_text(
        '[containers]\ndevices = ["nvidia.com/gpu=0", "/dev/null:/dev/x=y"]\n'
    )
    set_release(root, "podman", release)
    found = [item for item in examine(root) if item.name == "engine-config-broken" and item.is_bad]
    assert [("nvidia.com/gpu=0" in item.text, "/dev/null" in item.text) for item in found] == [(True, False)] * named


def test_a_program_without_its_execute_bit_is_there(broken: Broken) -> None:
    """ "Does not exist" sent people to install again what was there."""
    root = broken("docker-runtime")
    program = root / "opt/before/ocigpu-runtime"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o644)
    (found,) = [item for item in examine(root) if item.name == "engine-runtime-missing" and item.is_bad]
    assert "which is not executable" in found.text
    run(["sh", "-c", found.fixes[0]])
    assert not [item for item in examine(root) if item.name == "engine-runtime-missing" and item.is_bad]


def test_the_runtime_that_k3s_brings_is_one(broken: Broken) -> None:
    root = broken("no-runc")
    assert [item.severity for item in examine(root) if item.name == "runtime-missing"] == ["error"]
    own = root / "var/lib/rancher/k3s/data/0123/bin/runc"
    own.parent.mkdir(parents=True)
    own.touch(0o755)
    (root / "var/lib/rancher/k3s/data/current").symlink_to("/var/lib/rancher/k3s/data/0123")
    (found,) = [item for item in examine(root) if item.name == "runtime-missing"]
    assert (found.severity, found.evidence[0].path) == ("ok", f"{root}/var/lib/rancher/k3s/data/current/bin/runc")


def test_a_choice_is_no_fix(broken: Broken, run: Run) -> None:
    """Scripts take "fixes" of --json: a simulated host does not bring a GPU back."""
    root = broken()
    for name in (root / "sys/bus/pci/devices").iterdir():
        name.unlink() if name.is_symlink() else shutil.rmtree(name)
    (found,) = [item for item in examine(root) if item.name == "no-gpu"]
    assert not [fix for fix in found.fixes if "sim create" in fix]
    assert found.choices == ("ocigpu sim create /tmp/gpus --gpus 8 --model h100  # to try containers without a GPU",)
    data = json.loads(run("doctor", "--root", root, "--json")[1])
    assert {item["name"]: item["choices"] for item in data["findings"]}["no-gpu"] == list(found.choices)
    assert f"    or       {found.choices[0]}" in run("doctor", "--root", root)[1].splitlines()
