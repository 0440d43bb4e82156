"""The metadata of a claim's devices as files in its containers (KEP-5304): KubeVirt finds a GPU's PCI address there.

A file for each request, read-only below /var/run/kubernetes.io/dra-device-attributes; a CDI device for each file.
Source: "Device metadata protocol" of Kubernetes 1.37's documentation; k8s.io/dynamic-resource-allocation/api/metadata.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.cdi.edits import MOUNT_OPTIONS
from ocigpu.cdi.write import write_spec
from ocigpu.core.errors import CdiError, OsErrorAs
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef
from ocigpu.kubernetes.dra.specs import is_written
from ocigpu.system.files import replace_path

VERSIONS = ("v1beta1", "v1alpha1")
"""Of metadata.resource.k8s.io, newest first: readers take the first that they know."""
ROOT = "/var/run/kubernetes.io/dra-device-attributes"
POD_CLAIM = "resource.kubernetes.io/pod-claim-name"
"""The annotation of a claim that was made from a template: its name in the pod."""
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class MetadataPlace(NamedTuple):
    """Where a claim's metadata are: the CDI specification, the directory of the files, and the claim's pod's name."""

    spec: str
    directory: str
    pod_claim: str = ""


def metadata_place(arguments: "Mapping[str, str]") -> MetadataPlace:
    """Return the place in a step's arguments; those that a later version has added are ignored."""
    return MetadataPlace(**{name: text for name, text in arguments.items() if name in MetadataPlace._fields})


def pod_claim_name(document: dict[str, Any]) -> str:
    """Return the name in the pod's specification of a claim made from a template, "" for another claim.

    Whoever may make claims may write the annotation, so what is no name counts as none.
    """
    name = str((document["metadata"].get("annotations") or {}).get(POD_CLAIM, ""))
    return name if _LABEL.fullmatch(name) else ""


def metadata_device(driver: str, claim: ClaimRef, request: str) -> str:
    """Return the qualified name of the CDI device of a request's file."""
    return f"{driver}/metadata={claim.uid}_{request.partition('/')[0]}"


def has_names(claim: ClaimRef, devices: Sequence[Allotted]) -> bool:
    """Return whether claim and requests have names that can be parts of a path, as the API server demands."""
    requests = (part for each in devices for part in each.request.split("/"))
    return bool(_SUBDOMAIN.fullmatch(claim.name)) and ".." not in claim.name and all(map(_LABEL.fullmatch, requests))


def make_metadata(
    claim: ClaimRef, request: str, devices: Sequence[Allotted], driver: str, pool: str, pod_claim: str = ""
) -> bytes:
    """Return the content of a request's file: a JSON document in each of :data:`VERSIONS`."""
    document: dict[str, Any] = {
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1},
        **({"podClaimName": pod_claim} if pod_claim else {}),
        "requests": [
            {
                "name": request,
                "devices": [
                    {
                        "driver": driver,
                        "pool": pool,
                        "name": each.device.name,
                        **({"attributes": each.device.attributes} if each.device.attributes else {}),
                    }
                    for each in devices
                ],
            }
        ],
    }
    heads = ({"kind": "DeviceMetadata", "apiVersion": f"metadata.resource.k8s.io/{version}"} for version in VERSIONS)
    return "".join(f"{json.dumps({**head, **document}, indent=2)}\n" for head in heads).encode()


def request_names(devices: Sequence[Allotted]) -> list[str]:
    """Return the names of a claim's requests, without those of subrequests."""
    return list(dict.fromkeys(each.request.partition("/")[0] for each in devices))


def is_lost(place: MetadataPlace, devices: Sequence[Allotted]) -> bool:
    """Return whether the specification or one of the files must be written again."""
    files = (f"{place.directory}/{name}.json" for name in request_names(devices))
    return not is_written(place.spec) or any(not os.path.isfile(file) or not os.path.getsize(file) for file in files)


def write_metadata(place: MetadataPlace, claim: ClaimRef, devices: Sequence[Allotted], driver: str, pool: str) -> None:
    """Write the files of a claim and the CDI specification that mounts them.

    ``devices``: with their attributes.  Raises CdiError (OCIGPU-CDI-8); then no specification exists.
    """
    kind = "resourceclaimtemplates" if place.pod_claim else "resourceclaims"
    inside = f"{ROOT}/{kind}/{place.pod_claim or claim.name}"
    entries = []
    with OsErrorAs(CdiError, "OCIGPU-CDI-8", f"write {place.directory}"):
        os.makedirs(place.directory, 0o755, exist_ok=True)
        for name in request_names(devices):
            own = [each for each in devices if each.request.partition("/")[0] == name]
            request, path = own[0].request, f"{place.directory}/{name}.json"
            replace_path(path, make_metadata(claim, request, own, driver, pool, place.pod_claim), 0o644)
            mount = {
                "hostPath": path,
                "containerPath": f"{inside}/{name}/{driver}-metadata.json",
                "options": ["ro", "nosuid", "nodev", "noexec", *MOUNT_OPTIONS],
                "type": "bind",
            }
            entries.append({"name": f"{claim.uid}_{name}", "containerEdits": {"mounts": [mount]}})
    write_spec({"cdiVersion": "0.5.0", "kind": f"{driver}/metadata", "devices": entries}, place.spec, "json")


def swept_metadata(directory: str, known: Collection[str]) -> list[MetadataPlace]:
    """Return what is left of the files of unknown claims; their specifications are swept with the others."""
    try:
        names = os.listdir(directory)
    except OSError:  # nothing was ever written
        return []
    places = (MetadataPlace("", f"{directory}/{name}") for name in sorted(names) if name not in known)
    return [place for place in places if stat.S_ISDIR(os.lstat(place.directory).st_mode)]


def remove_metadata(place: MetadataPlace) -> None:
    """Remove the specification, then the files; what is missing is no error.  Raises CdiError (OCIGPU-CDI-8)."""
    for remove, path in ((os.unlink, place.spec), (shutil.rmtree, place.directory)):
        with OsErrorAs(CdiError, "OCIGPU-CDI-8", f"remove {path}"):
            try:
                remove(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
