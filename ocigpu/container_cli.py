"""``ocigpu-container-cli``: ``info`` and ``list`` with the options and output of nvidia-container-cli.

For scripts and tools that already call that program.  As there, global options come before the command, long options
may be shortened, and every failure ends with exit status 1.
"""

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Sequence
from typing import NoReturn

from ocigpu import __version__
from ocigpu.errors import HostError, OcigpuError, RequestError, UsageError, printable
from ocigpu.facts import DeviceNode, Gpu, HostFacts, MigDevice, mig_capability_paths
from ocigpu.settings import Settings, read_settings

PROGRAM = "ocigpu-container-cli"
MAX_IMEX_CHANNELS = 1 << 20
CAPABILITIES_DIRECTORY = "/proc/driver/nvidia/capabilities"
INFO_LABELS = ("Device Index", "Device Minor", "Model", "Brand", "GPU UUID", "Bus Location", "Architecture")
CONFIGURE_MESSAGE = "configure is not in this version: ocigpu-hook prestart provisions containers"

LIBRARY_ORDER = (
    "libnvidia-ml.so", "libnvidia-cfg.so", "libnvidia-nscq.so",
    "libcuda.so", "libcudadebugger.so", "libnvidia-opencl.so", "libnvidia-gpucomp.so", "libnvidia-ptxjitcompiler.so",
    "libnvidia-fatbinaryloader.so", "libnvidia-allocator.so", "libnvidia-compiler.so", "libnvidia-pkcs11.so",
    "libnvidia-pkcs11-openssl3.so", "libnvidia-nvvm.so", "libnvidia-tileiras.so",
    "libnvidia-ngx.so",
    "libvdpau_nvidia.so", "libnvidia-encode.so", "libnvidia-opticalflow.so", "libnvcuvid.so",
    "libnvidia-eglcore.so", "libnvidia-glcore.so", "libnvidia-tls.so", "libnvidia-glsi.so", "libnvidia-fbc.so",
    "libnvidia-ifr.so", "libnvidia-rtcore.so", "libnvoptix.so",
    "libGLX_nvidia.so", "libEGL_nvidia.so", "libGLESv2_nvidia.so", "libGLESv1_CM_nvidia.so",
    "libnvidia-glvkspirv.so", "libnvidia-cbl.so",
)  # fmt: skip
"""The order in which nvidia-container-cli lists libraries (1.17); ours that it does not know come after."""
BINARY_ORDER = (
    "nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nv-fabricmanager",
    "nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """argparse with the exit status of nvidia-container-cli for usage errors, and its ``-?`` and ``--usage``."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see: {self.prog} --help")


class _CommandParser(_Parser):
    """The parser of one command: it also notes how many words followed the command, which ``list`` must know."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        options.words = len(args or ())
        return options, unknown


class _Version(argparse.Action):
    """``-V``: versions in the vendor's layout, "name: value" lines that scripts parse."""

    def __call__(self, parser: argparse.ArgumentParser, *_rest: object) -> None:
        built = datetime.datetime.fromtimestamp(int(os.stat(__file__).st_mtime), datetime.UTC)
        for name, value in (
            ("cli-version", __version__),
            ("lib-version", __version__),
            ("build date", built.strftime("%Y-%m-%dT%H:%M+00:00")),
            ("build revision", __version__),
            ("build compiler", f"{platform.python_implementation()} {platform.python_version()}"),
            ("build platform", platform.machine()),
            ("build flags", ""),
        ):
            print(f"{name}: {value}")
        parser.exit()


