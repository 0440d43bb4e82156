"""``ocigpu watch``: when it looks, what it takes for a change, and what it does on hosts that really change."""

import fcntl
import json
import math
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import requirements
from support.product import PROGRAMS

from ocigpu.cdi import watch
from ocigpu.cdi.versions import NEWEST
from ocigpu.cdi.watch import (
    FIRST_RETRY,
    LONGEST_RETRY,
    LONGEST_WAIT,
    QUIET,
    RENEWAL,
    SETTLING,
    YOUNG,
    Pace,
    Uevents,
    Watch,
    describe_event,
)
from ocigpu.core.settings import Settings
from ocigpu.gpus import cached
from ocigpu.gpus.cached import read_stamp
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.sim.create import create_host
from ocigpu.system import store as cache
from ocigpu.system.settings_file import read_settings

NULL_DEVICE = Path("/sys/devices/virtual/mem/null/uevent")
NEVER = "86400"
OWN_RUN = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o mode=755 tmpfs /run && exec "$@"', "sh")
"""Put before a command of root: what it keeps below /run goes with it."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(tmp_path / "cache"))
    monkeypatch.setenv("OCIGPU_CDI_MAX_VERSION", NEWEST)  # whatever engines this machine has


# When to look and when to act: no clock but the one in the test.


def test_the_first_look_is_at_once_and_the_next_after_the_interval() -> None:
    pace = Pace(5.0, 100.0)
    assert pace.due == 100.0
    pace.succeeded(100.0)
    assert pace.due == 105.0


def test_a_change_is_acted_on_once_it_is_quiet() -> None:
    pace = Pace(5.0, 0.0)
    pace.stir(1.0)
    assert pace.due == 1.0 + QUIET
    pace.stir(1.4)
    assert pace.due == 1.4 + QUIET
    assert not pace.must_act(1.4 + QUIET)


def test_changes_without_end_are_acted_on_all_the_same() -> None:
    pace = Pace(60.0, 0.0)
    times = [1.0 + 0.4 * step for step in range(20)]
    for now in times:
        pace.stir(now)
    assert pace.due == 1.0 + LONGEST_WAIT
    assert pace.must_act(pace.due)
    pace.succeeded(pace.due)
    assert not pace.must_act(1000.0)


def test_failures_are_retried_less_and_less_often() -> None:
    pace = Pace(1000.0, 0.0)
    now, waits = 0.0, []
    for _ in range(9):
        pace.failed(now)
        assert not pace.may_retry(now)
        waits.append(pace.due - now)
        now = pace.due
        assert pace.may_retry(now)
    assert waits == [FIRST_RETRY * 2**step for step in range(6)] + [LONGEST_RETRY] * 3


def test_while_a_retry_waits_the_host_is_still_looked_at() -> None:
    pace = Pace(0.25, 0.0)
    pace.failed(0.0)
    assert pace.due == 0.25
    pace.wait(0.25)
    assert (pace.due, pace.may_retry(0.5)) == (0.5, False)


def test_a_change_of_the_host_ends_the_back_off() -> None:
    pace = Pace(5.0, 0.0)
    for _ in range(5):
        pace.failed(0.0)
    pace.forget_failures()
    assert pace.may_retry(0.0)
    pace.failed(0.0)
    assert pace.due == FIRST_RETRY


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"ACTION": "add", "SUBSYSTEM": "module", "DEVPATH": "/module/nvidia_uvm"}, "add module nvidia_uvm"),
        ({"ACTION": "unbind", "SUBSYSTEM": "pci", "DEVPATH": "/devices/pci0000:00/0000:3b:00.0"},
         "unbind pci 0000:3b:00.0"),
        ({"ACTION": "change", "SUBSYSTEM": "nvidia-nvswitch", "DEVPATH": "/x/a"}, "change nvidia-nvswitch a"),
        ({"ACTION": "add", "SUBSYSTEM": "net", "DEVPATH": "/devices/virtual/net/veth0"}, ""),
        ({"ACTION": "online", "SUBSYSTEM": "pci", "DEVPATH": "/x"}, ""),
        ({}, ""),
    ],
    ids=["module", "pci", "nvidia", "network", "another action", "nothing"],
)  # fmt: skip
def test_only_events_that_may_concern_gpus_count(event: dict[str, Any], text: str) -> None:
    assert describe_event(event) == text


def test_without_kernel_events_it_says_so_and_only_looks(
    host: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise PermissionError(1, "Operation not permitted")

    def stop_at_the_first_look(watcher: Watch, _pace: Pace, _now: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(watch, "Uevents", refuse)
    monkeypatch.setattr(Watch, "step", stop_at_the_first_look)
    before = signal.getsignal(signal.SIGTERM)
    Watch(GenerateOptions(), read_settings(str(host / "config.toml")), str(target)).run(5.0)
    assert signal.getsignal(signal.SIGTERM) is before
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "warning: no kernel events (netlink socket: Operation not permitted): only looking at intervals"


def test_facts_are_read_again_before_they_are_too_old(
    host: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "SETTLED", -1.0)  # the host was made just now
    settings = read_settings(str(host / "config.toml"))
    watcher = Watch(GenerateOptions(), settings, str(target))
    watcher.step(Pace(5.0, 0.0), 0.0)
    assert watcher.facts_due == SETTLING  # the specification was written
    assert not read_stamp(settings)
    watcher.renew_facts(SETTLING)
    stamp = read_stamp(settings)
    assert stamp
    assert watcher.facts_due == SETTLING + RENEWAL
    assert RENEWAL + YOUNG + SETTLING < cached.MAX_AGE
    (kept,) = (host / "run/ocigpu").glob("facts-*")
    before = kept.read_bytes()
    watcher.renew_facts(SETTLING + RENEWAL)
    assert kept.read_bytes() == before
    monkeypatch.setattr(watch, "YOUNG", 0.0)
    watcher.renew_facts(SETTLING + RENEWAL)
    assert kept.read_bytes() != before
    assert read_stamp(settings) == stamp


def test_no_gpu_is_woken_for_facts(host: Path, target: Path) -> None:
    (host / "run/nvidia-persistenced/socket").unlink()
    watcher = Watch(GenerateOptions(), read_settings(str(host / "config.toml")), str(target))
    watcher.renew_facts(0.0)
    assert watcher.facts_due == math.inf


def test_a_host_without_a_driver_has_no_facts_to_read(host: Path, target: Path) -> None:
    for name in ("proc", "sys", "usr"):
        shutil.rmtree(host / name)
    watcher = Watch(GenerateOptions(), read_settings(str(host / "config.toml")), str(target))
    watcher.renew_facts(0.0)
    assert watcher.facts_due == math.inf


# Kernel events.


def send_uevent(path: Path) -> None:
    """Make the kernel tell everybody of a "change" of a device that has not changed."""
    path.write_text("change\n")


def uevents_missing(path: Path) -> str:
    return "" if os.access(path, os.W_OK) else f"{path} cannot be written here"


@pytest.fixture
def uevents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uevents]:
    """The kernel's events, those of memory devices among them: every machine has these."""
    requirements.require(uevents_missing(NULL_DEVICE))
    monkeypatch.setattr(watch, "SUBSYSTEMS", (*watch.SUBSYSTEMS, "mem"))
    with NULL_DEVICE.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # such events reach every namespace: no other tests make them meanwhile
        uevents = Uevents()
        yield uevents
        uevents.close()


