"""The service's SQLite file: opened by one service at a time, brought to this version, changed in transactions, read.

``schema.sql`` makes a new file; ``from-N.sql`` makes a file of version N one of version N + 1.
"""

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ocigpu.core.errors import HostError
from ocigpu.system.files import lock, lock_file

FILE = "caas.sqlite"
VERSION = 3


class Database:
    """An open file.  ``serving``: no other process may open it for serving meanwhile; API keys may be made beside it.

    ``secret``: random bytes that stay the same for the life of the file; ``unclean``: the log of changes may still
    contain deleted values.  Raises HostError (OCIGPU-CAAS-1) if the file cannot be opened, is of a newer version, or is
    being served.
    """

    def __init__(self, directory: str, serving: bool = False) -> None:
        self.unclean = True  # a process that was killed may have left something
        self._guard = threading.RLock()
        self._lock = -1
        self._base: sqlite3.Connection = None  # type: ignore[assignment] # until it is open
        self._directory, path = directory, os.path.join(directory, FILE)
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            if serving:
                self._lock = lock_file(f"{path}.lock")
                if not lock(self._lock, 0):
                    raise HostError("OCIGPU-CAAS-1", f"{path}: another service uses it", "one service at a time")
            os.close(lock_file(path))
            self._base = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
            # deleted data is overwritten: values of secrets; FULL: an answer is sent once its data is on the disk
            for pragma in ("journal_mode = wal", "synchronous = full", "secure_delete = on"):
                self.read(f"pragma {pragma}")
            with self.change() as base:
                _upgrade(base, path)
        except BaseException as error:
            self.close()
            if not isinstance(error, (OSError, sqlite3.Error)):
                raise
            cause = error.strerror if isinstance(error, OSError) else str(error)
            raise HostError("OCIGPU-CAAS-1", f"{path}: {cause}") from error
        self.secret: bytes = self.read("select value from meta where name = 'secret'")[0][0]
        if serving:
            self.clean()

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._base:
            self._base.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: it is on the disk when the block ends, and undone if the block raises."""
        with self._guard:
            self._base.execute("begin immediate")
            try:
                yield self._base
            except BaseException:
                self._base.execute("rollback")
                raise
            self._base.execute("commit")

    def read(self, text: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows of a query."""
        with self._guard:
            return self._base.execute(text, values).fetchall()

    def clean(self) -> None:
        """Empty the log of changes (WAL), which keeps deleted values; during a read of the file, the next call does it.

        Source: "PRAGMA wal_checkpoint", TRUNCATE.
        """
        if not self.unclean:
            return
        with self._guard:
            self._base.execute("pragma busy_timeout = 0")
            try:
                (busy, _, _) = self._base.execute("pragma wal_checkpoint(truncate)").fetchone()
            except sqlite3.OperationalError:  # a full disk: nothing is lost
                busy = 1
            self._base.execute("pragma busy_timeout = 10000")
        self.unclean = bool(busy)

    def has_space(self, size: int) -> bool:
        """Tell whether the disk has room for this many more bytes; freed space in the file is used again."""
        disk = os.statvfs(self._directory)
        unused = self.read("select freelist_count * page_size from pragma_freelist_count, pragma_page_size")[0][0]
        return int(disk.f_bavail * disk.f_frsize + unused) >= size


def _upgrade(base: sqlite3.Connection, path: str) -> None:
    (version,) = base.execute("pragma user_version").fetchone()
    if version > VERSION:
        raise HostError("OCIGPU-CAAS-1", f"{path}: written by a newer ocigpu", "run that version")
    steps = [f"from-{number}.sql" for number in range(version, VERSION)] if version else ["schema.sql"]
    for step in steps:
        for statement in Path(__file__).with_name(step).read_text(encoding="utf-8").split(";"):
            base.execute(statement)
    if not version:
        base.execute("insert into meta values ('secret', ?)", (secrets.token_bytes(32),))
    base.execute(f"pragma user_version = {VERSION}")