class _Usage(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_rest: object) -> None:
        parser.print_usage()
        parser.exit()


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-?", "--help", action="help", help="show this help and exit")
    parser.add_argument("--usage", action=_Usage, nargs=0, help="show a short usage message and exit")
    parser.add_argument("-V", "--version", action=_Version, nargs=0, help="show versions and exit")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(PROGRAM, add_help=False, description="Report the driver, GPUs and driver files of this host.")
    _add_common(parser)
    parser.add_argument("-d", "--debug", metavar="FILE", dest="debug_file", help="append messages to FILE")
    parser.add_argument("-k", "--load-kmods", action="store_true", help="accepted; modules are loaded by the host")
    parser.add_argument("-n", "--no-pivot", action="store_true", help="accepted; only configure would use it")
    parser.add_argument("-u", "--user", metavar="UID[:GID]", help="accepted; the driver library runs confined anyway")
    parser.add_argument("-r", "--root", metavar="PATH", default="", help="driver root")
    parser.add_argument("-l", "--ldcache", metavar="FILE", default="", help="loader cache below the driver root")
    parser.add_argument("--no-create-imex-channels", action="store_true", help="accepted; none are created")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_CommandParser)

    info = commands.add_parser("info", add_help=False, help="report the driver and the GPUs")
    _add_common(info)
    info.add_argument("--csv", action="store_true", help="as comma separated values")

    listing = commands.add_parser("list", add_help=False, help="list driver files and device nodes, a path a line")
    _add_common(listing)
    listing.add_argument("-d", "--device", metavar="ID", action="append", default=[], help="device nodes of these")
    listing.add_argument("-l", "--libraries", action="store_true", help="libraries")
    listing.add_argument("-b", "--binaries", action="store_true", help="binaries")
    listing.add_argument("-i", "--ipcs", action="store_true", help="sockets")
    listing.add_argument("-f", "--firmwares", action="store_true", help="firmware")
    listing.add_argument("--compat32", action="store_true", help="with -l, 32-bit libraries too")
    listing.add_argument("--mig-config", metavar="ID", default="", help="MIG configuration capabilities (all)")
    listing.add_argument("--mig-monitor", metavar="ID", default="", help="MIG monitoring capabilities (all)")
    listing.add_argument("--imex-channel", metavar="CHANNEL", action="append", default=[], help="IMEX channels")
    listing.add_argument("--no-persistenced", action="store_true", help="without the nvidia-persistenced socket")
    listing.add_argument("--no-fabricmanager", action="store_true", help="without the fabric manager's socket")
    listing.add_argument("--no-gsp-firmware", action="store_true", help="without firmware")

    commands.add_parser("configure", add_help=False, help="not in this version").add_argument("rest", nargs="*")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: of this process) and return its exit status; errors go to standard error."""
    debug_file = ""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        debug_file = options.debug_file or ""
        text = "".join(f"{line}\n" for line in run_command(options))
    except SystemExit as stop:  # argparse: --help, --version
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except OcigpuError as error:
        return _report(error, debug_file)
    except Exception as error:  # the last line of defence: a user sees a sentence, not a traceback
        if os.environ.get("OCIGPU_DEBUG") == "1":
            raise
        return _report(OcigpuError("OCIGPU-INT-1", f"{type(error).__name__}: {error}"), debug_file)
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # Python flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options; ``-u`` and ``--user`` take their value attached or not at all, which argparse cannot say."""
    prepared = []
    for word in words:
        if word in ("-u", "--user"):
            prepared.append("--user=")
        elif word.startswith("-u"):
            prepared.append(f"--user={word[2:]}")
        else:
            prepared.append(word)
    parser = make_parser()
    options, unknown = parser.parse_known_args(prepared)
    if options.command is None:
        raise UsageError("no command given", f"see: {PROGRAM} --help")
    if options.command == "configure":
        raise UsageError(CONFIGURE_MESSAGE, "")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _report(error: OcigpuError, debug_file: str) -> int:
    text = error.render(PROGRAM)
    print(text, file=sys.stderr)
    if debug_file:
        try:
            with open(debug_file, "a", encoding="utf-8") as file:
                print(text, file=file)
        except OSError as failure:
            print(f"{PROGRAM}: --debug {debug_file}: {failure.strerror}", file=sys.stderr)
    return 1


def run_command(options: argparse.Namespace) -> list[str]:
    """Return the lines that the command prints; raises OcigpuError."""
    channels = _imex_channels(options.imex_channel) if options.command == "list" else []
    settings = _settings(options)
    from ocigpu.host.discover import read_host_facts

    try:
        facts = read_host_facts(settings)
    except HostError as error:
        raise HostError(error.code, f"initialization error: {error.message}", error.hint) from error
    if options.command == "info":
        return render_csv(facts) if options.csv else render_info(facts)
    return render_list(facts, options, channels)


