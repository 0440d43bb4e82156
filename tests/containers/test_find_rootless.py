"""A user without privileges: the own containers are seen with their GPUs, and root does not trust their states."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from containers_lab import WAITING, runc_state, write_state
from support import machine, requirements
from support.bundle import give_to
from support.fixtures import MakeBundle
from support.process import explain, run, wait_for
from support.product import PublicCopy, SimulatedHost, open_clone
from support.runtimes import container_id, start_in_background

from ocigpu.cli.front.main import main
from ocigpu.containers import find, users
from ocigpu.containers.find import Places, find_containers
from ocigpu.containers.report import make_reports
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.system.child import Child
from ocigpu.system.settings_file import read_settings

pytestmark = [pytest.mark.root, pytest.mark.engine]

USER = 4321


def make_rootless(config: dict[str, Any]) -> None:
    """Change a config as ``runc spec --rootless`` writes it: one id mapped, no cgroup, the host's network and sysfs."""
    linux = config["linux"]
    linux["namespaces"] = [item for item in linux["namespaces"] if item["type"] != "network"] + [{"type": "user"}]
    for name in ("uidMappings", "gidMappings"):
        linux[name] = [{"containerID": 0, "hostID": USER, "size": 1}]
    del linux["resources"]
    config["mounts"] = [item for item in config["mounts"] if item["destination"] != "/sys"]


