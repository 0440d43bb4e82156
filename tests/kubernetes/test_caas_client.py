"""The client of the service for containers: ocigpu caas run, list, show, logs, delete, keys."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from caas_lab import SEED, Lab, ended, make_lab, running
from support.fixtures import Run
from support.process import wait_for

from ocigpu.cli.cluster import caas_client
from ocigpu.cli.front.main import main

IMAGE = SEED["container-url"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with make_lab(tmp_path_factory.mktemp("caas")) as made:
        yield made


@pytest.fixture
def caas(lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command with a key of landon's; returns status, output and errors."""
    monkeypatch.setenv("OCIGPU_CAAS_URL", f"http://127.0.0.1:{lab.server.port}")
    monkeypatch.setenv("OCIGPU_CAAS_KEY", lab.key())

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["caas", *words])
        said = capfd.readouterr()
        return status, said.out, said.err

    return run


def test_a_container_is_run_seen_and_deleted(
    lab: Lab, caas: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pull").write_text("robot:pull-pass:word\n")
    monkeypatch.setenv("TOKEN", "hidden-value")
    words = [
        "--gpus",
        "2",
        "--cpus",
        "6",
        "--pull-credentials",
        str(tmp_path / "pull"),
        "--memory",
        "9Gi",
        "--env",
        "A=1",
        "--secret",
        "TOKEN",
        "--ends-after",
        "600",
        "--entrypoint",
        "python",
    ]
    status, out, _ = caas("run", IMAGE, *words, "--", "-m", "train")
    made = out.strip()
    assert status == 0
    pod = lab.pod(made)
    main_container = pod["spec"]["containers"][0]
    assert (main_container["command"], main_container["args"]) == (["python"], ["-m", "train"])
    assert pod["spec"]["activeDeadlineSeconds"] == 600
    assert main_container["resources"]["limits"] == {"nvidia.com/gpu": "2", "cpu": "6", "memory": "9Gi"}
    lab.set_status(made, **running())
    found = json.loads(caas("show", made, "--wait", "running", "--json")[1])
    assert (found["schema-version"], found["lifecycle"], found["gpus"]) == (1, "running", 2)
    shown = caas("show", made)[1]
    assert "vm boot 90.0 s" in shown
    assert "hidden-value" not in shown + json.dumps(found)
    assert "pass:word" not in shown + json.dumps(found)
    secret = lab.cluster.get("Secret", f"{made.replace('_', '-')}-pull", "tenant-landon")
    assert '"robot", "password": "pull-pass:word"' in secret["stringData"][".dockerconfigjson"]
    assert caas("run", IMAGE, "--pull-credentials", "/etc/hostname")[0] == 2
    assert "OCIGPU-CAAS-3" in caas("run", IMAGE, "--pull-credentials", "/nonexistent")[2]
    listed = json.loads(caas("list", "--lifecycle", "running", "--limit", "1", "--json")[1])
    assert [one["id"] for one in listed["containers"]] == [made]
    assert made in caas("list")[1]
    assert caas("delete", made) == (0, "", "")
    wait_for("its end", lambda: caas("show", made)[0] == 1)
    assert "OCIGPU-CAAS-2: not_found" in caas("show", made)[2]


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3)])
def test_follow_shows_what_it_prints_and_ends_as_it_does(lab: Lab, code: int, status: int) -> None:
    """A process of its own: a connection that breaks in the middle is taken up again."""
    env = {"OCIGPU_CAAS_URL": f"http://127.0.0.1:{lab.server.port}", "OCIGPU_CAAS_KEY": lab.key(), "PATH": "/usr/bin"}
    before = {one.id for one in lab.server.store.list_containers("landon", limit=200)}
    command = [sys.executable, "-m", "ocigpu.cli.front.main", "caas", "run", IMAGE, "--follow"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        new: set[str] = set()

        def is_there() -> bool:
            new.update({one.id for one in lab.server.store.list_containers("landon", limit=200)} - before)
            return bool(new)

        wait_for("the container", is_there)
        (made,) = new
        name = made.replace("_", "-")
        lab.pod(made)
        lab.set_status(made, **running())
        lab.cluster.log("tenant-landon", name, "2026-11-23T10:02:01Z one")
        assert process.stdout.readline() == "one\n"
        lab.stop()
        lab.start()
        lab.cluster.log("tenant-landon", name, "2026-11-23T10:02:02Z two")
        assert process.stdout.readline() == "two\n"
        lab.set_status(made, **ended(code))
        assert process.stdout.read() == ""
        said = process.stderr.read()
        assert process.wait(60) == status
    assert f"{made}: running\n" in said
    assert ("finished: completed" if code == 0 else "failed: exit_nonzero") in said
    assert "vm boot 90.0 s" in said


def test_logs_afterwards(lab: Lab, caas: Run) -> None:
    made = caas("run", IMAGE)[1].strip()
    lab.pod(made)
    for number in range(3):
        lab.cluster.log("tenant-landon", made.replace("_", "-"), f"2026-11-23T10:02:0{number}Z line {number}")
    lab.set_status(made, **running())
    wait_for("it runs", lambda: '"running"' in caas("show", made, "--json")[1])
    assert caas("logs", made, "--tail", "2")[1] == "line 1\nline 2\n"
    found = json.loads(caas("logs", made, "--tail", "1", "--json")[1])
    assert (found["container"], found["lines"]) == (made, [{"time": "2026-11-23T10:02:02Z", "text": "line 2"}])
    lab.set_status(made, **ended())
    assert caas("logs", made, "--follow", "--timestamps")[1].splitlines()[0] == "2026-11-23T10:02:00Z line 0"


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_container_prints_does_not_steer_a_terminal(
    lab: Lab, caas: Run, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    key = lab.key()
    made = lab.run(key)
    pod = lab.pod(made)["metadata"]["name"]
    lab.cluster.log("tenant-landon", pod, "2026-11-23T10:02:01Z a\tb \x1b]0;owned\x07\x1b[2J\x9b1m \u202ec")
    lab.set_status(made, **ended())
    lab.wait(key, made, "finished")
    monkeypatch.setattr("ocigpu.cli.front.show.sys.stdout.isatty", lambda: terminal)
    status, out, _ = caas("logs", made)
    assert status == 0
    if terminal:
        assert out == "a\tb \\x1b]0;owned\\x07\\x1b[2J\\x9b1m \\u202ec\n"
    else:
        assert out == "a\tb \x1b]0;owned\x07\x1b[2J\x9b1m \u202ec\n"


@pytest.mark.parametrize(
    "url", ["http://caas.example:8443", "http://10.0.0.1", "http://[fd00::1]:1/x", "http://0x7f.1"]
)
def test_a_key_is_not_sent_in_clear_without_a_word(caas: Run, url: str) -> None:
    status, _, error = caas("list", "--url", url)
    assert (status, "would be sent unencrypted" in error, "--allow-http" in error) == (2, True, True)


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.2:1", "http://[::1]:1", "https://127.0.0.1:1"])
def test_on_this_machine_and_with_tls_a_key_is_sent(caas: Run, url: str) -> None:
    status, _, error = caas("list", "--url", url)
    assert (status, "OCIGPU-CAAS-3" in error) == (1, True)
    assert "OCIGPU-CAAS-3" in caas("list", "--url", "http://127.0.0.1.:1", "--allow-http")[2]


def test_keys(lab: Lab, caas: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text(lab.admin + "\n")
    admin = ("--key-file", str(tmp_path / "admin"))
    made = json.loads(caas("keys", "create", "--tenancy", "landon", "--expires", "600", "--json", *admin)[1])
    assert made["id"] in caas("keys", "list", *admin)[1]
    assert made["key"] not in caas("keys", "list", "--json", *admin)[1]
    monkeypatch.setenv("OCIGPU_CAAS_KEY", made["key"])
    assert caas("list")[0] == 0
    assert "scope_missing" in caas("keys", "list")[2]
    ended = json.loads(caas("keys", "revoke", made["id"], "--json", *admin)[1])
    assert (ended["id"], ended["revoked"]) == (made["id"], True)
    assert "credential_invalid" in (error := caas("list")[2])
    assert "hint: set OCIGPU_CAAS_KEY" in error
    assert caas("keys", "create", "--tenancy", "landno", *admin)[2] == 'note: no tenancy is named "landno" yet\n'
    # the last admin key, by itself
    for one in json.loads(caas("keys", "list", "--json", *admin)[1])["keys"]:
        own = (tmp_path / "admin").read_text().split("_")[1]
        if "admin" in one["scopes"] and one["id"] != own:
            assert "note" not in caas("keys", "revoke", one["id"], *admin)[2]
    assert (
        "the last admin key; to create one, where the service runs: ocigpu caas admin-key"
        in (caas("keys", "revoke", own, *admin)[2])
    )


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["run", IMAGE, "--gpus", "3"], 1, "OCIGPU-CAAS-2: gpus_no_partition: gpus 3: not one of 1, 2, 4, 8"),
        (["run", "No Image"], 1, "image_invalid"),
        (["run", IMAGE, "--tenancy", "other"], 1, "tenancy_mismatch"),
        (["run", IMAGE, "--env", "NOT_THERE"], 2, "no value"),
        (["run", IMAGE, "--mount", "x"], 2, "SERVER:/PATH:/TARGET"),
        (["run", IMAGE, "--follow", "--json"], 2, "contradict"),
        (["show", "ctr_none"], 1, "not_found"),
        (["show", "../keys"], 1, "not_found"),
        (["list", "--url", "ftp://x"], 2, "not an http(s) address"),
        (["run", IMAGE, "--env", "A=\ud800"], 1, "surrogate pair is not a character (RFC 8259 section 8.2)\n"),
        (["logs", "ctr_none", "--follow", "--json"], 2, "excludes --follow"),
        (["list", "--url", "http://127.0.0.1:1"], 1, "OCIGPU-CAAS-3: http://127.0.0.1:1: Connection refused\n"),
        (["list", "--url", "https://127.0.0.1:1", "--ca", "/nonexistent"], 1, "--ca /nonexistent: No such file"),
        (["list", "--url", "https://127.0.0.1:1", "--ca", "/etc/hostname"], 1, "not certificates in PEM"),
        (["list", "--key-file", "/nonexistent"], 1, "key /nonexistent: No such file"),
        (["list", "--key-file", "/dev/zero"], 1, "key /dev/zero: larger than 4 KiB"),
    ],
)
def test_what_is_wrong_is_one_line(lab: Lab, caas: Run, words: list[str], status: int, said: str) -> None:
    found, out, error = caas(*words)
    assert (found, out) == (status, "")
    assert said in error
    assert len(error.splitlines()) <= 2
    before = len(lab.server.store.list_containers("other"))
    assert before == 0


def test_a_request_whose_answer_is_lost_makes_one_container(
    lab: Lab, caas: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, calls = caas_client.CaasClient.send, []

    def lose(self: Any, method: str, *rest: Any) -> Any:
        connection, answer = send(self, method, *rest)
        calls.append(method)
        if len(calls) == 1:
            connection.close()
            raise self._away(ConnectionResetError("reset"))
        return connection, answer

    monkeypatch.setattr(caas_client.CaasClient, "send", lose)
    before = len(lab.server.store.list_containers("landon", limit=200))
    assert caas("run", IMAGE)[0] == 0
    assert len(lab.server.store.list_containers("landon", limit=200)) == before + 1


def test_something_else_answers(caas: Run) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        status, _, error = caas("list", "--url", f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (status, "OCIGPU-CAAS-3" in error, "not this service's answer" in error) == (1, True, True)