def _settings(options: argparse.Namespace) -> Settings:
    settings = read_settings(os.environ.get("OCIGPU_CONFIG", ""))
    if options.root:
        settings = settings._replace(driver_root=os.path.abspath(options.root))
    if options.ldcache:
        settings = settings._replace(driver_ldcache=options.ldcache)
    return settings


def render_info(facts: HostFacts) -> list[str]:
    """Return the lines of ``info``: labels in 15 columns, an empty line before every GPU."""
    lines = [_field("NVRM version:", facts.driver_version), _field("CUDA version:", facts.cuda_version)]
    for gpu in facts.gpus:
        lines.append("")
        lines += [_field(f"{label}:", value) for label, value in zip(INFO_LABELS, _info_values(gpu), strict=True)]
    return lines


def render_csv(facts: HostFacts) -> list[str]:
    """Return the lines of ``info --csv``; nothing is quoted, and the second header is there without GPUs too."""
    return [
        "NVRM version,CUDA version",
        f"{facts.driver_version},{facts.cuda_version}",
        "",
        ",".join(INFO_LABELS),
        *(",".join(_info_values(gpu)) for gpu in facts.gpus),
    ]


def _info_values(gpu: Gpu) -> tuple[str, ...]:
    return (str(gpu.index), str(gpu.minor), gpu.model, gpu.brand, gpu.uuid, gpu.bus_id, gpu.architecture)


def _field(label: str, value: str) -> str:
    return f"{label:<15} {value}"


def render_list(facts: HostFacts, options: argparse.Namespace, channels: list[int]) -> list[str]:
    """Return the paths that ``list`` prints, in the order of nvidia-container-cli, without the driver root.

    Without options everything is listed; one word that asks for an IMEX channel counts as none.
    """
    whole = options.words == 0 or (options.words == 1 and bool(channels))
    paths: list[str] = []
    gpus: list[Gpu] = []
    mig_devices: list[tuple[Gpu, MigDevice]] = []
    specific_mig = False
    if whole or options.device:
        gpus, mig_devices, specific_mig = select_by_token("all" if whole else ",".join(options.device), facts)
        paths += [node.container_path for node in facts.control_nodes]
        paths += [gpu.node.container_path for gpu in gpus if gpu.node]
        for gpu, mig in mig_devices:
            paths += _mig_paths(facts, gpu, mig)
    paths += [f"/dev/nvidia-caps-imex-channels/channel{channel}" for channel in channels]
    for name, value in (("config", options.mig_config), ("monitor", options.mig_monitor)):
        if value:
            paths += _mig_capability_paths(facts, name, value, gpus, specific_mig)
    root = "" if facts.driver_root == "/" else facts.driver_root.rstrip("/")
    if whole or options.binaries:
        binaries = sorted(facts.binaries, key=lambda file: _rank(file.container_path, BINARY_ORDER))
        paths += [_below(root, file.host_path) for file in binaries]
    if whole or options.libraries:
        libraries = sorted(facts.libraries, key=lambda library: _rank(library.name, LIBRARY_ORDER))
        for bits in (64, 32) if whole or options.compat32 else (64,):
            paths += [_below(root, library.host_path) for library in libraries if library.bits == bits]
    if whole or options.ipcs:
        dropped = [
            name
            for name, drop in (("persistenced", options.no_persistenced), ("fabricmanager", options.no_fabricmanager))
            if drop
        ]
        for file in facts.sockets:
            if not any(name in file.container_path for name in dropped):
                paths.append(_below(root, file.host_path))
    if (whole or options.firmwares) and not options.no_gsp_firmware:
        paths += [file.container_path for file in facts.firmware]
    return [printable(path) for path in paths]


def _rank(path: str, order: tuple[str, ...]) -> int:
    """Return the place of a file in the vendor's order; of two names that match, the longer one is meant."""
    name = path.rpartition("/")[2]
    matches = [known for known in order if name.startswith(known)]
    return order.index(max(matches, key=len)) if matches else len(order)


def _below(root: str, path: str) -> str:
    return path.removeprefix(root) if root and path.startswith(root + "/") else path


