"""``--json`` of every command: one object, with the version of its schema first, of one shape for each command."""

import json
from pathlib import Path
from typing import Any

import pytest
from containers_lab import WAITING, container
from support.fixtures import MakeBundle
from support.product import SimulatedHost

from ocigpu.cli.front.main import COMMANDS, main
from ocigpu.cli.front.manual import read_page
from ocigpu.cli.front.show import SCHEMA_VERSION

pytestmark = [pytest.mark.root, pytest.mark.engine]

LOGS = {
    "caas serve", "compute-domain controller", "compute-domain daemon", "fabric serve", "mig-manager",
    "mps-control-daemon", "node-installer", "tenancy controller", "watch",
}  # fmt: skip
"""Services: --json is the form of their log."""
ELSEWHERE = {"engine test", "setup", "mig apply", "mig checkpoint", "mig restore"}
"""Two need engines (tests/engines/test_engines_all.py), the others a host of their own (test_mig_apply.py)."""
OTHER_HOSTS = ("caas", "fabric", "firmware", "lease", "tenancy", "vfio")
"""Groups that need a service, a cluster or a host without a driver: their own tests read what they print."""
DOCUMENTS = {"cdi generate"}
"""What it prints is a file of somebody else's format."""

LINES = {
    "attach": ["attach {name} --gpu 2", "attach {name} --gpu 2"],
    "cdi diff": ["cdi diff {specs}/a.json"],
    "cdi list": ["cdi list --spec-dir {specs}", "cdi list --spec-dir /nonexistent"],
    "cdi refresh": ["cdi refresh --output {specs}/a.json"],
    "cdi show": ["cdi show {specs}/a.json", "cdi show nvidia.com/gpu=0 --spec-dir {specs}"],
    "cdi validate": ["cdi validate {specs}/a.json", "cdi validate --spec-dir {specs}"],
    "chart import": ["chart import {specs}/values.yaml --from device-plugin", "chart import /dev/null --from gfd"],
    "config get": ["config get mode", "config get runtime.runtimes"],
    "config import": ["config import /dev/null --dry-run --output {specs}/config.toml"],
    "config keys": ["config keys"],
    "config set": ["config set mode hook --config {specs}/config.toml"],
    "config show": ["config show"],
    "config unset": ["config unset mode --config {specs}/config.toml"],
    "detach": ["detach {name} --gpu 2", "detach {name} --gpu 2"],
    "diff": ["diff {name}", "diff {name} --runtime-mode spec"],
    "doctor": ["doctor --root {host}"],
    "engine configure": ["engine configure docker --root {image}", "engine configure podman --root {image} --dry-run"],
    "engine remove": ["engine remove docker --root {image}", "engine remove --root {image}"],
    "engine status": ["engine status --root {image}", "engine status docker --root {image}"],
    "explain": ["explain", "explain DEV-1", "explain uvm-missing", "explain {name}", "explain --messages"],
    "facts": ["facts"],
    "list": ["list"],
    "mig assert": ["mig assert -c all-disabled"],
    "mig export": ["mig export"],
    "mig generate-config": ["mig generate-config"],
    "mig plan": ["mig plan -c all-disabled"],
    "node-labels": ["node-labels --show"],
    "plan": ["plan --devices 0", "plan", "plan --devices nvidia.com/gpu=0 --config {settings}"],
    "ps": ["ps", "ps --all"],
    "refresh": ["refresh"],
    "repair": ["repair {name}", "repair --all --dry-run"],
    "sim show": ["sim show {host}"],
    "status": ["status"],
    "system create-dev-char-symlinks": ["system create-dev-char-symlinks --dry-run"],
    "system create-device-nodes": ["system create-device-nodes --dry-run"],
    "top": ["top --once", "top --sort memory"],
    "topology": ["topology"],
    "trace": ["trace {trace}"],
    "verify": ["verify {name}"],
    "version": ["version"],
}


def test_every_command_with_json_is_here() -> None:
    with_json = {name for name in COMMANDS if "--json" in read_page(name).options}
    others = {name for name in with_json if name.split()[0] in OTHER_HOSTS}
    assert set(LINES) == with_json - others - LOGS - DOCUMENTS - ELSEWHERE


@pytest.mark.rest
def test_json_is_an_object_of_one_shape(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "image/usr/bin").mkdir(parents=True)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/values.yaml").write_text("gfd: {enabled: true}\n")
    settings = tmp_path / "settings.toml"
    settings.write_text(f'{simulated_host.settings.read_text()}\n[cdi]\nspec-dirs = ["{tmp_path}/specs"]\n')
    settings.chmod(0o644)
    trace = tmp_path / "trace.jsonl"
    environment = {**runtime_environment, "OCIGPU_TRACE": str(trace)}
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "1"})
    with container(bundle, environment, host=simulated_host) as made:
        words = {
            "name": made.name, "specs": tmp_path / "specs", "host": simulated_host.directory, "trace": trace,
            "image": tmp_path / "image", "settings": settings,
        }  # fmt: skip
        monkeypatch.setenv("OCIGPU_CONFIG", made.environment["OCIGPU_CONFIG"])
        assert main(["cdi", "generate", "--output", f"{tmp_path}/specs/a.json"]) == 0
        for name, lines in LINES.items():
            shapes = set()
            for line in lines:
                where = ["--state-dir", str(made.state)] if "--state-dir" in read_page(name).options else []
                capsys.readouterr()
                main([*line.format(**words).split(), "--json", *where])
                data: Any = json.loads(capsys.readouterr().out)
                assert next(iter(data)) == "schema-version", line
                assert data["schema-version"] == SCHEMA_VERSION
                shapes.add(frozenset(data))
            assert len(shapes) == 1, (name, shapes)
