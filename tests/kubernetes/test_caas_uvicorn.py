"""uvicorn, whose inside the service builds on: the range of versions that was tested, and what the service needs there.

A version outside the range is not necessarily wrong.  Read what ocigpu/tenants/service/server.py uses of it, run
tests/kubernetes/test_caas_*.py with it, then widen the range in pyproject.toml.
"""

import asyncio
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from support.process import run
from uvicorn.server import ServerState

from ocigpu.system.service import ENDING
from ocigpu.tenants.service.server import MAX_CHUNKS, HttpProtocol, RequestParser, UvicornServer
from ocigpu.tenants.service.web import KNOWN

REPOSITORY = Path(__file__).parents[2]
EXTRA = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["tenants"]
(TESTED,) = (one.specifier for one in map(Requirement, EXTRA) if one.name == "uvicorn")


def next_minor(version: str) -> Version:
    major, minor = Version(version).release[:2]
    return Version(f"{major}.{minor + 1}")


def test_this_uvicorn_is_of_the_tested_range() -> None:
    assert uvicorn.__version__ in TESTED, __doc__


def test_the_range_ends_with_the_version_that_packages_carry() -> None:
    lines = (REPOSITORY / "packaging/requirements-kubernetes.txt").read_text().splitlines()
    (carried,) = (line.split()[0].partition("==")[2] for line in lines if line.startswith("uvicorn=="))
    assert [Version(one.version) for one in TESTED if one.operator == "<"] == [next_minor(carried)]


@pytest.mark.rest
def test_no_uvicorn_is_published_that_is_newer_than_the_range() -> None:
    """Says so, and fails for nobody: what others publish is no defect of a change."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "uvicorn"]
    done = run(pip, check=False, timeout=120)
    if done.returncode:
        pytest.xfail("the package index does not answer")
    newest = done.stdout.partition("(")[2].partition(")")[0]
    if newest not in TESTED:
        pytest.xfail(f"uvicorn {newest} is published, tested is {TESTED}: {__doc__}")


class Wire(asyncio.Transport):
    """A connection on which nothing arrives but what a test feeds."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 2)})
        self.sent, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Served:
    """A request that a protocol of ours was fed, and what its application saw."""

    def __init__(self) -> None:
        self.scope: Any = None
        self.known_before = self.known_inside = self.known_after = False


async def serve(head: bytes, body: bytes = b"") -> tuple[Served, HttpProtocol, Wire, ServerState]:
    found, wire, state = Served(), Wire(), ServerState()

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        found.scope, found.known_before = scope, protocol.is_known
        scope[KNOWN] = True
        found.known_inside = protocol.is_known
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        found.known_after = protocol.is_known

    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", h11_max_incomplete_event_size=16 << 10)
    config.load()
    protocol = HttpProtocol(config, server_state=state, app_state={})
    protocol.connection_made(wire)
    assert protocol in state.connections, "the door looks for who is known among them"
    protocol.data_received(head + body)
    await asyncio.gather(*state.tasks)
    protocol.connection_lost(None)
    return found, protocol, wire, state


def test_the_protocol_knows_the_request_that_it_answers() -> None:
    found, protocol, wire, state = asyncio.run(serve(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert (found.known_before, found.known_inside, found.known_after) == (False, True, False)
    assert protocol.cycle.scope is found.scope, "who shows a credential is marked there"
    assert protocol.cycle.response_complete
    assert protocol.transport is wire
    assert protocol not in state.connections
    assert wire.sent.startswith(b"HTTP/1.1 204 ")
    # from 2.4 on Starlette learns only from a failed send that the client is gone: streams would keep their places
    assert found.scope["asgi"]["spec_version"] < "2.4"


def test_the_protocol_reads_with_our_parser() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    found, protocol, wire, _ = asyncio.run(serve(head, b"1\r\nx\r\n" * (MAX_CHUNKS + 1)))
    assert isinstance(protocol.conn, RequestParser)
    assert found.scope
    assert wire.closed, "it has too many parts"


def test_the_server_tells_us_of_its_end_and_leaves_signals_alone() -> None:
    told: list[str] = []

    async def run_and_stop() -> None:
        config = uvicorn.Config(lambda _scope: None, log_config=None, lifespan="off", port=0, host="127.0.0.1")
        server = UvicornServer(config)
        server.on_shutdown = lambda: told.append("end")
        before = [signal.getsignal(number) for number in ENDING]
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        assert [signal.getsignal(number) for number in ENDING] == before
        assert not told
        server.should_exit = True
        await serving

    asyncio.run(run_and_stop())
    assert told == ["end"]