def select_by_token(text: str, facts: HostFacts) -> tuple[list[Gpu], list[tuple[Gpu, MigDevice]], bool]:
    """Return the GPUs and MIG devices of a --device list, and whether MIG devices were named one by one.

    As nvidia-container-cli reads it: "all", a GPU's UUID, its PCI address, its index, a MIG device's UUID, "GPU:MIG";
    a MIG device brings its GPU along, and on a host without GPUs every list is accepted.
    Raises RequestError OCIGPU-DEV-1 for anything else.
    """
    gpus: list[Gpu] = []
    mig_devices: list[tuple[Gpu, MigDevice]] = []
    for token in filter(None, text.split(",")) if facts.gpus else ():
        if token.lower() == "all":
            return list(facts.gpus), [(gpu, mig) for gpu in facts.gpus for mig in gpu.mig_devices], False
        gpu = next((gpu for gpu in facts.gpus if _is_gpu(token, gpu)), None)
        pair = next(((gpu, mig) for gpu in facts.gpus for mig in gpu.mig_devices if _is_mig(token, gpu, mig)), None)
        if gpu is None and pair is None:
            raise RequestError("OCIGPU-DEV-1", f"device error: {printable(token, 120)}: unknown device")
        if gpu is not None:
            gpus.append(gpu)
        elif pair is not None:
            gpus.append(pair[0])
            mig_devices.append(pair)
    unique = [gpu for gpu in facts.gpus if gpu in gpus]
    return unique, list(dict.fromkeys(mig_devices)), bool(mig_devices)


def _is_gpu(token: str, gpu: Gpu) -> bool:
    if token.lower() == gpu.uuid.lower():
        return True
    if token.isascii() and token.isdigit():
        return int(token) == gpu.index
    return token.count(":") == 2 and _same_address(token, gpu.bus_id)


def _same_address(token: str, bus_id: str) -> bool:
    """Compare PCI addresses by domain, bus and device; the function is not looked at."""
    try:
        wanted = [int(part, 16) for part in token.partition(".")[0].split(":")]
    except ValueError:
        return False
    return wanted == [int(part, 16) for part in bus_id.partition(".")[0].split(":")]


def _is_mig(token: str, gpu: Gpu, mig: MigDevice) -> bool:
    return token.lower() == mig.uuid.lower() or token == f"{gpu.index}:{mig.index}"


def _mig_paths(facts: HostFacts, gpu: Gpu, mig: MigDevice) -> list[str]:
    paths = [f"{CAPABILITIES_DIRECTORY}/{path}" for path in mig_capability_paths(gpu.minor, mig)]
    by_minor = {node.minor: node for _, node in facts.cap_nodes}
    nodes = [by_minor.get(mig.gi_minor), by_minor.get(mig.ci_minor)]
    return paths + [node.container_path for node in nodes if node is not None]


def _mig_capability_paths(facts: HostFacts, name: str, value: str, gpus: list[Gpu], specific_mig: bool) -> list[str]:
    if value != "all":
        raise RequestError("OCIGPU-REQ-1", f"mig-{name} error: only 'all' devices are currently supported", "")
    if specific_mig:
        message = f"mig-{name} error: cannot enable mig-{name} with specific MIG devices selected"
        raise RequestError("OCIGPU-REQ-1", message, "")
    nodes: list[tuple[str, DeviceNode]] = list(facts.cap_nodes)
    paths = [f"{CAPABILITIES_DIRECTORY}/mig/{name}"]
    paths += [node.container_path for path, node in nodes if path == name]
    for gpu in gpus:
        if gpu.mig_capable:
            paths += [f"{CAPABILITIES_DIRECTORY}/gpu{gpu.minor}", "/dev/nvidia-caps"]
            paths += [node.container_path for path, node in nodes if path.startswith(f"gpu{gpu.minor}/")]
    return paths


def _imex_channels(values: list[str]) -> list[int]:
    channels = []
    for item in filter(None, ",".join(values).split(",")):
        if not (item.isascii() and item.isdigit() and len(item) <= 7 and int(item) < MAX_IMEX_CHANNELS):
            message = f"error parsing IMEX info: unsupported IMEX channel value: {printable(item, 120)}"
            raise RequestError("OCIGPU-REQ-6", message)
        channels.append(int(item))
    return channels


if __name__ == "__main__":
    sys.exit(main())
