"""Health on a separate port: a thread that shares nothing with the one that answers requests.

So the kubelet gets an answer even while requests are held up: it ends a dead service, not a busy one.
"""

import threading
import time
from collections.abc import Callable
from http import HTTPStatus

from ocigpu.system.pages import NOT_FOUND, Page, WebAnswer, WebServer

DEAD = 60.0
"""Seconds without a sign of life of the thread that answers requests, after which it is taken for dead."""


class HealthServer(WebServer):
    """Answers /healthz and /readyz while :meth:`run` does.

    ``problem``: why the service does not follow its cluster, "" where it does.  Raises HostError (OCIGPU-KUBE-3) when
    it cannot listen.
    """

    probes = ("/healthz", "/readyz")

    def __init__(
        self, host: str, port: int, problem: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(host, port, Page, bytes, lambda: False)
        self._problem, self._clock = problem, clock
        self._thread = threading.Thread(target=self.serve_forever, name="health", daemon=True)
        self.beat()

    def beat(self) -> None:
        """Give a sign of life."""
        self.last_beat = self._clock()

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def end(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.close()

    def answer(self, path: str, _packed: bool, /) -> WebAnswer:
        """Return the answer to a probe: 200, or 503 with why."""
        if path not in self.probes:
            return NOT_FOUND
        silent = self._clock() - self.last_beat
        why = f"no sign of life for {silent:.0f} s" if silent > DEAD else ""
        if path == "/readyz":
            why = why or self._problem()
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        return WebAnswer(status, "text/plain; charset=utf-8", (f"{why or 'ok'}\n".encode("utf-8", "replace"),))
