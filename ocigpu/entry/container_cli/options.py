"""The command line of ``ocigpu-container-cli``: the options of nvidia-container-cli.

As there, global options come before the command, and long options may be shortened.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ocigpu import is_snapshot
from ocigpu.core.errors import UsageError

PROGRAM = "ocigpu-container-cli"
COMMANDS = ("info", "list", "configure")
COMPAT_MODES = ("mount", "ldconfig", "disabled")
CONFIGURE_EPILOG = """\
Nothing is printed on success; notes go to the file of --debug.  Everything is undone when a step
fails.  Exit status: 0 the container has its GPUs, 1 it has not, and it and the host are as they were.

With --pid it is done in the namespaces of that process, as a prestart hook does it; without, in those of the caller,
who has made a mount namespace and mounted ROOTFS in it.

Other than nvidia-container-cli: devices are what NVIDIA_VISIBLE_DEVICES takes, and none means none; the settings'
supported-driver-capabilities and disable-require hold here too; ldconfig is always the host's, confined, and without
@ that of the settings; cuda-compat-mode mount is ldconfig; nothing of the image is executed, so NVC_INSECURE_MODE
and --no-pivot change nothing.

Example: ocigpu-container-cli configure --ldconfig=@/sbin/ldconfig --device=all --compute --utility --pid=4711 ROOTFS
"""


class OrdinaryPythonError(Exception):
    """A snapshot leaves this command line to the ordinary Python, which has argparse's words of its own version."""


class Parser(argparse.ArgumentParser):
    """argparse with our error messages and nvidia-container-cli's exit status."""

    def error(self, message: str) -> NoReturn:
        if is_snapshot():
            raise OrdinaryPythonError
        raise UsageError(message, f"see: {self.prog} --help")


