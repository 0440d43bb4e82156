"""Every fault is found by its name, with evidence and a fix, nothing else is found, and the fix clears it."""

import json
import shlex
from pathlib import Path

import pytest
from doctor.conftest import Broken, bad, examine, rely_on_ldconfig
from support.fixtures import Run
from support.products import one_in

from ocigpu.doctor.findings import CHECKS, SEVERITIES, Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.report import render_findings, run_checks
from ocigpu.sim.fault_names import FAULT_NAMES

WITHOUT_MIG_DEVICES = "mig-empty"
FAULTS = [name for name in FAULT_NAMES if name != WITHOUT_MIG_DEVICES]
CHOICES = ("docker-runtime", "systemd-cgroups")
"""Faults whose fixes change more than the fault, or are one of two: --fix does not run them (test_doctor_fix.py)."""


@pytest.mark.parametrize("fault", one_in(3, FAULTS))
def test_a_fault_is_found_by_its_name_with_evidence_and_a_fix_and_nothing_else_is(fault: str, broken: Broken) -> None:
    findings = examine(broken(fault))
    assert bad(findings) == set(FAULT_NAMES[fault].findings)
    for item in findings:
        check_form(item)


def check_form(item: Finding) -> None:
    """A finding says what was looked at, and what helps."""
    assert item.severity in SEVERITIES
    assert item.text
    if item.severity == "not-checked":
        return
    assert item.evidence, item
    assert all(entry.path and (entry.found or entry.path.startswith("and ")) for entry in item.evidence), item
    if item.severity in ("error", "warning"):
        assert item.fixes, item


@pytest.mark.root
@pytest.mark.parametrize("fault", CHOICES)
def test_the_fix_that_is_printed_clears_the_finding(fault: str, broken: Broken, run: Run) -> None:
    root = broken(fault)
    for name in FAULT_NAMES[fault].findings:
        for item in examine(root):
            if item.name == name and item.severity != "ok":
                carry_out(item, run)
    left = bad(examine(root)) & set(FAULT_NAMES[fault].findings)
    assert not left, left


def carry_out(finding: Finding, run: Run) -> None:
    """Run what a user would."""
    assert not finding.safe
    lines = [line for fix in finding.fixes if (line := fix.removeprefix("# or: ")).startswith("ocigpu ")]
    for line in lines:
        status, out, err = run(*shlex.split(line)[1:])
        assert status == 0, f"{line}\n{out}{err}"
    assert lines, finding


def test_every_check_is_shown_by_a_fault_or_needs_this_machine() -> None:
    shown = {name for fault in FAULT_NAMES.values() for name in fault.findings}
    elsewhere = {"simulated-host", "docker-not-restarted", "docker-context", "docker-options", "container-lost-gpu"}
    elsewhere |= {"engine-not-running", "wsl-gpus"}  # test_doctor_engines.py, test_doctor_wsl.py
    # tests/engines/test_engines_staged.py
    elsewhere |= {"engine-not-restarted", "hook-file", "containerd-hidden", "containerd-cri-off"}
    elsewhere |= {"image-libcuda", "driver-capabilities", "vendor-devices"}  # the latter in test_doctor_amd.py
    assert {check.name for check in CHECKS} == shown | elsewhere


def test_a_gpu_in_mig_mode_without_instances_is_found(session_directory: Path, run: Run) -> None:
    directory = session_directory / "mig host"
    words = ("sim", "create", directory, "--gpus", 2, "--model", "a100", "--mig", "0:", "--fault", WITHOUT_MIG_DEVICES)
    status, out, err = run(*words)
    assert status == 0, err
    assert f"look at:   ocigpu doctor --root {directory}" in out.replace("'", "")
    assert bad(examine(directory)) == {"mig-half-configured"}
    assert run("sim", "remove", directory)[0] == 0


def test_a_fault_that_does_not_exist_leaves_no_host(session_directory: Path, run: Run) -> None:
    directory = session_directory / "no host"
    status, _, err = run("sim", "create", directory, "--gpus", 1, "--model", "l4", "--fault", "zzz")
    assert (status, directory.exists()) == (1, False)
    assert "OCIGPU-SIM-1" in err
    assert "missing-uvm" in err


def test_several_faults_are_found_together(broken: Broken) -> None:
    found = bad(examine(broken("no-persistence", "no-dev-char", "no-ldconfig", "old-kernel")))
    assert found == {"persistence-off", "dev-char-links", "ldconfig-missing", "kernel-too-old"}


def test_links_of_the_vendors_names_are_not_the_vendors_toolkit(broken: Broken) -> None:
    root = broken()
    for name, program in (("nvidia-ctk", "ocigpu"), ("nvidia-cdi-hook", "ocigpu-hook")):
        (root / "usr/bin" / name).symlink_to(program)
        (root / "usr/bin" / program).touch()
        (root / "usr/bin" / program).chmod(0o755)
    assert [item.severity for item in examine(root) if item.name == "vendor-toolkit"] == ["ok"]


def test_a_specification_without_soname_links_is_noted(broken: Broken) -> None:
    root = broken()
    rely_on_ldconfig(root)
    (found,) = (item for item in examine(root) if item.name == "cdi-hook-missing")
    assert found.severity == "note"
    assert "relies on its hook program: the links lib" in found.text
    assert "ocigpu cdi generate" in found.fixes[0]


