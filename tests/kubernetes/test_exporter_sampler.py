"""The process that asks NVML, seen from its parent: it hangs, it is replaced, it follows orders."""

import os
import time
from collections.abc import Iterator

import pytest
from support.process import is_alive, own_children, wait_for
from support.product import SimulatedHost

from ocigpu.core.settings import Settings
from ocigpu.exporter.sample import Sample
from ocigpu.exporter.sampler import FIRST_RETRY, LONGEST_RETRY, STUCK, Orders, Sampler
from ocigpu.gpus.nvidia.on_node import find_library
from ocigpu.system.service import Backoff
from ocigpu.system.settings_file import read_settings

ORDERS = Orders(("DCGM_FI_DEV_GPU_TEMP",), 0.1, 300, 300)


@pytest.fixture
def retry() -> Backoff:
    """When the sampler starts its next process."""
    return Backoff(FIRST_RETRY, LONGEST_RETRY)


@pytest.fixture
def sampler(simulated_host: SimulatedHost, retry: Backoff) -> Iterator[Sampler]:
    found = Sampler(read_settings(str(simulated_host.settings)), deadline=60.0, retry=retry)
    yield found
    found.close()


def children() -> set[int]:
    """Return the processes that ask NVML, of this one."""
    return own_children("ocigpu.exporter.sampler_child")


def wait_for_sample(sampler: Sampler, seconds: float = 120) -> Sample:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if samples := sampler.wait(0.1):
            return samples[0]
    raise AssertionError("no sample")


def test_samples_come_until_the_end_of_the_process_that_wants_them(sampler: Sampler) -> None:
    sampler.order(ORDERS)
    found = wait_for_sample(sampler)
    assert [gpu.values for gpu in found.gpus] == [{"DCGM_FI_DEV_GPU_TEMP": 30}] * 8
    (child,) = children()
    sampler.close()
    assert not is_alive(child)


def test_other_orders_are_followed_at_once(sampler: Sampler) -> None:
    sampler.order(ORDERS._replace(interval=3600))
    wait_for_sample(sampler)
    sampler.order(Orders(("DCGM_FI_DEV_FB_USED",), 3600, 300, 300))
    assert set(wait_for_sample(sampler).gpus[0].values) == {"DCGM_FI_DEV_FB_USED"}


def test_each_nvlink_of_a_gpu_has_its_traffic_and_temperatures_their_thresholds(sampler: Sampler) -> None:
    """A simulated A100 has 12 links."""
    links = tuple(f"DCGM_FI_DEV_NVLINK_BANDWIDTH_L{link}" for link in range(18))
    limits = ("DCGM_FI_DEV_SLOWDOWN_TEMP", "DCGM_FI_DEV_SHUTDOWN_TEMP")
    rates = ("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", "DCGM_FI_DEV_PCIE_RX_THROUGHPUT")
    sampler.order(Orders((*links, *limits, *rates, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"), 3600, 300, 300))
    values = wait_for_sample(sampler).gpus[0].values
    total = values["DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"]
    assert [link in values for link in links] == [True] * 12 + [False] * 6
    assert [values[link] for link in links[:12]] == [pytest.approx(total / 12, rel=1e-3)] * 12
    assert [values[name] for name in (*limits, *rates)] == [89, 92, 100, 100]


def test_nvml_that_hangs_is_replaced_and_answers_again(sampler: Sampler, simulated_host: SimulatedHost) -> None:
    sampler.order(ORDERS)
    wait_for_sample(sampler)
    (child,) = children()
    faults = simulated_host.directory / "faults"
    faults.write_text("hang\n")
    sampler.deadline = 1.0
    try:
        while not (late := wait_for_sample(sampler)).error:
            pass
        assert late.error == "NVML did not answer within 1.1 s"
        assert not is_alive(child)
    finally:
        faults.unlink()
    sampler.deadline = 60.0
    while wait_for_sample(sampler).error:
        pass
    assert children() - {child}


def test_no_second_process_is_started_beside_one_that_does_not_end(
    sampler: Sampler, retry: Backoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.order(ORDERS)
    wait_for_sample(sampler)
    (child,) = children()
    monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))  # stuck in the driver
    retry.first = retry.longest = 3600.0
    sampler.close()
    assert [sample.error for sample in sampler.wait(0.1)] == [STUCK.format("NVML")]
    assert sampler.wait(0.1) == [], "it is told at intervals"
    retry.due = 0.0
    assert wait_for_sample(sampler).error == STUCK.format("NVML")
    assert not children() - {child}
    monkeypatch.undo()

    def works() -> bool:
        retry.due = 0.0
        return not wait_for_sample(sampler).error

    wait_for("its end, and another process", works)


def test_a_host_without_a_driver_has_a_reason() -> None:
    sampler = Sampler(Settings(driver_root="/nonexistent"), retry=Backoff(3600.0))
    sampler.order(ORDERS)
    assert wait_for_sample(sampler).error == "there is no NVML library below /nonexistent"
    assert sampler.wait(0.01) == [], "it waits before it looks again"
    assert find_library(Settings(driver_root="/nonexistent")) == ""
