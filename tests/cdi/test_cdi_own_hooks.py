"""Our own hooks of CDI specifications, carried out by the shim: which, where, and when they stay hooks."""

import copy
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.bundle import base_config
from support.jsondiff import render_exactly
from support.machine import LOADER, TRIPLET

from ocigpu.cdi.generate import generate
from ocigpu.containers.difference import find_original
from ocigpu.core.config_json import CDI_DEVICES, DECLARED
from ocigpu.core.settings import Settings
from ocigpu.entry.arguments import parse_arguments
from ocigpu.entry.own_hooks import split_hooks
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.runtime import edit_bundle
from ocigpu.sim.create import create_host
from ocigpu.system import store
from ocigpu.system.log import Log

Config = dict[str, Any]
LIBRARIES = f"usr/lib/{TRIPLET}"
LINK = ["create-symlinks", "--link", "libcuda.so.1::/usr/lib/libcuda.so"]


def hook(path: Path | str, *words: str, **more: Any) -> Config:
    return {"hookName": "createContainer", "path": str(path), "args": ["ocigpu-hook", *words], **more}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "bin/ocigpu-hook"
    path.parent.mkdir()
    path.touch(0o755)
    return path


def test_hooks_by_any_name_of_our_program_are_taken_and_others_stay(program: Path, tmp_path: Path) -> None:
    (tmp_path / "nvidia-cdi-hook").symlink_to(program)
    other = hook("/usr/bin/other", *LINK)
    edits = [
        {"env": ["A=1"], "hooks": [hook(program, "--config", "/c.toml", *LINK), other]},
        {"hooks": [hook(tmp_path / "nvidia-cdi-hook", "--config=/c.toml", "hook", "update-ldcache", "--folder", "/l")]},
        {"deviceNodes": [{"path": "/dev/nvidia0"}]},
    ]
    before = copy.deepcopy(edits)
    left, own = split_hooks(edits, str(program))
    assert edits == before
    assert left == ({"env": ["A=1"], "hooks": [other]}, {"hooks": []}, edits[2])
    assert own
    assert ([type(command).__name__ for command in own.commands], own.settings) == (
        ["CreateSymlinks", "UpdateLdCache"], "/c.toml",
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        [*LINK, "+", "from-the-future"],
        [*LINK, "--odd"],
        ["--trace", "/t", *LINK],
        [*LINK, "--container-spec", "/state"],
        ["prestart"],
        [],
    ],
    ids=" ".join,
)
def test_hooks_that_only_the_program_understands_stay_with_all_others(program: Path, words: list[str]) -> None:
    edits = ({"hooks": [hook(program, *LINK)]}, {"hooks": [hook(program, *words)]})
    assert split_hooks(edits, str(program)) == (edits, None)


def test_hooks_of_other_stages_and_of_two_settings_stay(program: Path) -> None:
    for first, second in (
        ({"hookName": "startContainer"}, {"hookName": "prestart"}),
        ({"args": ["h", "--config", "/a", *LINK]}, {"args": ["h", *LINK]}),
    ):
        edits = ({"hooks": [hook(program, *LINK) | first, hook(program, *LINK) | second]},)
        assert split_hooks(edits, str(program)) == (edits, None)


# --- a bundle


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    requirements.require(requirements.root())
    directory = tmp_path_factory.mktemp("simulated") / "host"
    create_host(str(directory), gpus=2, model="h100", driver_version="550.163.01", mig=["1:1g.10gb"])
    return directory


class Machine:
    """A bundle on a simulated host whose devices come from a specification of ours."""

    def __init__(self, directory: Path, host: Path, program: Path) -> None:
        self.bundle, specs = directory / "bundle", directory / "cdi"
        self.rootfs, self.log = self.bundle / "rootfs", directory / "log"
        for path in (specs, self.rootfs / "etc", self.rootfs / LIBRARIES, self.rootfs / "lib64"):
            path.mkdir(parents=True, mode=0o755)
        (self.rootfs / "etc/debian_version").touch()
        (self.rootfs / "lib64" / LOADER).touch()
        self.settings = Settings(
            mode="cdi", simulation_root=str(host), cdi_spec_dirs=(str(specs),), hook_path=str(program)
        )
        options = GenerateOptions(hook_path=str(program))
        self.spec = specs / "nvidia.json"
        self.spec.write_text(json.dumps(generate(options, self.settings._replace(path=str(host / "config.toml"))).spec))
        self.spec.chmod(0o644)

    def write(self, device: str, edit: Callable[[Config], None] = lambda _: None) -> Config:
        config = base_config(["true"], {"NVIDIA_VISIBLE_DEVICES": f"nvidia.com/gpu={device}"})
        edit(config)
        (self.bundle / "config.json").write_text(json.dumps(config))
        return config

    def start(self) -> Config:
        arguments = parse_arguments(["create", "-b", str(self.bundle), "c"])
        edit_bundle(arguments, self.settings, "/nonexistent/stub", Log(((str(self.log), "text"),)))
        found: Config = json.loads((self.bundle / "config.json").read_text())
        return found


