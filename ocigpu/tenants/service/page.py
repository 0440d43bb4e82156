"""The page at /: one file, which asks /v1/overview with the key that its reader gives it.

Its Content-Security-Policy permits the style and the script that are in it, by their hashes (CSP Level 3), and requests
to the place that it came from; nothing else is loaded, and nothing may put the page into a frame.
"""

import base64
import hashlib
import os
import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILE = os.path.join(os.path.dirname(__file__), "page.html")


def make_headers(text: str) -> dict[str, str]:
    """Return the headers of the page's answer."""
    sources = []
    for tag in ("script", "style"):
        found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found)
        sources.append(f"{tag}-src " + " ".join(f"'sha256-{one}'" for one in hashes))
    nothing = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return {
        "Content-Security-Policy": f"{nothing}; connect-src 'self'; {'; '.join(sources)}",
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def make_route() -> Route:
    """Return the route of the page."""
    with open(FILE, encoding="utf-8") as file:
        text = file.read()
    headers = make_headers(text)

    async def show(_request: Request) -> Response:
        return Response(text, headers=headers, media_type="text/html")

    return Route("/", show, methods=["GET"])
