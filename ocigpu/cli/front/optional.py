"""Parts of ocigpu that need modules which not every installation has."""

from collections.abc import Iterator
from contextlib import contextmanager

from ocigpu.core.errors import HostError, how_to_install


@contextmanager
def needing(what: str, code: str = "OCIGPU-KUBE-3", extra: str = "kubernetes") -> Iterator[None]:
    """Import such modules in the block; raises HostError, which says ``what`` needs them, where one is not there.

    ``extra``: the part that brings them.
    """
    try:
        yield
    except ImportError as error:
        raise HostError(code, f"{what}: {error}", how_to_install(extra)) from error
