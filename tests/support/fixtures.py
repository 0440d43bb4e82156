"""Fixtures that several test files share."""

import functools
import itertools
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import machine, requirements
from support.bundle import base_config, compile_probes, make_rootfs, write_bundle
from support.process import run
from support.product import REPOSITORY, PublicCopy, SimulatedHost, make_public_copy, make_simulated_host
from support.runtimes import container_id, set_cgroup
from support.upgrade import make_next_version

from ocigpu.cli.engines.archive_image import write_image
from ocigpu.cli.front.main import main


@pytest.fixture(scope="session")
def probes(session_directory: Path) -> Path:
    """The directory of the compiled probe programs."""
    requirements.require(requirements.compiler())
    directory = session_directory / "probes"
    directory.mkdir()
    compile_probes(directory)
    return directory


@pytest.fixture(scope="session")
def rootfs(session_directory: Path, probes: Path) -> Callable[[str], Path]:
    """Call with a layout: returns a root file system to copy, made once."""
    requirements.require(requirements.programs("busybox"))

    def get(layout: str) -> Path:
        path = session_directory / "layouts" / layout
        if not path.exists():
            make_rootfs(path, layout, probes)
        return path

    return get


@pytest.fixture(scope="session")
def runtime_environment(probes: Path) -> dict[str, str]:
    """The environment that low-level runtimes are started with."""
    variables = {"PATH": os.environ["PATH"], "HOME": "/root"}
    if not requirements.may_raise_limits():
        variables["LD_PRELOAD"] = str(probes / "memlock.so")
    return variables


@pytest.fixture(scope="session")
def public_copy(session_directory: Path) -> PublicCopy:
    """The product where other users can run it."""
    directory = session_directory / "product"
    directory.mkdir()
    return make_public_copy(directory)


@pytest.fixture(scope="session")
def vendor_cli(session_directory: Path, public_copy: PublicCopy, simulated_host: SimulatedHost) -> Path:
    """A directory with nvidia-container-cli, which any user can run; it gives GPUs of the simulated host."""
    path = session_directory / "vendor-cli" / "nvidia-container-cli"
    path.parent.mkdir()
    program = "from ocigpu.entry.container_cli.main import main; sys.exit(main())"
    program = f"import sys; sys.path.append({str(public_copy.library)!r}); {program}"
    words = shlex.join([public_copy.python, "-I", "-S", "-c", program])
    path.write_text(f'#!/bin/sh\nOCIGPU_CONFIG={simulated_host.settings} exec {words} "$@"\n')
    path.chmod(0o755)
    return path.parent


MakeBundle = Callable[..., Path]
_numbers = itertools.count(1)
IMAGE = "localhost/gpu:1"


@pytest.fixture
def work_directory(session_directory: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of this test alone that every user may enter; removed after it unless something is mounted below."""
    path = session_directory / f"{request.node.originalname[:30]}.{next(_numbers)}"  # a socket's path has 107 bytes
    path.mkdir(mode=0o755)
    yield path
    if not machine.mounts_below(str(path)):
        # what cannot be removed now is named or removed when the session ends
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_bundle(work_directory: Path, rootfs: Callable[[str], Path]) -> MakeBundle:
    """Call with argv, variables and layout: returns a bundle; ``edit`` may change the config before it is written."""
    numbers = itertools.count(1)

    def make(
        arguments: list[str],
        env: dict[str, str] | None = None,
        layout: str = "glibc",
        edit: Callable[[dict[str, Any]], None] | None = None,
    ) -> Path:
        config = base_config(arguments, env)
        if edit:
            edit(config)
        bundle = write_bundle(work_directory / f"bundle{next(numbers)}", config, rootfs(layout))
        set_cgroup(bundle, container_id())
        return bundle

    return make


@pytest.fixture(scope="session")
def simulated_host(session_directory: Path) -> SimulatedHost:
    """A simulated host with eight GPUs."""
    requirements.require(requirements.root(), requirements.programs("gcc"))
    return make_simulated_host(session_directory / "host8", 8)


@pytest.fixture(scope="session")
def mig_host(session_directory: Path) -> SimulatedHost:
    """A simulated host with two GPUs, the first one cut into two MIG devices."""
    requirements.require(requirements.root(), requirements.programs("gcc"))
    return make_simulated_host(session_directory / "host-mig", 2, ("0:3g.20gb,1g.5gb",))


@pytest.fixture(scope="session")
def image(session_directory: Path, rootfs: Callable[[str], Path]) -> Path:
    """The archive of image ``localhost/gpu:1``: a glibc image whose command waits."""
    return write_image(session_directory / "image.tar", rootfs("glibc"), IMAGE, ["/probe", "pause"])


def build_packages(sources: Path, directory: Path, *kinds: str) -> Path:
    """Build the packages of these kinds; returns ``directory``, in which they are then."""
    requirements.require(requirements.programs("dpkg-deb", "dpkg-shlibdeps", "rpmbuild", "gcc"))
    environment = {**os.environ, "SNAPSHOT": "yes"}
    built = run([sources / "packaging/package.sh", *kinds], env=environment, timeout=900).stdout.split()
    directory.mkdir()
    for path in built:
        shutil.copy(path, directory)
    assert len(built) == 3 * len(kinds)
    return directory


@pytest.fixture(scope="session")
def packages(session_directory: Path) -> Path:
    """The directory of the packages of both kinds, built anew in a directory of the clone: support/workers.py."""
    return build_packages(REPOSITORY, session_directory / "packages", "deb", "rpm")


@pytest.fixture(scope="session")
def next_packages(session_directory: Path, packages: Path) -> Callable[[str], Path]:
    """Call with a kind: returns the directory of its packages of the next version."""
    del packages  # with which the libraries were fetched
    sources = make_next_version(session_directory / "next-sources")
    fetched = [path for name in ("vendored", "kubernetes") for path in REPOSITORY.glob(f"build/packages/{name}-*")]
    (sources / "build/packages").mkdir(parents=True)
    run(["cp", "-a", *fetched, sources / "build/packages"])
    return functools.cache(lambda kind: build_packages(sources, session_directory / f"next-{kind}", kind))


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(name="run")
def run_in_this_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call with arguments: runs ``ocigpu`` in this process; returns status, standard output and standard error."""
    monkeypatch.delenv("OCIGPU_CONFIG", raising=False)
    monkeypatch.delenv("OCIGPU_DEBUG", raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
