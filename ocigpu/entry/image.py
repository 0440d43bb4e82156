"""The modules of the hot path in one file of byte code: a start reads that instead of fifty files in ten directories.

``packaging/byte_code.py`` writes the file beside the package's own byte code when it is installed.  The stubs of shim
and hook first execute the code of this module, with which the file begins.  A module whose source is another than the
one that was compiled, by size and time as for every ``.pyc`` (PEP 3147), is loaded from its source as usual, and so is
every module where there is no such file.
"""

import sys
from _frozen_importlib import ModuleSpec
from marshal import loads
from posix import O_CLOEXEC, O_RDONLY, close, fstat, open, pread, stat  # noqa: A004 - os loads more

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


class ModuleImage:
    """Finder and loader (importlib.abc) of the modules of an image.

    ``base``: the directory in which the package is, with a slash.  ``file``: the open image, read up to where the codes
    begin.  ``modules``: by name, the path of the source below ``base``, its size and its time in whole seconds, 0 where
    that does not count, and where among the codes its own begins and how long it is.
    """

    def __init__(self, base: str, file: "Any", modules: "dict[str, tuple[str, int, int, int, int]]") -> None:
        self.base = base
        self.path = file.name
        self.modules = modules
        self.fd = -1
        self.codes = file.tell()
        status = fstat(file.fileno())
        self.identity = status.st_dev, status.st_ino

    def find_spec(self, name: str, _path: "Any" = None, _target: "Any" = None) -> "Any":
        """Return the spec of a module in the image; None for one that is missing or whose source has changed."""
        found = self.modules.get(name)
        if found is None:
            return None
        path, size, seconds, _, _ = found
        path = self.base + path
        try:
            if seconds:
                status = stat(path)
                if (status.st_size, int(status.st_mtime)) != (size, seconds):
                    return None
            if not self._is_open() and not self._open():
                return None
        except OSError:
            return None
        is_package = path.endswith("/__init__.py")
        spec = ModuleSpec(name, self, origin=path, is_package=is_package)  # type: ignore[arg-type] # any object is a loader
        spec.has_location = True
        spec.cached = self.path  # otherwise a __pycache__ path would be computed for each module
        if is_package:
            spec.submodule_search_locations = [path[: -len("/__init__.py")]]
        return spec

    def _is_open(self) -> bool:
        """Tell whether the descriptor is still the image's: some processes close inherited descriptors."""
        try:
            status = fstat(self.fd)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def _open(self) -> bool:
        """Open the image; returns False when it is another file now, or took the place of a closed standard stream."""
        self.fd = open(self.path, O_RDONLY | O_CLOEXEC)
        if self.fd > 2 and self._is_open():
            return True
        close(self.fd)
        self.modules = {}
        return False

    def create_module(self, _spec: "Any") -> None:
        """Leave the making of the module to the import system."""

    def exec_module(self, module: "ModuleType") -> None:
        """Execute a module's code in its namespace."""
        _, _, _, begin, length = self.modules[module.__name__]
        exec(loads(pread(self.fd, length, self.codes + begin)), module.__dict__)  # noqa: S102, S302 - our own file


def use_image(file: "Any", modules: "dict[str, tuple[str, int, int, int, int]]", base: str) -> None:
    """Find modules in an image first; ``file`` stands behind its table of modules."""
    sys.meta_path.insert(0, ModuleImage(base, file, modules))
