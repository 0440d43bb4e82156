"""``make demo-tenants`` from its begin to its end."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import requirements
from support.product import REPOSITORY
from support.transcript import Typed

pytestmark = [pytest.mark.root, pytest.mark.rest, pytest.mark.timeout(600)]
START = REPOSITORY / "docs/tenants/README.md"
PROGRAM = Path(__file__).parents[1] / "demo_tenants.py"


def test_the_demonstration() -> None:
    requirements.require(requirements.compiler(), requirements.programs("openssl"))
    found = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=580)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"
    assert "FirmwareMismatch" in found.stdout
    assert found.stdout.rstrip().endswith("all as it should be")
    (shown,) = re.findall(r"^```text\n(== .*?)^```", START.read_text(), re.DOTALL | re.MULTILINE)
    told = found.stdout[found.stdout.index("== a tenancy") :]
    assert Typed("make demo-tenants", shown.strip()).fits(told), "docs/tenants/README.md shows this"
