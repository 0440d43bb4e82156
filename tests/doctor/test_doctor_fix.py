"""``doctor --fix``: every fix that it may run is run here or on a real engine, by what the doctor prints."""

import os
import pty
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor.conftest import Broken, bad, examine, rely_on_ldconfig
from support.fixtures import Run
from support.product import PROGRAMS
from support.products import one_in

from ocigpu.doctor.findings import CHECKS, Evidence, Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.report import run_checks
from ocigpu.sim.faults import SPEC

pytestmark = pytest.mark.root
FAULTS = {
    "missing-nodes": ("device-nodes-missing.needed",),
    "missing-control": ("device-nodes-missing.needed",),
    "missing-uvm": ("uvm-missing.nodes",),
    "wrong-nodes": ("device-nodes-wrong.replaced",),
    "node-modes": ("device-nodes-wrong.changed",),
    "no-dev-char": ("dev-char-links.systemd",),
    "mig-nodes": ("mig-nodes.missing",),
    "no-cdi": ("cdi-missing.mode",),
    "stale-cdi": ("cdi-stale.stale",),
    "gpu-exchanged": ("cdi-stale.stale",),
    "vendor-cdi": ("cdi-duplicate.two-directories", "cdi-stale.stale"),
    "partial-cdi": ("cdi-partial.no-node",),
    "too-new-cdi": ("cdi-too-new.version",),
    "two-cdi": ("cdi-duplicate.one-directory",),
    "cdi-hook": ("cdi-hook-missing.none",),
    "docker-unconfigured": ("engine-not-configured.docker",),
    "docker-default": ("engine-default-missing.nvidia",),
    "docker-gpus": ("docker-gpus-hook.none",),
    "docker-cdi-off": ("docker-cdi-off.off",),
    "no-cgroups": ("no-cgroups-mismatch.ours",),
    "dangling-libcuda": ("driver-link.wrong",),
    "two-containerd": ("containerd-two-configs.some",),
}
"""Faults of a simulated host, and what they are found as."""


def without_modeset(root: Path) -> None:
    (root / "dev/nvidia-modeset").unlink()


def without_systemd(root: Path) -> None:
    shutil.rmtree(root / "run/systemd")
    shutil.rmtree(root / "dev/char")


def without_specification(root: Path) -> None:
    (root / SPEC).unlink()


def without_hook(root: Path) -> None:
    (root / "usr/bin/nvidia-container-runtime-hook").unlink()


def in_wsl(root: Path) -> None:
    (root / SPEC).unlink()
    lib, store = root / "usr/lib/wsl/lib", root / "usr/lib/wsl/drivers/nv_1"
    for path in (lib / "libdxcore.so", store / "libcuda.so.1.1", store / "libnvidia-ml.so.1"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of Windows")
    os.mknod(root / "dev/dxg", 0o20666, os.makedev(10, 125))


def containerd_alone(root: Path) -> None:
    for name in ("docker", "dockerd", "podman", "nvidia-container-runtime-hook"):
        (root / "usr/bin" / name).unlink()
    (root / "usr/bin/containerd").touch(0o755)


STAGED: dict[str, Callable[[Path], None]] = {
    "device-nodes-missing.modeset": without_modeset,
    "dev-char-links.missing": without_systemd,
    "cdi-missing.users": without_specification,
    "cdi-missing.wsl": in_wsl,
    "cdi-hook-missing.relying": rely_on_ldconfig,
    "docker-gpus-hook.default": without_hook,
    "engine-not-configured.nothing": containerd_alone,
}
"""What no fault of a simulated host is found as."""
ELSEWHERE = {"container-lost-gpu.lost"}
"""tests/containers/test_repair_containers.py."""


def pattern_of(said: str) -> re.Pattern[str]:
    """Return what matches the text of a finding of the table."""
    check = next(check for check in CHECKS if check.name == said.partition(".")[0])
    parts = re.split(r"\{\w+\}", check.says[said.partition(".")[2]]["text"])
    return re.compile(".*".join(map(re.escape, parts)))


def check_fixed(root: Path, said: tuple[str, ...], run: Run) -> None:
    """Let the doctor fix what it has found as this; it says that it is gone, and it is."""
    names = {name.partition(".")[0] for name in said}
    before = [item for item in run_checks(Host(str(root)), names) if item.is_bad]
    for name in said:
        found = [item for item in before if pattern_of(name).fullmatch(item.text)]
        assert found
        assert all(item.safe and set(item.safe) <= set(item.fixes) for item in found)
    _, out, err = run("doctor", "--root", root, "--fix", "--yes")
    assert "done: it is gone" in out, out + err
    left = {item.text for item in run_checks(Host(str(root)), names)}
    assert left.isdisjoint(item.text for item in before), out + err


@pytest.mark.parametrize("fault", one_in(4, FAULTS))
def test_a_fix_that_is_carried_out_clears_the_finding(fault: str, broken: Broken, run: Run) -> None:
    check_fixed(broken(fault), FAULTS[fault], run)


@pytest.mark.parametrize("said", one_in(3, STAGED))
def test_a_fix_of_what_no_fault_shows_clears_the_finding(said: str, broken: Broken, run: Run) -> None:
    root = broken()
    STAGED[said](root)
    check_fixed(root, (said,), run)


def test_nothing_is_marked_as_safe_that_no_test_has_run() -> None:
    safe = {f"{check.name}.{name}" for check in CHECKS for name, entry in check.says.items() if entry.get("safe")}
    assert safe == {name for names in FAULTS.values() for name in names} | set(STAGED) | ELSEWHERE


def test_it_asks_before_each_shows_what_it_does_and_takes_no_for_an_answer(broken: Broken) -> None:
    root = broken("missing-uvm", "docker-gpus", "no-dev-char")
    master, terminal = pty.openpty()
    command = [PROGRAMS / "ocigpu", "doctor", "--root", str(root), "--fix"]
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, text=True) as doctor:
        os.write(master, b"y\nn\ny\n")  # of the first, which is the error, the links are gone as well
        out = doctor.communicate(timeout=300)[0]
    os.close(master)
    os.close(terminal)
    assert doctor.returncode == 3
    assert bad(examine(root)) == {"docker-gpus-hook"}
    assert out.index("to do: ") < out.index("Carry it out? [y/N]") < out.index("done: it is gone")
    assert out.count("Carry it out? [y/N]") == 2
    assert "dev-char-links: already resolved" in out
    assert "done: it is gone" in out
    assert not (root / "usr/bin/nvidia-container-runtime-hook").is_symlink()


