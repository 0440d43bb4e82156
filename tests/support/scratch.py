"""A machine to install packages on: this one as it is, every change kept in memory and gone at the end, no network."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.process import Completed, explain, run

ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}

_SETUP = """
set -e
directory=$1 hidden=$2
shift 2
mount -t tmpfs scratch "$directory"
mkdir "$directory/upper" "$directory/work" "$directory/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$directory/upper,workdir=$directory/work" "$directory/root"
cd "$directory/root"
for name in proc sys dev; do mount --rbind "/$name" "$name"; done
mount -t tmpfs run run
mkdir run/changes
rm -rf etc/ocigpu # the tests' own, or an operator's
mount --bind "$directory/upper" run/changes
mkdir -p ".$hidden"
mount -t tmpfs hidden ".$hidden"
for name; do
  mkdir -p ".$name"
  mount --bind "$name" ".$name"
done
pivot_root . .
umount -l .
cd /
echo ready
exec cat
"""


class ScratchMachine:
    """Call it with words of a command; ``enter`` are the words that go before a command started in another way."""

    def __init__(self, pid: int, *more: str) -> None:
        self.root = Path(f"/proc/{pid}/root")
        self.enter = ("nsenter", "--target", str(pid), "--mount", "--net", *more, "--root", "--wd")

    def __call__(self, *words: str, check: bool = True, env: dict[str, str] | None = None) -> Completed:
        result = run([*self.enter, *words], check=False, env={**ENVIRONMENT, **(env or {})}, timeout=120)
        assert not check or result.returncode == 0, explain(result)
        return result

    def changes(self, *expected: str) -> list[str]:
        """Return what differs from this machine, without /run and paths that start with one of ``expected``.

        It begins without /etc/ocigpu, which this machine has while the tests run (support/isolation.py).
        """
        upper = self.root / "run/changes"
        names = {f"/{path.relative_to(upper)}": path for path in upper.rglob("*")}
        if not (self.root / "etc/ocigpu").exists():
            names.pop("/etc/ocigpu", None)
        files = [
            name for name, path in names.items() if path.is_symlink() or not path.is_dir() or not Path(name).is_dir()
        ]
        return sorted(name for name in files if not name.startswith(expected))


@contextmanager
def scratch_machine(
    directory: Path, *, hidden: Path, shared: Sequence[Path], alone: bool = False
) -> Iterator[ScratchMachine]:
    """Make one, at an empty ``directory``; ``hidden`` is an empty directory there, ``shared`` are the real ones.

    ``alone``: no other process of this machine is seen there, and its own end with it.
    """
    setup = ["sh", "-c", _SETUP, "sh", str(directory), str(hidden), *map(str, shared)]
    words = [
        "unshare",
        "--mount",
        "--net",
        *(("--pid", "--fork", "--kill-child", "--mount-proc") if alone else ()),
        *setup,
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin
        assert holder.stdout
        try:
            assert holder.stdout.readline() == "ready\n"
            if alone:
                (first,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
                yield ScratchMachine(int(first), "--pid")
            else:
                yield ScratchMachine(holder.pid)
        finally:
            holder.stdin.close()  # it ends, and its mounts with it
            holder.wait(60)
