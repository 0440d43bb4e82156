"""WSL 2's part of the Windows display driver: /dev/dxg, and files below /usr/lib/wsl that Windows provides."""

import os

from ocigpu.core.facts import DeviceNode, HostFile
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import digest
from ocigpu.gpus.nodes import NodeReader
from ocigpu.gpus.pci import read_number
from ocigpu.gpus.tree import Tree, find_roots, node_tree, read_bytes
from ocigpu.gpus.wsl import DXCORE, LIBRARIES, STORES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ocigpu.gpus.vendors import Fingerprint

CUDA = "libcuda.so.1.1"
SMI = "nvidia-smi"
NAMED = (
    CUDA,
    "libcuda_loader.so",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so",
    "libnvdxgdmal.so.1",
    "nvcubins.bin",
    SMI,
)
"""Files of the driver store in the vendor's order; all other libraries, .bin and .dll files come after them."""
MAX_STORES = 4096
MAX_FILES = 4096
MAX_SMI = 1 << 24


class Store(NamedTuple):
    """A driver store with a CUDA library; ``current``: its nvidia-smi is the one that Windows provides to Linux."""

    path: str
    current: bool
    files: tuple[HostFile, ...]


class WslFacts(NamedTuple):
    """``node``: /dev/dxg; ``dxcore``: the library that talks to it; ``stores``: those of NVIDIA, by path."""

    node: DeviceNode | None = None
    dxcore: HostFile | None = None
    stores: tuple[Store, ...] = ()


def read_wsl_facts(settings: Settings, chosen: "Sequence[str]") -> WslFacts:
    """Return WSL's part of the driver; ``chosen``: read only these stores.  Needs no privilege."""
    roots = find_roots(settings)
    tree = Tree(roots.driver)
    dev = roots.dev or (roots.driver if os.path.exists(f"{roots.driver}/dev/dxg") else "")
    reader = NodeReader(Tree(dev, roots.stand_in) if dev else node_tree(roots))
    number = read_number(f"{roots.sys}/class/misc/dxg/dev")
    node = reader.read("/dev/dxg", *number) if number else reader.read_existing("/dev/dxg")
    smi = tree.find(f"{LIBRARIES}/{SMI}")
    content = read_bytes(smi, MAX_SMI) if smi else None
    paths = chosen or [f"{STORES}/{name}" for name in tree.names(STORES)[:MAX_STORES]]
    stores = [_read_store(tree, path.rstrip("/"), content) for path in paths if tree.find(f"{path}/{CUDA}")]
    return WslFacts(node, _file(tree, f"{LIBRARIES}/{DXCORE}"), tuple(stores))


def _read_store(tree: Tree, path: str, smi: bytes | None) -> Store:
    own = tree.find(f"{path}/{SMI}")
    names = tree.names(path)[:MAX_FILES]
    others = [name for name in names if name not in NAMED and (".so" in name or name.endswith((".bin", ".dll")))]
    files = (_file(tree, f"{path}/{name}") for name in (*NAMED, *others))
    current = bool(smi) and bool(own) and read_bytes(own, MAX_SMI) == smi
    return Store(path, current, tuple(filter(None, files)))


def _file(tree: Tree, path: str) -> HostFile | None:
    found = tree.find(path)
    return HostFile(found, path) if found and tree.kind(found) == "file" else None


def read_wsl_fingerprint(settings: Settings) -> "Fingerprint":
    """Return pairs that change when Windows brings another driver: its stores, and the program it gives to Linux."""
    tree = Tree(find_roots(settings).driver)
    stores = [name for name in tree.names(STORES)[:MAX_STORES] if tree.find(f"{STORES}/{name}/{CUDA}")]
    files = filter(None, (tree.find(f"{LIBRARIES}/{name}") for name in (SMI, DXCORE)))
    return ("stores", digest(stores)), ("files", digest(map(_state, files)))


def _state(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:  # gone since
        return f"{path} -"
    return f"{path} {status.st_size} {status.st_mtime_ns}"
