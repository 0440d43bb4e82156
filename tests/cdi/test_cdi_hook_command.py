"""ocigpu-hook called for a CDI specification: what counts as such a call, where the container is, how it ends."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.process import Completed
from support.product import PROGRAMS

from ocigpu.cdi.hook_words import CreateSymlinks, DisableDeviceNodeModification, UpdateApplicationProfile
from ocigpu.core.errors import SpecError
from ocigpu.entry.cdi_hook import find_rootfs, is_cdi_call, read_driver_proc, read_hook_facts
from ocigpu.entry.cdi_hook_plan import DriverProc

HOOK = PROGRAMS / "ocigpu-hook"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("create-symlinks", True),
        ("chmod --mode 755", True),
        ("hook anything", True),
        ("make-coffee", True),
        ("prestart", False),
        ("prestrat", False),
        ("createContainer", False),
        ("-x", False),
        ("", False),
    ],
)
def test_calls_of_cdi_hooks_are_told_from_stages(line: str, expected: bool) -> None:
    assert is_cdi_call(line.split()) is expected


def bundle_with(directory: Path, **config: Any) -> Path:
    (directory / "rootfs").mkdir(parents=True)
    text = {"root": {"path": "rootfs"}, "linux": {"namespaces": [{"type": "mount"}]}, **config}
    (directory / "config.json").write_text(json.dumps(text))
    return directory


def state(**fields: Any) -> bytes:
    return json.dumps({"ociVersion": "1.0.2", "id": "c1", "status": "creating", **fields}).encode()


@pytest.mark.parametrize(
    ("root", "expected"),
    [(None, "rootfs"), ("rootfs", "rootfs"), ("other", "other"), ("./x/../other", "other"), ("/absolute", "/absolute")],
)
def test_the_root_is_that_of_the_state_or_else_of_the_bundle(root: str | None, expected: str, tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path / "bundle")
    (bundle / "other").mkdir()
    (bundle / "x").mkdir()
    wanted = bundle / expected
    if expected.startswith("/"):
        root, wanted = str(tmp_path), tmp_path
    fields = {"bundle": str(bundle), **({"root": root} if root else {})}
    assert find_rootfs(state(**fields)) == str(wanted)


def test_a_bundle_of_an_old_runtime_is_found(tmp_path: Path) -> None:
    assert find_rootfs(state(bundlePath=str(bundle_with(tmp_path / "b")))) == str(tmp_path / "b/rootfs")


@pytest.mark.parametrize(
    ("root", "code"),
    [
        ("/", "OCIGPU-SPEC-3"),
        ("../../../../../../../..", "OCIGPU-SPEC-3"),
        ("missing", "OCIGPU-SPEC-3"),
        ("config.json", "OCIGPU-SPEC-3"),
        ("", "OCIGPU-SPEC-5"),
        (5, "OCIGPU-SPEC-5"),
        ("a\0b", "OCIGPU-SPEC-5"),
    ],
)
def test_a_root_that_is_none_is_refused(root: Any, code: str, tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path / "bundle")
    with pytest.raises(SpecError) as caught:
        find_rootfs(state(bundle=str(bundle), root=root))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"root": {"path": "/"}}, "OCIGPU-SPEC-3"),
        ({"root": {}}, "OCIGPU-SPEC-3"),
        ({"root": {"path": "gone"}}, "OCIGPU-SPEC-3"),
        ({"linux": {"namespaces": []}}, "OCIGPU-SPEC-3"),
    ],
)
def test_a_bundle_without_a_container_of_its_own_is_refused(config: dict[str, Any], code: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        find_rootfs(state(bundle=str(bundle_with(tmp_path / "b", **config))))
    assert caught.value.code == code


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"bundle": "b"}', b'{"bundle": 1}', b'{"bundle": "/\\u0000"}'])
def test_what_is_no_state_is_refused(text: bytes) -> None:
    with pytest.raises(SpecError) as caught:
        find_rootfs(text)
    assert caught.value.code == "OCIGPU-SPEC-5"


# what is read of the host


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A host's procfs with a GPU and two capabilities."""
    top = tmp_path / "proc"
    write(top / "devices", "Character devices:\n195 nvidia\n509 nvidia-caps\n\nBlock devices:\n  8 sd\n")
    driver = top / "driver/nvidia"
    write(driver / "params", "ModifyDeviceFiles: 1\n")
    write(driver / "gpus/0000:3b:00.0/information", "Device Minor: \t 4\nBus Location: \t 0000:3b:00.0\n")
    write(driver / "capabilities/mig/config", "DeviceFileMinor: 1\n")
    write(driver / "capabilities/gpu4/mig/gi10/access", "DeviceFileMinor: 120\n")
    write(driver / "capabilities/gpu4/mig/gi2/ci0/access", "DeviceFileMinor: 31\n")
    write(driver / "capabilities/gpu4/mig/gi2/access", "DeviceFileMinor: 30\n")
    write(driver / "capabilities/gpu4/mig/gi3/access", "nonsense\n")
    return top


def test_the_drivers_procfs_is_read(proc: Path) -> None:
    found = read_driver_proc(f"{proc}/driver/nvidia/")
    assert found.directory == f"{proc}/driver/nvidia"
    assert [(gpu.name, gpu.minor) for gpu in found.gpus] == [("0000:3b:00.0", 4)]
    assert [item.name for item in found.files] == ["params"]
    assert found.capabilities == (
        ("mig/config", 1),
        ("gpu4/mig/gi2/access", 30),
        ("gpu4/mig/gi2/ci0/access", 31),
        ("gpu4/mig/gi10/access", 120),
    )
    assert (found.gpu_major, found.caps_major) == (195, 509)


