"""A real containerd on the files that ``ocigpu engine configure containerd`` writes."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.engines import Containerd, start_containerd
from support.fixtures import IMAGE
from support.process import Completed, run
from support.product import PROGRAMS, RUNTIME, SimulatedHost, listed_uuids
from support.products import one_in
from support.runtimes import container_id

from ocigpu.engines.checker import program_version

pytestmark = [pytest.mark.root, pytest.mark.engine]

HOST_NETWORK = 2
CRI = "io.containerd.grpc.v1.cri"


def configure(*words: str | Path, check: bool = True) -> Completed:
    return run(
        [PROGRAMS / "ocigpu", "engine", "configure", "containerd", "--runtime-path", RUNTIME, *words], check=check
    )


@pytest.fixture(scope="module")
def containerd(session_directory: Path, image: Path, simulated_host: SimulatedHost) -> Iterator[Containerd]:
    """A containerd whose file was configured, ocigpu being the default runtime."""
    requirements.require(requirements.programs("containerd", "ctr", "runc"))
    pytest.importorskip("grpc", reason="not installed: grpcio")
    originals = []

    def prepare(file: Path) -> None:
        originals.append(file.read_bytes())
        output = configure("--config", file, "--default").stdout
        assert "checked by: containerd config dump" in output
        assert "next step: systemctl restart containerd" in output

    env = {"OCIGPU_CONFIG": str(simulated_host.settings)}
    directory = session_directory / "configured-containerd"
    with start_containerd(directory, image, {}, env, sandbox_image=IMAGE, prepare=prepare) as engine:
        yield engine
    run([PROGRAMS / "ocigpu", "engine", "remove", "containerd", "--config", directory / "config.toml"])
    assert (directory / "config.toml").read_bytes() == originals[0]


@pytest.mark.rest
@pytest.mark.parametrize("handler", ["ocigpu", ""], ids=["by name", "by default"])
def test_a_pod_gets_its_gpus(
    containerd: Containerd, simulated_host: SimulatedHost, session_directory: Path, handler: str
) -> None:
    config: dict[Any, Any] = {
        1: {1: "pod", 2: container_id(), 3: "default"},
        3: str(containerd.directory / "logs"),
        8: {1: f"/{session_directory.name}-configured", 2: {1: {1: HOST_NETWORK}}},
    }
    (answer,) = containerd.cri(("RuntimeService/RunPodSandbox", {1: config, 2: handler}))
    assert "error" not in answer, answer
    sandbox = answer["1"]
    container = {1: {1: "container"}, 2: {1: IMAGE}, 6: [{1: "NVIDIA_VISIBLE_DEVICES", 2: "0,2"}]}
    try:
        (created,) = containerd.cri(("RuntimeService/CreateContainer", {1: sandbox, 2: container, 3: config}))
        assert "error" not in created, created
        started, listed = containerd.cri(
            ("RuntimeService/StartContainer", {1: created["1"]}),
            ("RuntimeService/ExecSync", {1: created["1"], 2: ["nvidia-smi", "-L"], 3: 30}),
        )
        assert "error" not in {**started, **listed}, (started, listed)
        assert listed_uuids(listed["1"]) == [simulated_host.gpus[0], simulated_host.gpus[2]]
    finally:
        stop = {1: sandbox}
        answers = containerd.cri(("RuntimeService/StopPodSandbox", stop), ("RuntimeService/RemovePodSandbox", stop))
        assert all("error" not in answer for answer in answers), answers


def containerd_version() -> tuple[int, ...]:
    version = program_version("/", "containerd")
    assert version
    return version


def dump(config: Path) -> dict[str, Any]:
    text = config.with_name("on.toml")
    text.write_text(re.sub("disabled_plugins.*\n", "", config.read_text()))  # one that is off is not shown
    result = run(["containerd", "--config", text, "config", "dump"])
    text.unlink()
    found: dict[str, Any] = tomllib.loads(result.stdout)
    return found


def runtimes(config: Path) -> dict[str, str]:
    """Return the programs of containerd's runtimes as it sees them itself, by name."""
    plugins = dump(config)["plugins"]
    plugin = plugins.get("io.containerd.cri.v1.runtime") or plugins[CRI]
    return {
        name: entry.get("options", {}).get("BinaryName", "") for name, entry in plugin["containerd"]["runtimes"].items()
    }


