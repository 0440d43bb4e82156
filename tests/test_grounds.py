"""make test-grounds takes minutes and a registry; what can go wrong with it unseen is held here."""

import re
import subprocess

import pytest
from support.product import REPOSITORY

GROUNDS = REPOSITORY / "tests/grounds"


@pytest.mark.parametrize("name", ["run.sh", "roots.sh", "boot.sh", "inside.sh", "others.sh"])
def test_the_shell_understands_it(name: str) -> None:
    done = subprocess.run(["bash", "-n", GROUNDS / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_types_the_five_minutes_of_the_readme() -> None:
    """inside.sh names them by their place."""
    text = (GROUNDS / "inside.sh").read_text()
    (function,) = re.findall(r"^section\(\) \{.*?^\}$", text, re.MULTILINE | re.DOTALL)
    script = f"{function}\nsection README.md 'With Docker, in five minutes'"
    typed = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, capture_output=True, text=True).stdout.splitlines()
    wanted = (
        "make deb && apt install ", "ocigpu doctor", "ocigpu engine configure docker", "systemctl restart docker",
        "docker run ", "ocigpu sim create ", "install ",
    )  # fmt: skip
    assert [line[: len(begin)] for line, begin in zip(typed, wanted, strict=True)] == list(wanted)
