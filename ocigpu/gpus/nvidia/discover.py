"""Everything about the host's driver, read once: files, nodes, procfs and NVML become :class:`HostFacts`.

Reads only.  A child process queries NVML while this one reads the rest.
"""

import os

from ocigpu.core.errors import HostError
from ocigpu.core.facts import MISSING_NODE, NOT_LISTED, HostFacts
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.devices import DriverNodes, driver_nodes
from ocigpu.gpus.nvidia.files import (
    GDS_FILES,
    read_binaries,
    read_configs,
    read_daemon_files,
    read_firmware,
    read_named_libraries,
)
from ocigpu.gpus.nvidia.gpus import MigCapabilities, complete_mig, gpus_from_procfs, merge_gpus
from ocigpu.gpus.nvidia.libraries import (
    find_libraries,
    find_nvml,
    library_versions,
    native_machine,
    read_libraries,
)
from ocigpu.gpus.nvidia.nvml import LIB_RM_VERSION_MISMATCH, NvmlAnswer, NvmlChild, start_nvml
from ocigpu.gpus.nvidia.procfs import (
    ProcGpu,
    parse_devices,
    parse_permissions,
    read_kernel_version,
    read_proc_files,
    read_proc_gpus,
)
from ocigpu.gpus.pci import read_gpus
from ocigpu.gpus.tegra import is_tegra
from ocigpu.gpus.tree import Roots, Tree, find_roots, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.facts import DeviceNode

    _GpuNodes = tuple[DeviceNode | None, tuple[DeviceNode, ...]]

MAX_NOTES_ON_PATHS = 3
CONTROL_NODE = "/dev/nvidiactl"
"""Where the driver root has this node, it has all of them (:func:`ocigpu.gpus.tree.find_roots`)."""
FAULTS = "/faults"
"""The file with the faults of a simulated host's GPUs, which its NVML reads."""


class SearchPaths(NamedTuple):
    """Directories of the host that an operator names; () for the usual ones below the driver root.

    ``libraries`` replace the loader's cache and all library directories, for NVML too; ``configs`` replace /etc and
    /usr/share.  Both are paths of the real "/", whatever the driver root is.
    """

    libraries: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()


def read_host_facts(settings: Settings, search: SearchPaths | None = None) -> HostFacts:
    """Return the facts of the host that the settings describe (a simulated one with ``simulation.root``).

    ``search``: an operator's search paths instead of the usual ones.

    Needs no privilege to read an ordinary host; as root, NVML still runs without privileges.  Raises HostError:
    OCIGPU-HOST-1 when there is no driver, OCIGPU-HOST-2 when kernel module and libraries differ in version,
    OCIGPU-HOST-3 when a file of procfs or sysfs exists but cannot be read.  A GPU that cannot be used carries its error
    and hides no other GPU; other reading errors are in ``notes``.
    """
    return _Discovery(settings, search or SearchPaths()).run()


def read_host_facts_and_places(
    settings: Settings, asked: NvmlChild | None = None
) -> tuple[HostFacts, dict[str, bool], NvmlChild | None]:
    """Return the facts as :func:`read_host_facts` does, the host's paths that determined them, and the NVML query.

    A path that was only checked has False, a directory whose names all matter True.  What the fingerprint
    (:mod:`ocigpu.gpus.fingerprint`) covers is left out.  ``asked``: a query of NVML made just now, which is not
    repeated if its library is still the right one.
    """
    discovery = _Discovery(settings, SearchPaths(), asked)
    return discovery.run(), discovery.places(), discovery.nvml


