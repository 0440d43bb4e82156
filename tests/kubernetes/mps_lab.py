"""A simulated host whose control daemon of MPS is the double of tests/support."""

import sys
from pathlib import Path

from support.product import SimulatedHost, make_simulated_host

DOUBLE = Path(__file__).parents[1] / "support/nvidia-cuda-mps-control"


def make_mps_host(directory: Path) -> SimulatedHost:
    """Make a host with two GPUs."""
    host = make_simulated_host(directory, 2)
    program = host.directory / "usr/bin/nvidia-cuda-mps-control"
    program.unlink()
    program.write_text(DOUBLE.read_text().replace("/usr/bin/env python3", f"{sys.executable} -IS"))
    program.chmod(0o755)
    return host