def test_what_is_left_of_a_finding_is_not_gone() -> None:
    """A text may tell numbers: one of two is repaired."""

    def missing(*paths: str, name: str = "a") -> Finding:
        seen = [Evidence(path, "missing") for path in paths]
        return Finding("error", f"{len(paths)} are missing", tuple(seen), name=name, code=f"{name}.gone")

    two = missing("/dev/a", "/dev/b")
    assert two.is_still(two)
    assert missing("/dev/b").is_still(two)
    assert not missing("/dev/c").is_still(two)
    assert not missing("/dev/b", name="b").is_still(two)
    assert not two._replace(severity="ok").is_still(two)
    assert Finding("error", "x", name="a").is_still(Finding("error", "y", name="a"))


def test_without_a_terminal_it_refuses_and_says_how(broken: Broken, run: Run) -> None:
    root = broken("missing-uvm")
    code, out, err = run("doctor", "--root", root, "--fix")
    assert (code, out) == (2, "")
    assert "standard input is not a terminal" in err
    assert "--fix --yes" in err
    assert bad(examine(root)) == {"uvm-missing"}


def test_what_fails_is_said_and_what_is_not_safe_is_left(broken: Broken, run: Run) -> None:
    root = broken("no-cdi", "apparmor")
    (root / "var/run/cdi").rmdir()
    (root / "var/run/cdi").touch()  # where a directory is to be
    code, out, _ = run("doctor", "--root", root, "--fix", "--yes")
    assert code == 4
    assert "failed: ocigpu cdi refresh" in out
    assert {"cdi-missing", "apparmor-denies"} <= bad(examine(root))


def test_options_that_do_not_fit_are_refused(run: Run) -> None:
    for words in (("--yes",), ("--fix", "--yes", "--json"), ("--format", "xml"), ("--format", "junit", "--json")):
        code, out, err = run("doctor", *words)
        assert (code, out, err.count("\n") > 0) == (2, "", True)


def test_a_directory_of_another_user_is_not_changed(broken: Broken, run: Run) -> None:
    """What says that it is a simulated host is a file of whoever made it, and links below it may lead anywhere."""
    root = broken("two-cdi")
    os.chown(root, 12345, 12345)
    before = sorted(path.name for path in root.rglob("*.yaml*"))
    code, _, err = run("doctor", "--root", root, "--fix", "--yes")
    assert code == 2
    assert "whose links may lead to this machine" in err
    assert sorted(path.name for path in root.rglob("*.yaml*")) == before
