"""Cursors, where a list continues: opaque to the reader, and valid only for the list they were made for."""

import base64
import hashlib
import hmac
from collections.abc import Mapping

from ocigpu.tenants.service.problems import Refusal

_MARK = 12


def make_cursor(secret: bytes, last: str, filters: Mapping[str, str]) -> str:
    """Return the cursor after the item ``last`` of the list with these filters."""
    return base64.urlsafe_b64encode(_mark(secret, last, filters) + last.encode()).decode().rstrip("=")


def read_cursor(secret: bytes, cursor: str, filters: Mapping[str, str]) -> str:
    """Return the item after which the list continues, "" without a cursor; raises Refusal (cursor_invalid)."""
    if not cursor:
        return ""
    try:
        found = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        last = found[_MARK:].decode("ascii")
    except ValueError as error:
        raise Refusal("cursor_invalid") from error
    if not hmac.compare_digest(found[:_MARK], _mark(secret, last, filters)):
        raise Refusal("cursor_invalid")
    return last


def _mark(secret: bytes, last: str, filters: Mapping[str, str]) -> bytes:
    text = "\0".join(("cursor", last, *(f"{name}={filters[name]}" for name in sorted(filters))))
    return hmac.digest(secret, text.encode(), hashlib.sha256)[:_MARK]
