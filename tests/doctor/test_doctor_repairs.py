"""Commands that make files readable again, and findings of engines that such commands fix."""

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.engine_roots import make_host, put
from support.fixtures import Run

from ocigpu.doctor import repairs
from ocigpu.doctor.host import Host
from ocigpu.doctor.repairs import find_config_repair, find_entry_repair, find_removal, find_repair, find_switch_repair
from ocigpu.doctor.report import run_checks
from ocigpu.engines import units
from ocigpu.engines.places import parse_config

SWITCH = 'disabled_plugins = ["io.containerd.grpc.v1.cri", "x.y"]\nroot = "/a,]"\n'


def repaired(file: Path, command: str) -> dict[str, Any]:
    subprocess.run(["sh", "-e", "-c", command], check=True)
    return parse_config(str(file), file.read_text())


@pytest.mark.parametrize(
    ("name", "text", "data"),
    [
        ("a.json", '{"a": [1, 2, ],\n "b": {"c": 1,\n}\n,}', {"a": [1, 2], "b": {"c": 1}}),
        ("a.json", '{"a": ",}",\n}', {"a": ",}"}),
        ("a.json", '{"a": ",}", "b": {"c": [1,],}, }', {"a": ",}", "b": {"c": [1]}}),
        ("a.json", '{"a": {"b": "/c d"},\t\r\n}', {"a": {"b": "/c d"}}),
        ("a.json", '{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ("a.json", '{\n  "a": {"b": true}\n  "c": "d",\n  "e": [1 2],\n}\n', {"a": {"b": True}, "c": "d", "e": [1, 2]}),
        ("a.json", '{\n  // one, "two"\n  # three\n  "a": "// b" // "c"\n}\n', {"a": "// b"}),
        ("a.json", '{\n  "a": {"b": [1, 2,\n', {"a": {"b": [1, 2]}}),
        ("a.json", "{\n", {}),
        ("a.json", "{ \u201cdns\u201d: [\u201c192.0.2.1\u201d] }\n", {"dns": ["192.0.2.1"]}),
        ("a.toml", "[a]\nb = 1\nc = d\n  e = f\n", {"a": {"b": 1}}),
        ("a.toml", "[a\nb = 1\n", {"b": 1}),
    ],
)
def test_a_command_makes_a_file_readable(name: str, text: str, data: object, tmp_path: Path) -> None:
    file = tmp_path / f"it's {name}"
    file.write_bytes(text.encode())
    command = find_repair(str(file), text, partial(parse_config, name))
    assert repaired(file, command) == data


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"a" 1}'),
        ("a.json", '{"a": 1} x'),
        ("a.json", '{"a": "b}'),
        ("a.json", '{"a": [01]}'),
        ("a.json", '\ufeff{"a": [12 3]}'),
        ("a.json", "{" + '"a": [' * 2000),
        ("a.json", "{}"),
        ("a.toml", "a = [\n1,\n"),
        ("a.toml", "a\n" * 5),
        ("a.toml", "a = 1\n"),
    ],
)
def test_no_command_is_printed_that_does_not_help(name: str, text: str) -> None:
    assert find_repair(f"/{name}", text, partial(parse_config, name)) == ""


