"""References of images, as engines read them: [REGISTRY/]REPOSITORY[:TAG][@DIGEST].

Source: grammar and normalizing of github.com/distribution/reference; a name without a registry belongs to docker.io,
and there a single word to library/.  In some names the grammar takes the first word for a part of the repository, but
an engine then contacts it as a host (a_b.c/x): such names are not accepted here.  Nothing is fetched here.  The kubelet
is the first to contact a registry, from the node's network, so the permitted registries are checked before.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ocigpu.core.errors import quoted
from ocigpu.tenants.service.problems import Refusal

REGISTRIES = ("docker.io", "ghcr.io", "nvcr.io", "quay.io", "registry.k8s.io")
"""Allowed where the operator names none: public ones, whose names lead nowhere into the node's network."""
MAX_NAME = 255
_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[a-fA-F0-9:]+\])"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:(?P<registry>{_HOST}(?::[0-9]+)?)/)?(?P<repository>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[a-f0-9]{64}|sha384:[a-f0-9]{96}|sha512:[a-f0-9]{128}))?"
)
_IDENTIFIER = re.compile(r"[a-f0-9]{64}")
"""Of an image on its machine, and so no name of a repository."""


class ImageReference(NamedTuple):
    """A reference with what its short form leaves out."""

    registry: str
    repository: str
    tag: str
    digest: str

    def __str__(self) -> str:
        tag, digest = f":{self.tag}" if self.tag else "", f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"


def parse_image(text: str) -> ImageReference:
    """Return a reference in full; raises Refusal (image_invalid)."""
    first, slash, rest = text.partition("/")
    # a first word is a registry only if it cannot be a repository: docker's rule
    if (slash and not ("." in first or ":" in first or first == "localhost" or first != first.lower())) or not slash:
        rest, first = text, ""
    registry = "docker.io" if first in ("", "index.docker.io") else first
    found = _REFERENCE.fullmatch(f"{registry}/{rest}") if len(text) <= 1024 else None
    if not found or found["registry"] != registry or _IDENTIFIER.fullmatch(text):
        raise Refusal("image_invalid", f"image {quoted(text)}: not a reference of an image")
    repository = found["repository"]
    if registry == "docker.io" and "/" not in repository:
        repository = f"library/{repository}"
    if len(registry) + len(repository) >= MAX_NAME:
        raise Refusal("image_invalid", f"image {quoted(text)}: longer than {MAX_NAME} characters")
    tag = found["tag"] or ("" if found["digest"] else "latest")
    return ImageReference(registry, repository, tag, found["digest"] or "")


def check_registry(image: ImageReference, allowed: Sequence[str]) -> None:
    """Raise Refusal (registry_not_allowed) unless one of ``allowed`` is, or begins, registry and repository."""
    name = f"{image.registry}/{image.repository}/"
    if not any(name.startswith(f"{prefix.rstrip('/')}/") for prefix in allowed):
        what = f"{image.registry}/{image.repository}"
        raise Refusal("registry_not_allowed", f"image {quoted(what)}: allowed are {', '.join(allowed)}")