@pytest.mark.root
def test_kernel_events_are_received_and_read_to_the_end(uevents: Uevents) -> None:
    assert "change mem null" not in uevents.read()
    send_uevent(NULL_DEVICE)
    send_uevent(NULL_DEVICE)
    assert uevents.read().count("change mem null") == 2
    assert "change mem null" not in uevents.read()


@pytest.mark.root
def test_events_that_were_lost_are_told_and_later_ones_are_received(uevents: Uevents) -> None:
    uevents.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel takes its least
    for _ in range(64):
        send_uevent(NULL_DEVICE)
    found = uevents.read()
    assert "events were lost" in found
    assert found.count("change mem null") < 64
    send_uevent(NULL_DEVICE)
    assert "change mem null" in uevents.read()


# The whole command, on simulated hosts that change.


@pytest.fixture
def host(tmp_path: Path) -> Path:
    create_host(str(tmp_path / "host"), gpus=1, model="a100", mig=("0:1g.5gb",))
    return tmp_path / "host"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cdi/nvidia.yaml"


class Watcher:
    """The command in a process of its own; what it has said is in ``lines``."""

    def __init__(self, host: Path, target: Path, interval: str = "0.1", notify: str = "") -> None:
        command = [
            *(OWN_RUN if os.geteuid() == 0 else ()),
            PROGRAMS / "ocigpu",
            "watch",
            "--json",
            "--interval",
            interval,
        ]
        self.process = subprocess.Popen(
            [*command, "--config", host / "config.toml", "--output", target],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "NOTIFY_SOCKET": notify},
        )  # fmt: skip
        self.lines: list[dict[str, Any]] = []

    def next(self) -> dict[str, Any]:
        assert self.process.stdout
        text = self.process.stdout.readline()
        assert text, "the watch has ended"
        self.lines.append(json.loads(text))
        return self.lines[-1]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop it meanwhile: what is done is one change for it, however long a busy machine takes over the parts."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal; returns the exit status, and what else it said is in ``lines``."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate()
        self.lines += [json.loads(line) for line in rest.splitlines()]
        return self.process.returncode


