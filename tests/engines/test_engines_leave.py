"""``ocigpu engine leave`` knows the containers of a real Podman, whichever database it has."""

import json
import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_roots import configure, make_host, put, snapshot
from support.podman import Podman, make_podman

from ocigpu.cli.engines import configure as commands
from ocigpu.cli.front.main import main
from ocigpu.containers import users

pytestmark = [pytest.mark.root, pytest.mark.engine]
HOOK = {"hookName": "createContainer", "path": "/usr/bin/ocigpu-hook"}
SPECIFICATION = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [{"name": "all", "containerEdits": {"hooks": [HOOK]}}],
}


@pytest.fixture
def place(session_directory: Path) -> Iterator[Path]:
    """A directory with a short path, for Podman takes no long ones."""
    place = session_directory / "leave"
    place.mkdir(mode=0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def podman(place: Path, runtime_environment: dict[str, str]) -> Podman:
    podman = make_podman(place / "podman", runtime_environment.get("LD_PRELOAD", ""))
    with (podman.directory / "containers.conf").open("a") as file:
        file.write(f'ocigpu = ["{podman.directory}/runc"]\n')
    (podman.cdi / "nvidia.json").write_text(json.dumps(SPECIFICATION))
    (podman.directory / "root").mkdir()
    return podman


def create(podman: Podman, name: str, *options: str, runtime: str = "ocigpu") -> None:
    done = podman.run(runtime, "create", "--name", name, *options, "--rootfs", podman.directory / "root", "true")
    assert done.returncode == 0, done.stderr


def test_containers_that_podman_made_keep_it(podman: Podman, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host(place)
    put(host, "/etc/containers/storage.conf", '[storage]\ngraphroot = "/podman/storage"\n')
    put(host, "/etc/cdi/nvidia.json", json.dumps(SPECIFICATION))
    configure(host, "podman")
    create(podman, "gone")
    create(podman, "plain", runtime="runc")
    create(podman, "cdi", "--device=nvidia.com/gpu=all", runtime="runc")
    create(podman, "web")
    assert podman.run("", "rm", "gone").returncode == 0
    before = snapshot(host)
    assert main(["engine", "leave", "--root", str(host)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("ocigpu: OCIGPU-ENG-6: still needed: Podman's container web, made with the runtime ocigpu\n")
    assert "podman rm" in said
    assert snapshot(host) == before
    assert podman.run("", "rm", "web").returncode == 0
    assert main(["engine", "leave", "--root", str(host)]) == 0
    said = capsys.readouterr().out
    assert " ".join(said.replace("note:", "").split()).endswith(
        "Podman's container cdi, made with nvidia.com/gpu=all, starts again once another toolkit has written "
        "/etc/cdi/nvidia.json"
    )


def test_a_users_containers_keep_nothing_and_are_named(
    podman: Podman, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files say what they like, so they stop no removal."""
    create(podman, "web")
    create(podman, "other", runtime="runc")
    nobody = pwd.getpwnam("nobody")
    home = place / "home"
    storage = home / ".local/share/containers/storage"
    shutil.copytree(podman.directory / "storage", storage, symlinks=True)
    put(home, ".config/containers/containers.conf", '[engine.runtimes]\nocigpu = ["/usr/bin/ocigpu-runtime"]\n')
    for path in (home, *home.rglob("*")):
        os.chown(path, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)
    for parent in home.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    logged_in = place / "user"
    (logged_in / str(nobody.pw_uid)).mkdir(parents=True)
    os.chown(logged_in / str(nobody.pw_uid), nobody.pw_uid, -1)
    monkeypatch.setattr(users, "USER_DIRECTORIES", str(logged_in))
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: _at(nobody, home))
    assert commands._ask_users("/", "/usr/bin/ocigpu-runtime", []) == [
        "user nobody: Podman's container web, made with the runtime ocigpu, does not start without ocigpu (podman rm)"
    ]


def _at(entry: pwd.struct_passwd, home: Path) -> pwd.struct_passwd:
    return pwd.struct_passwd((*entry[:5], str(home), entry[6]))
