"""A PostgreSQL of the tests: the distribution's programs, a cluster of its own in a temporary directory, one socket.

The server runs as ``nobody`` where the tests are root, because it refuses root, and ends with the tests' process.
"""

import ctypes
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from support import machine
from support.process import wait_for

PR_SET_PDEATHSIG = 1
_NUMBERS = itertools.count()


def find_postgres() -> str:
    """Return the directory of the newest server's programs, "" for none: Debian keeps them off PATH."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda one: int(one.parts[-3]))
    found = str(places[-1]) if places else shutil.which("postgres")
    return os.path.dirname(os.path.realpath(found)) if found else ""


class Postgres:
    """A server; ``directory``: has its data and socket."""

    def __init__(self, directory: Path, fsync: bool = False) -> None:
        self.directory, self._programs, self._fsync = directory, find_postgres(), fsync
        self._as: dict[str, Any] = {"cwd": "/", "env": {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}}
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            os.chown(directory, user.pw_uid, user.pw_gid)
            self._as |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        words = ["--auth=trust", "--username=postgres", "--no-sync", "--no-instructions"]
        done = subprocess.run(
            [f"{self._programs}/initdb", "-D", str(directory / "data"), *words],
            capture_output=True,
            text=True,
            **self._as,
        )
        assert done.returncode == 0, done.stderr
        self.start()

    def start(self) -> None:
        settings = {
            "listen_addresses": "", "unix_socket_directories": str(self.directory), "max_connections": "50",
            "shared_buffers": "16MB", "autovacuum": "off", "fsync": "on" if self._fsync else "off",
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            self.child = subprocess.Popen(
                [f"{self._programs}/postgres", "-D", str(self.directory / "data"), *words],
                stdout=log, stderr=log, preexec_fn=_end_with_parent, **self._as,  # noqa: PLW1509 - it only calls prctl(2)
            )  # fmt: skip
        wait_for("PostgreSQL", self._answers, on_failure=(self.directory / "log").read_text)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End the server at once, with its connections."""
        self.child.send_signal(number)
        self.child.wait(60)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True

    def url(self, name: str) -> str:
        return f"postgresql://postgres@/{name}?host={self.directory}"

    def do(self, text: str, name: str = "postgres") -> list[Any]:
        """Execute a statement; returns its rows."""
        with psycopg.connect(self.url(name), autocommit=True) as base:
            done = base.execute(text)
            return done.fetchall() if done.description else []

    def make_database(self) -> str:
        """Return the URL of a new database."""
        name = f"db{next(_NUMBERS)}"
        self.do(f"create database {name} template template0 locale 'C.UTF-8' encoding 'UTF8'")
        return self.url(name)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


@contextmanager
def postgres(fsync: bool = False) -> Iterator[Postgres]:
    directory = Path(tempfile.mkdtemp(prefix=f"{machine.NAME}-"))
    try:
        server = Postgres(directory, fsync)
        try:
            yield server
        finally:
            if server.child.poll() is None:
                server.stop()
    finally:
        shutil.rmtree(directory)
