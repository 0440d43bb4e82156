"""``ocigpu``, the operator's command line: what would be done for a container, and why.

Exit status: 0 done, 1 the command failed, 2 the command line could not be understood, 130 interrupted.

A command line is understood, and help shown, without importing more than the one command.
"""

import gc
import os
import sys

from ocigpu import __version__
from ocigpu.cli import manual
from ocigpu.cli.arguments import HELP, HelpWanted, call, options_of, parameters_of, parse
from ocigpu.cli.manual import ROOT as PROGRAM
from ocigpu.core.errors import OcigpuError, UsageError, as_own_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

COMMANDS = {
    "status": "about:status_command",
    "plan": "plan:plan_command",
    "list": "host:list_command",
    "facts": "host:facts_command",
    "refresh": "host:refresh_command",
    "ps": "containers:ps_command",
    "top": "top:top_command",
    "topology": "topology:topology_command",
    "doctor": "doctor:doctor_command",
    "explain": "explain:explain_command",
    "diff": "containers:diff_command",
    "demo": "demo:demo_command",
    "verify": "containers:verify_command",
    "attach": "containers:attach_command",
    "detach": "containers:detach_command",
    "repair": "containers:repair_command",
    "cdi generate": "cdi_generate:generate_command",
    "cdi list": "cdi:list_command",
    "cdi show": "cdi:show_command",
    "cdi validate": "cdi_validate:validate_command",
    "cdi diff": "cdi_generate:diff_command",
    "cdi refresh": "cdi_generate:refresh_command",
    "cdi transform root": "cdi:transform_root_command",
    "watch": "watch:watch_command",
    "device-plugin": "kubernetes:device_plugin_command",
    "dra-driver": "kubernetes:dra_driver_command",
    "exporter": "kubernetes:exporter_command",
    "config check": "config:check_command",
    "config show": "config:show_command",
    "config keys": "config:keys_command",
    "config default": "config:default_command",
    "config import": "config:import_command",
    "engine configure": "engine:configure_command",
    "engine remove": "engine:remove_command",
    "engine test": "engine_test:run_command",
    "engine status": "engine:status_command",
    "engine leave": "engine_leave:leave_command",
    "trace": "trace:trace_command",
    "system create-device-nodes": "system:nodes_command",
    "system create-dev-char-symlinks": "system:links_command",
    "fabric list": "fabric:list_command",
    "fabric plan": "fabric:plan_command",
    "fabric activate": "fabric:activate_command",
    "fabric deactivate": "fabric:deactivate_command",
    "fabric audit": "fabric:audit_command",
    "fabric restore": "fabric:restore_command",
    "fabric serve": "fabric:serve_command",
    "mig plan": "mig:plan_command",
    "mig apply": "mig:apply_command",
    "mig assert": "mig:assert_command",
    "mig export": "mig:export_command",
    "mig generate-config": "mig:generate_command",
    "mig checkpoint": "mig:checkpoint_command",
    "mig restore": "mig:restore_command",
    "vfio holders": "vfio:holders_command",
    "vfio identify": "vfio:identify_command",
    "vfio reset": "vfio:reset_command",
    "mig-manager": "kubernetes:mig_manager_command",
    "firmware show": "firmware:show_command",
    "firmware record": "firmware:record_command",
    "firmware approve": "firmware:approve_command",
    "firmware check": "firmware:check_command",
    "lease list": "lease:list_command",
    "lease show": "lease:show_command",
    "lease release": "lease:release_command",
    "lease quarantine": "lease:quarantine_command",
    "lease maintenance": "lease:maintenance_command",
    "lease history": "lease:history_command",
    "lease agent": "lease:agent_command",
    "node-labels": "kubernetes:node_labels_command",
    "node-installer": "kubernetes:node_installer_command",
    "mps-control-daemon": "kubernetes:mps_command",
    "caas serve": "caas:serve_command",
    "caas admin-key": "caas:admin_key_command",
    "tenancy controller": "tenancy:controller_command",
    "tenancy list": "tenancy:list_command",
    "tenancy show": "tenancy:show_command",
    "tenancy create": "tenancy:create_command",
    "tenancy suspend": "tenancy:suspend_command",
    "tenancy delete": "tenancy:delete_command",
    "caas run": "caas:run_command",
    "caas list": "caas:list_command",
    "caas show": "caas:show_command",
    "caas logs": "caas:logs_command",
    "caas delete": "caas:delete_command",
    "caas keys create": "caas:keys_create_command",
    "caas keys list": "caas:keys_list_command",
    "caas keys revoke": "caas:keys_revoke_command",
    "sim create": "sim:create_command",
    "sim exec": "sim:exec_command",
    "sim show": "sim:show_command",
    "sim remove": "sim:remove_command",
    "completion": "complete:completion_command",
    "nvidia-ctk": "vendor_ctk:ctk_command",
    "help": "about:help_command",
    "version": "about:version_command",
}
"""Every command, with the module of this room and the function that it is."""
LENIENT = ("device-plugin", "dra-driver", "exporter", "node-labels", "mps-control-daemon", "nvidia-ctk")
"""Commands that read the vendor's options themselves: they are written in more ways than typer knows."""


