"""What a command and everything it starts does, as strace(1) tells it: programs executed, files opened, calls."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CALLS = "trace=execve,execveat,clone,clone3,fork,vfork,open,openat,openat2"
_LINE = re.compile(r"(\d+\.\d+) (\w+)\((.*)\) += (-?\d+)")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_FORKS = ("clone", "clone3", "fork", "vfork")


class Program(NamedTuple):
    """What a process was between two execve(2), or, with ``forked``, one that lived without any.

    ``path`` and ``words``: of its execve, or of the process that it is a copy of.  ``opened``: in order, what
    could be opened.  ``calls``: how often each system call was made, as far as they were traced.  ``parent`` is 0 where
    that is not known, such as below a container's own process.
    """

    begin: float
    pid: int
    parent: int
    path: str
    words: tuple[str, ...]
    forked: bool
    opened: list[str]
    calls: Counter[str]

    @property
    def kind(self) -> str:
        """What it is: "shim" and "hook" (stubs), "python", "fork of python", "grep", "ldconfig"; else ""."""
        name = os.path.basename(self.path)
        if name.startswith("python") or name == "ocigpu-python":
            return "fork of python" if self.forked else "python"
        if self.forked:
            return ""
        return {"ocigpu-runtime": "shim", "ocigpu-hook": "hook", "grep": "grep", "ldconfig": "ldconfig"}.get(name, "")

    def __str__(self) -> str:
        return f"{'fork of ' if self.forked else ''}{self.path} {' '.join(self.words[1:])[:100]} ({self.pid})"


def trace(
    command: Sequence[str | os.PathLike[str]],
    env: dict[str, str] | None = None,
    *,
    all_calls: bool = False,
    stdin: str = "",
) -> list[Program]:
    """Run a command to its end under strace; returns the programs that it and its descendants were, by begin.

    strace waits for all of them: a container that the command makes must end with it (see :func:`life`).
    Threads are part of their process.  ``all_calls``: count every call, not only what makes processes and opens files.
    Raises RuntimeError with what the command said when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="ocigpu-trace-") as name:
        directory = Path(name)
        (directory / "input").write_text(stdin)
        words = ["strace", "-ff", "-qq", "-ttt", "-s", "1000", "-o", str(directory / "log")]
        words += [*([] if all_calls else ["-e", CALLS]), "--", *(os.fspath(word) for word in command)]
        # files, not pipes: a created container keeps the descriptors
        with (directory / "output").open("wb") as output, (directory / "input").open() as source:
            status = subprocess.run(words, stdin=source, stdout=output, stderr=output, env=env, check=False).returncode
        if status:
            text = (directory / "output").read_text(errors="replace")
            raise RuntimeError(f"{' '.join(os.fspath(word) for word in command)}: status {status}: {text}")
        logs = {int(path.suffix[1:]): path.read_text(errors="replace").splitlines() for path in directory.glob("log.*")}
    return parse(logs)


def life(runtime: str | os.PathLike[str], state: Path, bundle: Path, name: str) -> list[str]:
    """Return a command that creates, starts and deletes a container; whatever happens, it does not outlive that."""
    base = f'"{runtime}" --root "{state}"'
    create = f'{base} create --bundle "{bundle}" "{name}" && {base} start "{name}"'
    return ["/bin/sh", "-c", f'{create}; status=$?; {base} delete --force "{name}"; exit $status']


def parse(logs: dict[int, list[str]]) -> list[Program]:
    """Return the programs of the lines of ``strace -ff -ttt``, which writes a file for each thread."""
    made: dict[int, tuple[int, Program]] = {}  # process -> the one that made it, and what that was just then
    threads: dict[int, Program] = {}
    found: list[Program] = []
    for pid in sorted(logs, key=lambda pid: logs[pid][0].split()[0] if logs[pid] else ""):
        parent, copied = made.get(pid, (0, None))
        now = threads.get(pid) or Program(
            0.0, pid, parent, copied.path if copied else "", copied.words if copied else (), True, [], Counter()
        )
        before = len(found)
        for line in logs[pid]:
            match = _LINE.match(line)
            if not match:
                continue
            begin, call, arguments, result = float(match[1]), match[2], match[3], int(match[4])
            now.calls[call] += 1
            if result < 0:
                continue
            if call in ("execve", "execveat"):
                strings = _STRING.findall(arguments)
                now = Program(begin, pid, parent, strings[0] or strings[1], tuple(strings[1:]), False, [], Counter())
                found.append(now)
            elif call in _FORKS and "CLONE_THREAD" in arguments:
                threads[result] = now
            elif call in _FORKS:
                made[result] = (now.pid, now)
            elif call in ("open", "openat", "openat2"):
                now.opened.append(_STRING.findall(arguments)[0])
        if len(found) == before and pid not in threads and logs[pid]:
            found.append(now._replace(begin=float(logs[pid][0].split()[0])))
    return sorted(found, key=lambda program: program.begin)
