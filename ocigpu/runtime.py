"""``ocigpu-runtime``: an OCI runtime in front of runc.

On ``create`` and ``run`` it edits the bundle's config.json if the container requests GPUs.  Then it becomes the
low-level runtime (exec: same process, same descriptors, same exit status); for every other command it does so at once.
"""

import os
import stat
import time

from ocigpu import ORDINARY, RUNTIME_SPEC, version_line
from ocigpu.bundle.policy import find_hook, hook_path, owns_device_policy
from ocigpu.core.config_json import CDI_DEVICES, DECLARED, OWN_RUNTIMES, SEARCH_PATH, get_object, is_stub
from ocigpu.core.errors import MAKE_NODES, CdiError, HostError, OcigpuError
from ocigpu.core.settings import MODES, Settings
from ocigpu.entry.arguments import Arguments, find_container_id, parse_arguments
from ocigpu.entry.pass_through import remember
from ocigpu.system import signals
from ocigpu.system.log import Log, begin_trace, get_trace, mark, no_answer, report_failure, step, trace_problem
from ocigpu.system.settings_file import is_snapshot_refused, read_settings
from ocigpu.system.signals import begin_deadline, end_deadline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ocigpu.core.config_json import Document
    from ocigpu.core.facts import HostFacts
    from ocigpu.entry.prepared import Task
    from ocigpu.gpus.request import Request

LOOP_VARIABLE = "OCIGPU_RUNTIME_PID"
TRACE_VARIABLE = "OCIGPU_TRACE"
PROGRAM = "ocigpu-runtime"


def main(argv: list[str]) -> int:
    """Run the shim, with the stub's words (argv[0] is its path).  Returns only on failure: a status, or ORDINARY."""
    log = Log()
    begin_ns, began = time.time_ns(), time.monotonic_ns()
    try:
        arguments = parse_arguments(argv[1:])
        log = _log(arguments, Settings())
        creates = arguments.subcommand in ("create", "run")
        if creates:
            begin_deadline(lambda: report_failure(PROGRAM, no_answer(), log))
        config = os.environ.get("OCIGPU_CONFIG", "")
        if is_snapshot_refused(config):
            return ORDINARY
        if arguments.version:
            print_version(argv[0])
        wanted = os.environ.get(TRACE_VARIABLE, "") if creates else ""
        problem = _begin_trace(wanted, argv, began) if wanted else ""
        with step("settings"):
            settings = _read_settings(config, creates, log)
        log = _log(arguments, settings or Settings())
        if creates and settings and settings.trace and not wanted:
            problem = _begin_trace(settings.trace, argv, began)
        if problem:
            log.write("warning", problem)
        check_no_loop()
        with step("find-runtime", ", ".join((settings or Settings()).runtime_runtimes)):
            runtime = find_runtime(settings or Settings(), argv[0])
        if settings:
            remember(runtime, settings, begin_ns)  # after every command, for the next start
        if creates and settings:
            task = edit_bundle(arguments, settings, argv[0], log)
            if task:
                from ocigpu.entry.prepared import wait_for_hook

                end_deadline()
                with step("early", task.path, "a process is ready when the hook is called"):
                    wait_for_hook(task)
            mark("exec", runtime)
            if problem := trace_problem():
                log.write("warning", problem)
        end_deadline()
        become(runtime, argv[1:])
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the last resort: whatever it is, it must be one line
        return report_failure(PROGRAM, error, log)
    finally:
        end_deadline()
    return 1


def _read_settings(config: str, creates: bool, log: Log) -> Settings | None:
    """Return the settings; None if they cannot be used and the command only looks at, stops or deletes a container.

    That must work whatever became of the file, with the usual low-level runtime; no container starts without settings.
    """
    try:
        return read_settings(config, True)
    except OcigpuError as error:
        if creates:
            raise
        log.write("warning", f"{error.line}; the usual runtime is used")
        return None


def print_version(stub: str) -> None:
    """Print the lines before the low-level runtime's own version; the stub prints the same if it needs no Python."""
    try:
        os.write(1, f"{version_line(stub, PROGRAM)}\nspec: {RUNTIME_SPEC}\n\n".encode())
    except OSError:  # standard output is closed: the low-level runtime reports that
        return


