"""From Allocate to a container that runc starts: it sees exactly the GPUs that the kubelet was told.

What the response says is put into a bundle as CRI engines do (containerd: pkg/cri/opts, internal/cri/server).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_lab import GPU, MIG_1G, MIG_3G, MODES, Kubelet, apply_response, kubelet, plugin
from support import requirements
from support.product import CONTROL_NODES, RUNTIME, SimulatedHost, gpu_names, listed_uuids
from support.runtimes import container_id, run_container, script

pytestmark = [pytest.mark.root, pytest.mark.engine]
LOOK = script(["nvidia-smi", "-L"], ["ls", "/dev"])


@pytest.fixture
def node(
    work_directory: Path, request: pytest.FixtureRequest, rootfs: Callable[[str], Path]
) -> Iterator[Callable[[SimulatedHost, str], tuple[Kubelet, Path]]]:
    """Call with a host and a strategy: returns the kubelet of a node, and its settings."""
    rootfs("glibc")
    opened: list[Any] = []

    def make(host: SimulatedHost, strategy: str, *words: str) -> tuple[Kubelet, Path]:
        settings = work_directory / "config.toml"
        runc = requirements.find_program("runc")
        directories = f'cdi.spec-dirs = ["{work_directory}/cdi"]\n'
        text = host.settings.read_text() + f'[runtime]\nruntimes = ["{runc}"]\n'
        settings.write_text(MODES[strategy.partition("+")[0]] + directories + text)
        directory = work_directory / "dp"
        kubelets = kubelet(directory)
        opened.append(kubelets)
        entered = kubelets.__enter__()
        words = (f"--device-list-strategy={strategy.partition('+')[0]}", "--mig-strategy=mixed", *words)
        running = plugin(settings, directory, *words)
        opened.append(running)
        running.__enter__()
        return entered, settings

    yield make
    for each in reversed(opened):
        each.__exit__(None, None, None)


def start(
    make_bundle: Callable[..., Path], response: dict[str, Any], settings: Path, environment: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Run a container with a response; returns the GPUs that nvidia-smi lists, and the nodes in /dev."""
    bundle = make_bundle(LOOK, edit=lambda config: apply_response(config, response, settings.parent / "cdi"))
    done = run_container([RUNTIME], bundle, container_id(), env={**environment, "OCIGPU_CONFIG": str(settings)})
    assert done.returncode == 0, done.stderr
    listing, nodes = done.stdout.split("@@0\n")[:2]
    return listed_uuids(listing), gpu_names(nodes)


@pytest.mark.parametrize("strategy", ["envvar", "volume-mounts", "cdi-annotations", "cdi-cri", "envvar+specs"])
def test_containers_of_pods_see_their_gpus(
    node: Any,
    strategy: str,
    simulated_host: SimulatedHost,
    make_bundle: Callable[..., Path],
    runtime_environment: dict[str, str],
) -> None:
    words = ("--pass-device-specs",) if strategy.endswith("+specs") else ()
    kubelets, settings = node(simulated_host, strategy, *words)
    kubelets.expect(gpu=(8, 8))
    for pod, count in (("one", 1), ("three", 3)):
        response = kubelets.admit(pod, "main", {GPU: count})
        assert bool(response["devices"]) == bool(words)
        wanted = sorted(simulated_host.gpus.index(id_) for id_ in kubelets.held(pod)[GPU])
        listed, nodes = start(make_bundle, response, settings, runtime_environment)
        assert listed == [simulated_host.gpus[index] for index in wanted]
        gpus = {f"nvidia{index}" for index in wanted}
        assert gpus == {name for name in nodes if name.removeprefix("nvidia").isdigit()}
        assert set(CONTROL_NODES) <= set(nodes)


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
def test_a_container_with_mig_devices(
    node: Any,
    strategy: str,
    mig_host: SimulatedHost,
    make_bundle: Callable[..., Path],
    runtime_environment: dict[str, str],
) -> None:
    kubelets, settings = node(mig_host, strategy)
    kubelets.expect(gpu=(1, 1), mig_3g=(1, 1), mig_1g=(1, 1))
    response = kubelets.admit("mig", "main", {MIG_1G: 1})
    bundle = make_bundle(
        script(["nvidia-smi", "-L"]), edit=lambda config: apply_response(config, response, settings.parent / "cdi")
    )
    environment = {**runtime_environment, "OCIGPU_CONFIG": str(settings)}
    done = run_container([RUNTIME], bundle, container_id(), env=environment)
    assert done.returncode == 0, done.stderr
    own, other = (uuid for uuid, _, _ in reversed(mig_host.mig_devices))
    assert own in done.stdout
    assert other not in done.stdout
    assert mig_host.gpus[1] not in done.stdout
    assert kubelets.held("mig") == {MIG_1G: [own]}
    assert kubelets.devices(MIG_3G) == {other: "Healthy"}
