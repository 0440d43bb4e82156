"""Ten thousand allocations through one plugin: nothing is given twice, nothing grows."""

from collections.abc import Callable
from pathlib import Path

import pytest
from plugin_lab import GPU, kubelet, plugin
from support.product import SimulatedHost

pytestmark = pytest.mark.root


def resident(pid: int) -> int:
    """Return the KiB of memory that a process uses."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.rest
def test_ten_thousand_allocations(
    simulated_host: SimulatedHost, work_directory: Path, times: Callable[[int], int]
) -> None:
    directory, pods = work_directory / "dp", times(10_000)
    with kubelet(directory) as kubelets, plugin(simulated_host.settings, directory) as running:
        kubelets.expect(gpu=(8, 8))
        kubelets.soak(GPU, 500, [1, 2, 4, 3])
        descriptors = len(list(Path(f"/proc/{running.child.pid}/fd").iterdir()))
        threads = len(list(Path(f"/proc/{running.child.pid}/task").iterdir()))
        memory = resident(running.child.pid)
        assert kubelets.soak(GPU, pods, [1, 2, 1, 4, 3, 8, 1, 2])["pods"] == pods
        assert len(list(Path(f"/proc/{running.child.pid}/fd").iterdir())) <= descriptors + 8
        assert len(list(Path(f"/proc/{running.child.pid}/task").iterdir())) <= threads + 16
        assert resident(running.child.pid) < memory + 32 * 1024
        kubelets.expect(gpu=(8, 8))