@pytest.fixture
def started(host: Path, target: Path) -> Iterator[list[Watcher]]:
    running: list[Watcher] = []
    yield running
    for watcher in running:
        if watcher.process.poll() is None:
            watcher.process.kill()
            watcher.process.communicate()


@pytest.fixture
def watcher(host: Path, target: Path, started: list[Watcher]) -> Watcher:
    """A watch that has written the specification."""
    started.append(Watcher(host, target))
    assert started[0].next()["reasons"] == ["there was no file"]
    return started[0]


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def add_mig_device(host: Path, scratch: Path) -> None:
    """Give the host what another one with two MIG devices has: NVML's answers, capabilities and their nodes."""
    create_host(str(scratch), gpus=1, model="a100", mig=("0:1g.5gb,2g.10gb",))
    for library in scratch.glob("usr/lib/*/libnvidia-ml.so.*.*"):
        os.replace(library, host / library.relative_to(scratch))
    for node in (scratch / "dev/nvidia-caps").iterdir():
        if not (host / "dev/nvidia-caps" / node.name).exists():
            os.link(node, host / "dev/nvidia-caps" / node.name)
    instances = "proc/driver/nvidia/capabilities/gpu0/mig"
    shutil.copytree(scratch / instances, host / instances, dirs_exist_ok=True)


def names_in(target: Path) -> list[str]:
    return [device["name"] for device in yaml.safe_load(target.read_text())["devices"]]


def test_a_mig_device_that_is_made_leads_to_one_rewrite(
    watcher: Watcher, host: Path, target: Path, tmp_path: Path
) -> None:
    assert "0:0" in names_in(target)
    assert "0:1" not in names_in(target)
    with watcher.paused():
        add_mig_device(host, tmp_path / "other")
    line = watcher.next()
    assert line["changed"]
    assert "MIG devices have changed: 1 then, 2 now" in line["reasons"]
    assert {"0:0", "0:1"} <= set(names_in(target))
    after = identity(target)
    # something else, that changes nothing in the specification: the next line is of that
    os.utime(host / "etc/ld.so.cache", (1, 1))
    line = watcher.next()
    assert (line["changed"], line["reasons"]) == (False, ["the loader's cache has changed"])
    assert watcher.end() == 0
    assert identity(target) == after
    assert [line["changed"] for line in watcher.lines] == [True, True, False]


