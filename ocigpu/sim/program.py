"""Programs of a simulated host that are Python: a stub in the host's /usr/bin, and what it calls."""

import contextlib
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ocigpu.core.errors import OcigpuError

_PACKAGE = Path(__file__).parents[2]


def render_stub(module: str, root: str) -> str:
    """Return a script that calls ``module``'s main(root, arguments), with the Python and the sources that run now."""
    code = (
        f"import sys; sys.path.insert(0, {str(_PACKAGE)!r}); from ocigpu.sim.program import run; "
        f"sys.exit(run({module!r}, {root!r}, sys.argv[1:]))"
    )
    return (
        "#!/bin/sh\n# Prints what a SIMULATED host shows: there is no GPU.\n"
        f'exec {shlex.quote(sys.executable)} -I -B -c {shlex.quote(code)} "$@"\n'
    )


def run(module: str, root: str, arguments: Sequence[str]) -> int:
    """Run a module's main; returns its exit status, 1 with a line on stderr where the host cannot be read."""
    name = module.rpartition(".")[2].replace("_", "-")
    try:
        status = importlib.import_module(module).main(root, arguments)
        sys.stdout.flush()
    except OcigpuError as error:
        print(f"{name}: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    if not os.environ.get("OCIGPU_SIM_QUIET"):
        print(f"{name}: SIMULATED host, no real GPU", file=sys.stderr)
    return int(status)
