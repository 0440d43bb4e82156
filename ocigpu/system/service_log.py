"""The log of a service: a line on standard error, for the journal or a container's log."""

import json
import time
from typing import TYPE_CHECKING, Any

from ocigpu.core.errors import printable

if TYPE_CHECKING:
    pass


class ServiceLog:
    """One line on standard output for each message: plain, or a JSON object."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def __call__(self, level: str, message: str, **fields: Any) -> None:
        message = printable(message)
        if self.as_json:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            print(json.dumps({"time": now, "level": level, "msg": message, **fields}), flush=True)
        else:
            print(message if level == "info" else f"{level}: {message}", flush=True)
