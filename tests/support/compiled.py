"""Simulated hosts of a session: each command of the C compiler is run once, its result is copied.

Compiling takes most of the time of making a host, and a table that is filled in afterwards holds what differs from one
host to another.  A command is the same when its words, its inputs and the variables that a compiler obeys are; failures
are not kept.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocigpu.sim import libraries

VARIABLES = ("PATH", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH", "TMPDIR")


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    compile_really = libraries.Compiler.run
    made: dict[tuple[str, ...], bytes] = {}

    def run(self: libraries.Compiler, *arguments: str | Path) -> str:
        words = [*map(str, arguments)]
        output = Path(words.pop(words.index("-o") + 1))
        headers = f"-I{self.scratch}"
        key = (
            *(os.environ.get(name, "") for name in VARIABLES),
            self.path,
            *(digest(self.scratch / "unsupported.h") if word == headers else digest(Path(word)) for word in words),
        )
        if key in made:
            output.write_bytes(made[key])
            output.chmod(0o755)
            return ""
        failure = compile_really(self, *arguments)
        if not failure:
            made[key] = output.read_bytes()
        return failure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries.Compiler, "run", run)
        yield


def digest(word: Path) -> str:
    """Return what stands for a word in a command: for a file, what is in it."""
    return hashlib.sha256(word.read_bytes()).hexdigest() if word.is_file() else str(word)