def load_command(name: str) -> "Callable[..., Any]":
    """Return the function of a command; imports its module."""
    module, _, function = COMMANDS[name].partition(":")
    # __import__: importlib is more than the smallest commands
    loaded: Callable[..., Any] = getattr(__import__(f"ocigpu.cli.{module}", fromlist=[function]), function)
    return loaded


def find_command(words: "Sequence[str]") -> "tuple[str, Sequence[str]]":
    """Return the name of the command or group that the first words are, "" for none, and the words after it."""
    name = ""
    for number, word in enumerate(words):
        longer = f"{name} {word}".lstrip()
        if longer not in COMMANDS and not any(command.startswith(f"{longer} ") for command in COMMANDS):
            return name, words[number:]
        name = longer
    return name, ()


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run the command line (default: of this process) and return its exit status; errors go to standard error."""
    debug = os.environ.get("OCIGPU_DEBUG") == "1"
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "_OCIGPU_COMPLETE" in os.environ:
        from ocigpu.cli.complete import print_candidates

        return print_candidates(words, COMMANDS, find_command)
    try:
        status = _run(words)
        sys.stdout.flush()
    except OcigpuError as error:
        if debug:
            raise
        return _report(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, a closed pager) has seen enough.  Python flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the last line of defence: a user sees a sentence, not a traceback
        usage = _usage_error(error, find_command(words)[0])
        if usage is not None:
            return _report(usage)
        if debug:
            raise
        return _report(as_own_error(error))
    return status if isinstance(status, int) else 0


def _run(words: list[str]) -> "Any":
    if not words:
        print(manual.render_help("", COMMANDS))
        return 2
    if words[0] == "--version" or words == ["version"]:
        print(f"{PROGRAM} {__version__}")
        return 0
    name, rest = find_command(words)
    try:
        if name not in COMMANDS and rest and rest[0] in HELP:
            raise HelpWanted
        if name in COMMANDS:
            page, lenient = manual.read_page(name), name in LENIENT
            if any(word in HELP for word in rest):  # the page says enough
                parse(rest, options_of(page), lenient)
            function = load_command(name)
            values = parse(rest, parameters_of(function, page), lenient)
            if values is not None:
                gc.enable()  # the program's entry has it off while modules are imported
                return call(function, values)
    except HelpWanted:
        print(manual.render_help(name, COMMANDS))
        return 0
    try:
        from ocigpu.cli.described import make_app, run
    except ModuleNotFoundError as error:  # pip --no-deps: typer says what is wrong with a command line
        raise UsageError("the command line cannot be understood", f"see: {PROGRAM} {name} --help") from error

    gc.enable()
    return run(make_app({other: load_command(other) if other == name else None for other in COMMANDS}, LENIENT), words)


def _usage_error(error: Exception, command: str) -> UsageError | None:
    """Return the command line parser's error as one of ours, or None if it is something else.

    typer's own parser and click's (which older versions of typer use) have no public base class in common.
    """
    format_message = getattr(error, "format_message", None)
    if format_message is None or getattr(error, "exit_code", None) != 2:
        return None
    message = " ".join(str(format_message()).split()).rstrip(".")
    return UsageError(message[:1].lower() + message[1:], f"see: {PROGRAM} {command} --help".replace("  ", " "))


def _report(error: OcigpuError) -> int:
    text = error.render(PROGRAM)
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        text = text.replace(error.code, f"\x1b[31m{error.code}\x1b[0m", 1).replace(
            "\nhint:", "\n\x1b[1mhint:\x1b[0m", 1
        )
    print(text, file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