@pytest.mark.parametrize(
    ("release", "file", "command"),
    [
        ("ID=debian", "", "apt-get install --reinstall libcuda1"),
        ("ID=ubuntu\nID_LIKE=debian", "", "apt-get install --reinstall libnvidia-compute-550"),
        (
            "ID=ubuntu\nID_LIKE=debian",
            "var/lib/dpkg/info/libnvidia-cfg1-550-server:amd64.list",
            "apt-get install --reinstall libnvidia-compute-550-server",
        ),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"', "", "dnf reinstall {0} || dnf install {0}"),
        ("ID=nixos", "", "# install the user-space part of driver 550.163.01 again; then"),
        ("ID=debian", "usr/bin/nvidia-uninstall", "# install the user-space part of driver 550.163.01 again; then"),
    ],
)
def test_a_missing_library_is_installed_by_the_systems_packages(
    release: str, file: str, command: str, broken: Broken
) -> None:
    root = broken("no-libcuda")
    (root / "etc/os-release").write_text(f"{release}\n")
    if file:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
        (root / file).chmod(0o755)
    (found,) = (item for item in examine(root) if item.name == "driver-libraries")
    assert found.fixes[:2] == (command.format("nvidia-driver-cuda-libs"), "ldconfig")


def test_a_program_of_ours_that_is_not_executable_is_made_so(broken: Broken) -> None:
    root = broken()
    hook = root / "usr/bin/ocigpu-hook"
    hook.chmod(0o644)
    found = {item.name: item for item in examine(root) if item.is_bad}
    assert {"programs-broken", "cdi-hook-missing"} <= found.keys()
    for name in ("programs-broken", "cdi-hook-missing"):
        assert "/usr/bin/ocigpu-hook" in found[name].text
        assert found[name].text.partition("ocigpu-hook")[2].partition("is not executable")[1]
        assert shlex.split(found[name].fixes[0]) == ["chmod", "+x", str(hook)]
    hook.chmod(0o755)
    assert bad(examine(root)) == set()


def test_a_report_has_each_restart_once() -> None:
    """systemd refuses the fourth restart of dockerd in a minute."""
    restart = "systemctl restart docker"
    items = [Finding("error", text, (), ("true", restart), "x") for text in ("a", "b", "c")]
    lines = "\n".join(render_findings(items))
    assert lines.count(f"             {restart}\n") + lines.endswith(f"             {restart}") == 1
    assert lines.count(f"# {restart}  (once, see 3)") == 2


@pytest.mark.root
def test_a_simulated_host_without_libraries_is_made_again(session_directory: Path, run: Run) -> None:
    place = session_directory / "without libraries"
    assert run("sim", "create", place, "--gpus", 1, "--model", "l4", "--fault", "no-libraries")[0] == 0
    host = Host(config=str(place / "config.toml"))
    (found,) = run_checks(host, ["driver-libraries"])
    for command in found.fixes[0].split(" && "):
        assert run(*shlex.split(command)[1:])[0] == 0
    (found,) = run_checks(Host(config=str(place / "config.toml")), ["driver-libraries"])
    assert found.severity == "ok"
    assert run("sim", "remove", place)[0] == 0


def test_a_name_out_of_a_log_is_no_command(broken: Broken) -> None:
    root = broken("apparmor")
    with (root / "var/log/kern.log").open("a") as file:
        file.write('apparmor="DENIED" operation="open" profile="x; reboot" name="/proc/driver/nvidia/params"\n')
    (found,) = (item for item in examine(root) if item.name == "apparmor-denies")
    assert found.fixes[0].startswith("aa-complain 'x; reboot'")


@pytest.mark.parametrize(
    ("fault", "name", "first", "not_in"),
    [
        ("secure-boot", "secure-boot", "mokutil --sb-state", "modprobe"),
        ("two-drivers", "driver-library-mismatch", "ldconfig -p", "rmmod"),
    ],
)
def test_the_first_advice_is_on_the_cause(fault: str, name: str, first: str, not_in: str, broken: Broken) -> None:
    (found,) = (item for item in examine(broken(fault)) if item.name == name)
    assert found.fixes[0].startswith(first)
    assert not any(not_in in fix for fix in found.fixes)


def test_help_of_sim_create_lists_every_fault(run: Run) -> None:
    _, out, _ = run("sim", "create", "--help")
    for name in FAULT_NAMES:
        assert f"  {name} " in out


def test_what_ocigpus_hook_changes_is_not_lost_to_systemd(broken: Broken) -> None:
    """It tells systemd of the devices (ocigpu/provision/scope.py); the vendor's does not."""
    root = broken()
    path = root / "etc/docker/daemon.json"
    settings = json.loads(path.read_text())
    del settings["default-runtime"]
    path.write_text(json.dumps(settings | {"exec-opts": ["native.cgroupdriver=systemd"]}))
    assert [item.severity for item in examine(root) if item.name == "systemd-cgroup-loses-devices"] == ["not-checked"]


def test_links_of_a_simulated_host_in_use_are_nobodys_business(broken: Broken, run: Run) -> None:
    """Whether or not this machine was booted with systemd: nothing is said about it."""
    root = broken("no-dev-char")
    _, out, _ = run("doctor", "--config", root / "config.toml", "--json")
    (found,) = (item for item in json.loads(out)["findings"] if item["name"] == "dev-char-links")
    assert found["severity"] == "not-checked"
    assert "simulated host" in found["text"]
