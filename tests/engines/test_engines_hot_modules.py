"""The regime of the hot path is for the modules that it loads: what real starts load is recorded.

``TYPE_CHECKING = False`` and the records of :mod:`ocigpu.core.record` save a start the milliseconds of ``typing``; in
any other module they are only in the reader's way.  The records are also for what ``ocigpu ps`` loads: from Python 3.14
those of ``typing`` load ``annotationlib`` and ``ast``.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.bundle import base_config, write_bundle
from support.process import explain, run
from support.product import PublicCopy, SimulatedHost, make_public_copy
from support.runtimes import container_id, run_container, set_cgroup

from ocigpu.core.vendors import GPU_VENDORS
from ocigpu.gpus.fingerprint import ANNOTATION
from ocigpu.sim.create import create_host

pytestmark = [pytest.mark.root, pytest.mark.engine]

RECORDS = re.compile(r"^from ocigpu\.core\.record import ", re.MULTILINE)
CHECKING = re.compile(r"^TYPE_CHECKING = False$", re.MULTILINE)
STUB_CODE = "ocigpu.entry.image"
"""The stubs execute it, and never import it."""
RECORDER = """
class _Recorder:
    @staticmethod
    def find_spec(name, *_):
        try:
            fd = os.open(LOG, os.O_WRONLY | os.O_APPEND)  # a container has no such file
            os.write(fd, f"{name}\\n".encode())
            os.close(fd)
        except OSError:
            pass

sys.meta_path.insert(0, _Recorder)
"""
CLI = "import sys; sys.path += sys.argv[1:3]; from ocigpu.cli.front.main import main; sys.exit(main(sys.argv[3:]))"
QUICK = (["--version"], ["--help"], ["plan", "--help"], ["list"], ["plan", "--gpus", "all"], ["cdi", "generate"])
"""Commands that import nothing dearer than a start does: tests/cli/test_cli_front.py."""
NVIDIA = {
    "NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all", "NVIDIA_REQUIRE_CUDA": "cuda>=11.0",
}  # fmt: skip
AMD = {"AMD_VISIBLE_DEVICES": "0"}
OTHERS = ("csv", "vfio", "wsl")
"""Sources of specifications alone: a start reads the host's fingerprint of the one that a specification is of."""
OF_OTHERS = {"NVIDIA_VISIBLE_DEVICES": ",".join(f"test.example/{name}=0" for name in OTHERS)}


class Starts:
    """Starts containers with a copy of the product that records what its processes import."""

    def __init__(self, product: PublicCopy, directory: Path, base: dict[str, str]) -> None:
        self.product, self.directory, self.base = product, directory, base
        self.log = directory / "imports"
        self.log.touch()
        self.log.chmod(0o666)
        first = product.library / "ocigpu/__init__.py"
        first.write_text(first.read_text() + RECORDER.replace("LOG", repr(str(self.log))))

    @property
    def loaded(self) -> set[str]:
        return set(self.log.read_text().split())

    def settings(self, host: SimulatedHost, mode: str) -> dict[str, str]:
        environment = host.environment(self.base)
        path = self.directory / f"{host.directory.name}-{mode}.toml"
        lines = {
            "mode": mode, "trace": f"{self.directory}/trace" if mode == "hook" else "",
            "cdi.spec-dirs": [str(self.specs(host))], "cdi.environment-vendors": [*GPU_VENDORS, "test.example"],
        }  # fmt: skip
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items())
        path.write_text(text + Path(environment["OCIGPU_CONFIG"]).read_text())
        path.chmod(0o644)
        return {**environment, "OCIGPU_CONFIG": str(path)}

    def specs(self, host: SimulatedHost) -> Path:
        path = self.directory / f"{host.directory.name}-specs"
        path.mkdir(exist_ok=True)
        return path

    def command(self, words: list[str], environment: dict[str, str]) -> None:
        site = os.path.dirname(os.path.dirname(pytest.__file__))
        done = run([self.product.python, "-I", "-S", "-c", CLI, self.product.library, site, *words], env=environment)
        assert done.stdout or "--quiet" in words

    def start(self, host: SimulatedHost, mode: str, variables: dict[str, str], image: Path) -> None:
        """Start a container twice: before the second start everything that can be is kept from the first."""
        environment = self.settings(host, mode)
        for _ in range(2):
            name = container_id()
            bundle = write_bundle(self.directory / name, base_config(["/probe", "true"], variables), image)
            set_cgroup(bundle, name)
            done = run_container([self.product.runtime], bundle, name, env=environment, cgroup="v2")
            assert done.returncode == 0, explain(done)
            shutil.rmtree(bundle)