@pytest.mark.parametrize(
    ("service", "socket", "before"),
    [
        ("loaded active running", "loaded active listening", ""),
        ("loaded inactive dead", "not-found inactive dead", ""),
        ("loaded failed failed", "loaded failed failed", "systemctl reset-failed docker.service docker.socket && "),
        ("loaded activating auto-restart", "loaded active running", "systemctl reset-failed docker.service && "),
        ("masked inactive dead", "loaded failed failed",
         "systemctl unmask docker.service && systemctl reset-failed docker.socket && "),
    ],
)  # fmt: skip
def test_a_service_that_systemd_refuses_is_made_ready_first(
    service: str, socket: str, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = ("LoadState={}\nActiveState={}\nSubState={}\n".format(*each.split()) for each in (service, socket))
    (tmp_path / "answer").write_text("\n".join(blocks))
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(units, "BOOTED", str(tmp_path))
    assert units.start_command("docker") == f"{before}systemctl restart docker"
    assert units.start_command("docker", "start") == f"{before}systemctl start docker"
    of_user = before.replace("systemctl", "systemctl --user")
    assert units.start_command("--user docker") == f"{of_user}systemctl --user restart docker"
    monkeypatch.setattr(units, "BOOTED", str(tmp_path / "none"))
    assert units.start_command("docker") == "systemctl restart docker"


def test_the_command_line_of_a_service_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd 257 prints that of Debian's docker.service."""
    shown = "ExecStart={ path=/usr/sbin/dockerd ; argv[]=/usr/sbin/dockerd -H fd:// $DOCKER_OPTS ; ignore_errors=no }"
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho '{shown}'\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(units, "BOOTED", str(tmp_path))
    assert units.read_words("docker") == ["/usr/sbin/dockerd", "-H", "fd://"]
    monkeypatch.setattr(units, "BOOTED", str(tmp_path / "none"))
    assert units.read_words("docker") == []


def test_keys_are_renamed_or_taken_out(tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    runtimes, hosts = '"runtimess": {"a": {"path": "/a\\\\b"}}', '"hosts": [\n        "fd://"\n    ]'
    file.write_text(f'{{\n    {runtimes},\n    "debug": true,\n    {hosts}\n}}\n')
    command = find_removal(str(file), file.read_text(), {"runtimess": "runtimes", "hosts": ""})
    assert repaired(file, command) == {"runtimes": {"a": {"path": "/a\\b"}}, "debug": True}
    assert find_removal("/a", '{"b": {"a": 1}, "a": 2}', {"a": "c"}) == ""


RUNTIMES = {"ocigpu": {"path": "/usr/bin/ocigpu-runtime"}}
STAGED = """{
    "log-driver": "json-file",
    "log-opts": {
        "labels": "a",
        "max-size": "10m",
    "runtimes": {
        "ocigpu": {
            "path": "/usr/bin/ocigpu-runtime"
        }
    },
    "default-runtime": "ocigpu"
}
"""


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (STAGED, {"labels": "a", "max-size": "10m"}),
        (STAGED.replace('"10m",', '"10m"'), {"labels": "a", "max-size": "10m"}),
        (STAGED.replace('{\n        "labels": "a",\n        "max-size": "10m",', '{"max-size": "10m", '),
         {"max-size": "10m"}),
        (STAGED.replace('        "labels": "a",\n        "max-size": "10m",\n', ""), {}),
    ],
)  # fmt: skip
def test_a_bracket_is_closed_before_the_next_key_of_the_top_level(
    text: str, options: dict[str, str], tmp_path: Path
) -> None:
    """Deleted after "max-size" on Debian: at the end of the file it would put "runtimes" below "log-opts"."""
    file = tmp_path / "daemon.json"
    file.write_text(text)
    data = repaired(file, find_config_repair(str(file), str(file), text, "not valid JSON"))
    top = {"log-driver": "json-file", "log-opts": options, "runtimes": RUNTIMES, "default-runtime": "ocigpu"}
    assert data == top


@pytest.mark.parametrize(
    "text",
    [
        '{"log-opts": {"a": "b", "runtimes": {"c": {"path": "/c"}},}}',
        '{"builder": {"features": {"a": true},}}',
        '{"log-opts": {"labels": ["a"],}}',
    ],
)
def test_no_repair_leaves_a_key_of_the_top_level_below_another(text: str) -> None:
    assert find_config_repair("/daemon.json", "/daemon.json", text, "") == ""