@pytest.fixture
def machine(tmp_path: Path, host: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(store, "SYSTEM_DIRECTORY", str(tmp_path / "cache"))
    return Machine(tmp_path, host, program)


def own_hooks(config: Config) -> list[Config]:
    return [entry for entry in (config.get("hooks") or {}).get("createContainer", []) if "ocigpu-hook" in entry["path"]]


def test_links_and_the_loaders_cache_are_made_and_other_gpus_are_hidden(machine: Machine) -> None:
    original = machine.write("0")
    once = machine.start()
    assert own_hooks(once) == []
    assert os.readlink(machine.rootfs / LIBRARIES / "libcuda.so.1") == "libcuda.so.550.163.01"
    assert b"libcuda.so.1\0" in (machine.rootfs / "etc/ld.so.cache").read_bytes()
    assert "/proc/driver/nvidia/gpus/0000:02:00.0" in once["linux"]["maskedPaths"]
    assert "/proc/driver/nvidia/gpus/0000:01:00.0" not in once["linux"]["maskedPaths"]
    assert "/proc/driver/nvidia" in once["linux"]["readonlyPaths"]
    assert once["annotations"][CDI_DEVICES] == "nvidia.com/gpu=0"
    (profile,) = (m for m in once["mounts"] if m["destination"].endswith("application-profiles-rc.d"))
    assert "EGLVisibleDGPUDevices" in next(Path(profile["source"]).iterdir()).read_text()
    found = find_original(once, machine.settings, str(machine.bundle))
    assert found.mode == "cdi"
    assert all(entry in found.config["mounts"] for entry in original["mounts"])
    assert len(found.config["mounts"]) == len(original["mounts"])
    assert not {CDI_DEVICES, DECLARED} & set(found.config.get("annotations", {}))
    for name in ("maskedPaths", "readonlyPaths"):
        assert found.config["linux"].get(name, []) == original["linux"].get(name, []), name


@pytest.mark.parametrize("keeps", [True, False], ids=["asks again", "void"])
def test_starting_twice_equals_starting_once(machine: Machine, keeps: bool) -> None:
    """Specifications overwrite the variable that asked: what is there stays, then."""
    machine.write("0")
    once = machine.start()
    if keeps:
        once["process"]["env"] = [*once["process"]["env"], "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"]
        (machine.bundle / "config.json").write_text(json.dumps(once))
    again = machine.start()
    env, again["process"]["env"] = again["process"]["env"], once["process"]["env"]
    assert "NVIDIA_VISIBLE_DEVICES=void" in env
    assert render_exactly(again) == render_exactly(once)


def test_another_request_takes_back_what_was_hidden(machine: Machine) -> None:
    machine.write("0")
    config = machine.start()
    config["process"]["env"] = ["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=1:0"]
    (machine.bundle / "config.json").write_text(json.dumps(config))
    config = machine.start()
    assert own_hooks(config), "MIG devices need the hook"
    assert not [path for path in config["linux"].get("maskedPaths", []) if "nvidia" in path]
    assert not {CDI_DEVICES, DECLARED} & set(config["annotations"])


def volume(config: Config) -> None:
    cache = "/etc/ld.so.cache"
    entry = {"destination": cache, "type": "bind", "source": cache, "options": ["rbind"]}
    config["mounts"].append(entry)


def capable(config: Config) -> None:
    config["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
    config["process"]["capabilities"] = {"bounding": ["CAP_MKNOD"]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (volume, "is in or below what is mounted on /etc/ld.so.cache"),
        (capable, "it may make and open nodes of GPUs that are not granted"),
    ],
)
def test_what_mode_spec_could_not_do_stays_a_hook(
    machine: Machine, change: Callable[[Config], None], reason: str
) -> None:
    machine.write("0", change)
    assert len(own_hooks(machine.start())) == 1
    assert reason in machine.log.read_text()
    assert not (machine.rootfs / "etc/ld.so.cache").exists()


def test_a_link_beside_nodes_stays_a_hook(machine: Machine, program: Path) -> None:
    """A view of their directory would cover them."""
    spec = json.loads(machine.spec.read_text())
    words = ["--config", f"{machine.settings.simulation_root}/config.toml", "create-symlinks"]
    spec["containerEdits"]["hooks"].append(hook(program, *words, "--link", "nvidia0::/dev/again"))
    machine.spec.write_text(json.dumps(spec))
    machine.write("0")
    assert own_hooks(machine.start())
    assert "a link is beside nodes in /dev" in machine.log.read_text()


def test_a_mount_below_proc_is_not_taken_for_a_simulated_hosts(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").touch()
    spec = json.loads(machine.spec.read_text())
    mount = {"hostPath": str(tmp_path / "cpuinfo"), "containerPath": "/proc/cpuinfo", "options": ["ro", "bind"]}
    spec["containerEdits"]["mounts"].append(mount)
    machine.spec.write_text(json.dumps(spec))
    machine.write("0")
    assert "cpuinfo" not in json.dumps(machine.start()["hooks"])


@pytest.mark.parametrize("name", [f"{LIBRARIES}/libcuda.so.1", "etc/ld.so.cache"])
def test_an_image_with_something_else_in_the_place_needs_the_hook(machine: Machine, name: str) -> None:
    (machine.rootfs / name).write_text("the image's")
    machine.write("0")
    config = machine.start()
    assert len(own_hooks(config)) == 1
    assert (machine.rootfs / name).read_text() == "the image's"
    assert not list((machine.rootfs / LIBRARIES).glob("*nvidia*"))
    assert CDI_DEVICES not in config.get("annotations", {})


def test_links_of_an_image_lead_nowhere(machine: Machine, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (machine.rootfs / LIBRARIES).rmdir()
    (machine.rootfs / LIBRARIES).symlink_to(outside)
    machine.write("0")
    machine.start()
    assert list(outside.iterdir()) == []


def test_nothing_is_kept_of_a_library_that_could_not_be_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def busy(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith("/libcuda.so.550.163.01"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return real(path, flags, *rest, **more)

    machine.write("0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", busy)
        config = machine.start()
    assert len(own_hooks(config)) == 1
    assert "libcuda.so.550.163.01: Too many open files" in machine.log.read_text()
    machine.write("0")
    assert own_hooks(machine.start()) == []
    assert b"libcuda.so.1\0" in (machine.rootfs / "etc/ld.so.cache").read_bytes()