@pytest.fixture(scope="module")
def loaded(
    session_directory: Path,
    rootfs: Callable[[str], Path],
    simulated_host: SimulatedHost,
    mig_host: SimulatedHost,
    runtime_environment: dict[str, str],
) -> tuple[set[str], set[str]]:
    """What the two programs import in every mode, cold and warm, for every vendor, and the quick commands; and what
    ``ocigpu ps`` imports."""
    directory = session_directory / "hot-modules"
    directory.mkdir()
    starts = Starts(make_public_copy(directory / "product"), directory, runtime_environment)
    shutil.copytree(Path(yaml.__file__).parent, starts.product.library / "yaml")
    with_cache = directory / "with-cache"
    shutil.copytree(rootfs("glibc"), with_cache, symlinks=True)
    run(["ldconfig", "-r", with_cache])
    amd_host = SimulatedHost(directory / "host-amd", (), ())
    create_host(str(amd_host.directory), gpus=1, model="mi300x")
    rows = (
        (simulated_host, "nvidia.com", NVIDIA, with_cache),
        (mig_host, "nvidia.com", NVIDIA, rootfs("glibc")),
        (amd_host, "amd.com", AMD, rootfs("busybox")),
    )
    for name in OTHERS:
        device = {"name": "0", "containerEdits": {"env": [f"FROM_{name}=1"]}}
        spec = {"cdiVersion": "0.6.0", "kind": f"test.example/{name}", "devices": [device]}
        spec["annotations"] = {ANNOTATION: f"source={name} release=none"}
        (starts.specs(mig_host) / f"{name}.json").write_text(json.dumps(spec))
    hook = ["--nvidia-cdi-hook-path", str(starts.product.runtime.with_name("ocigpu-hook"))]
    for host, vendor, _, _ in rows:
        output = ["--vendor", vendor, "--output", f"{starts.specs(host)}/{vendor}.yaml"]
        starts.command(["cdi", "generate", "--quiet", *output, *hook], starts.settings(host, "cdi"))
    starts.log.write_text("")
    for host, _, variables, image in rows:
        for mode in ("hook", "spec", "cdi"):
            starts.start(host, mode, variables, image)
    starts.start(mig_host, "cdi", OF_OTHERS, with_cache)

    environment = starts.settings(mig_host, "hook")
    for words in (*QUICK, ["cdi", "generate", "--quiet", "--output", f"{directory}/quick.yaml"]):
        for _ in range(2):
            starts.command(words, environment)
    starts.command(["plan", "--devices", ""], {**environment, "_OCIGPU_COMPLETE": "words"})
    hot = starts.loaded
    starts.log.write_text("")
    starts.command(["ps"], environment)
    return hot, starts.loaded


@pytest.mark.rest
def test_a_module_with_the_regime_of_the_hot_path_is_loaded_there(
    loaded: tuple[set[str], set[str]], public_copy: PublicCopy
) -> None:
    hot, by_ps = loaded
    library = public_copy.library
    texts = {
        ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in (library / "ocigpu").rglob("*.py")
    }
    unchecked = {name for name, text in texts.items() if CHECKING.search(text)}
    with_records = {name for name, text in texts.items() if RECORDS.search(text)}
    assert len(unchecked | with_records) > 90
    assert sorted(unchecked - hot - {"ocigpu", STUB_CODE}) == []
    assert sorted(with_records - hot - by_ps - {STUB_CODE}) == []
