"""What a Tegra system's CSV files list: device nodes, directories, libraries and links that containers need.

The files are NVIDIA's (/etc/nvidia-container-runtime/host-files-for-container.d of L4T): a line is "<type>,<path>",
with the types dev, dir, lib and sym.  A path may be a pattern: ``*``, ``?`` and ``[...]`` within one part (glob(7)).
"""

import os

from ocigpu.core.config_json import clean_path
from ocigpu.core.facts import LISTED, DeviceNode, FeatureNodes, Gpu, HostFacts, HostFile, Library
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import digest
from ocigpu.gpus.libraries.elf import read_elf
from ocigpu.gpus.nvidia.devices import driver_nodes
from ocigpu.gpus.nvidia.nvml import NvmlAnswer, start_nvml
from ocigpu.gpus.offer import is_library
from ocigpu.gpus.tegra import CSV_DIRECTORY, RELEASE
from ocigpu.gpus.tree import MAX_LINKS, Roots, Tree, find_roots, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ocigpu.gpus.vendors import Fingerprint

MAX_FOUND = 4096
_SPECIAL = frozenset("*?[")


def is_pattern(text: str) -> bool:
    """Return whether the text has a character that makes it a pattern."""
    return not _SPECIAL.isdisjoint(text)


def matches_name(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a whole name."""
    from fnmatch import fnmatchcase  # only for CSV files

    return fnmatchcase(name, pattern.replace("[^", "[!"))


def matches_path(pattern: str, path: str) -> bool:
    """Return whether a pattern matches a whole path; no part of it reaches across a slash."""
    parts, names = pattern.split("/"), path.split("/")
    return len(parts) == len(names) and all(matches_name(*pair) for pair in zip(parts, names, strict=True))


def expand(tree: Tree, path: str) -> list[str]:
    """Return the paths in a tree that a pattern matches, sorted, 4096 at most; a plain path is returned as it is."""
    if not is_pattern(path):
        return [path]
    found = [""]
    for part in path.strip("/").split("/"):
        if not is_pattern(part):
            found = [f"{directory}/{part}" for directory in found]
            continue
        hidden = part.startswith(".")
        found = [
            f"{directory}/{name}"
            for directory in found
            for name in tree.names(directory or "/")
            if (hidden or not name.startswith(".")) and matches_name(part, name)
        ][:MAX_FOUND]
    return [candidate for candidate in found if tree.resolve(candidate)]


CSV_FILES = tuple(f"{CSV_DIRECTORY}/{name}.csv" for name in ("devices", "drivers", "l4t"))
TYPES = ("dev", "dir", "lib", "sym")
CSV_LIMIT = 1 << 20
MAX_ENTRIES = 1 << 14
MAX_NAMED = 5
CONTROL_NODES = ("nvidia-modeset", "nvidia-uvm-tools", "nvidia-uvm", "nvidiactl")
NVML_PATHS = tuple(
    f"{directory}/libnvidia-ml.so.1"
    for directory in (
        "/usr/lib/aarch64-linux-gnu/nvidia",
        "/usr/lib/aarch64-linux-gnu/tegra",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu/nvidia",  # of a simulated one
    )
)
UNVERSIONED = (
    ("libcuda.so.", "libcuda.so", "libcuda.so.1"),
    ("libGLX_nvidia.so.", "libGLX_indirect.so.0", ""),
    ("libnvidia-opticalflow.so.", "libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
)
"""Libraries with two numbers after this prefix, a link that they get, and its target ("": the library itself)."""


INTEGRATED_NAMES = ("(nvgpu)", "NVIDIA Thor")
INTEGRATED_BUS_ID = "00000000:01:00.0"


def is_integrated(gpu: "Gpu") -> bool:
    """Return whether a GPU is part of the chip: NVML has no PCI address for it, or gives it that of Tegra's."""
    if gpu.bus_id:
        return gpu.bus_id == INTEGRATED_BUS_ID
    return any(name in gpu.model for name in INTEGRATED_NAMES)


class Entry(NamedTuple):
    """One line of a CSV file: ``kind`` of :data:`TYPES`."""

    kind: str
    path: str


class CsvFacts(NamedTuple):
    """The listed files that exist on this host.

    ``links``: (target text, path) pairs.  ``control_nodes``: those of the desktop driver that are there;
    ``second_node``: /dev/nvidia2, which the integrated GPU of such a system has beside /dev/nvidia0.
    """

    nodes: tuple[DeviceNode, ...] = ()
    files: tuple[HostFile, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    control_nodes: tuple[DeviceNode, ...] = ()
    second_node: DeviceNode | None = None
    notes: tuple[str, ...] = ()


def needs_csv(settings: Settings) -> bool:
    """Return whether what containers need of a Tegra system is in CSV files: without NVML or with its integrated GPU.

    One with discrete GPUs alone is like any other host.  Integrated GPUs are parts of Tegra chips, so NVML, which takes
    its time, is asked there only.
    """
    answer = ask_nvml(find_roots(settings))
    if answer is None or answer.problem:
        return True
    return any(name in gpu.model for gpu in answer.gpus for name in INTEGRATED_NAMES)


def parse_csv(text: str) -> tuple[tuple[Entry, ...], int]:
    """Return the entries of a CSV file and how many of its lines are none; a path may hold commas."""
    entries: list[Entry] = []
    bad = 0
    for line in text.splitlines():
        kind, comma, path = (part.strip() for part in line.partition(","))
        if comma and kind in TYPES and path and "\0" not in path and len(entries) < MAX_ENTRIES:
            entries.append(Entry(kind, path))
        elif line.strip():
            bad += 1
    return tuple(entries), bad


def read_csv_facts(
    roots: Roots,
    files: "Sequence[str]",
    ignore: "Sequence[str]" = (),
    search: "Sequence[str]" = (),
    driver: Tree | None = None,
) -> CsvFacts:
    """Return the existing files that the CSV files name.

    ``ignore``: patterns of sym lines to leave out ("**/x" is a name, another one the whole path).  ``search``:
    directories of the host in which libraries and links are searched after the driver root.  ``driver``: the tree of
    that root, which records the paths read.  Raises HostError (OCIGPU-HOST-3) for a file that exists but cannot be
    read.
    """
    reader = _Reader(roots, search, driver)
    missing = []  # a release of L4T has two or three of the usual ones
    for path in files:
        text = read_text(reader.driver.find(path) or reader.driver.host(path), CSV_LIMIT)
        entries, bad = parse_csv(text or "")
        if text is None:
            missing.append(f"{reader.driver.host(path)}: missing; passed over")
        elif not entries:
            reader.notes.append(f"{reader.driver.host(path)}: no entries; passed over")
        elif bad:
            reader.notes.append(f"{reader.driver.host(path)}: lines that are not <type>,<path>: {bad}; passed over")
        for entry in entries:
            if entry.kind != "sym" or not is_ignored(entry.path, ignore):
                reader.add(entry)
    if not reader.nodes or files is not CSV_FILES:
        reader.notes += missing
    reader.add_release()
    return reader.facts()


def is_ignored(path: str, patterns: "Sequence[str]") -> bool:
    """Return whether a pattern matches: "**/x" the last part of the path, another one all of it."""
    name = path.rpartition("/")[2]
    return any(
        matches_name(pattern[3:], name) if pattern.startswith("**/") else matches_path(pattern, path)
        for pattern in patterns
    )


class _Reader:
    def __init__(self, roots: Roots, search: "Sequence[str]", driver: Tree | None = None) -> None:
        self.roots = roots
        self.driver = driver or Tree(roots.driver)
        host = self.driver if roots.host == roots.driver else Tree(roots.host)
        self.places = [(self.driver, ""), *((host, directory.rstrip("/")) for directory in search), (host, "")]
        self.devices = driver_nodes(roots)
        self.nodes: dict[str, DeviceNode] = {}
        self.files: dict[str, HostFile] = {}
        self.links: dict[str, str] = {}
        self.missing: list[str] = []
        self.notes: list[str] = []

    def add(self, entry: Entry) -> None:
        found = {"dev": self._add_nodes, "dir": self._add_directories}.get(entry.kind)
        if not (found(entry.path) if found else self._add_files(entry)):
            self.missing.append(entry.path)

    def _add_nodes(self, path: str) -> bool:
        nodes = [self.devices.read_existing(name) for name in expand(self.devices.tree, path)]
        self.nodes.update((node.container_path, node) for node in nodes if node)
        return any(nodes)

    def _add_directories(self, path: str) -> bool:
        paths = [name for name in expand(self.driver, path) if self.driver.kind(self.driver.find(name)) == "directory"]
        for name in paths:
            self.files.setdefault(name, HostFile(self.driver.find(name), name, (), "directory"))
        return bool(paths)

    def _add_files(self, entry: Entry) -> bool:
        for tree, directory in self.places:
            paths = [path for path in expand(tree, f"{directory}/{entry.path.lstrip('/')}") if tree.resolve(path)]
            for path in paths:
                self._add_file(tree, path)
                if entry.kind == "lib":
                    self._add_library_links(tree, tree.resolve(path))
                else:
                    self._add_chain(tree, path)
            if paths:
                return True
        return False

    def _add_file(self, tree: Tree, path: str) -> None:
        resolved = tree.resolve(path)
        host_path = tree.host(resolved)
        kind = tree.kind(host_path)
        if kind:
            self.files.setdefault(resolved, HostFile(host_path, resolved, (), kind))

    def _add_chain(self, tree: Tree, path: str) -> None:
        """Add every link between a path and what it leads to in the end."""
        for _ in range(MAX_LINKS):
            directory, _, name = path.rpartition("/")
            target = tree.link(f"{tree.resolve(directory or '/').rstrip('/')}/{name}")
            if not target:
                return
            self.links.setdefault(path, target)
            path = clean_path(os.path.join(directory or "/", target))

    def _add_library_links(self, tree: Tree, resolved: str) -> None:
        """Add the names by which programs and the loader know a library, where the host has them or they are usual."""
        directory, _, name = resolved.rpartition("/")
        for prefix, link, target in UNVERSIONED:
            if matches_name(f"{prefix}*.*", name):
                self.links.setdefault(f"{directory}/{link}", target or name)
        if name.count(".") < 2:
            return
        elf = read_elf(tree.host(resolved))
        soname = (elf.soname if elf else "") or name
        plain = f"{name.partition('.so')[0]}.so"
        if soname != name and tree.link(f"{directory}/{soname}"):
            self.links.setdefault(f"{directory}/{soname}", name)
        if tree.link(f"{directory}/{plain}"):
            self.links.setdefault(f"{directory}/{plain}", soname)

    def add_release(self) -> None:
        if self.driver.find(RELEASE):
            self.files.setdefault(RELEASE, HostFile(self.driver.find(RELEASE), RELEASE))

    def facts(self) -> CsvFacts:
        notes = [*self.notes, *self.devices.notes]
        if self.missing:
            names = ", ".join(self.missing[:MAX_NAMED]) + (", ..." if len(self.missing) > MAX_NAMED else "")
            notes.append(f"entries of the CSV files that this host does not have: {len(self.missing)} ({names})")
        control = (self.devices.read_existing(f"/dev/{name}") for name in CONTROL_NODES)
        # a file of a link's own name would be in the way of it
        links = tuple((target, path) for path, target in self.links.items() if path not in self.files)
        return CsvFacts(
            tuple(self.nodes.values()),
            tuple(self.files.values()),
            links,
            tuple(filter(None, control)),
            self.devices.read_existing("/dev/nvidia2"),
            tuple(notes),
        )


def find_listed_nvml(tree: Tree) -> str:
    """Return the path of NVML on a Tegra system, "" where it has none."""
    return next((path for path in map(tree.resolve, NVML_PATHS) if path), "")


def ask_nvml(roots: Roots) -> NvmlAnswer | None:
    """Return NVML's answer, None on a system without it; waits for it, at most a few seconds."""
    path = find_listed_nvml(Tree(roots.driver))
    return start_nvml(path, roots).collect() if path else None


def read_gpu_nodes(roots: Roots, gpu: "Gpu") -> tuple[DeviceNode, ...]:
    """Return the node of a discrete GPU and its DRM nodes."""
    reader = driver_nodes(roots)
    node = reader.gpu_node(gpu.minor)
    return (*((node,) if node else ()), *(reader.drm_nodes(roots.sys, gpu.bus_id) if gpu.bus_id else ()))


def read_listed_facts(roots: Roots, driver: Tree, kernel: str) -> HostFacts | None:
    """Return the facts of a Tegra system with an integrated GPU, None where its lists name no node of this host.

    ``driver``: the tree of the driver root.  ``kernel``: the version of the kernel module, "" for none.
    """
    listed = read_csv_facts(roots, CSV_FILES, driver=driver)
    answer = ask_nvml(roots) or NvmlAnswer(f"NVML: no library of it below {roots.driver or '/'}")
    gpus = (Gpu(0, 0, "", "", "Tegra"),) if answer.problem else answer.gpus
    if not listed.nodes or not any(is_integrated(gpu) or answer.problem for gpu in gpus):
        return None
    own = next((node for node in listed.nodes if node.container_path == "/dev/nvidia0"), listed.nodes[0])
    reader = driver_nodes(roots)
    return HostFacts(
        driver_root=roots.driver or "/",
        simulated=roots.stand_in,
        driver_version=answer.driver_version or kernel,
        cuda_version=answer.cuda_version,
        source="procfs" if answer.problem else "nvml",
        gpus=tuple(
            gpu._replace(node=own if answer.problem or is_integrated(gpu) else reader.gpu_node(gpu.minor))
            for gpu in gpus
        ),
        majors=tuple(reader.majors.items()),
        control_nodes=tuple(node for node in listed.nodes if node != own),
        libraries=tuple(filter(None, map(_library, listed.files))),
        features=(FeatureNodes(LISTED, (), listed.files, listed.links),),
        notes=(*([answer.problem] if answer.problem else []), *listed.notes, *answer.notes),
    )


def _library(file: HostFile) -> Library | None:
    elf = read_elf(file.host_path) if file.kind == "file" else None
    name = file.container_path.rpartition("/")[2]
    return Library(file.host_path, name, elf.soname or name, ()) if elf and is_library(name) else None


def read_csv_fingerprint(settings: Settings) -> "Fingerprint":
    """Return pairs that change with L4T's release and its CSV files; not with files that an option named instead."""
    tree = Tree(find_roots(settings).driver)
    texts = [read_text(tree.find(path), CSV_LIMIT) or "" for path in CSV_FILES]
    release = read_text(tree.find(RELEASE)) or ""
    return (
        ("release", digest(release.splitlines())),
        ("files", digest(line for text in texts for line in text.splitlines())),
    )
