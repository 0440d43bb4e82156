"""``ocigpu``, the operator's command line: what would be done for a container, and why.

Exit status: 0 done, 1 the command failed, 2 the command line could not be understood, 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from ocigpu import __version__
from ocigpu.cli.attach import ATTACH_EPILOG, DETACH_EPILOG, attach_command, detach_command
from ocigpu.cli.cdi import cdi_app
from ocigpu.cli.config import config_app
from ocigpu.cli.demo import DEMO_EPILOG, demo_command
from ocigpu.cli.device_plugin import DEVICE_PLUGIN_EPILOG, device_plugin_command
from ocigpu.cli.diff import DIFF_EPILOG, diff_command
from ocigpu.cli.doctor import DOCTOR_EPILOG, doctor_command
from ocigpu.cli.engine import engine_app
from ocigpu.cli.explain import EXPLAIN_EPILOG, explain_command
from ocigpu.cli.exporter import EXPORTER_EPILOG, exporter_command
from ocigpu.cli.host import FACTS_EPILOG, LIST_EPILOG, facts_command, list_command
from ocigpu.cli.mps import MPS_EPILOG, mps_command
from ocigpu.cli.node_installer import NODE_INSTALLER_EPILOG, node_installer_command
from ocigpu.cli.node_labels import NODE_LABELS_EPILOG, node_labels_command
from ocigpu.cli.plan import PLAN_EPILOG, plan_command
from ocigpu.cli.ps import PS_EPILOG, ps_command
from ocigpu.cli.refresh import REFRESH_EPILOG, refresh_command
from ocigpu.cli.repair import REPAIR_EPILOG, repair_command
from ocigpu.cli.sim import sim_app
from ocigpu.cli.system import system_app
from ocigpu.cli.trace import TRACE_EPILOG, trace_command
from ocigpu.cli.verify import VERIFY_EPILOG, verify_command
from ocigpu.cli.watch import WATCH_EPILOG, watch_command
from ocigpu.core.errors import OcigpuError, UsageError, as_own_error

PROGRAM = "ocigpu"

EPILOG = """\
\b
Exit status of every command; what else there is, its own --help says:
  0  done
  1  the command failed; the message has a code for "ocigpu explain"
  2  the command line could not be understood

\b
Environment:
  OCIGPU_CONFIG  settings file when --config is not given
  OCIGPU_DEBUG   1: show a traceback with an error

\b
Examples:
  ocigpu list
  ocigpu plan --gpus 0,2
  ocigpu plan --bundle /run/containers/mine --json
  ocigpu sim create /tmp/gpus --gpus 8 --model h100
  ocigpu plan --config /tmp/gpus/config.toml --gpus all
  ocigpu cdi generate --output /etc/cdi/nvidia.yaml
  ocigpu explain OCIGPU-DEV-1
"""

PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Of commands that read the vendor's options themselves: they are written in more ways than typer knows."""

app = typer.Typer(
    name=PROGRAM,
    help="Gives containers their NVIDIA GPUs, and shows its work.",
    epilog=EPILOG,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan", epilog=PLAN_EPILOG)(plan_command)
app.command("list", epilog=LIST_EPILOG)(list_command)
app.command("facts", epilog=FACTS_EPILOG)(facts_command)
app.command("refresh", epilog=REFRESH_EPILOG)(refresh_command)
app.command("ps", epilog=PS_EPILOG)(ps_command)
app.command("doctor", short_help="Find out why containers do not get their GPUs.", epilog=DOCTOR_EPILOG)(doctor_command)
app.command("explain", epilog=EXPLAIN_EPILOG)(explain_command)
app.command("diff", epilog=DIFF_EPILOG)(diff_command)
app.command("demo", short_help="Run real containers with GPUs and check what they see.", epilog=DEMO_EPILOG)(
    demo_command
)
app.command("verify", short_help="Try from inside what a container can reach.", epilog=VERIFY_EPILOG)(verify_command)
app.command("attach", epilog=ATTACH_EPILOG)(attach_command)
app.command("detach", epilog=DETACH_EPILOG)(detach_command)
app.command("repair", epilog=REPAIR_EPILOG)(repair_command)
app.add_typer(cdi_app, name="cdi", short_help="Write, list, check and compare CDI specifications.")
app.command("watch", short_help="Keep a CDI specification up to date.", epilog=WATCH_EPILOG)(watch_command)
app.command(
    "device-plugin",
    short_help="Offer this node's GPUs to Kubernetes.",
    epilog=DEVICE_PLUGIN_EPILOG,
    context_settings={"ignore_unknown_options": True},
)(device_plugin_command)
app.command(
    "exporter",
    short_help="Export the GPUs' metrics for Prometheus.",
    epilog=EXPORTER_EPILOG,
    context_settings={"ignore_unknown_options": True},
)(exporter_command)
app.add_typer(config_app, name="config")
app.add_typer(engine_app, name="engine", short_help="Make container engines know ocigpu, and undo it.")
app.command("trace", epilog=TRACE_EPILOG)(trace_command)
app.add_typer(system_app, name="system", short_help="Make the host's device nodes and their links.")
app.command(
    "node-labels", short_help="Label a Kubernetes node.", epilog=NODE_LABELS_EPILOG, context_settings=PASSED_ON
)(node_labels_command)
app.command("node-installer", short_help="Install ocigpu on a Kubernetes node.", epilog=NODE_INSTALLER_EPILOG)(
    node_installer_command
)
app.command("mps-control-daemon", short_help="Share GPUs by MPS.", epilog=MPS_EPILOG, context_settings=PASSED_ON)(
    mps_command
)
app.add_typer(sim_app, name="sim", short_help="Make, show and remove simulated GPU hosts.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root_command(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Gives containers their NVIDIA GPUs, and shows its work."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


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
