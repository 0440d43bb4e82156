"""sbom.py VERSION SECONDS MUSL...: prints what packages contain of others, in CycloneDX 1.6 (JSON), the same each time.

Python libraries by the lists of packaging/, and what the interpreter that is kept started is linked from: sources by
packaging/snapshot/sources.txt, and MUSL, "DISTRIBUTION SUITE VERSION", which stubs are linked with, too.  What an image
has of a system is not in it.  SECONDS: since 1970, the time that the document names.
"""

import datetime
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

HERE = Path(__file__).parent


def read_libraries(name: str) -> Iterator[Component]:
    """Return the Python libraries of a list; those for Kubernetes alone are optional."""
    for library, version in re.findall(r"^([\w.-]+)==([^\s;]+)", (HERE / name).read_text(), re.MULTILINE):
        scope = ComponentScope.REQUIRED if name == "requirements.txt" else ComponentScope.OPTIONAL
        purl = PackageURL("pypi", name=library.lower().replace("_", "-"), version=version)
        yield Component(name=library, version=version, purl=purl, bom_ref=str(purl), scope=scope)


def read_sources() -> Iterator[Component]:
    """Return the sources of the interpreter that is kept started; Debian's patches are a component of their own."""
    text = (HERE / "snapshot/sources.txt").read_text()
    for digest, address in re.findall(r"^([0-9a-f]{64}) (\S+)$", text, re.MULTILINE):
        file = address.rpartition("/")[2]
        name, version = re.match(r"([^_]+)_(.+?)(?:\.orig)?(?:\.debian)?\.tar\.", file).groups()
        purl = PackageURL("deb", "debian", name, version, {"arch": "source", "distro": "trixie"})
        checksum = HashType(alg=HashAlgorithm.SHA_256, content=digest)
        place = ExternalReference(type=ExternalReferenceType.SOURCE_DISTRIBUTION, url=XsUri(address), hashes=[checksum])
        yield Component(name=name, version=version, purl=purl, bom_ref=str(purl), external_references=[place])


def read_musl(line: str) -> Component:
    """Return the C library of the packages of a suite."""
    distribution, suite, version = line.split()
    purl = PackageURL("deb", distribution, "musl", version, {"arch": "source", "distro": suite})
    return Component(name="musl", version=version, purl=purl, bom_ref=str(purl))


def main(version: str, seconds: str, *musl: str) -> None:
    """Print the document."""
    components = {
        component.bom_ref.value: component
        for component in (
            *read_libraries("requirements-kubernetes.txt"),
            *read_libraries("requirements.txt"),  # the last of one name counts: it is required
            *read_sources(),
            *map(read_musl, musl),
        )
    }
    own = Component(name="ocigpu", version=version, type=ComponentType.APPLICATION, bom_ref=f"ocigpu@{version}")
    number = uuid.uuid5(uuid.NAMESPACE_URL, f"ocigpu {version} {seconds}")
    bom = Bom(components=components.values(), serial_number=number)
    bom.metadata.component = own
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    bom.register_dependency(own, components.values())
    print(JsonV1Dot6(bom).output_as_string(indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
