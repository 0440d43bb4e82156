"""``ocigpu-container-cli``: ``info``, ``list`` and ``configure`` with the options and output of nvidia-container-cli.

For scripts, hooks and tools that already call that program.  Every failure ends with exit status 1.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from ocigpu import ORDINARY, is_snapshot
from ocigpu.core.errors import HostError, OcigpuError, RequestError, as_own_error, printable
from ocigpu.core.settings import Settings
from ocigpu.core.tokens import MAX_IMEX_CHANNEL, MAX_TOKENS
from ocigpu.entry.container_cli.options import PROGRAM, OrdinaryPythonError, parse_options
from ocigpu.system.log import no_answer
from ocigpu.system.settings_file import is_snapshot_refused, read_settings
from ocigpu.system.signals import begin_deadline, end_deadline

LOADING = {"-k", "--load-kmods"}
"""Options that may start modprobe, which only the ordinary interpreter can."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: of this process).

    Returns the exit status, or ORDINARY; errors go to standard error.
    """
    debug_file = os.environ.get("NVC_DEBUG_FILE", "")
    begin_deadline(lambda: _report(no_answer(), debug_file))
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if is_snapshot_refused(os.environ.get("OCIGPU_CONFIG", "")) or (is_snapshot() and LOADING.intersection(words)):
            return ORDINARY
        options = parse_options(words)
        if options.load_kmods and is_snapshot():
            return ORDINARY
        debug_file = options.debug_file or debug_file
        text = "".join(f"{line}\n" for line in run_command(options, debug_file))
    except OrdinaryPythonError:
        return ORDINARY
    except SystemExit as stop:  # argparse: --help, --version
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except OcigpuError as error:
        return _report(error, debug_file)
    except Exception as error:  # the last line of defence: a user sees a sentence, not a traceback
        if os.environ.get("OCIGPU_DEBUG") == "1":
            raise
        return _report(as_own_error(error), debug_file)
    finally:
        end_deadline()
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # Python flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _report(error: OcigpuError, debug_file: str) -> int:
    text = error.render(PROGRAM)
    print(text, file=sys.stderr)
    write_debug(debug_file, [text])
    return 1


def write_debug(path: str, lines: Sequence[str]) -> None:
    """Append lines to the file of --debug or NVC_DEBUG_FILE ("": nothing is done); a failure is told and no more."""
    if path:
        try:
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as failure:
            print(f"{PROGRAM}: --debug {printable(path)}: {failure.strerror}", file=sys.stderr)


def run_command(options: argparse.Namespace, debug_file: str = "") -> list[str]:
    """Carry out the command; return the lines that it prints.  Raises OcigpuError."""
    channels = [] if options.command == "info" else _imex_channels(options.imex_channel)
    settings = _settings(options)
    if options.load_kmods:
        from ocigpu.entry.container_cli.load import load_driver

        # channels of a container, which its image may have named, get nodes in the container alone
        made = [] if options.no_create_imex_channels or options.command == "configure" else channels
        write_debug(debug_file, load_driver(settings, made))
    if options.command == "configure":
        from ocigpu.entry.container_cli.configure import configure

        write_debug(debug_file, configure(options, channels, settings))
        return []
    from ocigpu.entry.container_cli.list import render_csv, render_info, render_list
    from ocigpu.gpus.cached import read_facts

    try:
        facts = read_facts(settings)  # as a start would have them now
    except HostError as error:
        raise HostError(error.code, f"initialization error: {error.message}", error.hint) from error
    if options.command == "info":
        return render_csv(facts) if options.csv else render_info(facts)
    return render_list(facts, options, channels)


def _settings(options: argparse.Namespace) -> Settings:
    settings = read_settings(os.environ.get("OCIGPU_CONFIG", ""), keep=True)
    if options.root:
        settings = settings._replace(driver_root=os.path.abspath(options.root), simulation_root="")
    if options.ldcache:
        settings = settings._replace(driver_ldcache=options.ldcache)
    return settings


def _imex_channels(values: list[str]) -> list[int]:
    channels: dict[int, None] = {}
    for item in filter(None, ",".join(values).split(",")):
        if not (item.isascii() and item.isdigit() and len(item) <= 7 and int(item) <= MAX_IMEX_CHANNEL):
            message = f"error parsing IMEX info: unsupported IMEX channel value: {printable(item, 120)}"
            raise RequestError("OCIGPU-REQ-6", message)
        channels[int(item)] = None
    if len(channels) > MAX_TOKENS:
        raise RequestError("OCIGPU-REQ-6", f"error parsing IMEX info: more than {MAX_TOKENS} IMEX channels")
    return list(channels)


if __name__ == "__main__":
    sys.exit(main())
