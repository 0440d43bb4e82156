"""The command line of an OCI runtime (runc, crun): where is the subcommand, where is the bundle.

Global options and their values are parsed: a container named "create" is not the command ``create``, and the arguments
of a container's own command are never read.
"""

from ocigpu.core.errors import UsageError
from ocigpu.core.record import NamedTuple

GLOBAL_WITH_VALUE = ("log", "log-format", "log-level", "root", "criu", "rootless", "cgroup-manager")
"""Global options of runc 1.0-1.3 and crun 1.x that take a value."""
GLOBAL_FLAGS = ("debug", "systemd-cgroup", "version", "v", "V", "help", "h", "usage")
SUBCOMMANDS = (
    "checkpoint", "create", "delete", "events", "exec", "features", "help", "kill", "list", "mounts", "pause", "ps",
    "restore", "resume", "run", "spec", "start", "state", "update",
)  # fmt: skip
"""Subcommands of runc 1.0-1.3 and crun 1.x."""
CREATE_WITH_VALUE = ("bundle", "b", "config", "f", "console-socket", "pid-file", "preserve-fds", "user", "u")
"""Options of ``create`` and ``run`` that take a value; ``--config`` names another config.json (crun only)."""
CREATE_SHORT = "bfu"
CREATE_FLAGS = "dk"
"""Letters without a value that crun (argp) also takes in front of another: ``-db DIR`` is ``--detach --bundle DIR``."""


class Arguments(NamedTuple):
    """The relevant parts of a command line: ``subcommand`` ("" for none), bundle directory ("" is the current
    directory), name of the configuration file in it, the global logging options, and whether the version is requested.
    """

    subcommand: str = ""
    bundle: str = ""
    config: str = "config.json"
    log: str = ""
    log_format: str = "text"
    version: bool = False


def parse_arguments(argv: list[str]) -> Arguments:
    """Return the parsed arguments (without argv[0]).

    Both runtimes' spellings are understood: one or two dashes, ``--name value`` and ``--name=value``.  Raises
    UsageError when ``create`` or ``run`` has a bundle option without a value.
    """
    options, position = _parse_global(argv)
    subcommand = argv[position] if position < len(argv) else ""
    arguments = Arguments(
        subcommand,
        log=options.get("log", ""),
        log_format="json" if options.get("log-format") == "json" else "text",
        version=not options.keys().isdisjoint(("version", "v")),
    )
    if subcommand not in ("create", "run"):
        return arguments
    bundle, config, _ = _parse_create(argv[position + 1 :])
    return arguments._replace(bundle=bundle, config=config)


def find_container_id(argv: list[str]) -> str:
    """Return the container's id in the arguments of ``create`` or ``run``, "" if there is none; raises as above."""
    return _parse_create(argv[_parse_global(argv)[1] + 1 :])[2]


def _parse_global(argv: list[str]) -> tuple[dict[str, str], int]:
    """Return the options before the subcommand, and its index."""
    options: dict[str, str] = {}
    position = 0
    unknown = False
    while position < len(argv):
        word = argv[position]
        if word != "-" and not word.startswith("-") and unknown and word not in SUBCOMMANDS:
            # the value of an option that only newer runtimes have: a create behind it must not be missed
            position, unknown = position + 1, False
            continue
        if word == "--" or not word.startswith("-") or word == "-":
            break
        name, equals, value = word.lstrip("-").partition("=")
        position += 1
        if name in GLOBAL_WITH_VALUE and not equals:
            value = argv[position] if position < len(argv) else ""
            position += 1
        unknown = not equals and name not in GLOBAL_WITH_VALUE and name not in GLOBAL_FLAGS
        options[name] = value
    if position < len(argv) and argv[position] == "--":
        position += 1
    return options, position


def _parse_create(words: list[str]) -> tuple[str, str, str]:
    """Return the bundle, the name of its configuration, and the last word that is neither an option nor its value."""
    bundle, config, container = "", "config.json", ""
    position = 0
    while position < len(words) and words[position] != "--":
        word = words[position]
        position += 1
        if not word.startswith("-") or word == "-":
            container = word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and not word.startswith("--") and not _known(name):
            letters = name.lstrip(CREATE_FLAGS)
            if letters[:1] and letters[0] in CREATE_SHORT:
                name, value = letters[0], letters[1:]  # crun (argp) also takes -bDIR
                equals = "=" if value else ""
        if name not in CREATE_WITH_VALUE:
            continue
        if not equals:
            if position >= len(words):
                raise UsageError(f"option {word} needs a value")
            value = words[position]
            position += 1
        if name in ("bundle", "b"):
            bundle = value
        elif name in ("config", "f"):
            config = value
    return bundle, config, words[-1] if position + 1 < len(words) else container


def _known(name: str) -> bool:
    """Tell whether a single-dash word is a long option in Go's spelling (``-bundle``), not a cluster (``-bDIR``)."""
    return name in CREATE_WITH_VALUE
