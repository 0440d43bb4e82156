"""The Ansible role where no engine can be asked for a container: CRI-O starts only pods."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
from support import requirements
from support.engines import SYSTEM_PATH, private_machine
from support.process import run
from support.product import PROGRAMS, REPOSITORY, SimulatedHost


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.rest
@pytest.mark.timeout(900)
def test_a_host_with_nothing_but_crio_is_configured_and_what_was_not_tried_is_said(
    session_directory: Path, simulated_host: SimulatedHost
) -> None:
    """ansible-core of PyPI; a program stands in for CRI-O, whose file is all that the role touches."""
    requirements.require(requirements.overlay(), requirements.programs("busybox"))
    venv = session_directory / "ansible-crio"
    run([sys.executable, "-m", "venv", venv])
    run([venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "ansible-core>=2.16"], timeout=600)
    chosen = {
        "ocigpu_program": str(PROGRAMS / "ocigpu"),
        "ocigpu_engines": ["crio"],
        "ocigpu_restart": False,
        "ansible_python_interpreter": sys.executable,
    }
    variables = {
        "PATH": f"{venv}/bin:/usr/local/bin:{SYSTEM_PATH}",
        "HOME": str(session_directory / "ansible-crio-home"),
        "LANG": "C.UTF-8",
        "ANSIBLE_LOCALHOST_WARNING": "False",
    }
    crio = "printf '#!/bin/sh\\necho crio version 1.30.0\\n' >/usr/local/bin/crio && chmod 755 /usr/local/bin/crio"
    with private_machine(session_directory / "ansible-crio-private") as enter:
        run([*enter, "sh", "-c", crio])
        site = REPOSITORY / "packaging/ansible/site.yml"
        vendors = session_directory / "nvidia-config.toml"
        vendors.write_text("accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")

        def play(*more: str, **other: object) -> str:
            values = ["-e", json.dumps({**chosen, "ocigpu_test": False, **other})]
            command = [venv / "bin/ansible-playbook", "--inventory=localhost,", "--connection=local", site, *values]
            done = run([*enter, *command, *more], check=False, env=variables, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        settings = "/etc/ocigpu/config.toml"
        said = play("--check", ocigpu_import=str(vendors))
        assert f"would be written to {settings}" in said
        assert "accept-nvidia-visible-devices-envvar-when-unprivileged = false" in said
        assert run([*enter, "test", "-e", settings], check=False).returncode
        for changed in (2, 0):
            assert f"changed={changed} " in play(ocigpu_import=str(vendors))
            imported = tomllib.loads(run([*enter, "cat", settings]).stdout)
            assert imported["accept-nvidia-visible-devices-envvar-when-unprivileged"] is False
        play(ocigpu_remove=True)
        own = str(simulated_host.settings)
        assert "changed=2 " in play("--check", ocigpu_config_source=own)
        assert "changed=2 " in play(ocigpu_config_source=own)
        assert f"{settings} is kept" in play(ocigpu_import=str(vendors))
        assert run([*enter, "cat", settings]).stdout == simulated_host.settings.read_text()
        play(ocigpu_remove=True)
        words = ["ansible-playbook", "--inventory=localhost,", "--connection=local", site, "-e", json.dumps(chosen)]
        for changed in (1, 0):
            done = run([*enter, venv / "bin" / words[0], *words[1:]], check=False, env=variables, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"changed={changed} " in done.stdout
            assert "crio is not tested: only pods use it" in done.stdout
        file = "/etc/crio/crio.conf.d/99-ocigpu.conf"
        written = run([*enter, "cat", file]).stdout
        assert f'runtime_path = "{PROGRAMS}/ocigpu-runtime"' in written
        for changed, default in ((1, "true"), (0, "true"), (0, ""), (2, "false"), (0, "false")):
            assert f"changed={changed} " in play("--diff", ocigpu_default=default)
            assert ("default_runtime" in run([*enter, "cat", file]).stdout) == (default != "false")
        words[-1] = json.dumps(chosen | {"ocigpu_remove": True, "ocigpu_serial": "10%"})
        for changed in (1, 0):
            done = run([*enter, venv / "bin" / words[0], *words[1:]], check=False, env=variables, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"changed={changed} " in done.stdout
        assert not run([*enter, "ls", "/etc/crio/crio.conf.d"], check=False).stdout