def test_an_imex_channel_or_a_lost_file_is_seen(watcher: Watcher, host: Path, target: Path) -> None:
    channels = host / "dev/nvidia-caps-imex-channels"
    channels.mkdir(exist_ok=True)
    (channels / "channel7").write_text("")
    assert watcher.next()["reasons"][0].startswith("IMEX channels have changed")
    target.unlink()
    line = watcher.next()
    assert (line["changed"], line["reasons"]) == (True, ["there was no file"])
    assert target.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_it_with_success(watcher: Watcher, number: int) -> None:
    assert watcher.end(number) == 0
    assert len(watcher.lines) == 1


@pytest.mark.root
def test_a_kernel_event_makes_it_look_at_once(host: Path, target: Path, started: list[Watcher]) -> None:
    device = next(Path("/sys/bus/pci/devices").glob("*/uevent"), Path("/sys/bus/pci"))
    requirements.require(uevents_missing(device))
    watcher = Watcher(host, target, NEVER)
    started.append(watcher)
    watcher.next()
    (host / "dev/nvidia-uvm-tools").chmod(0o600)
    send_uevent(device)
    line = watcher.next()
    assert line["reasons"] == ["device numbers or nodes have changed"]
    assert f"change pci {device.parent.name}" in line["events"]
    assert "(after: " in line["msg"]
    assert watcher.end() == 0


def test_a_failure_is_told_once_and_the_file_stays_until_it_is_over(watcher: Watcher, host: Path, target: Path) -> None:
    before = identity(target)
    version = host / "proc/driver/nvidia/version"
    good = version.read_text()
    version.chmod(0o644)
    version.write_text(good.replace("550.", "999."))
    line = watcher.next()
    assert line["level"] == "error"
    assert "OCIGPU-HOST-2" in line["msg"]
    assert f"{target} is unchanged, and is stale: the driver was 550." in line["msg"]
    assert identity(target) == before
    version.write_text(good)
    line = watcher.next()
    assert (line["level"], line["changed"]) == ("info", False)
    assert watcher.end() == 0
    assert identity(target) == before


def test_settings_are_read_again_when_their_file_changes(watcher: Watcher, host: Path, target: Path) -> None:
    settings = host / "config.toml"
    good = settings.read_text()
    with watcher.paused():  # what is written in place is empty before it is whole
        settings.write_text("nonsense = 1\n")
    line = watcher.next()
    assert "OCIGPU-SET-2" in line["msg"]
    assert line["msg"].endswith("the previous settings stay in force")
    assert watcher.next()["reasons"] == ["the settings file has changed"]
    with watcher.paused():
        settings.write_text(f'{good}\n[driver]\nldcache = "/etc/none"\n')
    line = watcher.next()
    assert line["changed"]
    assert line["reasons"][0].startswith("settings have changed")


def test_the_service_manager_is_told_when_it_is_ready(
    host: Path, target: Path, tmp_path: Path, started: list[Watcher]
) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        watcher = Watcher(host, target, NEVER, address)
        started.append(watcher)
        states = [manager.recv(4096).decode() for _ in range(2)]
        assert states == [f"STATUS={target} is up to date", "READY=1"]
        assert target.exists()
        assert watcher.end() == 0
        assert manager.recv(4096) == b"STOPPING=1"


def test_options_of_the_command_line_stay_when_settings_are_read_again(tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text('mode = "hook"\n')
    settings.chmod(0o644)
    from_line = read_settings(str(settings))._replace(driver_root="/run/driver")
    watcher = Watch(GenerateOptions(), from_line, str(tmp_path / "a.yaml"))
    settings.write_text("no-cgroups = true\n")
    watcher.reread_settings()
    assert watcher.settings == Settings(no_cgroups=True, driver_root="/run/driver", path=str(settings))
