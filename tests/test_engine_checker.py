"""What an engine makes of a file before and after, compared: recorded answers of engines that this machine lacks."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.engine_roots import RUNTIME, V2

from ocigpu.core.errors import OcigpuError
from ocigpu.engines import checker, places
from ocigpu.engines.checker import Meant, check
from ocigpu.system.programs import Finished

RECORDED = Path(__file__).parent / "recorded" / "containerd"
STOCK = f"""\
version = 2

[plugins]
  [plugins."{V2}"]
    [plugins."{V2}".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"""
"""Debian 13's own /etc/containerd/config.toml."""
MEANT = Meant(frozenset({"ocigpu"}), "ocigpu", RUNTIME)


class RecordedContainerd:
    """Answers "config dump" as it did to the machine's file before and after."""

    def __init__(self, before: str, after: str) -> None:
        self.answers = before, after
        self.read: list[str] = []

    def run(self, command: Sequence[str], **_variables: str) -> Finished:
        assert command[3:] == ["config", "dump"]
        text = Path(command[2]).read_text()
        self.read.append(text)
        return Finished(0, self.answers["ocigpu" in text], "")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedContainerd:
    double = RecordedContainerd(*((RECORDED / f"1.7.24-{when}.toml").read_text() for when in ("before", "after")))
    monkeypatch.setattr(checker, "run_check", double.run)
    monkeypatch.setattr(places, "find_program", lambda _root, name: f"/usr/bin/{name}")
    return double


def with_entry(text: str) -> str:
    return f'{text}[plugins."{V2}".containerd.runtimes.ocigpu.options]\nBinaryName = "{RUNTIME}"\n'


def test_what_containerd_spells_out_in_its_own_entry_for_runc_may_go(
    tmp_path: Path, recorded: RecordedContainerd
) -> None:
    """Its entry has sandbox_mode = "podsandbox", which an entry without one has too once containerd runs."""
    file = tmp_path / "config.toml"
    file.write_text(STOCK)
    assert 'sandbox_mode = "podsandbox"' in recorded.answers[0]
    assert 'sandbox_mode = "podsandbox"' not in recorded.answers[1]
    assert check("containerd", str(file), {str(file): with_entry(STOCK)}, MEANT) == "containerd config dump"


def test_another_mode_of_sandboxes_may_not_change(tmp_path: Path, recorded: RecordedContainerd) -> None:
    before, after = recorded.answers
    recorded.answers = before.replace('"podsandbox"', '"shim"'), after
    file = tmp_path / "config.toml"
    file.write_text(STOCK)
    with pytest.raises(OcigpuError, match=r"runc\.sandbox_mode otherwise than before"):
        check("containerd", str(file), {str(file): with_entry(STOCK)}, MEANT)


@pytest.mark.parametrize("name", ["cri", V2])
def test_an_interface_that_is_switched_off_is_on_for_the_check(
    tmp_path: Path, recorded: RecordedContainerd, name: str
) -> None:
    """The dump of containerd has nothing of a plugin that is off."""
    file = tmp_path / "config.toml"
    file.write_text(f'disabled_plugins = ["{name}", "restart"]\n{STOCK}')
    check("containerd", str(file), {str(file): with_entry(file.read_text())}, MEANT)
    assert all('disabled_plugins = ["restart"]' in text for text in recorded.read)


def test_an_interface_that_an_import_switches_off_is_not_looked_for(
    tmp_path: Path, recorded: RecordedContainerd
) -> None:
    off = f'version = 2\ndisabled_plugins = ["{V2}"]\n'
    recorded.answers = off, off
    file = tmp_path / "config.toml"
    file.write_text(STOCK)
    check("containerd", str(file), {str(file): with_entry(STOCK)}, MEANT)
