"""What a release consists of: repositories that apt installs from and upgrades by, and the list of others' parts."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packageurl import PackageURL
from support import requirements
from support.process import run, wait_for
from support.product import REPOSITORY, SimulatedHost
from support.scratch import ScratchMachine, scratch_machine
from support.toolkit import write_toolkit

from ocigpu import __version__

pytestmark = [pytest.mark.rest, pytest.mark.root, pytest.mark.xdist_group("packages"), pytest.mark.timeout(900)]

PORT = "8431"
CHART = "packaging/kubernetes/chart/Chart.yaml"
SOURCES = f"""\
Types: deb
URIs: http://127.0.0.1:{PORT}/
Suites: stable
Components: main
Signed-By: /etc/apt/keyrings/ocigpu.asc
"""


@pytest.fixture(scope="module")
def key(session_directory: Path) -> Iterator[dict[str, str]]:
    """A key of whoever makes a release, as the environment that names it."""
    requirements.require(requirements.programs("gpg", "apt-ftparchive", "createrepo_c"))
    home = session_directory / "gnupg"
    home.mkdir(mode=0o700)
    environment = {"GNUPGHOME": str(home), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    made = ["--batch", "--quiet", "--passphrase", "", "--quick-generate-key", "ocigpu tests", "ed25519", "sign", "1d"]
    run(["gpg", *made], env=environment)
    listed = run(["gpg", "--batch", "--list-keys", "--with-colons"], env=environment).stdout
    (fingerprint,) = re.findall(r"^fpr:.*:([0-9A-F]{40}):$", listed, re.MULTILINE)
    yield {**environment, "KEY": fingerprint, "SOURCE_DATE_EPOCH": "1700000000"}
    run(["gpgconf", "--kill", "all"], env=environment)


@pytest.fixture(scope="module")
def release(session_directory: Path, packages: Path, key: dict[str, str]) -> Path:
    """The directory of a release, with this version in its repositories."""
    directory = session_directory / "release"
    shutil.copytree(packages, directory)
    publish(directory, key)
    return directory


def publish(directory: Path, key: dict[str, str]) -> None:
    names = sorted(path.name for path in directory.iterdir() if path.suffix in (".deb", ".rpm"))
    run([REPOSITORY / "packaging/repositories.sh", directory, "stable", *names], env=key)


@pytest.fixture
def machine(session_directory: Path, release: Path) -> Iterator[ScratchMachine]:
    """A machine whose only registry is the release, served there on loopback."""
    directory = Path(tempfile.mkdtemp(dir=session_directory))
    with scratch_machine(directory, hidden=REPOSITORY, shared=[session_directory]) as machine:
        apt = machine.root / "etc/apt"
        shutil.rmtree(apt / "sources.list.d", ignore_errors=True)
        (apt / "sources.list").unlink(missing_ok=True)
        (apt / "sources.list.d").mkdir()
        (apt / "keyrings").mkdir(exist_ok=True)
        (apt / "keyrings/ocigpu.asc").write_bytes((release / "ocigpu-archive-keyring.asc").read_bytes())
        (apt / "sources.list.d/ocigpu.sources").write_text(SOURCES)
        (apt / "apt.conf.d/99tests").write_text(
            'APT { Get::Assume-Yes "true"; Sandbox::User "root"; }; Acquire::http::Proxy "DIRECT";\n'
        )
        machine("ip", "link", "set", "lo", "up")
        words = ["/usr/bin/python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(release), PORT]
        with subprocess.Popen([*machine.enter, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                ask = ("bash", "-c", f"</dev/tcp/127.0.0.1/{PORT}")
                wait_for("the registry", lambda: machine(*ask, check=False).returncode == 0)
                yield machine
            finally:
                server.kill()


def test_apt_installs_upgrades_and_removes(
    machine: ScratchMachine, release: Path, key: dict[str, str], next_packages: Callable[[str], Path]
) -> None:
    machine("apt-get", "update", "--error-on=any")
    machine("apt-get", "install", "ocigpu", "ocigpu-kubernetes")
    assert machine("ocigpu", "--version").stdout == f"ocigpu {__version__}\n"
    for path in next_packages("deb").iterdir():
        shutil.copy(path, release)
    publish(release, key)
    machine("apt-get", "update", "--error-on=any")
    machine("apt-get", "upgrade")
    assert machine("ocigpu", "--version").stdout == f"ocigpu {__version__}.1\n"
    machine("apt-get", "remove", "ocigpu")
    assert not (machine.root / "usr/bin/ocigpu").exists()


def test_the_role_adds_the_repository_and_installs_from_it(
    machine: ScratchMachine, release: Path, session_directory: Path, simulated_host: SimulatedHost
) -> None:
    venv = session_directory / "ansible-release"
    run([sys.executable, "-m", "venv", venv])
    run([venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "ansible-core>=2.16"], timeout=600)
    shutil.rmtree(machine.root / "etc/apt/sources.list.d")
    (machine.root / "etc/apt/sources.list.d").mkdir()
    (machine.root / "etc/apt/keyrings/ocigpu.asc").unlink()
    (machine.root / "etc/ocigpu").mkdir()
    (machine.root / "etc/docker/daemon.json").unlink(missing_ok=True)  # of whoever uses this machine
    shutil.copy(simulated_host.settings, machine.root / "etc/ocigpu/config.toml")
    chosen = {
        "ocigpu_release": f"http://127.0.0.1:{PORT}",
        "ocigpu_engines": ["podman"],
        "ocigpu_test": False,
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    words = [str(venv / "bin/ansible-playbook"), "--inventory=localhost,", "--connection=local"]
    shutil.copytree(REPOSITORY / "packaging/ansible", session_directory / "role")  # the clone is not seen there
    site = str(session_directory / "role/site.yml")
    variables = {"HOME": str(session_directory / "ansible-release-home"), "LANG": "C.UTF-8"}
    toolkit = write_toolkit(session_directory / "role-toolkit")
    (machine.root / "etc/apt/sources.list.d/toolkit.list").write_text(f"deb [trusted=yes] file:{toolkit} ./\n")
    machine("apt-get", "update", "--error-on=any")
    machine("apt-get", "install", "nvidia-container-toolkit")

    # a source that nobody serves is not the role's trouble
    (machine.root / "etc/apt/sources.list.d/dead.list").write_text("deb http://127.0.0.1:1/ dead main\n")

    def play(changed: int, *more: str, **given: Any) -> None:
        done = machine(*words, site, "--extra-vars", json.dumps(chosen | given), *more, env=variables)
        assert "DEPRECATION" not in done.stdout + done.stderr
        assert f"changed={changed} " in done.stdout, done.stdout

    without = json.dumps(chosen | {"ocigpu_release_suite": "forky"})
    refused = machine(*words, site, "--check", "--extra-vars", without, env=variables, check=False)
    assert "/dists/forky/InRelease: the release has no packages for this host's python3." in refused.stdout
    assert not (machine.root / "etc/apt/sources.list.d/ocigpu.sources").exists()
    for changed in (4, 0):
        play(changed)
    assert machine("ocigpu", "--version").returncode == 0
    names = machine.root / "usr/bin/nvidia-container-runtime"
    assert not names.is_symlink()
    given: dict[str, Any] = {"ocigpu_nvidia_names": "ocigpu-nvidia-names"}
    play(1, "--check", **given)
    for changed in (1, 0):
        play(changed, **given, ocigpu_remove="false")  # as -e NAME=VALUE gives it
    assert names.is_symlink()
    for changed in (2, 0):  # the engine's configuration, and the package
        play(
            changed,
            **given,
            ocigpu_remove="true",
            ocigpu_restart="false",
            ocigpu_nvidia_toolkit="nvidia-container-toolkit",
        )
    assert names.is_file()
    assert not names.is_symlink()
    # the test before may have published a newer one
    by_path = max(release.glob("ocigpu-nvidia-names_*.deb"), key=lambda path: path.stat().st_mtime_ns)
    play(2, ocigpu_nvidia_names=str(by_path))
    play(2, ocigpu_nvidia_names=str(by_path), ocigpu_remove=True)
    assert not names.exists()


def test_apt_believes_no_list_that_another_key_has_signed(machine: ScratchMachine, release: Path) -> None:
    list_of_files = release / "dists/stable/InRelease"
    signed = list_of_files.read_text()
    try:
        list_of_files.write_text(signed.replace("Label: ocigpu", "Label: others"))
        done = machine("apt-get", "update", "--error-on=any", check=False)
    finally:
        list_of_files.write_text(signed)
    assert done.returncode != 0
    assert "BADSIG" in done.stdout + done.stderr


def test_the_repositories_are_the_same_each_time_but_for_their_signatures(
    release: Path, key: dict[str, str], tmp_path: Path
) -> None:
    def content(directory: Path) -> dict[str, str]:
        found = (path for name in ("dists", "rpm") for path in (directory / name).rglob("*") if path.is_file())
        return {
            str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in found
            if path.name != "InRelease" and path.suffix not in (".gpg", ".asc")
        }

    again = tmp_path / "again"
    again.mkdir()
    for path in release.glob("ocigpu*"):
        shutil.copy(path, again)  # with a time of its own
    publish(again, key)
    assert content(again) == content(release)


def test_dnf_finds_every_package_by_its_sum_in_a_list_that_is_signed(release: Path, key: dict[str, str]) -> None:
    (repodata,) = release.glob("rpm/python3.*/repodata")
    run(["gpg", "--verify", repodata / "repomd.xml.asc", repodata / "repomd.xml"], env=key)
    primary = run(["gzip", "-dc", repodata / "primary.xml.gz"]).stdout
    spaces = {"m": "http://linux.duke.edu/metadata/common"}
    listed = {}
    for package in ET.fromstring(primary).findall("m:package", spaces):
        place, checksum = package.find("m:location", spaces), package.find("m:checksum", spaces)
        assert place is not None
        assert checksum is not None
        listed[place.attrib["href"]] = checksum.text
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in release.glob("*.rpm")}
    assert listed == files


def test_get_takes_sums_that_the_key_has_signed_and_no_others(
    release: Path, key: dict[str, str], tmp_path: Path
) -> None:
    signed = tmp_path / "signed"
    signed.mkdir()
    names = [Path(shutil.copy(path, signed)).name for path in release.glob("*.deb")]
    sums = signed / "SHA256SUMS"
    sums.write_text(run(["sha256sum", *names], cwd=signed).stdout)
    run(["gpg", "--batch", "--local-user", key["KEY"], "--armor", "--detach-sign", sums], env=key)
    command = [REPOSITORY / "packaging/get", f"--keyring={release}/ocigpu-archive-keyring.asc", signed]
    assert "to install: " in run(command).stdout
    sums.write_text("0" * 64 + sums.read_text()[64:])
    done = run(command, check=False)
    assert done.returncode == 1
    assert "not signed by a key of" in done.stderr
    (signed / "SHA256SUMS.asc").unlink()
    assert run(command, check=False).returncode == 1


def test_the_list_of_others_parts_names_each_library_and_source_with_its_version() -> None:
    musl = "debian trixie 1.2.5-3"  # as packaging/snapshot/build.sh notes it
    command = [sys.executable, REPOSITORY / "packaging/sbom.py", __version__, "1700000000", musl]
    text = run(command).stdout
    assert run(command).stdout == text
    told = json.loads(text)
    assert (told["bomFormat"], told["metadata"]["component"]["version"]) == ("CycloneDX", __version__)
    names = {component["name"]: component["version"] for component in told["components"]}
    for name in ("requirements.txt", "requirements-kubernetes.txt"):
        fixed = re.findall(r"^([\w.-]+)==(\S+)", (REPOSITORY / "packaging" / name).read_text(), re.MULTILINE)
        assert fixed
        assert dict(fixed).items() <= names.items()
    assert names["python3.13"].startswith("3.13.")
    assert names["musl"] == "1.2.5-3"
    assert all(PackageURL.from_string(each["purl"]).version == each["version"] for each in told["components"])


@pytest.mark.parametrize("version", ["", "9.9.9", f"v{__version__}"])
def test_a_release_has_the_version_of_the_sources(version: str) -> None:
    done = run([REPOSITORY / "packaging/release.sh", version], check=False)
    assert (done.returncode, done.stderr) == (
        2,
        f"release: VERSION={version}, but ocigpu/__init__.py says {__version__}\n",
    )


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (
            "## Unreleased\n\n### Added\n- One line\n  and another.\n\n## {version} - 2026-01-01\n- Old.\n",
            "has 2 lines under",
        ),
        ("## Unreleased\n\n### Added\n\n## {version} - 2026-01-01\n- Old.\n", "not committed"),
        ("## {version} - 2026-01-01\n- New.\n\n## 0.0.9 - 2025-01-01\n- Old.\n", "not committed"),
        ("## Unreleased\n\n- New.\n", "no heading '## {version} - DATE'"),
    ],
)
def test_a_release_has_all_changes_below_its_version(tmp_path: Path, changes: str, refused: str) -> None:
    for name in ("packaging/release.sh", "tests/grounds/roots.sh", "ocigpu/__init__.py", CHART):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(changes.format(version=__version__))
    run(["git", "init", "-q", tmp_path])
    done = run([tmp_path / "packaging/release.sh", __version__], check=False)
    assert done.returncode == 2
    assert refused.format(version=__version__) in done.stderr


def test_the_chart_and_the_list_of_changes_have_that_version() -> None:
    chart = (REPOSITORY / CHART).read_text()
    assert re.findall(r"^(?:version|appVersion): \"?([^\"\n]+)", chart, re.MULTILINE) == [__version__] * 2
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(__version__)} - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE)
