"""docs/tenants/LEASES.md: what an operator types on a node, and what a stranger types on a simulated host."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.process import wait_for
from support.product import PROGRAMS, REPOSITORY
from support.transcript import Typed

from ocigpu.cli.front.main import main

PAGE = (REPOSITORY / "docs/tenants/LEASES.md").read_text()
ENVIRONMENT = "/etc/ocigpu/lease-agent.env"


def test_the_line_for_the_unit_is_whole_when_it_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [one for one in re.findall(r"^```sh\n(.*?)^```", PAGE, re.S | re.M) if ENVIRONMENT in one]
    script, _, last = block.strip().rpartition("\n")
    assert last == "systemctl enable --now ocigpu-lease-agent"
    subprocess.run(["bash", "-ec", script.replace(ENVIRONMENT, str(tmp_path / "env"))], check=True)
    (line,) = (tmp_path / "env").read_text().splitlines()
    name, _, words = line.partition("=")
    assert name == "OCIGPU_LEASE_AGENT"
    assert f"${name}" in (REPOSITORY / "packaging/systemd/ocigpu-lease-agent.service").read_text()
    assert main(["lease", "agent", *shlex.split(words), "--no-check"]) == 2  # it knows all of them
    assert "one of --check-program and --no-check" in capsys.readouterr().err


@pytest.mark.root
@pytest.mark.rest
@pytest.mark.timeout(300)
def test_gpus_of_a_simulated_host_become_free_by_hand(work_directory: Path) -> None:
    (block,) = [one for one in re.findall(r"^```console\n(.*?)^```", PAGE, re.S | re.M) if "podresources" in one]
    typed = [Typed(*text.split("\n", 1)) for text in re.split(r"^\$ ", block, flags=re.M)[1:]]
    *before, (last, shown) = typed
    assert last.startswith("ocigpu lease list")
    assert "about 20 seconds. `kill %1 %2` ends both" in PAGE.replace("\n", " ")
    here = str(work_directory / "host")
    commands = [each.command.replace("DIR", here).replace(".venv/bin/python", sys.executable) for each in before]
    environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    # each program is started when the one before it serves, as for one who types
    script = "\n".join(["set -em", *commands]).replace(
        ".json &", f".json &\nuntil [ -S {here}/pods.sock ]; do sleep 0.1; done"
    )
    with (work_directory / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["bash", "-c", f"{script}\nread _\nkill %1 %2\nwait || true"], cwd=REPOSITORY, env=environment,
            stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        ask = ["bash", "-c", last.replace("DIR", here)]

        def phases() -> str:
            return subprocess.run(ask, env=environment, capture_output=True, text=True).stdout

        wait_for("free GPUs", lambda: phases().count(" Free ") == 8, 120, (work_directory / "log").read_text)
        assert Typed(last, shown.strip()).fits(phases())
    finally:
        try:
            shell.communicate(b"\n", 60)
        except subprocess.TimeoutExpired:
            os.kill(shell.pid, signal.SIGKILL)
            raise
    assert shell.returncode == 0
