"""What pyproject.toml cannot say: a wheel brings the simulated GPUs' libraries, for machines without a C compiler.

They are compiled for this machine's type and for those that a cross compiler is here for (x86_64-linux-gnu-gcc,
aarch64-linux-gnu-gcc).  Without any compiler the wheel is as good as the sources: it then needs one where it is used.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # a build's own environment does not have it


class BuildPy(build_py):
    """Copies the package, then compiles."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            from ocigpu.sim.libraries import prebuild

            for machine, lacks in prebuild(Path(self.build_lib) / "ocigpu/sim/prebuilt").items():
                if lacks:
                    self.warn(f"simulated GPUs on {machine}: {lacks}")


setup(cmdclass={"build_py": BuildPy})