def seen_by_user(places: Places, host: SimulatedHost) -> list[Any]:
    """Return status, mode, GPUs and notes of each container as the user sees them, in a process of theirs."""
    settings = read_settings(str(host.settings))
    facts = read_host_facts(settings)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            open_clone()
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            reports = make_reports(find_containers(places)[0], facts, settings)
            seen = [
                [one.container.status, one.mode, [[gpu.index, gpu.state] for gpu in one.gpus], one.notes]
                for one in reports
            ]
            os.write(writer, json.dumps(seen).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as file:
        found: list[Any] = json.load(file)
    return found


@pytest.mark.rest
def test_a_rootless_container_is_its_users(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    public_copy: PublicCopy,
    runtime_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    requirements.require(requirements.user_namespaces())
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0,2"}, layout="busybox", edit=make_rootless)
    path = bundle / "config.json"
    config = json.loads(path.read_text())
    del config["linux"]["cgroupsPath"]
    path.write_text(json.dumps(config))
    state: Path = bundle.parent / str(USER) / "runc"
    (bundle.parent / "run").mkdir(mode=0o700)
    state.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(users, "USER_DIRECTORIES", str(bundle.parent))
    give_to(bundle.parent, USER, USER)
    environment = simulated_host.environment(runtime_environment)
    environment |= {"HOME": str(bundle.parent), "XDG_RUNTIME_DIR": str(bundle.parent / "run")}
    user = ("setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups")
    command = (*user, str(public_copy.runtime), "--root", str(state))
    name, places = container_id(), Places((str(state),))
    try:
        started = start_in_background(command, ["run", "--detach"], bundle, name, environment)
        assert started.returncode == 0, explain(started)
        ((status, mode, gpus, notes),) = seen_by_user(places, simulated_host)
        assert (status, mode, gpus) == ("running", "hook", [[0, ""], [2, ""]])
        assert len(notes) == 1
        assert notes[0].startswith("its device cgroup cannot be queried: ")
        assert find_containers(places) == (
            [], [f"{state}: states of user {USER} are not trusted: inspect them as that user"],
        )  # fmt: skip
        settings = read_settings(str(simulated_host.settings))
        (shown,), notes = users.find_of_users(read_host_facts(settings), settings)
        assert (shown.user, shown.name, shown.engine, shown.status, shown.mode) == (
            str(USER),
            name,
            "runc",
            "running",
            "hook",
        )
        assert [(index, uuid) for index, uuid, _ in shown.gpus] == [(str(i), simulated_host.gpus[i]) for i in (0, 2)]
        assert notes == []
        assert main(["explain", name[:-2], "--config", str(simulated_host.settings)]) == 0
        first, *text = capsys.readouterr().out.splitlines()
        assert first == f"of user {USER}, by their own files"
        assert re.search(rf"^container +{name} \(runc; running", text[0])
        seen = [line.split()[:2] for line in text if line.endswith("A100-SXM4-40GB  -")]
        assert seen == [[str(number), simulated_host.gpus[number]] for number in (0, 2)]
        assert main(["explain", name, "--config", str(simulated_host.settings), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["user"], data["explanation"]["container"]["name"]) == (str(USER), name)
        assert main(["diff", name, "--config", str(simulated_host.settings)]) == 0
        first, *text = capsys.readouterr().out.splitlines()
        assert first == f"of user {USER}, by their own files"
        assert any(line.startswith("+") and "ocigpu-hook" in line for line in text)
        assert main(["diff", name, "--config", str(simulated_host.settings), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["user"], data["mode"], bool(data["changes"])) == (str(USER), "hook", True)
        for words in (
            ["verify", name],
            ["attach", name, "--gpu", "1"],
            ["detach", name, "--gpu", "0"],
            ["repair", name],
        ):
            assert main([*words, "--config", str(simulated_host.settings)]) == 1
            said = capsys.readouterr().err
            assert f'container "{name}" is rootless, of user {USER}' in said
            assert "hint: Rootless containers: ocigpu ps, explain and diff work" in said
        assert main(["verify", "no-such-one", "--config", str(simulated_host.settings)]) == 1
        assert "OCIGPU-CTR-1" in capsys.readouterr().err
        assert "OCIGPU-CTR-6" in said_by_user(name, bundle.parent, simulated_host)
    finally:
        run([*command, "delete", "--force", name], env=environment, check=False)


def said_by_user(name: str, directory: Path, host: SimulatedHost) -> str:
    """Return what verify says to the user, whose containers are where XDG and /run/user would have them."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            find.USER_DIRECTORIES = str(directory)
            open_clone()
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            os.dup2(writer, 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            main(["verify", name, "--config", str(host.settings)])
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as file:
        text = file.read()
    assert f'container "{name}" is rootless' in text, text
    return text


def user_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a user's runc in a /run/user of the test."""
    machine.let_others_in(tmp_path)
    monkeypatch.setattr(users, "USER_DIRECTORIES", str(tmp_path))
    state = tmp_path / str(USER) / "runc"
    state.mkdir(parents=True)
    return state


def test_what_a_user_writes_is_shown_and_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of others' processes, of others' files, endless ones, and names with control characters."""
    state = user_directory(tmp_path, monkeypatch)
    secret = write_state(tmp_path / "roots", "secret", runc_state(pid=1))
    (state / "link").symlink_to(secret.parent)
    write_state(state, "of-root", runc_state(pid=1))
    (state / "fifo").mkdir()
    os.mkfifo(state / "fifo/state.json")
    write_state(state, "name\x1b[2J", runc_state())
    write_state(state, "large", b" " * (users.MAX_ANSWER + 1))
    give_to(tmp_path / str(USER), USER, USER)
    found, notes = users.find_of_users(HostFacts(), Settings())
    assert sorted(one.name for one in found) == ["name\x1b[2J", "of-root"]
    assert {one.gpus for one in found} == {()}
    assert notes == []


def test_a_user_who_never_answers_costs_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_to(user_directory(tmp_path, monkeypatch).parent, USER, USER)
    pids = tmp_path / "pids"
    pids.touch()
    pids.chmod(0o666)

    def hang(_places: Places) -> None:
        if os.fork() == 0:
            pids.write_text(str(os.getpid()))
        signal.pause()

    class Begun(Child):
        """One whose answer is waited for when it hangs, however late a busy machine lets it begin."""

        def collect(self, limit: int) -> tuple[bytes, int]:
            wait_for("the child's child", pids.read_text)
            return super().collect(limit)

    monkeypatch.setattr(users, "find_containers", hang)
    monkeypatch.setattr(users, "Child", Begun)
    monkeypatch.setattr(users, "SECONDS", 0.2)
    assert users.find_of_users(HostFacts(), Settings()) == ([], [f"containers of user {USER} could not be inspected"])
    wait_for("its child is gone", lambda: not Path(f"/proc/{pids.read_text()}").exists())


def test_directories_that_are_not_their_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(user_directory(tmp_path, monkeypatch), "x", runc_state())
    (tmp_path / "name").mkdir()
    assert users.find_of_users(HostFacts(), Settings()) == ([], [])