class _Discovery:
    def __init__(self, settings: Settings, search: SearchPaths, asked: NvmlChild | None = None) -> None:
        self.settings = settings
        self.nvml = asked
        self.search = search
        self.roots: Roots = find_roots(settings)
        self.root = self.roots.driver or "/"
        self.machine = native_machine()
        self.driver = Tree(self.roots.driver, self.roots.stand_in)
        self.libraries = Tree("") if search.libraries else self.driver
        self.dev = self.driver if self.roots.dev == self.roots.driver else Tree(self.roots.dev, self.roots.stand_in)
        self.trees = _trees_of_daemons(self.driver, self.roots)
        proc_driver = f"{self.roots.proc}/driver/nvidia"
        self.proc_driver = proc_driver if os.path.isdir(proc_driver) else ""
        self.kernel = read_kernel_version(self.roots.proc, self.roots.sys)
        self.in_procfs: tuple[ProcGpu, ...] = ()
        self.notes: list[str] = []

    def run(self) -> HostFacts:
        kernel = self.kernel
        if is_tegra(self.settings):
            from ocigpu.gpus.tegra.facts import read_listed_facts  # few hosts are such systems

            if listed := read_listed_facts(self.roots, self.driver, kernel):
                return listed
        cache = self.settings.driver_ldcache
        paths, note = find_libraries(self.libraries, cache, kernel, self.machine, self.search.libraries)
        self.notes += [note] if note else []
        versions = library_versions(paths)
        if not kernel and not self.proc_driver and not versions:
            raise self._no_driver("")
        if kernel and versions and kernel not in versions:
            raise _mismatch(kernel, ", ".join(versions), self.root)
        version = kernel or (versions[0] if versions else "")
        self.nvml = child = self._start_nvml(find_nvml(paths, version, self.libraries, self.machine))
        try:
            if self.proc_driver:
                self.in_procfs = read_proc_gpus(self.proc_driver)
            facts = self._read_files(paths, version)
            reader = self._reader(facts)
            facts = self._read_nodes(facts, reader)
            nodes = {gpu.bus_id: self._gpu_nodes(reader, gpu.minor, gpu.bus_id) for gpu in self.in_procfs}
            answer = child.collect() if child else NvmlAnswer(f"NVML: no library of it below {self.root}")
        finally:
            if child:
                child.close()
        if answer.code == LIB_RM_VERSION_MISMATCH:
            raise _mismatch(kernel or "another version", version or "of unknown version", self.root, answer.problem)
        if not kernel and not self.proc_driver and answer.problem:
            raise self._no_driver(answer.problem)
        if not kernel and answer.driver_version not in ("", version):
            facts = self._read_files(paths, answer.driver_version)
            facts = self._read_nodes(facts, reader)
        return self._merge(facts, reader, answer, nodes)

    def places(self) -> dict[str, bool]:
        """Return what the facts were read from, as :func:`read_host_facts_and_places` says."""
        self.driver.resolve(CONTROL_NODE)
        if self.roots.stand_in:
            self.driver.resolve(FAULTS)
        places: dict[str, bool] = {}
        for tree in (self.dev, *self.trees):  # searched in one record, checked in another: searched
            for path, searched in tree.places().items():
                places[path] = searched or places.get(path, False)
        return places

    def _start_nvml(self, path: str) -> NvmlChild | None:
        if path and self.search.libraries:
            if path.startswith(f"{self.roots.driver}/"):
                return start_nvml(path.removeprefix(self.roots.driver), self.roots)
            return None if self.roots.stand_in else start_nvml(path, self.roots._replace(driver=""))
        if not path and not self.roots.driver and not self.search.libraries:
            path = "libnvidia-ml.so.1"  # the loader may know a directory that we do not
        if self.nvml and self.nvml.library == path:
            return self.nvml
        return start_nvml(path, self.roots) if path else None

    def _read_files(self, paths: list[str], version: str) -> HostFacts:
        """Return what files say: everything but nodes and GPUs."""
        libraries, notes = read_libraries(self.libraries, paths, version, self.machine)
        configs = read_configs(self.driver, version, self.machine, self.search.configs)
        return HostFacts(
            driver_root=self.root,
            simulated=self.roots.stand_in,
            driver_version=version,
            majors=parse_devices(read_text(f"{self.roots.proc}/devices") or ""),
            libraries=libraries,
            binaries=read_binaries(self.driver),
            firmware=read_firmware(self.trees, version, self.roots.sys),
            sockets=read_daemon_files(self.trees),
            configs=configs,
            named_libraries=read_named_libraries(configs),
            proc_driver=self.proc_driver,
            proc_files=read_proc_files(self.proc_driver) if self.proc_driver else (),
            proc_capabilities=bool(self.proc_driver) and os.path.isdir(f"{self.proc_driver}/capabilities"),
            notes=tuple(notes),
        )

    def _reader(self, facts: HostFacts) -> DriverNodes:
        params = next((file.content for file in facts.proc_files if file.name == "params"), "")
        return DriverNodes(self.dev, facts.majors, parse_permissions(params), bool(self.kernel))

    def _read_nodes(self, facts: HostFacts, reader: DriverNodes) -> HostFacts:
        imex_major, imex_nodes = reader.imex_nodes()
        return facts._replace(
            control_nodes=reader.control_nodes(),
            imex_major=imex_major,
            imex_nodes=imex_nodes,
            features=reader.features(read_daemon_files(self.trees, GDS_FILES)),
        )

    def _gpu_nodes(self, reader: DriverNodes, minor: int, bus_id: str) -> "_GpuNodes":
        return reader.gpu_node(minor), reader.drm_nodes(self.roots.sys, bus_id) if bus_id else ()

    def _merge(
        self, facts: HostFacts, reader: DriverNodes, answer: NvmlAnswer, nodes: "dict[str, _GpuNodes]"
    ) -> HostFacts:
        """Add the GPUs: what NVML says, what procfs says, and their nodes."""
        from_procfs = bool(answer.problem)
        listed = gpus_from_procfs(self.in_procfs) if from_procfs else merge_gpus(answer.gpus, self.in_procfs)
        capabilities = MigCapabilities(self.roots.proc, self.proc_driver, reader)
        gpus = []
        has_nodes = any(node.host_path for node in facts.control_nodes)
        for gpu in listed:
            node, drm_nodes = nodes.get(gpu.bus_id) or self._gpu_nodes(reader, gpu.minor, gpu.bus_id)
            if node is None or node.minor != gpu.minor:
                node = reader.gpu_node(gpu.minor)
            missing = has_nodes and gpu.error == NOT_LISTED and node is not None and not node.host_path
            error = f"{MISSING_NODE}{node.container_path}" if missing and node else gpu.error
            whole = gpu._replace(node=node, drm_nodes=drm_nodes, error=error)
            gpus.append(complete_mig(whole, capabilities, from_procfs))
        if any(gpu.mig_capable for gpu in gpus):
            capabilities.add("config")
            capabilities.add("monitor")
        if from_procfs:
            self.notes.append(f"{answer.problem}; GPUs come from procfs, without their architecture")
        elif answer.driver_version not in ("", facts.driver_version):
            self.notes.append(f"NVML reports driver {answer.driver_version}, the kernel module {facts.driver_version}")
        unreadable = [*self.driver.unreadable, *self.dev.unreadable][:MAX_NOTES_ON_PATHS]
        notes = (*self.notes, *facts.notes, *answer.notes, *reader.notes, *unreadable)
        return facts._replace(
            cuda_version=answer.cuda_version,
            source="procfs" if from_procfs else "nvml",
            gpus=tuple(gpus),
            cap_nodes=tuple(sorted(capabilities.nodes.items(), key=lambda item: item[1].minor)),
            notes=tuple(dict.fromkeys(notes)),
        )

    def _no_driver(self, problem: str) -> HostError:
        roots = self.roots
        if roots.stand_in and not os.path.isdir(roots.driver):
            hint = f"Make it: ocigpu sim create {roots.driver}; for real GPUs remove simulation.root from the settings."
            return HostError("OCIGPU-HOST-1", f"no simulated host: simulation.root {roots.driver} does not exist", hint)
        from ocigpu.gpus.platforms import no_driver_to_load  # only where a start fails anyway

        if elsewhere := no_driver_to_load(roots):
            return elsewhere
        count = len(read_gpus(roots.sys))
        where = f"no {roots.proc}/driver/nvidia, no {roots.sys}/module/nvidia/version"
        what = problem or f"no libnvidia-ml.so.1 or libcuda.so.1 below {self.root}"
        gpus = f"{count} NVIDIA GPU{'s' * (count != 1)} on the PCI bus" if count else "no NVIDIA GPU on the PCI bus"
        return HostError("OCIGPU-HOST-1", f"no NVIDIA driver: {where}, {what}; {gpus}")