def _begin_trace(path: str, argv: list[str], began: int) -> str:
    """Begin a trace of this start; returns a note if that fails.

    ``began``: when this process started (monotonic ns); its work since then is the first step.
    """
    try:
        directory = os.getcwd()
    except OSError:  # the working directory was removed; a container with an absolute bundle does not need it
        directory = ""
    problem = begin_trace(os.path.join(directory, path), "shim", find_container_id(argv[1:]))
    if trace := get_trace():
        trace.write(("begin", directory, " ".join(argv[1:])), began)
    return problem


def _log(arguments: Arguments, settings: Settings) -> Log:
    files = []
    if arguments.log and arguments.log != "/dev/null":
        files.append((arguments.log, arguments.log_format))
    if settings.runtime_log:
        files.append((settings.runtime_log, "text"))
    return Log(tuple(files), settings.runtime_log_level)


def edit_bundle(arguments: Arguments, settings: Settings, stub: str, log: Log) -> "Task | None":
    """Edit the bundle's config.json if its container requests GPUs; else change nothing and read nothing of the host.

    An earlier edit is undone in any case, as its annotation records it.  Returns what can be prepared for the hook, if
    there is one.  Raises OcigpuError, with the file unchanged, for a request that cannot be granted.
    """
    from ocigpu.bundle.document import check_can_have_gpus, read_config, write_config
    from ocigpu.bundle.edit import take_back
    from ocigpu.gpus.vendors import parse_request

    where = os.path.join(arguments.bundle, arguments.config)
    with step("read-config", where):
        document = read_config(arguments.bundle, arguments.config)
    with step("request", where):
        request = parse_request(document.config, settings, os.path.dirname(where))
    mark("selection", reason=" ".join((request.selection, *request.cdi_devices)))
    for note in request.notes:
        log.write("warning", note)
    annotations = get_object(document.config, "annotations")
    if request.selection == "nothing" and CDI_DEVICES in annotations:
        return None  # specifications overwrite the variable of the request
    edited_before = DECLARED in annotations
    if edited_before:
        take_back(document.config)
    if request.selection == "nothing":
        if edited_before:
            write_config(document)
        return None
    check_can_have_gpus(document.config, document.path)
    if request.selection == "cdi":
        inject_devices(document, request, settings, arguments.bundle, stub, log)
        log.write("info", f"{document.path}: granted {', '.join(request.cdi_devices)}")
        return None
    if MODES[settings.mode] == "spec" and _declare(document, request, settings, arguments.bundle, log):
        return None
    return _add_hook(document, request, settings, arguments, stub, log)


def _declare(document: "Document", request: "Request", settings: Settings, bundle: str, log: Log) -> bool:
    """Declare the whole request in config.json and root directory, as mode spec; False if the hook must do it."""
    from ocigpu.bundle.hookless import declare_in_bundle
    from ocigpu.bundle.rootfs import NeedsHookError

    try:
        with step("declare", document.path, "mode spec"):
            declared = declare_in_bundle(document, request, settings, bundle, owns_device_policy())
    except NeedsHookError as reason:
        log.write("info", f"{document.path}: the hook provides the container's GPUs, because {reason}")
        return False
    _write_notes(log, document.path, declared.notes, declared.granted)
    return True


def _add_hook(
    document: "Document", request: "Request", settings: Settings, arguments: Arguments, stub: str, log: Log
) -> "Task | None":
    """Add the hook and device rules to config.json, on disk too; returns what can be prepared for the hook."""
    from ocigpu.bundle.document import write_config
    from ocigpu.bundle.edit import edit_config
    from ocigpu.entry.prepared import Task, choose_path
    from ocigpu.gpus.cached import find_answer

    read: "list[HostFacts]" = []
    with step("rules", "", "kept from an earlier start, or of a plan made now"):
        answer = find_answer("rules", (request,), settings, lambda: _answer(request, settings, read))
    # absolute: the hook may be started in another directory than this one
    options = ["--config", os.path.abspath(settings.path)] if settings.path else []
    bundle = os.path.abspath(arguments.bundle or ".")
    options += ["--bundle", bundle]
    spec = os.path.abspath(document.path) if arguments.config != "config.json" else ""
    options += ["--spec", spec] if spec else []
    trace = get_trace()
    if trace or settings.trace:  # a trace that cannot be written is not opened again
        options += ["--trace", trace.path if trace else ""]
    owns_policy = owns_device_policy()
    early = choose_path() if owns_policy else ""
    options = ["--early", early, *options] if early else options
    declare_rules = owns_policy and not settings.no_cgroups
    program = hook_path(settings, stub)
    notes = edit_config(document.config, answer["rules"], program, options, declare_rules, answer["groups"])
    with step("write-config", document.path):
        written = write_config(document)
    _write_notes(log, document.path, notes, answer["granted"])
    if not early:
        return None
    return Task(early, settings, request, document, written, bundle, spec, read[0] if read else None)


