"""What the service answers when it refuses: RFC 9457 documents, each with a code that does not change.

One table, so that the answers, the OpenAPI document and docs/CAAS.md say the same.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ocigpu.core.errors import printable

MEDIA_TYPE = "application/problem+json"


class ProblemKind(NamedTuple):
    """What a code means: ``status`` of HTTP, ``title``, and what the caller can do."""

    status: int
    title: str
    fix: str


PROBLEMS: dict[str, ProblemKind] = {
    "request_invalid": ProblemKind(
        400, "The body is not what this request takes", "errors names each place by a JSON pointer."
    ),
    "parameter_invalid": ProblemKind(400, "A query parameter or header is wrong", "The detail names it."),
    "cursor_invalid": ProblemKind(
        400, "The cursor is not one of this list", "Begin without one, with the same filters as the pages before."
    ),
    "credential_missing": ProblemKind(
        401, "No credential", "Send Authorization: Bearer with an API key or a token of the identity provider."
    ),
    "credential_invalid": ProblemKind(
        401, "The credential is not accepted", "Ask for another key, or sign in again with the identity provider."
    ),
    "scope_missing": ProblemKind(403, "The credential does not permit this", "Use a credential with the scope named."),
    "tenancy_mismatch": ProblemKind(
        403,
        "The credential is of another tenancy",
        "Leave tenancy out: it comes from the credential. Only admin keys may name any.",
    ),
    "not_found": ProblemKind(404, "There is no such thing here", "Ids of other tenancies look the same."),
    "method_not_allowed": ProblemKind(405, "The method is not one of this path", "See Allow, and /v1/openapi.json."),
    "idempotency_in_flight": ProblemKind(
        409, "The first request with this Idempotency-Key is not answered yet", "Send it again after Retry-After."
    ),
    "tenancy_not_active": ProblemKind(
        409, "The tenancy takes no containers", "It is suspended or being deleted; ask its operator."
    ),
    "body_too_large": ProblemKind(413, "The body is larger than 1 MiB", "Put large data on a mount or into the image."),
    "media_type": ProblemKind(415, "The body is not JSON", "Send Content-Type: application/json."),
    "image_invalid": ProblemKind(
        422, "The image is not a reference", "Write REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@sha256:DIGEST."
    ),
    "registry_not_allowed": ProblemKind(
        422, "Images of this registry are not run here", "The detail lists the registries that are allowed."
    ),
    "gpus_no_partition": ProblemKind(422, "There is no NVLink partition of so many GPUs", "Ask for 1, 2, 4 or 8 GPUs."),
    "mount_not_allowed": ProblemKind(
        422, "This export is not one of the tenancy's", "The detail lists the exports that the tenancy may mount."
    ),
    "timeout_too_long": ProblemKind(
        422, "The time-out is longer than this service permits", "The detail has the limit."
    ),
    "tenancy_missing": ProblemKind(422, "The credential has no tenancy and the body names none", "Name a tenancy."),
    "tenancy_unknown": ProblemKind(422, "There is no such tenancy", "An operator makes it: kind Tenancy, ocigpu.io."),
    "idempotency_key_reused": ProblemKind(
        422, "The Idempotency-Key came with another body before", "Use a new key for another request."
    ),
    "quota_exceeded": ProblemKind(
        429, "The tenancy's quota does not hold this", "Wait until containers have ended, or ask for a larger quota."
    ),
    "too_many_streams": ProblemKind(
        429, "So many streams of this credential are open already", "Close one, or follow several in one stream."
    ),
    "internal": ProblemKind(500, "A defect of the service", "Report it with the request id; nothing was half made."),
    "cluster_unavailable": ProblemKind(
        503,
        "The cluster's API server does not answer",
        "Send it again after Retry-After, with the same Idempotency-Key.",
    ),
    "crd_version": ProblemKind(
        503, "The cluster has tenancies of a version that this service does not know", "The operator updates ocigpu."
    ),
}
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