def _trees_of_daemons(driver: Tree, roots: Roots) -> tuple[Tree, ...]:
    """Daemons of the host are found on the host even when the driver's files are elsewhere."""
    return (driver, Tree(roots.host)) if roots.driver != roots.host else (driver,)


def read_feature_facts(settings: Settings) -> HostFacts:
    """Return facts of nothing but features (GDS, MOFED, GDRCopy, NVSwitch) and IMEX channels: no driver is needed.

    Raises HostError OCIGPU-HOST-3 when a file of procfs is there and cannot be read.
    """
    roots = find_roots(settings)
    reader = driver_nodes(roots)
    imex_major, imex_nodes = reader.imex_nodes()
    return HostFacts(
        driver_root=roots.driver or "/",
        simulated=roots.stand_in,
        majors=tuple(reader.majors.items()),
        imex_major=imex_major,
        imex_nodes=imex_nodes,
        features=reader.features(read_daemon_files(_trees_of_daemons(Tree(roots.driver), roots), GDS_FILES)),
        notes=tuple(reader.notes),
    )


def _mismatch(kernel: str, libraries: str, root: str, problem: str = "") -> HostError:
    tail = f" ({problem})" if problem else ""
    return HostError(
        "OCIGPU-HOST-2", f"kernel module is {kernel}, but the libraries below {root} are {libraries}{tail}"
    )