def _answer(request: "Request", settings: Settings, read: "list[HostFacts]") -> "dict[str, Any]":
    """Return what the shim needs from a plan of hook mode: device rules, groups, and the names of the granted devices.

    The facts read for it are appended to ``read``.
    """
    from ocigpu.bundle.edit import rule_entries
    from ocigpu.gpus.vendors import make_plan, read_facts

    with step("facts", settings.driver_root):
        read.append(read_facts(settings, request.vendors))
    with step("plan"):
        plan = make_plan(read[0], request, settings)
    return {"rules": rule_entries(plan), "groups": plan.groups(), "granted": (*plan.gpus, *plan.mig_devices)}


def _write_notes(log: Log, path: str, notes: "Sequence[str]", granted: "Sequence[str]") -> None:
    """Log warnings and the granted devices; in hook mode the hook logs the plan's warnings."""
    if notes:
        log.write("warning", f"{path}: " + "; ".join(notes))
    log.write("info", f"{path}: granted {', '.join(granted) or 'driver files only'}")


def inject_devices(
    document: "Document", request: "Request", settings: Settings, bundle: str, stub: str, log: Log
) -> None:
    """Edit a configuration, on disk too, so that the container gets its CDI devices.

    The work of our own hooks in specifications is done now, if mode spec could do it.  Other hooks that provide GPUs
    are removed.  If the host has changed since we wrote a specification, it is used nevertheless, with a warning in the
    log.  Raises CdiError OCIGPU-CDI-4 to -6; that the specification is stale is then part of the message.  Raises what
    :func:`ocigpu.cdi.conditions.check_conditions` does.
    """
    from ocigpu.bundle.document import write_config
    from ocigpu.bundle.inject import edit_of_devices, leave_volumes, put_devices
    from ocigpu.bundle.rootfs import NeedsHookError
    from ocigpu.cdi.registry import read_registry
    from ocigpu.gpus.fingerprint import ANNOTATION, stale_reasons

    names = request.cdi_devices
    with step("read-specifications", ", ".join(settings.cdi_spec_dirs)):
        registry = read_registry(settings)
    with step("resolve", ", ".join(names)):
        resolved = registry.resolve(names)
    if request.capabilities or request.requirements:
        from ocigpu.cdi.conditions import check_conditions
        from ocigpu.gpus.vendors import read_facts

        with step("conditions"):
            notes = check_conditions(request, resolved.specs, lambda: read_facts(settings, request.vendors))
        for note in notes:
            log.write("warning", note)
    stale: dict[str, str] = {}
    fresh: list[str] = []
    for spec in resolved.specs:
        try:
            with step("check-stale", spec.path):
                reasons = stale_reasons(spec.annotations, settings)
        except HostError as error:
            log.write("warning", f"{spec.path}: it is unknown whether it fits the host: {error.message}")
            continue
        if reasons:
            stale[spec.path] = f"{spec.path} is stale: {'; '.join(reasons)}"
            log.write("warning", stale[spec.path])
        elif ANNOTATION in spec.annotations:
            fresh.append(spec.annotations[ANNOTATION])
    stamp = " ".join(fresh) if len(fresh) == len(resolved.specs) else ""

    owns_policy = owns_device_policy()
    others, own = resolved.edits, None
    if any("hooks" in item for item in resolved.edits):
        from ocigpu.entry.own_hooks import carry_out, split_hooks

        others, own = split_hooks(resolved.edits, find_hook(settings, stub))
    options = (owns_policy and not settings.no_cgroups, os.lstat, resolved.files, not owns_policy)
    try:
        with step("inject", ", ".join(names)):
            edit, notes = edit_of_devices(document.config, others, *options)
            edit, left = leave_volumes(document.config, edit, bundle)
        for note in (*notes, *left):
            log.write("warning", note)
        if own:
            try:
                carry_out(document, edit._replace(devices=names), own, resolved, settings, bundle, owns_policy, stamp)
            except NeedsHookError as reason:
                log.write("info", f"{document.path}: hooks of CDI specifications stay hooks, because {reason}")
                edit, _ = edit_of_devices(document.config, resolved.edits, *options)
                edit, _ = leave_volumes(document.config, edit, bundle)
            else:
                return
        put_devices(document.config, edit)
    except CdiError as error:
        steps = [error.hint] if error.hint == MAKE_NODES or not stale else []
        steps += [f"ocigpu cdi refresh --output {path}" for path in stale]
        raise CdiError(error.code, "; ".join((error.message, *stale.values())), " && ".join(steps)) from error
    if trace := get_trace():
        from ocigpu.entry.own_hooks import add_trace

        add_trace(document.config, hook_path(settings, stub), trace.path)
    with step("write-config", document.path):
        write_config(document)


