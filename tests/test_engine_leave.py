"""``ocigpu engine leave``: engines as they were before, or a refusal that says what needs ocigpu."""

import json
import os
from pathlib import Path

import pytest
from support.engine_roots import configure, make_host, put, snapshot

from ocigpu.cli.front.main import main

DAEMON = '{\n  "log-driver": "journald"\n}\n'
TASK = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/0123456789abcdef/runtime"
STAT = "9 (dockerd) S 1 " + "0 " * 17 + "{start} 0\n"
MADE = "/var/lib/docker/containers/0123456789abcdef"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    put(tmp_path, "/etc/docker/daemon.json", DAEMON)
    return make_host(tmp_path)


def leave(host: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["engine", "leave", "--root", str(host), *words])
    return status, capsys.readouterr().err


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio", "podman"])
def test_every_engine_is_as_it_was_before(host: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(host)
    configure(host, engine, default=True)
    assert snapshot(host) != before
    assert leave(host, capsys) == (0, "")
    assert snapshot(host) == before
    assert leave(host, capsys) == (0, "")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({TASK: "/usr/bin/ocigpu-runtime"}, "container 0123456789ab of k8s.io", id="containerd"),
        pytest.param(
            {"/proc/7/cmdline": "/usr/bin/conmon\0-c\0abc\0-n\0web\0-r\0/usr/bin/ocigpu-runtime\0-b\0/x\0"},
            "container web of conmon",
            id="Podman",
        ),
        pytest.param(
            {
                f"{MADE}/hostconfig.json": json.dumps({"Runtime": "ocigpu"}),
                f"{MADE}/config.v2.json": json.dumps({"Name": "/web"}),
            },
            "Docker's container web, made with the runtime ocigpu",
            id="Docker",
        ),
    ],
)
def test_a_container_that_needs_it_keeps_it_and_nothing_is_changed(
    host: Path, files: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(host, "docker")
    for path, text in files.items():
        put(host, path, text)
    before = snapshot(host)
    status, said = leave(host, capsys)
    assert status == 1
    assert said.startswith(f"ocigpu: OCIGPU-ENG-6: still needed: {message}")
    assert snapshot(host) == before


@pytest.mark.parametrize(("uid", "status"), [(0, 1), (4321, 0)], ids=["root's", "a user's"])
def test_containers_are_found_where_their_containerd_has_its_state(
    host: Path, uid: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether --state or a file says so: its shims work there.  Of the pod, which one shim serves, all containers."""
    task = put(host, TASK.replace("/run/containerd", "/srv/state"), "/usr/bin/ocigpu-runtime")
    put(host, "/proc/7/cmdline", "/usr/bin/containerd-shim-runc-v2\0-namespace\0k8s.io\0-id\0pod\0")
    put(host, "/proc/7/status", f"Uid:\t{uid or os.geteuid()}\nNSpid:\t7\n")
    assert leave(host, capsys) == (0, "")
    (host / "proc/7/cwd").symlink_to(f"/{task.parents[1].relative_to(host)}/pod")
    found, said = leave(host, capsys)
    assert (found, "container 0123456789ab of k8s.io" in said) == (status, bool(status))


@pytest.mark.parametrize("words", [(), ("--program", "nvidia-container-runtime")])
def test_a_container_of_gpus_keeps_the_last_hook(
    host: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    put(host, f"{MADE}/config.v2.json", json.dumps({"Name": "/web"}))
    request = {"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}
    asks = put(host, f"{MADE}/hostconfig.json", json.dumps({"Runtime": "runc", "DeviceRequests": [request]}))
    assert leave(host, capsys, *words) == (0, "")  # of another toolkit, which is gone
    link = host / "usr/bin/nvidia-container-runtime-hook"
    link.symlink_to("ocigpu-hook")
    status, said = leave(host, capsys, *words)
    assert status == 1
    assert said.startswith("ocigpu: OCIGPU-ENG-6: still needed: Docker's container web, made with --gpus\n")
    other = put(host, "/usr/local/bin/nvidia-container-runtime-hook", "#!/bin/sh\n", 0o755)
    assert leave(host, capsys, *words) == (0, "")
    other.unlink()
    asks.write_text(json.dumps({"Runtime": "runc", "DeviceRequests": [{**request, "Driver": "cdi"}]}))
    assert leave(host, capsys, *words) == (0, "")


def test_a_configuration_that_cannot_be_understood_and_says_the_name_keeps_it(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An entry that is only not seen: a comma too many, and the package would go."""
    put(host, "/etc/docker/daemon.json", '{"runtimes": {"ocigpu": {"path": "/usr/bin/ocigpu-runtime"}},}')
    status, said = leave(host, capsys)
    assert status == 1
    assert "docker: /etc/docker/daemon.json" in said
    assert "and it says ocigpu-runtime" in said
    put(host, "/etc/docker/daemon.json", '{"runtimes": {},}')
    assert leave(host, capsys)[0] == 0


def test_containers_of_other_runtimes_need_nothing(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(host, "docker")
    put(host, TASK, "/usr/bin/runc")
    put(host, "/proc/7/cmdline", "conmon\0-r\0/usr/bin/crun\0")
    put(host, "/proc/8/cmdline", "conmon\0-n\0web\0-r\0/usr/bin/ocigpu-runtime\0")  # a container's process says so
    put(host, "/proc/8/status", f"Uid:\t{os.geteuid()}\nNSpid:\t8\t1\n")
    put(host, f"{MADE}/hostconfig.json", json.dumps({"Runtime": "runc"}))
    assert leave(host, capsys)[0] == 0
    assert (host / "etc/docker/daemon.json").read_text() == DAEMON


def test_an_entry_that_leads_to_it_by_another_name_keeps_it(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the vendor's toolkit, from before: it is not ocigpu's to take out."""
    put(host, "/etc/docker/daemon.json", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}')
    link = host / "usr/bin/nvidia-container-runtime"
    link.symlink_to("ocigpu-runtime")
    for words in ((), ("--program", "nvidia-container-runtime")):
        status, said = leave(host, capsys, *words)
        assert status == 1
        assert 'docker: the runtime "nvidia" of /etc/docker/daemon.json is nvidia-container-runtime' in said
    link.unlink()
    put(host, "/usr/bin/nvidia-container-runtime", "#!/bin/sh\n", 0o755)  # the vendor's is back
    for words in ((), ("--program", "nvidia-container-runtime")):
        assert leave(host, capsys, *words) == (0, "")


def test_a_daemon_that_has_it_as_default_keeps_it_until_it_was_restarted(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(host, "docker", default=True)
    put(host, "/proc/9/cmdline", "/usr/bin/dockerd\0-H\0fd://\0")
    put(host, "/proc/9/status", f"Uid:\t{os.geteuid()}\t0\t0\t0\nNSpid:\t9\n")
    put(host, "/proc/9/stat", STAT.format(start=100))
    for _ in range(2):  # removing the package once more is no restart
        status, said = leave(host, capsys)
        assert status == 1
        assert "docker starts every container with it until: restart docker" in said
        assert (host / "etc/docker/daemon.json").read_text() == DAEMON
    put(host, "/proc/9/stat", STAT.format(start=200))
    assert leave(host, capsys) == (0, "")


GENERATED = """\
# File generated by k3s. DO NOT EDIT. Use config.toml.tmpl instead.
version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes."{name}"]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes."{name}".options]
  BinaryName = "{path}"
"""


@pytest.mark.parametrize(("name", "path"), [("ocigpu", "ocigpu-runtime"), ("nvidia", "nvidia-container-runtime")])
def test_what_k3s_writes_at_each_start_keeps_nothing(
    host: Path, name: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of our template, or of a program of the vendor's name that it finds: nobody could take it out by hand."""
    (host / "usr/bin/nvidia-container-runtime").symlink_to("ocigpu-runtime")
    k3s = "/var/lib/rancher/k3s/agent/etc/containerd"
    written = put(host, f"{k3s}/config.toml", GENERATED.format(name="runc", path="/usr/bin/runc"))
    before = snapshot(host)
    configure(host, "containerd", config=f"{k3s}/config.toml")
    written.write_text(GENERATED.format(name=name, path=f"/usr/bin/{path}"))  # it has started
    status = main(["engine", "leave", "--root", str(host)])
    said = capsys.readouterr()
    assert (status, said.err) == (0, "")
    assert "next step: systemctl restart k3s" in said.out
    written.write_text(GENERATED.format(name="runc", path="/usr/bin/runc"))  # once more
    assert snapshot(host) == before
    assert leave(host, capsys, "--program", "nvidia-container-runtime") == (0, "")