def test_a_host_without_the_driver_has_no_procfs_of_it(tmp_path: Path) -> None:
    assert read_driver_proc(str(tmp_path / "proc/driver/nvidia")) == DriverProc("")


def read_facts(rootfs: Path, *commands: Any) -> Any:
    fd = os.open(rootfs, os.O_PATH)
    try:
        return read_hook_facts(fd, commands)
    finally:
        os.close(fd)


def test_only_what_the_commands_need_is_read(proc: Path, tmp_path: Path) -> None:
    view = DisableDeviceNodeModification(f"{proc}/driver/nvidia")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.conf").touch()
    facts = read_facts(tmp_path, view, UpdateApplicationProfile())
    assert facts.driver_proc == read_driver_proc(view.driver_proc)
    assert (facts.loader.searched, facts.compat) == ((), None)


@pytest.mark.root
def test_targets_of_device_links_are_looked_for_inside_the_container(tmp_path: Path) -> None:
    rootfs = tmp_path / "rootfs"
    (rootfs / "dev/dri").mkdir(parents=True)
    for path in (rootfs / "dev/dri/card0", tmp_path / "card9"):
        os.mknod(path, 0o600 | 0o020000, os.makedev(226, 0))
    (rootfs / "dev/dri/card1").touch()
    (rootfs / "dev/dri/card2").symlink_to("../../../card9")
    names = [f"../card{number}" for number in range(4)]
    links = CreateSymlinks((), tuple((name, f"/dev/dri/by-path/{name[3:]}") for name in names))
    assert read_facts(rootfs, links).device_targets == ("/dev/dri/card0",)


# how it ends


def call(*words: str, text: bytes = b"", program: Path = HOOK) -> Completed:
    result = subprocess.run([program, *words], input=text, capture_output=True, timeout=60, check=False, env={})
    return Completed(words, result.returncode, result.stdout.decode(), result.stderr.decode())


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("make-coffee --cup 1", 0, 'note: CDI hook "make-coffee" is unknown and was left out'),
        ("hook make", 0, 'note: CDI hook "make" is unknown and was left out'),
        ("hook", 0, "note: no CDI hook was named"),
        ("make-coffee + make-tea", 0, "note: 2 warnings: CDI hook"),
        ("create-symlinks --link", 1, "OCIGPU-ARG-1: create-symlinks: option --link needs a value"),
        ("create-symlinks --link a", 1, 'OCIGPU-ARG-1: create-symlinks: link "a" is not written TARGET::PATH'),
        ("update-ldcache --foo", 1, 'OCIGPU-ARG-1: update-ldcache: unknown option "--foo"'),
        ("chmod --path /a", 1, "OCIGPU-ARG-1: chmod: option --mode is missing"),
        ("update-application-profile", 1, "OCIGPU-SPEC-5: container's state: line 1 column 1: Expecting value"),
        ("update-application-profile --container-spec /none", 1, "OCIGPU-SPEC-5: read state /none: No such file or"),
        ("--config /none update-application-profile", 1, "OCIGPU-SET-1: settings /none: No such file or directory"),
        ("--foo create-symlinks", 2, 'OCIGPU-ARG-1: unknown option "--foo"'),
        ("coffee", 2, 'OCIGPU-ARG-1: unknown command "coffee"'),
    ],
)
def test_the_exit_status_and_one_line_tell_how_it_went(words: str, status: int, said: str) -> None:
    result = call(*words.split())
    assert result.returncode == status
    assert result.stdout == ""
    first, *more = result.stderr.splitlines()
    assert first.startswith(f"ocigpu-hook: {said}")
    assert all(line.startswith("hint: ") for line in more)
    assert len(more) <= 1


@pytest.mark.parametrize("words", ["create-symlinks --help", "hook update-ldcache -h", "--help"])
def test_help_of_a_sub_command_is_that_of_the_program(words: str) -> None:
    result = call(*words.split())
    assert (result.returncode, result.stderr) == (0, "")
    assert "create-symlinks --link TARGET::PATH" in result.stdout


@pytest.mark.parametrize("name", ["nvidia-cdi-hook", "nvidia-ctk"])
@pytest.mark.parametrize("words", ["coffee", "prestart", ""])
def test_under_the_vendors_name_every_word_is_a_cdi_hook(name: str, words: str, tmp_path: Path) -> None:
    link = tmp_path / name
    link.symlink_to(HOOK)
    result = call(*words.split(), program=link)
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.startswith("ocigpu-hook: note: ")


@pytest.mark.root
def test_the_hosts_own_mounts_are_refused(tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path / "bundle")
    words = ("create-symlinks", "--link", "a::/b")
    result = call(*words, text=state(bundle=str(bundle), pid=1))
    assert result.returncode == 1
    assert result.stderr.startswith("ocigpu-hook: OCIGPU-NS-1: ")
    assert list((bundle / "rootfs").iterdir()) == []


def test_nothing_to_do_is_done_anywhere(tmp_path: Path) -> None:
    text = state(bundle=str(bundle_with(tmp_path / "bundle")))
    assert call("create-symlinks", text=text).returncode == 0
    (tmp_path / "state.json").write_bytes(text)
    result = call("create-symlinks", "--container-spec", str(tmp_path / "state.json"))
    assert (result.returncode, result.stderr) == (0, "")
