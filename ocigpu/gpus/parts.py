"""What vendors other than NVIDIA offer to resource claims."""

from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class GpuPart(NamedTuple):
    """A GPU, or a partition of one, under a name that stays whatever happens to the others.

    ``address``: of the GPU on the PCI bus as sysfs writes it; ``partition``: its number, -1 for a whole GPU.
    ``attributes`` (as values of the API, {"string": ...}) and ``capacity`` have the names of the vendor's driver of
    claims.  ``error`` is empty, or says why it cannot be given.
    """

    address: str
    partition: int
    uuid: str
    attributes: "dict[str, dict[str, Any]]"
    capacity: "dict[str, str]"
    error: str = ""

    @property
    def id(self) -> str:
        """What its vendor's folder knows it by: the address, and the number of the partition after a slash."""
        return self.address if self.partition < 0 else f"{self.address}/{self.partition}"
