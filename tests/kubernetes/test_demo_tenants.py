"""``make demo-tenants`` from its begin to its end."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import requirements

pytestmark = [pytest.mark.root, pytest.mark.rest, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).parents[1] / "demo_tenants.py"


def test_the_demonstration() -> None:
    requirements.require(requirements.compiler(), requirements.programs("openssl"))
    found = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=580)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"
    assert "FirmwareMismatch" in found.stdout
    assert found.stdout.rstrip().endswith("all as it should be")
