"""The unit file in which systemd keeps a container's device rules, as runc 1.1 to 1.3 and crun leave it."""

import os
import stat

import pytest

from ocigpu.core.actions import AllowDevice
from ocigpu.provision import scope
from ocigpu.provision.scope import change_scope, changed_text

GPU0 = AllowDevice(195, 0, "rw", "GPU 0")
CTL = AllowDevice(195, 255, "rw", "control")
NAME = "docker-1.scope"
CGROUP = f"/system.slice/{NAME}"
# Written by systemd 252, 257 and 262 for runc 1.1.5, 1.1.15 and 1.3.6.
RUNC = """# This is a drop-in unit file extension, created via "systemctl set-property"
# or an equivalent operation. Do not edit.
[Scope]
DeviceAllow=
DeviceAllow=char-pts rwm
DeviceAllow=/dev/char/1:3 rwm
DeviceAllow=char-* m

"""
CRUN = """# This is a transient unit file, created programmatically via the systemd API. Do not edit.
[Scope]
Slice=system.slice
DevicePolicy=strict
DeviceAllow=/dev/char/1:3 rwm

[Unit]
DefaultDependencies=no
"""


@pytest.fixture
def units(tmp_path, monkeypatch):
    """Stand for /run/systemd/transient, with the scope of one container."""
    monkeypatch.setattr(scope, "DIRECTORY", str(tmp_path))
    (tmp_path / f"{NAME}.d").mkdir()
    (tmp_path / NAME).write_text("[Scope]\nSlice=system.slice\n")
    file = tmp_path / f"{NAME}.d/50-DeviceAllow.conf"
    file.write_text(RUNC)
    os.utime(file, ns=(1, 1))
    return tmp_path


def contents(directory):
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_the_devices_are_added_to_what_systemd_keeps_and_taken_back(units):
    before, file = contents(units), units / f"{NAME}.d/50-DeviceAllow.conf"
    note, undo = change_scope(CGROUP, (GPU0, CTL))
    assert note == ""
    text = file.read_text()
    assert text == f"{RUNC}\n[Scope]\nDeviceAllow=/dev/char/195:0 rw\nDeviceAllow=/dev/char/195:255 rw\n"
    status = file.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o644, 1)  # systemctl asks for no daemon-reload
    assert change_scope(CGROUP, (GPU0,)) == ("", None)  # it says so already
    undo()
    assert contents(units) == before


def test_crun_names_the_devices_when_it_makes_the_scope(units):
    (units / f"{NAME}.d/50-DeviceAllow.conf").unlink()
    (units / NAME).write_text(CRUN)
    assert change_scope(f"/machine.slice/{NAME}/container", (GPU0,))[0] == ""
    assert (units / NAME).read_text() == f"{CRUN}\n[Scope]\nDeviceAllow=/dev/char/195:0 rw\n"


def test_a_device_that_is_taken_away_is_taken_from_systemd_too(units):
    change_scope(CGROUP, (GPU0, CTL))
    change_scope(CGROUP, (), (GPU0,))
    text = (units / f"{NAME}.d/50-DeviceAllow.conf").read_text()
    assert "195:0" not in text
    assert "DeviceAllow=/dev/char/195:255 rw\n" in text


@pytest.mark.parametrize(
    ("line", "added"),
    [("DeviceAllow=/dev/char/195:0 rwm", ""), ("DeviceAllow=/dev/char/195:0 r", "195:0 rw"), ("", "195:0 rw")],
)
def test_only_what_is_not_granted_is_added(line, added):
    after = changed_text(f"[Scope]\n{line}\n", (GPU0,), ())
    assert after == f"[Scope]\n{line}\n" + (f"\n[Scope]\nDeviceAllow=/dev/char/{added}\n" if added else "")


@pytest.mark.parametrize(
    "cgroup",
    [
        *("/docker/1", "/system.slice/other.scope", "", "/system.slice", "/.scope"),
        "/user.slice/session-3.scope/docker-1.scope",
        "/user.slice/user-1000.slice/user@1000.service/user.slice/docker-1.scope",  # an ordinary user's, named so
        "/../docker-1.scope",
    ],
)
def test_a_cgroup_that_systemd_does_not_keep_is_left_alone(units, cgroup):
    (units / "session-3.scope").write_text("[Scope]\nSlice=user.slice\n")  # rules would deny it everything else
    before = contents(units)
    assert change_scope(cgroup, (GPU0,)) == ("", None)
    assert contents(units) == before


def test_a_scope_that_ended_meanwhile_stays_away(units):
    _, undo = change_scope(CGROUP, (GPU0,))
    (units / f"{NAME}.d/50-DeviceAllow.conf").unlink()
    undo()
    assert not list((units / f"{NAME}.d").iterdir())


def test_a_unit_that_cannot_be_written_is_a_note(units):
    file = units / f"{NAME}.d/50-DeviceAllow.conf"
    file.unlink()
    file.symlink_to("/etc/passwd")
    note, undo = change_scope(CGROUP, (GPU0,))
    assert undo is None
    assert note.endswith(f"{NAME} does not include the devices: 50-DeviceAllow.conf: Too many levels of symbolic links")
