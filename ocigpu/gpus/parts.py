"""What vendors other than NVIDIA offer to resource claims."""

import re
from typing import Any, NamedTuple


class GpuPart(NamedTuple):
    """A GPU, or a partition of one, under a name that does not depend on the others.

    ``address``: of the GPU on the PCI bus as sysfs writes it; ``partition``: its number, -1 for a whole GPU.
    ``attributes`` (as values of the API, {"string": ...}) and ``capacity`` have the names of the vendor's driver of
    claims.  ``error`` is empty, or says why it cannot be used.
    """

    address: str
    partition: int
    uuid: str
    attributes: dict[str, dict[str, Any]]
    capacity: dict[str, str]
    error: str = ""

    @property
    def id(self) -> str:
        """Its id in the vendor's folder: the address, and after a slash the number of the partition."""
        return self.address if self.partition < 0 else f"{self.address}/{self.partition}"


def as_version(text: str) -> str:
    """Return a version as semantic versioning writes it: "550.163.01" is 550.163.1, "9.0" is 9.0.0; "" for none."""
    parts = re.findall(r"[0-9]+", text)[:3]
    return ".".join(str(int(part)) for part in [*parts, "0", "0"][:3]) if parts else ""