class _CommandParser(Parser):
    """The parser of one command: it also notes how many words followed the command, which ``list`` must know."""

    def parse_known_args(  # type: ignore[override] # argparse's has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        options.words = len(args or ())
        return options, unknown


class _Text(argparse.Action):
    """An option that prints a text and ends; raises OrdinaryPythonError in a snapshot."""

    def __call__(self, parser: argparse.ArgumentParser, *_rest: object) -> None:
        if is_snapshot():
            raise OrdinaryPythonError
        self.tell(parser)
        parser.exit()

    def tell(self, parser: argparse.ArgumentParser) -> None:
        """Print the text: the help, unless another class says otherwise."""
        parser.print_help()


class _Version(_Text):
    """``-V``: versions in the vendor's layout, "name: value" lines that scripts parse."""

    def tell(self, _parser: argparse.ArgumentParser) -> None:
        """Print the versions."""
        import datetime
        import os
        import platform

        from ocigpu import VENDOR_VERSION, __version__

        built = datetime.datetime.fromtimestamp(int(os.stat(__file__).st_mtime), datetime.UTC)
        for name, value in (
            ("cli-version", VENDOR_VERSION),
            ("lib-version", VENDOR_VERSION),
            ("build date", built.strftime("%Y-%m-%dT%H:%M+00:00")),
            ("build revision", f"ocigpu-{__version__}"),
            ("build compiler", f"{platform.python_implementation()} {platform.python_version()}"),
            ("build platform", platform.machine()),
            ("build flags", ""),
        ):
            print(f"{name}: {value}")


class _Usage(_Text):
    def tell(self, parser: argparse.ArgumentParser) -> None:
        """Print one line."""
        parser.print_usage()


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Return the options; raises UsageError, in a snapshot OrdinaryPythonError; SystemExit after --help and the like.

    ``-u`` and ``--user`` take their value attached or not at all, which argparse cannot say.
    """
    first = next((index for index, word in enumerate(words) if word in COMMANDS), len(words))
    prepared = []
    for word in words[:first]:
        if word in ("-u", "--user"):
            prepared.append("--user=")
        elif word.startswith("-u"):
            prepared.append(f"--user={word[2:]}")
        else:
            prepared.append(word)
    parser = make_parser()
    options, unknown = parser.parse_known_args([*prepared, *words[first:]])
    if options.command is None:
        parser.error("no command given")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = Parser(
        PROGRAM,
        add_help=False,
        description="Report the driver, GPUs and driver files of this host, or provide GPUs to a container.",
    )
    _add_common(parser)
    parser.add_argument(
        "-d", "--debug", metavar="FILE", dest="debug_file", help="append messages to FILE (NVC_DEBUG_FILE)"
    )
    parser.add_argument("-k", "--load-kmods", action="store_true", help="load kernel modules and make device nodes")
    parser.add_argument("-n", "--no-pivot", action="store_true", help="accepted; it is not needed")
    parser.add_argument("-u", "--user", metavar="UID[:GID]", help="accepted; the driver library runs confined anyway")
    parser.add_argument("-r", "--root", metavar="PATH", default="", help="driver root")
    parser.add_argument("-l", "--ldcache", metavar="FILE", default="", help="loader cache below the driver root")
    parser.add_argument("--no-create-imex-channels", action="store_true", help="with -k: no nodes of IMEX channels")
    # with a name of its own for it, argparse formats no usage text now, which loads half of the standard library
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog=PROGRAM, parser_class=_CommandParser)
    _add_info(commands)
    _add_list(commands)
    _add_configure(commands)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-?", "--help", action=_Text, nargs=0, help="show this help and exit")
    parser.add_argument("--usage", action=_Usage, nargs=0, help="show a short usage message and exit")
    parser.add_argument("-V", "--version", action=_Version, nargs=0, help="show versions and exit")


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that list and configure share."""
    parser.add_argument("-d", "--device", metavar="ID", action="append", default=[], help="GPUs and MIG devices")
    parser.add_argument("--mig-config", metavar="ID", default="", help="MIG configuration capabilities (all)")
    parser.add_argument("--mig-monitor", metavar="ID", default="", help="MIG monitoring capabilities (all)")
    parser.add_argument("--imex-channel", metavar="CHANNEL", action="append", default=[], help="IMEX channels")
    parser.add_argument("--no-persistenced", action="store_true", help="without the nvidia-persistenced socket")
    parser.add_argument("--no-fabricmanager", action="store_true", help="without the fabric manager's socket")
    parser.add_argument("--no-gsp-firmware", action="store_true", help="without firmware")


def _add_info(commands: "argparse._SubParsersAction[_CommandParser]") -> None:
    info = commands.add_parser("info", add_help=False, help="report the driver and the GPUs")
    _add_common(info)
    info.add_argument("--csv", action="store_true", help="as comma separated values")


def _add_list(commands: "argparse._SubParsersAction[_CommandParser]") -> None:
    listing = commands.add_parser("list", add_help=False, help="list driver files and device nodes, a path a line")
    _add_common(listing)
    _add_selection(listing)
    listing.add_argument("-l", "--libraries", action="store_true", help="libraries")
    listing.add_argument("-b", "--binaries", action="store_true", help="binaries")
    listing.add_argument("-i", "--ipcs", action="store_true", help="sockets")
    listing.add_argument("-f", "--firmwares", action="store_true", help="firmware")
    listing.add_argument("--compat32", action="store_true", help="with -l, 32-bit libraries too")


def _add_configure(commands: "argparse._SubParsersAction[_CommandParser]") -> None:
    parser = commands.add_parser(
        "configure",
        add_help=False,
        help="give a container its GPUs",
        epilog=CONFIGURE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(parser)
    parser.add_argument("-p", "--pid", metavar="PID", default="", help="the container's first process")
    _add_selection(parser)
    parser.add_argument("-r", "--require", metavar="EXPR", action="append", default=[], help="what must hold")
    parser.add_argument("-l", "--ldconfig", metavar="PATH", default="", help="@ and the host path of ldconfig")
    for letter, name in zip("cuvgDn", ("compute", "utility", "video", "graphics", "display", "ngx"), strict=True):
        parser.add_argument(f"-{letter}", f"--{name}", action="store_true", help=f"driver capability {name}")
    parser.add_argument("--compat32", action="store_true", help="32-bit libraries too")
    parser.add_argument("--no-cgroups", action="store_true", help="leave the device cgroup alone")
    parser.add_argument("--no-devbind", action="store_true", help="make no device nodes")
    parser.add_argument("--no-cntlibs", action="store_true", help="as --cuda-compat-mode=disabled")
    parser.add_argument(
        "--cuda-compat-mode",
        metavar="MODE",
        action="append",
        default=[],
        help="compatibility libraries of the image: ldconfig (mount means the same) or disabled",
    )
    parser.add_argument("rootfs", metavar="ROOTFS", help="the container's root directory, an absolute path of the host")
