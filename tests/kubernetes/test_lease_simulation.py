"""Clusters of simulated nodes whose GPUs are lent by the real state machine: every event is held against the truth."""

from pathlib import Path

import pytest
from support.lease_simulation import Chances, Simulation, table_of_document, write_document

from ocigpu.kubernetes.leases.lease import LeasePhase

DOCUMENT = Path(__file__).parents[2] / "docs/tenants/LEASES.md"


@pytest.mark.parametrize("seed", range(3))
def test_a_small_cluster_with_many_failures(seed: int) -> None:
    """Ten times as many as the large one has: each kind occurs."""
    chances = Chances(*(min(10 * each, 0.3) for each in Chances()))
    cluster = Simulation(4, 80, seed, chances._replace(reset_for_ever=0.02, mismatch=0.02), load=0.6)
    cluster.run()
    assert sum(cluster.happened.values()) > 200
    assert cluster.time_in[LeasePhase.LEASED] > 0


def test_without_failures_every_gpu_is_free_in_the_end() -> None:
    cluster = Simulation(4, 200, 1, Chances(*([0.0] * len(Chances()))), load=0.5)
    cluster.run()
    assert not +cluster.happened


@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_a_hundred_nodes_and_ten_thousand_requests() -> None:
    """The document has the table of this very run."""
    assert table_of_document(DOCUMENT) == write_document(None), (
        "write it: .venv/bin/python tests/support/lease_simulation.py"
    )