def check_no_loop() -> None:
    """Raise OcigpuError OCIGPU-RT-1 when the "low-level runtime" has led back here: a wrapper that starts this shim.

    :func:`become` leaves our process id in the environment; exec keeps it, and a wrapper that forks is its parent.
    """
    if os.environ.get(LOOP_VARIABLE, "") in (str(os.getpid()), str(os.getppid())):
        raise OcigpuError(
            "OCIGPU-RT-1",
            "the low-level runtime that was found starts ocigpu-runtime again",
            "Name the real runtime in the settings, with its path: runtime.runtimes.",
        )


def find_runtime(settings: Settings, stub: str) -> str:
    """Return the path of the first low-level runtime of the settings that exists and is not this program.

    A name with a slash is used as it is.  Any other name is searched in the absolute directories of PATH (not in the
    current one, which is a bundle), then in the usual ones.  Raises OcigpuError OCIGPU-RT-1.
    """
    own = _identity(stub)
    search = f"{os.environ.get('PATH', '')}:{SEARCH_PATH}".split(":")
    directories = [directory for directory in search if directory.startswith("/")]
    for name in settings.runtime_runtimes:
        paths = [name] if "/" in name else [f"{directory}/{name}" for directory in directories]
        for path in paths:
            identity = _identity(path)
            if identity and identity != own and os.access(path, os.X_OK) and not _is_shim(path):
                return path
    there = next(filter(os.path.isfile, OWN_RUNTIMES), "")
    raise OcigpuError(
        "OCIGPU-RT-1",
        f"no low-level runtime found; looked for {', '.join(settings.runtime_runtimes)}",
        f"Add {there} to runtime.runtimes in the settings, or install runc." if there else None,
    )


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _is_shim(path: str) -> bool:
    """Tell whether a program is another copy of this shim: executing it would loop for ever."""
    try:
        with open(path, "rb") as file:
            return is_stub(file.read(4096), b"ocigpu.runtime")
    except OSError:
        return False  # execute-only binaries exist; a script could not run unreadable


def become(runtime: str, arguments: list[str]) -> None:
    """Replace this process by the low-level runtime.

    CPython ignores SIGPIPE and SIGXFSZ, and exec would pass that on (signal(7)): both are reset first.  In the C locale
    it also adds LC_CTYPE to the environment (PEP 538), which is removed again.
    """
    os.environ[LOOP_VARIABLE] = str(os.getpid())
    if "LC_CTYPE" in os.environ and not _was_started_with("LC_CTYPE"):
        del os.environ["LC_CTYPE"]
    signals.signal(signals.SIGPIPE, signals.SIG_DFL)
    signals.signal(signals.SIGXFSZ, signals.SIG_DFL)
    try:
        os.execv(runtime, [runtime, *arguments])  # noqa: S606 - becoming the runtime is this program's purpose
    except OSError as error:
        raise OcigpuError("OCIGPU-RT-2", f"exec {runtime}: {error.strerror}") from error


def _was_started_with(variable: str) -> bool:
    """Tell whether a variable was in the environment that this process was started with (proc(5), environ)."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return b"\0" + variable.encode() + b"=" in b"\0" + file.read()
    except OSError:
        return True
