"""The Fabric Manager of a simulated host: a file of lines, which the simulated libnvfm (nvfm.c) reads and writes.

mode 1              FABRIC_MODE: 0 has no partitions, 2 those of virtual functions
epoch 1             one more with each start: connections of before are not valid
partition 3 18 1 3  number, NVLinks of each GPU, physical ids
active 3            is active
lacks 3 1           a GPU lacks so many of its NVLinks, by physical id
fails 3 -10         activating and deactivating it fails with this code
restarted 1         restarted with FABRIC_MODE_RESTART=1: waits for the activated list; else since this time
listens tcp:127.0.0.1:6666  at this address alone
old                 knows the first version of the connection's parameters only
slow 5              answers each request after so many seconds
down                does not run
"""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from ocigpu.gpus.nvidia.fabric.partitions import board_partitions, show_ids
from ocigpu.system.files import lock

FILE = "fabric-manager"
BOARD_OF = {"9.0": "hopper", "10.0": "blackwell", "10.3": "blackwell"}
"""By the architecture of a model that has NVSwitches."""


class SimulatedManager:
    """The manager of the simulated host in ``directory``; tests and demonstrations are its operator."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory, FILE)

    def start(self, board: str = "hopper", mode: int = 1, active: Collection[Collection[int]] = ()) -> None:
        """Start it as a service machine does: its partitions are inactive, except the given ones."""
        partitions = board_partitions(board, active)
        lines = [f"mode {mode}", f"epoch {self._epoch() + 1}"]
        for one in partitions:
            links = one.nvlinks[0][0]
            lines.append(f"partition {one.partition_id} {links} {show_ids(one.physical_ids).replace(',', ' ')}")
        self._write([*lines, *(f"active {one.partition_id}" for one in partitions if one.is_active)])

    def restart(self, since: int = 1) -> None:
        """Restart it with FABRIC_MODE_RESTART=1: it forgets active partitions unless listed within a minute.

        ``since``: the start of that minute instead of the next request.
        """
        kept = self._without("epoch", "active", "restarted", "down")
        self._write([*kept, f"epoch {self._epoch() + 1}", f"restarted {since}"])

    def stop(self) -> None:
        """End it; routes that are programmed stay."""
        self.say("down")

    def say(self, line: str) -> None:
        """Add a line, replacing those with the same word; see above."""
        self._write([*self._without(line.split(maxsplit=1)[0]), line])

    def fail(self, physical_ids: Collection[int], code: int) -> None:
        """Let activation and deactivation of a partition fail with this code from now on, 0: not any more."""
        self._write([*self.lines(), f"fails {self._id_of(physical_ids)} {code}"])

    def active(self) -> list[tuple[int, ...]]:
        """Return the sets that are active."""
        words = [line.split() for line in self.lines()]
        known = {word[1]: tuple(map(int, word[3:])) for word in words if word[0] == "partition"}
        return sorted(known[word[1]] for word in words if word[0] == "active")

    def lines(self) -> list[str]:
        """Return the lines of its file, none without one."""
        try:
            return self.path.read_text(encoding="ascii").splitlines()
        except FileNotFoundError:
            return []

    def _id_of(self, physical_ids: Collection[int]) -> str:
        ids = show_ids(physical_ids).split(",")
        return next(line.split()[1] for line in self.lines() if line[:9] == "partition" and line.split()[3:] == ids)

    def _without(self, *words: str) -> list[str]:
        return [line for line in self.lines() if line.split()[0] not in words]

    def _epoch(self) -> int:
        return next((int(line.split()[1]) for line in self.lines() if line.startswith("epoch ")), 0)

    def _write(self, lines: Iterable[str]) -> None:
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "w", encoding="ascii") as file:
            lock(file.fileno())  # the library does so, too
            file.truncate(0)
            file.write("".join(f"{line}\n" for line in lines))
