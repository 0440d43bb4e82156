"""Facts kept between starts under a storm of containers: a start after a change never sees what was before."""

import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import requirements
from support.machine import TRIPLET
from support.process import wait_for
from support.product import REPOSITORY, RUNTIME, make_simulated_host

pytestmark = [pytest.mark.root, pytest.mark.engine]

WORKERS = 16
"""Six in make test."""
OWN_RUN = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o mode=755 tmpfs /run && exec "$@"', "sh")
LOW_LEVEL = """#!/bin/sh
# stands for runc: shows what it was given, and what the hook would read
cat "$3/config.json"
echo
[ {mode} = hook ] || exit 0
exec {python} -I -S -c '
import sys
sys.path.append("{library}")
from ocigpu.gpus.cached import read_facts
from ocigpu.core.settings import Settings
facts = read_facts(Settings(simulation_root="{host}"))
print(*(item.host_path for item in facts.libraries if item.soname == "libcuda.so.1" and item.bits == 64))'
"""
CONFIG: dict[str, Any] = {
    "ociVersion": "1.0.2",
    "root": {"path": "rootfs"},
    "process": {"args": ["true"], "env": ["NVIDIA_VISIBLE_DEVICES=1"]},
    "linux": {"namespaces": [{"type": "mount"}], "resources": {"devices": [{"allow": False, "access": "rwm"}]}},
}


class Seen(NamedTuple):
    """What one start was given: the numbers of nodes that it may use, the path of libcuda."""

    numbers: frozenset[tuple[int, int]]
    library: str


class Starts:
    """Starts containers of a simulated host with a low-level runtime that only shows what it was given."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.directory, self.mode = directory, mode
        self.host = directory / "host"
        make_simulated_host(self.host, 2)
        low_level = directory / "low-level"
        python = os.path.realpath(sys.executable)
        low_level.write_text(LOW_LEVEL.format(host=self.host, python=python, library=REPOSITORY, mode=mode))
        low_level.chmod(0o755)
        self.settings = directory / "config.toml"
        text = f'mode = "{mode}"\nruntime.runtimes = ["{low_level}"]\nsimulation.root = "{self.host}"\n'
        self.settings.write_text(text)
        self.settings.chmod(0o644)
        self._numbers = itertools.count()

    def start(self) -> Seen | None:
        """Start a container with a GPU; None when that was refused with a code of ours."""
        bundle = self.directory / f"bundle{next(self._numbers)}"
        (bundle / "rootfs").mkdir(parents=True)
        (bundle / "config.json").write_text(json.dumps(CONFIG))
        done = subprocess.run(
            [*OWN_RUN, RUNTIME, "create", "--bundle", bundle, bundle.name],
            env={"PATH": os.environ["PATH"], "OCIGPU_CONFIG": str(self.settings)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            assert "OCIGPU-" in done.stderr, done.stderr
            return None
        if self.mode == "spec":
            return read_declared(json.loads(done.stdout))
        text, library = done.stdout.rstrip("\n").rsplit("\n", 1)
        return Seen(allowed_numbers(json.loads(text)), library)

    def has_answers(self) -> bool:
        """Start until facts are kept, and what follows from them for this request."""
        self.start()
        kept = "declared-*" if self.mode == "spec" else "rules-*"
        return all(any((self.host / "run/ocigpu").glob(names)) for names in ("facts-*", kept))


def allowed_numbers(config: dict[str, Any]) -> frozenset[tuple[int, int]]:
    rules = config["linux"]["resources"]["devices"]
    return frozenset((rule["major"], rule["minor"]) for rule in rules if rule["allow"])


def read_declared(config: dict[str, Any]) -> Seen:
    """Return what a configuration of mode spec gives; its nodes are those of its rules."""
    assert "ocigpu-hook" not in json.dumps(config)
    numbers = allowed_numbers(config)
    assert {(node["major"], node["minor"]) for node in config["linux"]["devices"]} == numbers
    sources = [mount["source"] for mount in config["mounts"] if "/libcuda.so." in mount["destination"]]
    return Seen(numbers, *[source for source in sources if "i386" not in source and "lib32" not in source])


def change_host(host: Path) -> None:
    """What loading another build of the driver does: other numbers, other nodes, a library at another place."""
    for name, minor in (("nvidia-uvm", 0), ("nvidia-uvm-tools", 1)):
        (host / "dev" / name).unlink()
        os.mknod(host / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(411, minor))
        (host / "dev" / name).chmod(0o666)
    devices = host / "proc/devices"
    devices.write_text(devices.read_text().replace("510 nvidia-uvm", "411 nvidia-uvm"))
    directory = host / "usr/lib" / TRIPLET
    library = next(directory.glob("libcuda.so.5*"))
    (directory / "new").mkdir()
    shutil.move(library, directory / "new" / library.name)
    (directory / "link").symlink_to(f"new/{library.name}")
    (directory / "link").rename(directory / "libcuda.so.1")


@pytest.mark.rest
@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_a_start_after_a_change_never_gets_what_was_before(
    work_directory: Path, mode: str, times: Callable[[int], int]
) -> None:
    requirements.require(requirements.root(), requirements.programs("gcc", "unshare"))
    starts = Starts(work_directory, mode)
    wait_for("facts that are kept", starts.has_answers)
    old = starts.start()
    assert old
    assert {number for number in old.numbers if number[0] == 510} == {(510, 0), (510, 1)}
    changed = threading.Event()
    workers = min(WORKERS, times(60))
    begun = threading.Barrier(workers + 1, timeout=250)

    def keep_starting(_: int) -> list[tuple[bool, Seen | None]]:
        found = [(False, starts.start())]
        begun.wait()
        for _ in range(3):
            after = changed.is_set()
            found.append((after, starts.start()))
        assert changed.wait(250)
        found.append((True, starts.start()))
        return found

    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(keep_starting, number) for number in range(workers)]
        begun.wait()
        change_host(starts.host)
        changed.set()
        found = [item for future in running for item in future.result()]
    new = Seen(
        frozenset((411 if major == 510 else major, minor) for major, minor in old.numbers),
        old.library.replace("/libcuda", "/new/libcuda"),
    )
    assert os.path.isfile(new.library)
    assert {seen for after, seen in found if after} == {new}
    during = [seen for after, seen in found if not after and seen]
    assert {seen.library for seen in during} <= {old.library, new.library, ""}
    assert {number for seen in during for number in seen.numbers} <= old.numbers | new.numbers
