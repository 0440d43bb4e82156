"""What the service answers when it refuses: RFC 9457 documents, each with a code that does not change.

One table, words.toml, so that the answers, the OpenAPI document and docs/tenants/CAAS.md say the same.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ocigpu.core.errors import printable

MEDIA_TYPE = "application/problem+json"


class ProblemKind(NamedTuple):
    """What a code means: ``status`` of HTTP, ``title``, and what the caller can do."""

    status: int
    title: str
    fix: str


WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
PROBLEMS = {code: ProblemKind(**kind) for code, kind in WORDS["problems"].items()}
"""Every code that an answer can have."""


class Refusal(Exception):  # noqa: N818 - an answer, no defect
    """Refuses a request with a code of PROBLEMS.

    ``detail``: this occurrence, one line; ``errors``: places in the body; ``retry_after``: seconds.
    """

    def __init__(
        self, code: str, detail: str = "", errors: "list[dict[str, str]] | None" = None, retry_after: int = 0
    ) -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.kind = code, PROBLEMS[code]
        self.detail, self.errors, self.retry_after = printable(detail), errors, retry_after

    def document(self, request_id: str) -> dict[str, Any]:
        """Return the members of RFC 9457, with ``code``, ``fix`` and ``errors`` as extensions."""
        found: dict[str, Any] = {
            "type": f"urn:ocigpu:problem:{self.code}",
            "title": self.kind.title,
            "status": self.kind.status,
            "detail": self.detail or self.kind.title,
            "instance": f"urn:uuid:{request_id}",
            "code": self.code,
            "fix": self.kind.fix,
        }
        return found | ({"errors": self.errors} if self.errors else {})

    def headers(self) -> Mapping[str, str]:
        """Return the fields that belong to the status: RFC 9110 sections 10.2.3 and 11.6.1, RFC 6750 section 3."""
        found = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        if self.kind.status == 401:
            error = "" if self.code == "credential_missing" else ' error="invalid_token"'
            found["WWW-Authenticate"] = f'Bearer realm="ocigpu"{error}'
        return found
