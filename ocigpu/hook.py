"""``ocigpu-hook prestart``: provides a container's GPUs while it is created; also the hooks of CDI specifications.

An OCI runtime starts it in the host's namespaces with the container's state on standard input, after the container's
namespaces and mounts are made and before its root is pivoted (runtime-spec, prestart and createRuntime hooks).
It works under our shim, under Docker's ``--gpus``, and when placed in a bundle by hand.

The hooks of CDI specifications have the vendor's names and run at another stage: :mod:`ocigpu.entry.cdi_hook`.
"""

import os

from ocigpu import ORDINARY, version_line
from ocigpu.bundle.document import check_can_have_gpus, read_config
from ocigpu.core.config_json import Document, mount_points, rootfs_path
from ocigpu.core.errors import UsageError, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.entry.state import parse_state, read_state
from ocigpu.gpus.vendors import make_plan, parse_request, read_facts
from ocigpu.system.files import file_state
from ocigpu.system.log import Log, begin_trace, get_trace, mark, no_answer, report_failure, say, step, trace_problem
from ocigpu.system.settings_file import is_snapshot_refused, read_settings
from ocigpu.system.signals import begin_deadline, end_deadline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ocigpu.core.actions import Plan
    from ocigpu.core.facts import HostFacts, ImageFacts
    from ocigpu.gpus.request import Request
    from ocigpu.provision.apply import Caller
    from ocigpu.provision.worker import Worker

PROGRAM = "ocigpu-hook"
VENDOR_CDI_PROGRAMS = ("nvidia-cdi-hook", "nvidia-ctk")
STAGES = ("prestart", "createRuntime", "poststart", "poststop")


def main(argv: list[str]) -> int:
    """Run the hook with the arguments of the stub; returns the exit status, or ORDINARY."""
    log = Log()
    begin_deadline(lambda: report_failure(PROGRAM, no_answer(), log))
    try:
        options, words = split_options(argv[1:])
        if is_snapshot_refused(options.get("config", "")):
            return ORDINARY
        cdi = words not in (["help"], ["version"]) and _is_cdi_call(argv[0], words)
        cdi_help = cdi and words[-1:] in (["--help"], ["-h"])
        command = "help" if cdi_help else "" if cdi else check_command(words)
        if command in ("help", "version"):
            print_about(command, argv[0])
            return 0
        if command in ("poststart", "poststop"):
            return 0
        settings = read_settings(options.get("config", ""), keep=True)
        log = open_log(settings)
        trace = options.get("trace", settings.trace)
        problem = begin_trace(trace, "hook") if trace else ""
        if cdi:
            from ocigpu.entry.cdi_hook import run_cdi_hook

            notes = _summary(run_cdi_hook(words, settings))
        else:
            notes = run_prestart(read_state(), settings, options.get("spec", ""), options.get("bundle", ""))
        mark("end")
        show_notes(tuple(filter(None, (problem, trace_problem(), *notes))), log)
    except BaseException as error:  # noqa: BLE001 - the last resort: whatever it is, it must be one line
        return show_failure(error, log)
    finally:
        end_deadline()
    return 0


def show_notes(notes: tuple[str, ...], log: Log) -> None:
    """Print notes about completed work to standard error and the log."""
    for note in notes:
        log.write("warning", note)
        say(f"{PROGRAM}: note: {note}")


def show_failure(error: BaseException, log: Log) -> int:
    """Print the error to standard error and the log; returns the exit status."""
    if isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches all processes of a runtime in the foreground
        say(f"{PROGRAM}: interrupted: everything begun was undone")
        return 130
    if not isinstance(error, Exception):
        raise error
    return report_failure(PROGRAM, error, log)


def open_log(settings: Settings) -> Log:
    """Return the log of the settings for the hook."""
    return Log(((settings.hook_log, "text"),) if settings.hook_log else (), settings.runtime_log_level)


def print_about(command: str, stub: str) -> None:
    """Print the help text or the version on standard output; ``stub``: path by which the hook was called."""
    if command == "help":
        with open(f"{os.path.dirname(__file__)}/entry/hook_usage.txt", encoding="utf-8") as file:
            print(file.read(), end="")
    else:
        print(version_line(stub, PROGRAM))


