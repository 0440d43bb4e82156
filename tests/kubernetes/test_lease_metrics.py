"""Metrics of the lease agent: what they count while GPUs go from tenant to tenant; Prometheus can read them."""

import urllib.request
from pathlib import Path

import pytest
from lease_lab import GPUS, SETS, World

from ocigpu.core.errors import HostError, SettingsError
from ocigpu.kubernetes.leases.lease import Lease, Phase
from ocigpu.kubernetes.leases.metrics import METRICS, LeaseMetrics
from ocigpu.system.exposition import render_histogram
from ocigpu.system.pages import serve_metrics

NAMED = [tuple(GPUS[number - 1] for number in ids) for ids in SETS]


class Counted:
    """An agent whose leases are counted in each round."""

    def __init__(self, directory: Path, gpus: int = 8) -> None:
        self.world = World(directory, gpus)
        self.agent = self.world.agent()
        self.metrics = LeaseMetrics(lambda: NAMED, self.agent.failures)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.time += 1
            self.metrics.take(self.agent.step(), self.world.time)

    def value(self, series: str) -> float:
        lines = self.metrics.render().decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series), -1.0)


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


def test_phases_sets_and_steps(counted: Counted) -> None:
    counted.run(60)
    assert counted.value('ocigpu_lease_gpus{phase="Free"}') == 8
    assert counted.value("ocigpu_lease_largest_free_set") == 8
    pair = (GPUS[0], GPUS[2])
    counted.world.allocate(counted.world.gate(), *pair)
    counted.world.start_pod(7, *pair)
    counted.run(100)
    assert counted.value('ocigpu_lease_gpus{phase="Leased"}') == 2
    assert [counted.value(f'ocigpu_lease_free_sets{{gpus="{size}"}}') for size in (1, 2, 4, 8)] == [6, 3, 1, 0]
    assert counted.value("ocigpu_lease_largest_free_set") == 4
    assert counted.value(f'ocigpu_lease_phase_seconds{{gpu="{GPUS[0]}",phase="Leased"}}') == pytest.approx(99, abs=3)
    counted.world.vms.pop(7)  # the machine ends, its pod is over much later
    counted.run(30)
    counted.world.end_pod(7)
    counted.run(30)
    assert counted.value('ocigpu_lease_gpus{phase="Free"}') == 8
    assert counted.value('ocigpu_lease_step_seconds_count{step="all"}') == 2
    for step in ("reset", "fabric", "check"):
        assert counted.value(f'ocigpu_lease_step_seconds_count{{step="{step}"}}') >= 2, step
        assert counted.value(f'ocigpu_lease_step_seconds_bucket{{step="{step}",le="10"}}') >= 2, step
    assert counted.value('ocigpu_lease_transitions_total{phase="Leased"}') == 2


def test_failures_have_their_reason(tmp_path: Path) -> None:
    counted = Counted(tmp_path, gpus=2)
    counted.world.broken.add(GPUS[0])
    counted.world.deviations[GPUS[1]] = "VBIOS 96.1, accepted 96.0"
    counted.run(700)
    assert counted.value('ocigpu_lease_failures_total{step="reset",reason="OCIGPU-VFIO-1"}') > 3
    assert counted.value('ocigpu_lease_quarantines_total{reason="ResetFailed"}') == 1
    assert counted.value('ocigpu_lease_quarantines_total{reason="FirmwareMismatch"}') == 1
    assert counted.value("ocigpu_lease_largest_free_set") == 0


def test_every_metric_is_in_the_table_and_has_its_type(counted: Counted) -> None:
    counted.run(60)
    counted.metrics.failures["check", "OCIGPU-LEASE-4"] += 1
    counted.metrics.quarantined["Xid"] += 1
    text = counted.metrics.render().decode()
    types = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    assert types == {name: kind for name, (kind, _) in METRICS.items()}
    assert text.endswith("\n")


def test_without_partitions_any_set_will_do_and_unknown_ones_are_left_out() -> None:
    leases = {gpu: Lease(gpu, Phase.FREE) for gpu in GPUS[:3]}
    metrics = LeaseMetrics()
    metrics.take(leases, 1.0)
    assert "ocigpu_lease_largest_free_set 3\n" in metrics.render().decode()

    def unread() -> list[tuple[str, ...]]:
        raise HostError("OCIGPU-FAB-9", "no state")

    metrics = LeaseMetrics(unread)
    metrics.take(leases, 1.0)
    assert "free_set" not in metrics.render().decode()


def test_buckets_add_up() -> None:
    text = render_histogram("seconds", "Some.", (1.0, 2.5), ((("step", "a"),), (3, 0, 1), 12.5))
    assert text.splitlines()[2:] == [
        'seconds_bucket{step="a",le="1"} 3',
        'seconds_bucket{step="a",le="2.5"} 3',
        'seconds_bucket{step="a",le="+Inf"} 4',
        'seconds_sum{step="a"} 12.5',
        'seconds_count{step="a"} 4',
    ]


def test_they_are_served() -> None:
    with pytest.raises(SettingsError, match="--metrics"):
        serve_metrics("nowhere", bytes)
    metrics = LeaseMetrics()
    server = serve_metrics("127.0.0.1:0", metrics.render)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
            assert b"ocigpu_lease_agent_info" in answer.read()
    finally:
        server.shutdown()