@pytest.mark.parametrize(
    "text",
    one_in(
        4,
        [
            pytest.param(None, id="no file"),
            pytest.param("", id="an empty file"),
            pytest.param('oom_score = -5\n[plugins.cri]\nsandbox_image = "x"\n', id="version 1"),
            pytest.param(f'version = 2\n[plugins."{CRI}"]\nsandbox_image = "x"\n', id="version 2"),
            pytest.param('disabled_plugins = ["cri"]\n', id="Docker's package"),
            pytest.param(f'version = 2\ndisabled_plugins = ["{CRI}"]\n', id="switched off"),
            pytest.param(f'version = 2\nplugins."{CRI}".containerd.no_pivot = false\n', id="dotted keys"),
            pytest.param(
                f'version = 2\n[plugins."{CRI}".containerd.runtimes.crun]\nruntime_type = "io.containerd.runc.v2"\n'
                f'[plugins."{CRI}".containerd.runtimes.crun.options]\nBinaryName = "/usr/bin/crun"\n',
                id="another runtime",
            ),
        ],
    ),
)
def test_containerd_sees_the_entry_and_nothing_else_changed(tmp_path: Path, text: str | None) -> None:
    requirements.require(requirements.programs("containerd"))
    file = tmp_path / "config.toml"
    others: set[str] = {"runc"}
    if text is not None:
        file.write_text(text)
        others = set(runtimes(file))
    output = configure("--config", file).stdout
    assert "checked by: containerd config dump" in output
    assert set(runtimes(file)) == {"ocigpu", *others}
    assert runtimes(file)["ocigpu"] == str(RUNTIME)
    run([PROGRAMS / "ocigpu", "engine", "remove", "containerd", "--config", file])
    assert [path.name for path in tmp_path.iterdir()] == ([] if text is None else ["config.toml"])
    assert text is None or file.read_text() == text


@pytest.mark.parametrize("version", ["", "version = 2\n"], ids=["version 1", "version 2"])
@pytest.mark.parametrize("with_runc", [True, False], ids=["with runc", "without runc"])
def test_containerd_sees_the_entry_of_a_template(tmp_path: Path, version: str, with_runc: bool) -> None:
    """Without an action, what is written from a template is its text."""
    requirements.require(requirements.programs("containerd"))
    table = f'plugins."{CRI}"' if version else "plugins.cri"
    file = tmp_path / "var/lib/rancher/rke2/agent/etc/containerd/config.toml.tmpl"
    file.parent.mkdir(parents=True)
    runc = f'[{table}.containerd.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n' if with_runc else ""
    file.write_text(f'{version}[{table}]\n  sandbox_image = "pause:3.6"\n{runc}')
    file.with_name("config.toml").write_text(file.read_text())
    run([PROGRAMS / "ocigpu", "engine", "configure", "rke2", "--root", tmp_path, "--runtime-path", RUNTIME])
    if version or containerd_version() < (2, 0):
        assert set(runtimes(file)) == {"ocigpu", "runc"}
    else:  # it reads nothing of version 1; RKE2's own does
        assert set(tomllib.loads(file.read_text())["plugins"]["cri"]["containerd"]["runtimes"]) == {"ocigpu", "runc"}


def test_containerd_sees_the_entry_of_a_drop_in(tmp_path: Path) -> None:
    requirements.require(requirements.programs("containerd"))
    file = tmp_path / "config.toml"
    file.write_text("version = 2\n")
    configure("--config", file, "--drop-in", tmp_path / "conf.d" / "gpus.toml", "--default")
    assert runtimes(file)["ocigpu"] == str(RUNTIME)
    assert "runc" in runtimes(file)
    run([PROGRAMS / "ocigpu", "engine", "remove", "containerd", "--config", file])
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def refused(tmp_path: Path, *words: str | Path) -> str:
    """Return the error of a run that changes nothing."""
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = configure(*words, check=False)
    assert result.returncode == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    return result.stderr


