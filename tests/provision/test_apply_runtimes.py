"""The same plan as a prestart hook of the real runtimes: runc as root, runc without root, crun."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from provision_bundles import (
    USER,
    copy_hook,
    crun,
    inside_a_user_namespace,
    rootless,
    rootless_crun,
    run,
    runc,
    write_bundle,
)
from provision_lab import host_mounts, snapshot
from support import machine
from support.product import PublicCopy

pytestmark = [pytest.mark.root, pytest.mark.engine]

HOOK_COMMAND: list[str] = []
"""The hook where ordinary users can run it: interpreter, script, library."""
SCRIPT = """
cat /proc/self/mountinfo
echo ---
stat -c '%n %F %a %u %g %t:%T' /dev/nvidia0 /dev/nvidiactl /dev/nvidia-caps/nvidia-cap1 /usr/lib64/libcuda.so.1.2
cat /usr/lib64/libcuda.so.1 /usr/lib64/libold.so.1; echo
cat /proc/driver/nvidia/params /proc/driver/nvidia/gpus/0000:01:00.0/information
cat /dev/nvidia0 2>&1 | sed 's/.*: //'
head -c 11 /etc/ld.so.cache; echo
touch /usr/lib64/new 2>&1 | sed 's/.*: //'
"""


@pytest.fixture(scope="module", autouse=True)
def hook_command(public_copy: PublicCopy) -> None:
    HOOK_COMMAND[:] = copy_hook(public_copy, "provision_hook.py")


def make_bundle(place: Path, *hook_arguments: str, **kind: Any) -> Path:
    return write_bundle(place, SCRIPT, {"prestart": [[*HOOK_COMMAND, str(place / "host"), *hook_arguments]]}, **kind)


def check(bundle: Path, done: subprocess.CompletedProcess[str], node: str) -> str:
    """Check what the container said and return its mounts."""
    assert done.returncode == 0, done.stderr
    mounts, _, said = done.stdout.partition("---\n")
    lines = said.splitlines()
    owner = 65534 if "root" in node else 0
    assert lines[0] == f"/dev/nvidia0 character special file 666 {owner} {owner} c3:0"
    assert lines[1] == f"/dev/nvidiactl character special file 666 {owner} {owner} c3:ff"
    assert lines[3].startswith("/usr/lib64/libcuda.so.1.2 regular file 644")
    assert lines[4:7] == ["driverdriver", "ModifyDeviceFiles: 0", "Model: x"]
    assert lines[7] == "No such device or address"  # the node is allowed: only the driver behind it is missing
    assert lines[8] in ("ld.so-1.7.0", "glibc-ld.so")
    answer = json.loads((bundle / "host.answer").read_text())
    assert answer["pivoted"] is False
    return mounts


@pytest.mark.parametrize("kernel", ["new", "old"])
@pytest.mark.parametrize("readonly", [False, True], ids=["writable", "readonly"])
def test_runc_as_root(place: Path, kernel: str, readonly: bool) -> None:
    bundle = make_bundle(place, kernel, readonly=readonly)
    before = host_mounts()
    done = run(bundle, *runc(bundle))
    mounts = check(bundle, done, "made")
    assert "/dev/nvidia0" not in mounts
    assert " /usr/lib64/libcuda.so.1.2 ro,nosuid,nodev" in mounts
    assert (done.stdout.splitlines()[-1] == "Read-only file system") is readonly
    assert "/dev/nvidia-caps/nvidia-cap1 character special file 440 0 44 c3:0" in done.stdout
    assert host_mounts() == before


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_crun_as_root(place: Path, kernel: str, runtime_environment: dict[str, str]) -> None:
    bundle = make_bundle(place, kernel)
    before = host_mounts()
    mounts = check(bundle, run(bundle, *crun(bundle), env=runtime_environment), "made")
    assert " /usr/lib64/libcuda.so.1.2 ro,nosuid,nodev" in mounts
    assert host_mounts() == before


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_runc_without_root(place: Path, kernel: str) -> None:
    bundle = make_bundle(place, kernel, user=True)
    before = host_mounts()
    mounts = check(bundle, run(bundle, *rootless(bundle)), "of the host's root")
    assert " /dev/nvidia0 ro,nosuid,noexec" in mounts
    for path in snapshot(place / "rootfs"):
        assert os.lstat(path).st_uid == USER
    assert host_mounts() == before


@pytest.mark.parametrize("how", ["raise", "kill worker", "kill parent"])
@pytest.mark.parametrize("entry", [2, 9, 20])
def test_a_failed_hook_stops_runc_and_leaves_the_image_as_it_was(place: Path, how: str, entry: int) -> None:
    bundle = make_bundle(place, "new", str(entry), how)
    tree, before = snapshot(place / "rootfs"), host_mounts()
    done = run(bundle, *runc(bundle))
    assert done.returncode != 0
    assert not (place / "host.answer").exists()
    if how != "kill parent":
        assert "hook: OCIGPU-" in done.stderr
    assert snapshot(place / "rootfs") == tree
    assert host_mounts() == before


def test_runc_with_a_rootfs_that_is_shared_with_the_host(place: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "shared", str(place)], check=True)
    try:
        subprocess.run(["mount", "--make-shared", str(place)], check=True)
        place.chmod(0o755)
        bundle = make_bundle(place, "new")
        config = json.loads((bundle / "config.json").read_text())
        config["linux"]["rootfsPropagation"] = "shared"
        (bundle / "config.json").write_text(json.dumps(config))
        ours = machine.mounts_below(str(place))
        check(bundle, run(bundle, *runc(bundle)), "made")
        after = machine.mounts_below(str(place))
        assert [line for line in after if "libcuda" in line or "driver" in line] == []
        assert after == ours
    finally:
        while machine.mounts_below(str(place)):
            subprocess.run(["umount", "-l", str(place)], check=True)


def test_runc_inside_a_user_namespace(place: Path) -> None:
    bundle = make_bundle(place, "new", user=True)
    mounts = check(bundle, run(bundle, *inside_a_user_namespace(bundle)), "of the host's root")
    assert " /dev/nvidia0 ro,nosuid,noexec" in mounts


def test_crun_hides_its_process_from_ordinary_users(place: Path, runtime_environment: dict[str, str]) -> None:
    """Nothing can be done about it from outside, so the hook says why and nothing is changed."""
    bundle = make_bundle(place, "new", user=True)
    tree = snapshot(place / "rootfs")
    log = place / "host.log"
    hook = json.loads((bundle / "config.json").read_text())["hooks"]["prestart"][0]
    script = place / "hook.sh"
    script.write_text(f"#!/bin/sh\nexec {' '.join(hook['args'])} 2>{log}\n")
    script.chmod(0o755)
    config = json.loads((bundle / "config.json").read_text())
    config["hooks"]["prestart"] = [{"path": str(script)}]
    (bundle / "config.json").write_text(json.dumps(config))
    assert run(bundle, *rootless_crun(bundle), env=runtime_environment).returncode != 0
    assert "OCIGPU-NS-2" in log.read_text()
    assert "ns/mnt: Permission denied\nhint: The runtime hides its process from ordinary users" in log.read_text()
    assert snapshot(place / "rootfs") == tree
