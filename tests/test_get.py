"""``packaging/get``: the file of a release that fits this machine."""

import functools
import os
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import requirements
from support.machine import MACHINE
from support.process import Completed, run
from support.served import served

REPOSITORY = Path(__file__).resolve().parents[1]


def get(*words: str | Path, cwd: Path) -> Completed:
    return run([REPOSITORY / "packaging/get", *words], check=False, cwd=cwd)


@pytest.fixture
def own() -> str:
    """The name of the file for this machine, which has that Python."""
    requirements.require(requirements.programs("dpkg", "apt-get", "sha256sum"))
    python = os.path.basename(os.path.realpath("/usr/bin/python3"))
    return f"ocigpu_1.0+{python}_{run(['dpkg', '--print-architecture']).stdout.strip()}.deb"


@pytest.fixture
def release(own: str, tmp_path: Path) -> Path:
    """A release with files for other Pythons, machines and kinds of system, and an older version."""
    directory = tmp_path / "release"
    directory.mkdir()
    python, machine = own.removesuffix(".deb").partition("+")[2].split("_")
    names = [own, own.replace("_1.0", "-kubernetes_1.0"), own.replace("_1.0", "-kubernetes_0.9")]
    names += ["ocigpu-nvidia-names_1.0_all.deb", f"ocigpu-1.0-1.{python}.{MACHINE}.rpm", "ocigpu-1.0-py3-none-any.whl"]
    names += [own.replace(python, "python3.9"), own.replace(python, "python3.99"), own.replace(machine, "riscv64")]
    names += [own.replace("1.0", "0.9")]
    for name in names:
        (directory / name).write_text(name)
    (directory / "SHA256SUMS").write_text(run(["sha256sum", *names], cwd=directory).stdout)
    return directory


@pytest.mark.rest
def test_the_file_that_fits_is_named_with_what_installs_it(release: Path, own: str) -> None:
    done = get("--nvidia-names", release.name, cwd=release.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        f"file: ./release/{own} (SHA-256 as in SHA256SUMS)",
        "file: ./release/ocigpu-nvidia-names_1.0_all.deb (SHA-256 as in SHA256SUMS)",
        f"to install: apt-get install ./release/{own} ./release/ocigpu-nvidia-names_1.0_all.deb",
    ]


def test_the_wheel_is_found_where_there_are_packages(release: Path) -> None:
    done = get("--wheel", release.name, cwd=release.parent)
    assert done.stdout.splitlines()[-1] == "to install: pipx install ./release/ocigpu-1.0-py3-none-any.whl"


@pytest.mark.rest
def test_the_part_for_kubernetes_is_that_of_the_same_version_and_python(release: Path, own: str) -> None:
    done = get("--kubernetes", release.name, cwd=release.parent)
    kubernetes = own.replace("_1.0", "-kubernetes_1.0")
    assert done.stdout.splitlines()[-1] == f"to install: apt-get install ./release/{own} ./release/{kubernetes}"
    (release / kubernetes).unlink()
    sums = (release / "SHA256SUMS").read_text().splitlines(keepends=True)
    (release / "SHA256SUMS").write_text("".join(line for line in sums if not line.endswith(f"  {kubernetes}\n")))
    done = get("--kubernetes", release.name, cwd=release.parent)
    assert (done.returncode, done.stderr) == (1, f"get: release has no package ocigpu-kubernetes that fits {own}\n")


def test_what_is_installed_lies_where_nobody_else_can_exchange_it(release: Path, own: str, tmp_path: Path) -> None:
    requirements.require(requirements.programs("curl"))
    (work := tmp_path / "work").mkdir()
    work.chmod(0o777)
    (programs := tmp_path / "bin").mkdir()
    (programs / "apt-get").write_text(
        f"""#!/bin/sh
cat "$2" && stat -c ' %u %a' "${{2%/*}}" && echo "$@" >{tmp_path}/words
exit 7
"""
    )
    (programs / "apt-get").chmod(0o755)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(release))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [REPOSITORY / "packaging/get", "--install", f"http://127.0.0.1:{server.server_port}/"]
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        done = run(command, check=False, cwd=work, env=environment)
        server.shutdown()
    assert (done.returncode, done.stdout.splitlines()[-1]) == (7, f"{own} {os.getuid()} 755"), done.stderr
    installed = Path((tmp_path / "words").read_text().split()[1])
    assert installed.name == own
    assert (installed.parent.exists(), list(work.iterdir())) == (False, [])


@pytest.mark.rest
def test_what_an_address_has_is_kept_here(release: Path, own: str, tmp_path: Path) -> None:
    requirements.require(requirements.programs("curl"))
    (work := tmp_path / "work").mkdir()
    with served(release) as address:
        done = get(address, cwd=work)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"to install: apt-get install ./{own}\n")
        assert [path.name for path in work.iterdir()] == [own]
        (release / own).unlink()
        (work / own).unlink()
        done = get(address, cwd=work)
        assert done.returncode == 1
        assert f"{own}: not fetched" in done.stderr
        assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "status", "said"),
    [
        ("http://example.invalid/x", 1, "take https://example.invalid/x"),
        ("http://127.0.0.1.example.invalid/", 1, "take https://127.0.0.1.example.invalid"),
        ("http://localhost@example.invalid/", 1, "not over http"),
        ("http://localhost:x@example.invalid/", 1, "not over http"),
        ("ftp://example.invalid/x", 2, "an address with https://"),
    ],
)
def test_an_address_whose_files_could_be_exchanged_on_the_way_is_refused(
    address: str, status: int, said: str, tmp_path: Path
) -> None:
    done = get(address, cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr


def test_a_file_that_is_not_the_releases_is_refused(release: Path, own: str) -> None:
    (release / own).write_text("x")
    done = get("--install", release, cwd=release)
    assert done.returncode == 1
    assert "do not install it" in done.stderr
    assert "install" not in done.stdout


@pytest.mark.rest
def test_a_release_without_a_file_that_fits_says_what_it_needs(release: Path) -> None:
    sums = (release / "SHA256SUMS").read_text().splitlines(keepends=True)
    (release / "SHA256SUMS").write_text("".join(line for line in sums if "python3.99" in line))
    done = get(release, cwd=release)
    assert done.returncode == 1
    assert "need one of: python3.99, and this system offers none" in done.stderr


@pytest.mark.parametrize("words", [[], ["--yes", "x"], ["a", "b"]], ids=len)
def test_what_makes_no_sense_is_an_error_of_usage(words: list[str], tmp_path: Path) -> None:
    assert get(*words, cwd=tmp_path).returncode == 2


def test_help_says_what_it_takes(tmp_path: Path) -> None:
    done = get("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"--install", "--nvidia-names", "SHA256SUMS"} <= {*done.stdout.replace(",", " ").split()}