def test_what_containerd_refuses_is_not_written(tmp_path: Path) -> None:
    requirements.require(requirements.programs("containerd"))
    file = tmp_path / "config.toml"
    file.write_text(f'version = 2\n[plugins."{CRI}"]\nmax_concurrent_downloads = "many"\n')
    error = refused(tmp_path, "--config", file)
    assert "OCIGPU-ENG-3" in error
    assert "many" in error or "cannot decode TOML string" in error  # before containerd 2, and since


def test_a_snapshotter_that_an_entry_would_change_is_not_changed(tmp_path: Path) -> None:
    """containerd 2 passes over the snapshotter of a file of version 2 without a table of runtimes: pods use overlayfs.

    With an entry they would use what the file says, and find none of their images and containers.
    """
    requirements.require(requirements.programs("containerd"))
    file = tmp_path / "config.toml"
    file.write_text(f'version = 2\n[plugins."{CRI}".containerd]\nsnapshotter = "native"\n')
    plugins = dump(file)["plugins"]
    if CRI in plugins and "containerd" in plugins[CRI]:
        assert plugins[CRI]["containerd"]["snapshotter"] == "native"
        configure("--config", file)
        assert dump(file)["plugins"][CRI]["containerd"]["snapshotter"] == "native"
    else:
        assert plugins["io.containerd.cri.v1.images"]["snapshotter"] == "overlayfs"
        error = refused(tmp_path, "--config", file)
        assert "OCIGPU-ENG-3" in error
        assert "snapshotter otherwise than before" in error


def test_an_entry_that_a_drop_in_would_hide_is_not_written(tmp_path: Path) -> None:
    """NVIDIA's tool copies the whole table into a drop-in: before 2.1 containerd then reads nothing else of it."""
    requirements.require(requirements.programs("containerd"))
    file = tmp_path / "config.toml"
    file.write_text(f'version = 2\nimports = ["{tmp_path}/conf.d/*.toml"]\n[plugins."{CRI}"]\nsandbox_image = "x"\n')
    drop_in = tmp_path / "conf.d" / "99-nvidia.toml"
    drop_in.parent.mkdir()
    drop_in.write_text(
        f'version = 2\n[plugins."{CRI}"]\nsandbox_image = "x"\n[plugins."{CRI}".containerd.runtimes.nvidia]\n'
        f'runtime_type = "io.containerd.runc.v2"\n'
    )
    if containerd_version() >= (2, 1):
        configure("--config", file)
        assert runtimes(file)["ocigpu"] == str(RUNTIME)
        assert "nvidia" in runtimes(file)
        return
    error = refused(tmp_path, "--config", file)
    assert "OCIGPU-ENG-3" in error
    assert "--drop-in" in error
    assert "OCIGPU-ENG-2" in refused(tmp_path, "--config", file, "--drop-in", tmp_path / "conf.d" / "gpus.toml")
    configure("--config", file, "--drop-in", drop_in)
    assert runtimes(file)["ocigpu"] == str(RUNTIME)
    assert "nvidia" in runtimes(file)


def test_cdi_is_switched_on_where_containerd_has_it(tmp_path: Path) -> None:
    requirements.require(requirements.programs("containerd"))
    file = tmp_path / "config.toml"
    file.write_text("version = 2\n")
    if containerd_version() < (1, 7):
        assert "1.7 is the first" in refused(tmp_path, "--config", file, "--cdi")
        return
    configure("--config", file, "--cdi")
    plugins = dump(file)["plugins"]
    assert (plugins.get("io.containerd.cri.v1.runtime") or plugins[CRI])["enable_cdi"] is True
