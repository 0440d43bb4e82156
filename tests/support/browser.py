"""A headless Chromium of the distribution, driven over a pipe by the DevTools protocol.

Source: https://chromedevtools.github.io/devtools-protocol/; --remote-debugging-pipe: messages end with a NUL byte, the
browser reads descriptor 3 and writes 4.
"""

import json
import os
import re
import select
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from support import requirements

NAVIGATES = re.compile("navigated or closed|[Cc]annot find|context was destroyed")
"""Errors of commands to a page in whose place another one comes."""


def missing() -> str:
    """Why there is no browser here, "" where there is: it is larger than all engines of the tests together."""
    return "" if requirements.find_program("chromium") else "no headless Chromium"


class Browser:
    """One page.  ``complaints``: what it logged: refused sources, exceptions, failed requests."""

    def __init__(self, directory: Path) -> None:
        self.complaints: list[str] = []
        self.urls: list[str] = []
        self._directory = directory
        self._number = 0
        self._session = ""
        self._rest = b""

    def __enter__(self) -> Self:
        reads, self._writer = os.pipe()
        self._reader, writes = os.pipe()
        words = [
            str(requirements.find_program("chromium")), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
            "--disable-extensions", "--disable-sync", "--remote-debugging-pipe",
            f"--user-data-dir={self._directory}/profile",
        ]  # fmt: skip
        # bash, as other shells know no descriptor above 9, puts the pipes where the browser looks for them
        shell = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *words]
        env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": str(self._directory), "LANG": "C.UTF-8"}
        with (self._directory / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(shell, pass_fds=(reads, writes), stdout=log, stderr=log, env=env)
        os.close(reads)
        os.close(writes)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
        except (AssertionError, OSError):
            self._process.kill()
        self._process.wait(60)
        os.close(self._writer)
        os.close(self._reader)

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result, None when the page went away meanwhile."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            found = self._read(deadline)
            if found.get("id") == self._number:
                assert "error" not in found or NAVIGATES.search(found["error"]["message"]), found
                return found.get("result")
            self._note(found)

    def _read(self, deadline: float) -> Any:
        while b"\0" not in self._rest:
            ready = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))[0]
            part = os.read(self._reader, 1 << 20) if ready else b""
            assert part, f"the browser says nothing:\n{(self._directory / 'chromium.log').read_text()[-2000:]}"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, message: Any) -> None:
        method, values = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.complaints.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(values["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Network.requestWillBeSent":
            self.urls.append(values["request"]["url"])

    def go(self, url: str) -> None:
        """Open an address."""
        self.call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, None while another page comes."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if found is None:
            return None
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def dark(self, dark: bool) -> None:
        """Have the page in its dark or its light colours."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
