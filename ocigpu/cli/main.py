"""``ocigpu``, the operator's command line: what would be done for a container, and why.

Exit status: 0 done, 1 the command failed, 2 the command line could not be understood, 130 interrupted.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from ocigpu import __version__
from ocigpu.cli import cdi, cdi_generate, cdi_validate, config, containers, engine, kubernetes, sim, system
from ocigpu.cli.demo import demo_command
from ocigpu.cli.doctor import doctor_command
from ocigpu.cli.explain import explain_command
from ocigpu.cli.host import facts_command, list_command, refresh_command
from ocigpu.cli.manual import ROOT as PROGRAM
from ocigpu.cli.manual import make_app
from ocigpu.cli.plan import plan_command
from ocigpu.cli.trace import trace_command
from ocigpu.cli.watch import watch_command
from ocigpu.core.errors import OcigpuError, UsageError, as_own_error

COMMANDS: dict[str, Callable[..., Any]] = {
    "plan": plan_command,
    "list": list_command,
    "facts": facts_command,
    "refresh": refresh_command,
    "ps": containers.ps_command,
    "doctor": doctor_command,
    "explain": explain_command,
    "diff": containers.diff_command,
    "demo": demo_command,
    "verify": containers.verify_command,
    "attach": containers.attach_command,
    "detach": containers.detach_command,
    "repair": containers.repair_command,
    "cdi generate": cdi_generate.generate_command,
    "cdi list": cdi.list_command,
    "cdi show": cdi.show_command,
    "cdi validate": cdi_validate.validate_command,
    "cdi diff": cdi_generate.diff_command,
    "cdi refresh": cdi_generate.refresh_command,
    "cdi transform root": cdi.transform_root_command,
    "watch": watch_command,
    "device-plugin": kubernetes.device_plugin_command,
    "exporter": kubernetes.exporter_command,
    "config check": config.check_command,
    "config show": config.show_command,
    "config keys": config.keys_command,
    "config default": config.default_command,
    "config import": config.import_command,
    "engine configure": engine.configure_command,
    "engine remove": engine.remove_command,
    "engine status": engine.status_command,
    "trace": trace_command,
    "system create-device-nodes": system.nodes_command,
    "system create-dev-char-symlinks": system.links_command,
    "node-labels": kubernetes.node_labels_command,
    "node-installer": kubernetes.node_installer_command,
    "mps-control-daemon": kubernetes.mps_command,
    "sim create": sim.create_command,
    "sim show": sim.show_command,
    "sim remove": sim.remove_command,
}
UNKNOWN_OPTIONS = {"ignore_unknown_options": True}
SETTINGS = {
    "device-plugin": UNKNOWN_OPTIONS,
    "exporter": UNKNOWN_OPTIONS,
    "node-labels": {**UNKNOWN_OPTIONS, "allow_extra_args": True},
    "mps-control-daemon": {**UNKNOWN_OPTIONS, "allow_extra_args": True},
}
"""Of commands that read the vendor's options themselves: they are written in more ways than typer knows."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


def root_command(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


app = make_app(COMMANDS, SETTINGS)
app.callback(invoke_without_command=True)(root_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: of this process) and return its exit status; errors go to standard error."""
    debug = os.environ.get("OCIGPU_DEBUG") == "1"
    try:
        status = get_command(app).main(
            args=list(sys.argv[1:] if arguments is None else arguments), prog_name=PROGRAM, standalone_mode=False
        )
        sys.stdout.flush()
    except OcigpuError as error:
        if debug:
            raise
        return _report(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader (head, a closed pager) has seen enough.  Python flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the last line of defence: a user sees a sentence, not a traceback
        usage = _usage_error(error)
        if usage is not None:
            return _report(usage)
        if debug:
            raise
        return _report(as_own_error(error))
    return status if isinstance(status, int) else 0


def _usage_error(error: Exception) -> UsageError | None:
    """Return the command line parser's error as one of ours, or None if it is something else.

    typer's own parser and click's (which older versions of typer use) have no public base class in common.
    """
    format_message = getattr(error, "format_message", None)
    if format_message is None or getattr(error, "exit_code", None) != 2:
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else PROGRAM
    message = " ".join(str(format_message()).split()).rstrip(".")
    return UsageError(message[:1].lower() + message[1:], f"see: {command} --help")


def _report(error: OcigpuError) -> int:
    print(error.render(PROGRAM), file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
