"""ldconfig in real containers: never the image's, never the host's own file, and bounded whatever it reads."""

import errno
import hashlib
import mmap
import os
import signal
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from security_lab import GIVERS, LIBRARY_DIR, MODES, Attacks, Marker, hooks_of
from support.machine import LOADER, running_ldconfig
from support.process import is_alive, run, wait_for
from ways_of_images import FULL

pytestmark = [pytest.mark.root, pytest.mark.engine]

WAYS = pytest.mark.parametrize("way", [*GIVERS, "update-ldcache", "enable-cuda-compat"])
PROGRAM = 'int main(void) {{ fclose(fopen("{path}", "w")); return 0; }}\n'
LIBRARIES = 100_000 if FULL else 10_000


@WAYS
@pytest.mark.parametrize("kind", ["program", "script"])
def test_the_images_own_ldconfig_is_never_executed(attacks: Attacks, way: str, kind: str) -> None:
    """8 (CVE-2024-0136, -0137): no setting has it executed; a path without the vendor's @ is the host's too."""
    ran = attacks.directory / "ran"
    settings = 'ldconfig = "/sbin/ldconfig"' if kind == "program" else ""

    def edit(config: dict[str, Any]) -> None:
        if way == "configure":
            (hook,) = config["hooks"]["prestart"]
            hook["args"] += ["--ldconfig=/sbin/ldconfig"] if kind == "program" else []

    def build(rootfs: Path, marker: Marker) -> None:
        for name in ("usr/sbin/ldconfig", "usr/sbin/ldconfig.real", f"usr/lib64/{LOADER}"):
            path = rootfs / name
            path.unlink(missing_ok=True)
            if kind == "script":
                path.write_text(f"#!/busybox sh\necho > {ran}; echo > /ran\n")
                path.chmod(0o755)
            else:
                run(["gcc", "-static", "-include", "stdio.h", "-x", "c", "-o", path, write(attacks, ran)])

    outcome = attacks.start(build, way, settings=settings, edit=edit)
    assert outcome.started, outcome.said
    assert not ran.exists()
    assert not (outcome.bundle / "rootfs/ran").exists()


def write(attacks: Attacks, ran: Path) -> Path:
    path = attacks.directory / "ran.c"
    path.write_text(PROGRAM.format(path=ran))
    return path


@pytest.mark.parametrize("way", ["hook", "configure", "update-ldcache"])
def test_the_hosts_ldconfig_cannot_be_written_while_it_runs(attacks: Attacks, way: str) -> None:
    """9 (CVE-2024-0135): what runs is a sealed copy; not even root of the host can change it or the file."""
    program = attacks.directory / "slow_ldconfig"
    run(["gcc", "-static", "-O1", "-o", program, Path(__file__).parents[1] / "support/slow_ldconfig.c"])
    before = hashlib.sha256(program.read_bytes()).hexdigest(), program.stat().st_mtime_ns

    def edit(config: dict[str, Any]) -> None:
        for stage, option in (("createContainer", "--ldconfig-path="), ("prestart", "--ldconfig=@")):
            for hook in config.get("hooks", {}).get(stage, ()):
                hook["args"].append(f"{option}{program}")

    bundle, marker = attacks.bundle(lambda *_: None, way, edit=edit)
    outcomes = []
    settings = f'ldconfig = "{program}"'
    starter = threading.Thread(target=lambda: outcomes.append(attacks.run(bundle, marker, way, settings=settings)))
    starter.start()
    try:
        wait_for("ldconfig to run", lambda: running_ldconfig(bundle))
        pid = running_ldconfig(bundle)
        with pytest.raises(OSError) as caught:
            os.open(f"/proc/{pid}/exe", os.O_WRONLY)
        assert caught.value.errno in (errno.ETXTBSY, errno.EPERM)
        fd = os.open(f"/proc/{pid}/exe", os.O_RDONLY)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        assert not os.path.samestat(os.fstat(fd), program.stat())
        os.close(fd)
    finally:
        if pid := running_ldconfig(bundle):
            os.kill(pid, signal.SIGKILL)
        starter.join()
    assert outcomes
    assert outcomes[0].started, outcomes[0].said
    assert not is_alive(pid)
    assert (hashlib.sha256(program.read_bytes()).hexdigest(), program.stat().st_mtime_ns) == before


@pytest.mark.parametrize("way", ["hook", "spec", "configure", "update-ldcache"])
def test_very_many_libraries_do_not_hold_up_the_host(attacks: Attacks, way: str) -> None:
    """11: a container that starts, or one line; ldconfig is bounded by its limits, the loader's cache is whole."""

    def build(rootfs: Path, marker: Marker) -> None:
        directory = rootfs / LIBRARY_DIR[1:]
        good = directory / "libm.so.6"
        for number in range(LIBRARIES):
            if number % 10_000 == 0:  # a file has 65,000 names at most
                library = directory / f"liboriginal{number}.so.1"
                library.write_bytes(good.read_bytes()[: 20_000 + number])
            os.link(library, directory / f"lib{number:06d}.so.1")

    outcome = attacks.start(build, way)
    assert outcome.started, outcome.said
    cache = outcome.bundle / "rootfs/etc/ld.so.cache"
    if cache.exists():
        assert stat.S_ISREG(cache.lstat().st_mode)
        subprocess.run(["ldconfig", "-p", "-C", cache], check=True, capture_output=True)


@pytest.mark.parametrize("mode", MODES)
def test_every_hook_that_is_written_has_an_environment_of_its_own(attacks: Attacks, mode: str) -> None:
    """6 (CVE-2025-23266): runtimes pass on the image's variables where an entry has none."""
    outcome = attacks.start(lambda *_: None, mode, variables={"LD_PRELOAD": "/proc/self/cwd/x.so"})
    hooks = hooks_of(outcome.bundle)
    assert hooks != []
    for hook in hooks:
        assert hook["env"], hook
        assert not [entry for entry in hook["env"] if entry.startswith(("LD_", "PYTHON"))]
