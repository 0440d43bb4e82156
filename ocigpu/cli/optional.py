"""Parts of ocigpu that need modules which not every installation has."""

from collections.abc import Iterator
from contextlib import contextmanager

from ocigpu.core.errors import HostError

INSTALL = (
    "Install it into a virtual environment: pip install 'ocigpu[{}]'; the deb and rpm packages are without it,"
    " packaging/kubernetes/Containerfile makes an image that has it"
)


@contextmanager
def needing(what: str, code: str = "OCIGPU-KUBE-3", extra: str = "kubernetes") -> Iterator[None]:
    """Import such modules in the block; raises HostError, which says ``what`` needs them, where one is not there.

    ``extra``: of the package, which brings them.
    """
    try:
        yield
    except ImportError as error:
        raise HostError(code, f"{what}: {error}", INSTALL.format(extra)) from error
