"""The host under examination: everything a check may examine, read below a root, at most once.

Three ways to name it: this machine; this machine with a simulated host's driver (settings with ``simulation.root``); or
a directory that stands for the root of another machine (``root``): a simulated host with its /etc, /proc and /sys, or a
mounted disk.  Daemons and processes are queried on this machine only.  Nothing is read before a check needs it.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property

from ocigpu.containers.believed import Container
from ocigpu.containers.find import default_places, find_containers
from ocigpu.core.errors import OcigpuError, SettingsError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import DEFAULT_PATH, Settings
from ocigpu.core.vendors import FIRST
from ocigpu.doctor.claim_facts import ClaimFacts, read_claim_facts
from ocigpu.doctor.files import RootFiles
from ocigpu.doctor.live import DockerAnswer, ask_docker, read_context
from ocigpu.doctor.logs import read_kernel_log
from ocigpu.doctor.running import SHARE, Lack, ask_for_lacks, begin_lacks, find_replaced
from ocigpu.doctor.spec_files import Specs, read_specs
from ocigpu.doctor.tenant_facts import TenantFacts, read_tenant_facts
from ocigpu.doctor.versions import read_engine_releases
from ocigpu.engines.places import Daemon, running_daemons
from ocigpu.engines.status import EngineStatus, read_engine_status
from ocigpu.gpus.nvidia.libraries import find_libraries, find_nvml, library_versions, missing_libraries, native_machine
from ocigpu.gpus.nvidia.nodes import Driver, NodeChange, find_changes, find_link_changes, plan_nodes, read_driver
from ocigpu.gpus.nvidia.nvml import NvmlAnswer, start_nvml
from ocigpu.gpus.nvidia.procfs import ProcGpu, parse_devices, read_kernel_version, read_proc_gpus
from ocigpu.gpus.pci import NVIDIA_VENDOR, Function, read_functions, read_gpus
from ocigpu.gpus.tegra import RELEASE
from ocigpu.gpus.tegra.facts import find_listed_nvml, read_listed_facts
from ocigpu.gpus.tree import Roots, Tree, find_roots, list_names, read_text
from ocigpu.gpus.vendors import find_vendors
from ocigpu.gpus.vfio.facts import SWITCH_CLASS
from ocigpu.gpus.wsl import looks_like_wsl
from ocigpu.gpus.wsl.facts import WslFacts, read_wsl_facts
from ocigpu.sim.made import read_marker
from ocigpu.system.child import Child
from ocigpu.system.proc import read_command
from ocigpu.system.settings_file import read_settings

DIRECTORIES = ("/usr/bin", "/usr/local/bin", "/opt/ocigpu/bin")
NVML_SECONDS = 30.0
"""A GPU that nothing keeps awake takes a second or two, and hosts have sixteen of them."""


class Host(RootFiles):
    """The subject of the checks.  ``root``: "" for this machine, else the directory that stands for "/".

    ``config``: the settings file, "" for the usual one.  ``nvml_seconds``: how long NVML may take.  ``states``: state
    directories of runc and crun to search instead of the usual ones.  Raises UsageError when ``root`` is not a
    directory.  An unusable settings file is not an error here: ``settings_error`` keeps the reason, and the defaults
    are used.
    """

    def __init__(
        self, root: str = "", config: str = "", nvml_seconds: float = NVML_SECONDS, states: tuple[str, ...] = ()
    ) -> None:
        super().__init__(root)
        self.config = config
        self.nvml_seconds = nvml_seconds
        self.states = states
        self.settings_error: OcigpuError | None = None
        self.settings = self._read_settings()
        self.user = os.geteuid()
        self.roots: Roots = find_roots(self.settings)
        self._begun: list[Child] = []

    def _read_settings(self) -> Settings:
        usual = self.root + DEFAULT_PATH
        path = self.config or (usual if self.root and os.path.lexists(usual) else "")
        try:
            settings = read_settings(path) if path or not self.root else Settings()
        except SettingsError as error:
            self.settings_error = error
            settings = Settings()
        return settings._replace(simulation_root=self.root) if self.root else settings

    @cached_property
    def marker(self) -> dict[str, object]:
        """The description of a simulated host; empty for a real one."""
        try:
            return read_marker(self.settings.simulation_root) if self.settings.simulation_root else {}
        except OcigpuError:
            return {}

    @cached_property
    def tenant_facts(self) -> TenantFacts:
        """The facts about virtual machines with GPUs."""
        return read_tenant_facts(self, self.roots.sys, self.settings.simulation_root)

    @cached_property
    def claim_facts(self) -> ClaimFacts:
        """The facts about DRA drivers."""
        return read_claim_facts(self)

    @cached_property
    def other_vendors(self) -> tuple[str, ...]:
        """The vendors beside NVIDIA whose drivers are loaded, by their names in gpus/vendors.py."""
        return tuple(name for name in find_vendors(self.settings) if name != FIRST)

    @property
    def simulated(self) -> bool:
        return bool(self.marker)

    def command(self, *words: str) -> str:
        """Return a command of ocigpu for this host: with its settings file where it is not the usual one."""
        config = self.config or (f"{self.root}/config.toml" if self.root and self.simulated else "")
        return shlex.join(["ocigpu", *words, *(("--config", config) if config else ())])

    @property
    def make_nodes(self) -> str:
        """The command that makes missing device nodes."""
        return self.command("system", "create-device-nodes")

    @property
    def program_directories(self) -> list[str]:
        """Directories to search for programs of ocigpu; for this machine also that of the running one."""
        return [*([os.path.dirname(os.path.abspath(sys.argv[0]))] if self.live else []), *DIRECTORIES]

    # The kernel and the driver

    @property
    def has_system(self) -> bool:
        """Whether there is more than a simulated driver: users, engines, programs."""
        return self.exists("/etc/passwd")

    @cached_property
    def system_names(self) -> dict[str, str]:
        """What the system calls itself: ID, ID_LIKE, PRETTY_NAME and VERSION_ID of os-release(5)."""
        pairs = (line.partition("=") for line in (self.text("/etc/os-release") or "").splitlines())
        wanted = ("ID", "ID_LIKE", "PRETTY_NAME", "VERSION_ID")
        return {name: value.strip("\"'") for name, _, value in pairs if name in wanted}

    @cached_property
    def kernel_release(self) -> str:
        """The running kernel's release, "" when it is unknown."""
        return (read_text(f"{self.proc}/sys/kernel/osrelease") or "").strip()

    @property
    def proc(self) -> str:
        """The machine's procfs: of the other machine's tree with a root, not of a simulated driver."""
        return f"{self.root}/proc"

    @property
    def sys(self) -> str:
        return f"{self.root}/sys"

    @cached_property
    def platform(self) -> str:
        """What kind of host it is: "wsl", "tegra" (/etc/nv_tegra_release), "" for GPUs on a PCI bus."""
        roots = self.roots._replace(driver=self.roots.host or self.root, dev=self.root or self.roots.host)
        if looks_like_wsl(roots._replace(proc=self.proc if self.root else self.roots.proc)):
            return "wsl"
        return "tegra" if Tree(roots.driver).find(RELEASE) else ""

    @cached_property
    def listed(self) -> HostFacts | None:
        """What a Tegra system with an integrated GPU has for containers, by its lists; None for any other host."""
        return read_listed_facts(self.roots, Tree(self.roots.driver), self.driver_version) if self.is_tegra else None

    @property
    def is_tegra(self) -> bool:
        return self.platform == "tegra"

    @property
    def is_wsl(self) -> bool:
        return self.platform == "wsl"

    @cached_property
    def wsl_stores(self) -> tuple[str, ...]:
        """Directories of NVIDIA's driver for Windows, as WSL shows them; none without a node or library."""
        facts = read_wsl_facts(self.settings, ()) if self.is_wsl else WslFacts()
        return tuple(store.path for store in facts.stores) if facts.node and facts.dxcore else ()

    @property
    def no_driver(self) -> str:
        """Why no version of a kernel module is known, as text."""
        elsewhere = {"wsl": "WSL: the driver is Windows'", "tegra": "Tegra: the driver is L4T's"}
        return elsewhere.get(self.platform, "no driver is loaded")

    @cached_property
    def pci_gpus(self) -> tuple[Function, ...]:
        """NVIDIA's display controllers on the PCI bus."""
        return read_gpus(self.roots.sys)

    @cached_property
    def pci_switches(self) -> tuple[Function, ...]:
        """NVIDIA's NVSwitches on the PCI bus."""
        return tuple(item for item in read_functions(self.roots.sys, NVIDIA_VENDOR) if item.base_class == SWITCH_CLASS)

    @cached_property
    def driver_version(self) -> str:
        """The version of the loaded kernel module, "" if none is loaded."""
        return read_kernel_version(self.roots.proc, self.roots.sys)

    @cached_property
    def majors(self) -> dict[str, int]:
        """NVIDIA's character devices in /proc/devices, by name."""
        return dict(parse_devices(read_text(f"{self.roots.proc}/devices") or ""))

    @cached_property
    def proc_gpus(self) -> tuple[ProcGpu, ...]:
        return read_proc_gpus(f"{self.roots.proc}/driver/nvidia")

    @cached_property
    def libraries(self) -> list[str]:
        """The driver's libraries, of any version: paths in the driver root."""
        tree = Tree(self.roots.driver)
        return find_libraries(tree, self.settings.driver_ldcache, self.driver_version, native_machine())[0]

    @cached_property
    def library_versions(self) -> list[str]:
        """Versions of libcuda and libnvidia-ml."""
        return library_versions(self.libraries)

    @cached_property
    def missing_libraries(self) -> list[str]:
        """Which of libcuda and libnvidia-ml the loaded driver's version has not in 64 bits."""
        return missing_libraries(self.libraries, self.driver_version, Tree(self.roots.driver), native_machine())

    @cached_property
    def driver(self) -> Driver | None:
        """The driver's devices in procfs, None when it is not loaded or others make its nodes."""
        return read_driver(self.roots) if self.driver_version and self.majors and not self.listed else None

    @cached_property
    def node_changes(self) -> tuple[NodeChange, ...]:
        """Each node that there should be, and what would have to be done for it."""
        if self.driver is None:
            return ()
        return find_changes(plan_nodes(self.driver)[0], self.roots)

    @cached_property
    def link_changes(self) -> tuple[NodeChange, ...]:
        """Each link of /dev/char that there should be, and what would have to be done for it."""
        return find_link_changes(plan_nodes(self.driver)[0], self.driver, self.roots) if self.driver else ()

    @property
    def wrong_nodes(self) -> tuple[NodeChange, ...]:
        return tuple(change for change in self.node_changes if change.what != "keep" and change.cause != "")

    @property
    def missing_nodes(self) -> tuple[NodeChange, ...]:
        return tuple(change for change in self.node_changes if change.what == "make" or change.cause == "missing")

    @cached_property
    def nvml(self) -> tuple[NvmlAnswer, list[dict[str, object]]]:
        """NVML's answer, and the GPUs as its child described them; without a library the answer states that."""
        tree = Tree(self.roots.driver)
        path = find_nvml(self.libraries, self.driver_version, tree, native_machine())
        path = find_listed_nvml(tree) if self.listed else path
        if not path:
            return NvmlAnswer("there is no libnvidia-ml.so of the driver's version"), []
        child = start_nvml(path, self.roots, self.nvml_seconds)
        answer, document = child.collect(), child.document
        return answer, document.get("gpus", [])

    @cached_property
    def has_pci(self) -> bool:
        return os.path.isdir(f"{self.roots.sys}/bus/pci/devices")

    @cached_property
    def mig_instances(self) -> Mapping[int, dict[str, list[str]]]:
        """By minor of a GPU: the directories of its GPU instances, "gi3", and of their compute instances."""
        capabilities = f"{self.roots.proc}/driver/nvidia/capabilities"
        found: dict[int, dict[str, list[str]]] = {}
        for gpu in self.nvml[0].gpus:
            directory = f"{capabilities}/gpu{gpu.minor}/mig"
            names = [name for name in _listed(directory) if name.startswith("gi")]
            found[gpu.minor] = {
                name: [item for item in _listed(f"{directory}/{name}") if item.startswith("ci")] for name in names
            }
        return found

    # Engines, containers, processes and logs

    @cached_property
    def engines(self) -> list[EngineStatus]:
        """Every engine and what its configuration files say."""
        return read_engine_status(self.root or "/", self.daemons)

    @cached_property
    def daemons(self) -> list[Daemon]:
        """The daemons of engines that run."""
        return running_daemons(self.root or "/")

    @cached_property
    def engine_releases(self) -> dict[str, str]:
        """The release of each installed engine, {"podman": "4.3.1"}; an engine of unknown release is left out."""
        return read_engine_releases(self)

    @cached_property
    def specs(self) -> Specs:
        """The CDI specifications in the directories that the settings and the engines name."""
        engines = [path for engine in self.engines for path in engine.cdi_spec_dirs]
        return read_specs(self, [*self.settings.cdi_spec_dirs, *engines])

    @cached_property
    def docker(self) -> DockerAnswer | None:
        """The running dockerd's description of itself; None if none can be queried."""
        return ask_docker(self.daemons) if self.live else None

    @cached_property
    def docker_context(self) -> tuple[str, str, bool]:
        return read_context()

    @cached_property
    def containers(self) -> tuple[list[Container], list[str]]:
        """The containers of this machine, and notes on what could not be read."""
        return find_containers(default_places(self.states)) if self.live else ([], [])

    @property
    def running_containers(self) -> list[Container]:
        return [item for item in self.containers[0] if item.status in ("created", "running")]

    @cached_property
    def lacks(self) -> list[Lack]:
        """What running containers lack of the driver; raises OSError, OcigpuError."""
        begun, self._begun = self._begun, []
        return ask_for_lacks(self.running_containers, self.settings, self.driver_version, begun)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Have children look at containers, where there are many, while others look at the host: :attr:`lacks`."""
        with ExitStack() as closing:
            with suppress(OSError, OcigpuError):  # the check that needs it reports the error
                if self.live and not self.user and self.driver_version and len(self.running_containers) > SHARE:
                    self._begun = begin_lacks(self.running_containers, self.settings, closing)
            yield

    @cached_property
    def processes(self) -> dict[int, str]:
        """Process ids and names (comm) of the machine."""
        found = {}
        for name in list_names(self.proc):
            if name.isascii() and name.isdigit():
                with suppress(OSError):  # it has ended since
                    found[int(name)] = read_command(f"{self.proc}/{name}")
        return found

    @cached_property
    def replaced_files(self) -> tuple[dict[int, tuple[str, str]], int]:
        """Processes that hold driver files that were replaced, and how many could not be looked at."""
        return find_replaced(self.proc, self.processes)

    @cached_property
    def kernel_log(self) -> list[str]:
        """The kernel's messages: of the ring buffer on this machine, else of the log files.

        Raises HostError when neither can be read: by default only root may.
        """
        return read_kernel_log(self)


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