def split_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options before the command, and the words from the command on ("help" or "version" for those options).

    One or two dashes are accepted, as the vendor's hook accepts them.  Raises UsageError for an unknown option.
    """
    options: dict[str, str] = {}
    position = 0
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        name, equals, value = word.lstrip("-").partition("=")
        position += 1
        if name in ("help", "h", "version"):
            return options, ["help" if name == "h" else name]
        if name not in ("config", "bundle", "spec", "early", "trace", "debug", "d", "quiet"):
            raise UsageError(f"unknown option {quoted(word)}")
        if not equals and name in ("config", "bundle", "spec", "early", "trace"):
            if position >= len(words):
                raise UsageError(f"option {word} needs a value")
            value = words[position]
            position += 1
        options[name] = value
    return options, words[position:]


def check_command(words: list[str]) -> str:
    """Return the command; raises UsageError for an unknown one, or none."""
    command = words[0] if words else ""
    if command not in (*STAGES, "help", "version"):
        raise UsageError(f"unknown command {quoted(command)}" if command else "no command given")
    return command


def _is_cdi_call(program: str, words: list[str]) -> bool:
    if os.path.basename(program) in VENDOR_CDI_PROGRAMS:
        return True
    if words and words[0] in STAGES:
        return False  # the usual case, which does not load the modules for CDI
    from ocigpu.entry.cdi_hook import is_cdi_call

    return is_cdi_call(words)


def _summary(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Return all notes as one, so that a successful run is one line in an engine's log."""
    return ((f"{len(notes)} warnings: " if len(notes) > 1 else "") + "; ".join(notes),) if notes else ()


class Ready(NamedTuple):
    """What was prepared for a container before its hook was called: the plan, its inputs and a worker.

    ``document``: its configuration, valid while :func:`ocigpu.system.files.file_state` of the file equals ``written``.
    """

    request: "Request"
    document: Document
    written: tuple[int, ...]
    facts: "HostFacts"
    image: "ImageFacts"
    plan: "Plan"
    worker: "Worker"


def find_plan(
    request: "Request", settings: Settings, rootfs: str, config: "dict[str, Any]", facts: "HostFacts | None" = None
) -> "tuple[HostFacts, ImageFacts, Plan]":
    """Return the host's facts (read unless given), the facts of the image below ``rootfs``, and the plan for both.

    ``config``: the container's.  Raises OcigpuError for a request that cannot be granted.
    """
    from ocigpu.provision.image import read_rootfs_facts

    if facts is None:
        with step("facts", settings.driver_root):
            facts = read_facts(settings, request.vendors)
    with step("image", rootfs):
        mounts = mount_points(config) if settings.loader_cache == "auto" else None
        image = read_rootfs_facts(rootfs, facts.driver_version, mounts)
    with step("plan"):
        plan = make_plan(facts, request, settings, image)
    return facts, image, plan


def run_prestart(
    state_text: bytes,
    settings: Settings,
    spec: str = "",
    bundle: str = "",
    ready: Ready | None = None,
    caller: "Caller | None" = None,
) -> tuple[str, ...]:
    """Provide the GPUs of this OCI state's container; returns notes for the log, nothing if it requests none.

    ``spec``: path of the container's configuration ("": config.json of the bundle).  ``bundle``: the bundle that the
    shim was given.  It is used if the state says "/": crun reports its working directory (do_hooks), which it leaves
    when it binds devices of the host for a user namespace.  ``ready``: used if request and image are still the same.
    ``caller``: the hook's process, if it is not this one.  Raises OcigpuError after all changes were undone.
    """
    from ocigpu.gpus.request import check_without_cdi

    if trace := get_trace():
        trace.name(state_text)
    with step("state"):
        state = parse_state(state_text)
    if state.bundle == "/" and bundle:
        state = state._replace(bundle=bundle)
    path = os.path.join(state.bundle, spec or "config.json")
    with step("read-config", spec or state.bundle):
        known = ready if ready and ready.written and ready.written == file_state(path) else None
        document = known.document if known else read_config(state.bundle, spec or "config.json")
    with step("request", path):
        request = known.request if known else parse_request(document.config, settings, os.path.dirname(path))
    if request.selection == "nothing":
        return ()
    check_without_cdi(request)
    check_can_have_gpus(document.config, path)
    rootfs = rootfs_path(document.config, state.bundle)
    from ocigpu.provision.apply import Caller, provision
    from ocigpu.provision.image import read_rootfs_facts

    fits = ready is not None and ready.request == request
    if ready and fits:
        with step("image", rootfs):
            image = read_rootfs_facts(rootfs, ready.facts.driver_version)
            # the runtime has made mount points since, which change the times that show whether the cache is current
            fits = ready.image == image._replace(stale_cache=ready.image.stale_cache)
    if ready and fits:
        plan, worker = ready.plan, ready.worker
    else:
        if ready:
            ready.worker.dismiss()
        _, _, plan = find_plan(request, settings, rootfs, document.config)
        worker = None
    notes = provision(plan, state.pid, rootfs, document.config, settings, worker, caller or Caller())
    return _summary(plan.notes) + notes
