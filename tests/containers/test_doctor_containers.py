"""``ocigpu doctor`` finds the container that has lost its GPU, and leaves it as it is."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from containers_lab import WAITING, container
from live_lab import apply_again, ocigpu
from support.bundle import LIBRARIES
from support.fixtures import MakeBundle
from support.product import SimulatedHost
from test_repair_containers import GPU_3, hook_by_hand

from ocigpu.doctor import running
from ocigpu.doctor.containers import check_driver_capabilities, check_lost_gpus
from ocigpu.doctor.findings import Finding
from ocigpu.doctor.host import Host


@pytest.mark.root
@pytest.mark.engine
def test_a_container_that_has_lost_its_gpu_is_found_and_repaired(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    environment = simulated_host.environment(runtime_environment, "runc")
    settings = environment["OCIGPU_CONFIG"]
    bundle = make_bundle(WAITING, GPU_3, edit=lambda config: hook_by_hand(config, settings))
    with container(bundle, environment) as made:

        def look() -> list[Finding]:
            return check_lost_gpus(Host(config=settings, states=(str(made.state),)))

        assert [item.severity for item in look()] == ["ok"]
        apply_again(made, "v1")
        for _ in range(2):  # looking changes nothing
            (found,) = look()
            assert found.severity == "error"
            assert any("195:3" in entry.found for entry in found.evidence)
        assert found.fixes[0] == f"ocigpu repair {made.name}"
        ocigpu(made, "repair", made.name)
        assert [item.severity for item in look()] == ["ok"]


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("ask", [lambda *_: 1 / 0, lambda *_: time.sleep(60)], ids=["fails", "hangs"])
def test_containers_that_cannot_be_looked_into_are_not_called_well(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[..., None],
) -> None:
    monkeypatch.setattr(running, "find_lacks", ask)
    monkeypatch.setattr(running, "SECONDS", 0.1)
    with container(make_bundle(WAITING, GPU_3), runtime_environment, host=simulated_host) as made:
        host = Host(config=made.environment["OCIGPU_CONFIG"], states=(str(made.state),))
        assert [item.severity for item in check_lost_gpus(host)] == ["not-checked"]


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("given", ["", "video,compute"])
def test_an_image_that_uses_driver_files_that_its_container_has_not_is_named(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost, given: str
) -> None:
    """NVIDIA's default mode gives them unasked: NVENC and Vulkan would be missed without a word."""
    names = ("libavcodec.so.59", "libvulkan.so.1")

    def of_image(capabilities: str) -> Path:
        variables = {"NVIDIA_DRIVER_CAPABILITIES": capabilities} if capabilities else {}
        bundle = make_bundle(WAITING, {**GPU_3, **variables})
        for name in names:
            (bundle / "rootfs" / LIBRARIES / name).touch()
        return bundle

    wanted = names if not given else names[1:]
    with container(of_image(given), runtime_environment, host=simulated_host) as made:
        host = Host(config=made.environment["OCIGPU_CONFIG"], states=(str(made.state),))
        (found,) = check_driver_capabilities(host)
        assert found.severity == "note"
        explained = ocigpu(made, "explain", made.name, "--config", host.config).stdout
        for text in (found.text, explained):
            assert [name for name in names if f"/{LIBRARIES}/{name}, which uses driver files for" in text] == [*wanted]
            assert f"NVIDIA_DRIVER_CAPABILITIES {'does not request them' if given else 'is not set'}" in text
    with container(of_image("all"), runtime_environment, host=simulated_host) as made:
        host = Host(config=made.environment["OCIGPU_CONFIG"], states=(str(made.state),))
        assert [item.severity for item in check_driver_capabilities(host)] == ["ok"]