def test_names_that_are_keys_elsewhere_are_no_obstacle(tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    data = {"runtimes": {"init": {"path": "/a"}}, "log-opts": {"labels": "a"}, "default-network-opts": {"bridge": {}}}
    text = json.dumps(data)[:-1] + ",}"
    file.write_text(text)
    assert repaired(file, find_config_repair(str(file), str(file), text, "")) == data


def test_a_repair_that_dockerd_refuses_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the repaired text in a private file, and one that it refuses for a second mistake is repaired further."""
    file, dockerd = tmp_path / "daemon.json", tmp_path / "dockerd"
    dockerd.write_text(
        '#!/bin/sh\n[ "$1" = --help ] && echo --validate && exit\n'
        f'[ "$1 $2" = "--validate --config-file" ] && [ "$3" != {file} ] || exit 3\n'
        'grep -q yes "$3" && echo "json: cannot unmarshal string" >&2 && exit 1\n'
        'grep -q debugg "$3" || exit 0\n'
        """echo "the following directives don't match any configuration option: debugg" >&2; exit 1\n"""
    )
    dockerd.chmod(0o755)
    monkeypatch.setattr(repairs.checker.places, "find_program", lambda *_: str(dockerd))
    assert find_config_repair(str(file), str(file), '{"debug": "yes",}', "") == ""
    file.write_text(text := '{"debugg": true,}')
    assert repaired(file, find_config_repair(str(file), str(file), text, "")) == {"debug": True}


@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_or_dead_link_for_a_file_is_moved_away(is_link: bool, tmp_path: Path) -> None:
    root = make_host(tmp_path)
    put(root, "/usr/bin/dockerd", "", 0o755)
    file = root / "etc/docker/daemon.json"
    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    if is_link:
        file.symlink_to("/srv/gone.json")
    else:
        file.mkdir()
    (found,) = (item for item in run_checks(Host(str(root)), ("engine-config-broken",)) if item.is_bad)
    subprocess.run(["sh", "-e", "-c", found.fixes[0]], check=True)
    assert not any(item.is_bad for item in run_checks(Host(str(root)), ("engine-config-broken",)))


def test_an_entry_that_is_a_path_becomes_a_table(tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    file.write_text('{"runtimes": {"a.b": "/x&y", "c": {"path": "z"}}}')
    data = repaired(file, find_entry_repair(str(file), file.read_text(), "a.b"))
    assert data == {"runtimes": {"a.b": {"path": "/x&y"}, "c": {"path": "z"}}}
    for text in ('{"runtimes": {"a": 1}, "b": {"a": "/x"}}', '{"runtimes": {"a": "/x"}, "b": {"a": "/y"}}'):
        assert find_entry_repair("/daemon.json", text, "a") == ""


def test_a_plugin_that_is_switched_off_is_switched_on(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(SWITCH)
    assert repaired(file, find_switch_repair(str(file), SWITCH)) == {"disabled_plugins": ["x.y"], "root": "/a,]"}
    for text in ('disabled_plugins = [\n"cri"]\n', 'disabled_plugins = ["cri", "a/b"]\n'):
        assert find_switch_repair("/a", text) == ""


PACKAGED = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".cni]\nbin_dir = "/usr/lib/cni"\n'


@pytest.mark.parametrize(
    ("text", "more", "counts"),
    [
        ('disabled_plugins = ["cri"]\n', "", False),
        (PACKAGED, "", False),
        (PACKAGED, "/usr/bin/kubelet", True),
        ('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n', "/usr/bin/kubelet", False),
        (PACKAGED + '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.ocigpu.options]\n'
                    'BinaryName = "/usr/bin/ocigpu-runtime"\n', "", True),
    ],
)  # fmt: skip
def test_what_docker_brings_is_not_spoken_of(text: str, more: str, counts: bool, tmp_path: Path, run: Run) -> None:
    root = make_host(tmp_path)
    for path in ("/usr/bin/dockerd", "/usr/bin/containerd", *([more] if more else [])):
        put(root, path, "", 0o755)
    put(root, "/etc/containerd/config.toml", text)
    said = run("doctor", "--root", root)[1]
    assert ("containerd" in said) is counts
    assert "Podman" not in said


@pytest.mark.parametrize(("program", "is_found"), [("/usr/bin/nvidia-container-toolkit", True), ("/gone", False)])
def test_a_hook_file_is_a_finding_where_its_program_fails(program: str, is_found: bool, tmp_path: Path) -> None:
    """Podman passes over a file whose program does not exist."""
    root = make_host(tmp_path)
    for path in ("/usr/bin/podman", "/usr/bin/nvidia-container-toolkit"):
        put(root, path, "", 0o755)
    put(root, "/usr/share/containers/oci/hooks.d/nvidia.json", json.dumps({"hook": {"path": program}}))
    (found,) = run_checks(Host(str(root)), ("hook-file",))
    assert found.is_bad is is_found
    put(root, "/usr/bin/nvidia-container-cli", "", 0o755)
    assert not any(item.is_bad for item in run_checks(Host(str(root)), ("hook-file",)))


def test_the_gpu_operator_has_its_program_beside_its_hook(tmp_path: Path) -> None:
    root = make_host(tmp_path)
    toolkit = "/usr/local/nvidia/toolkit"
    for path in ("/usr/bin/crio", f"{toolkit}/nvidia-container-runtime-hook", f"{toolkit}/nvidia-container-cli"):
        put(root, path, "", 0o755)
    hook = {"hook": {"path": f"{toolkit}/nvidia-container-runtime-hook"}}
    put(root, "/usr/share/containers/oci/hooks.d/nvidia.json", json.dumps(hook))
    (found,) = run_checks(Host(str(root)), ("hook-file",))
    assert found.severity == "ok"


def test_a_containerd_for_pods_that_has_none_is_found(tmp_path: Path) -> None:
    root = make_host(tmp_path)
    put(root, "/usr/bin/containerd", "", 0o755)
    entry = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.ocigpu.options]\n'
    file = put(
        root, "/etc/containerd/config.toml", f'version = 2\n{SWITCH}{entry}BinaryName = "/usr/bin/ocigpu-runtime"\n'
    )
    (found,) = run_checks(Host(str(root)), ("containerd-cri-off",))
    assert found.is_bad
    repaired(file, found.fixes[0])
    assert [item.severity for item in run_checks(Host(str(root)), ("containerd-cri-off",))] == ["ok"]
