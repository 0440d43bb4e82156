"""``ocigpu status``, ``version`` and ``help``: what is installed and how this machine stands, on one screen."""

import os
import sys
from typing import Any

from ocigpu import __version__
from ocigpu.cli.front import show

PROGRAMS = ("ocigpu-runtime", "ocigpu-hook", "ocigpu-container-cli")
UNITS = ("ocigpu-cdi-refresh.path", "ocigpu-cdi-refresh.service", "ocigpu-watch.service", "ocigpu-repair.service")
SECONDS = 3


def help_command(command: list[str] | None = None) -> int:
    from ocigpu.cli.front.main import main

    return main([*(command or []), "--help"])


def version_command() -> "show.Answer":
    yield _version()
    print(f"ocigpu {__version__}")


def _version() -> dict[str, Any]:
    from ocigpu.sim.libraries import find_prebuilt

    library = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    python = sys.version.split(" ")[0]
    return {"version": __version__, "python": python, "library": library, "prebuilt": find_prebuilt()}


def _simulation(prebuilt: list[str]) -> str:
    """Return where the libraries of simulated GPUs come from."""
    from ocigpu.sim.libraries import COMPILER_HINT, find_compiler

    machine, compiler = os.uname().machine, find_compiler()
    if machine in prebuilt:
        return f"prebuilt libraries for {' and '.join(prebuilt)}"
    if compiler:
        return f"libraries are compiled when needed, by {compiler}"
    return f"not possible: no prebuilt libraries for {machine}, no C compiler ({COMPILER_HINT})"


def _form(path: str) -> str:
    """Return what a program is, "" for none: packages have compiled ones, and a kept interpreter if it was built."""
    try:
        with open(path, "rb") as file:
            compiled = file.read(4) == b"\x7fELF"
    except OSError:
        return ""
    kept = os.path.join(os.path.dirname(os.path.realpath(path)), "ocigpu-python")
    return "script" if not compiled else "compiled, with a kept interpreter" if os.path.exists(kept) else "compiled"


def status_command(config: str = "") -> "show.Answer":
    from ocigpu.cdi.registry import read_registry
    from ocigpu.cli.cdi.files import file_state
    from ocigpu.cli.front.common import load_settings, own_program
    from ocigpu.core.errors import HostError
    from ocigpu.core.facts import HostFacts, to_data
    from ocigpu.engines.status import read_engine_status
    from ocigpu.gpus.vendors import read_host_facts

    settings = load_settings(config)
    notes = []
    try:
        facts = read_host_facts(settings, kept=True)
    except HostError as error:
        facts, notes = HostFacts(), [error.message]
    programs = {name: own_program(name) for name in PROGRAMS}
    engines = [one for one in read_engine_status() if one.installed]
    registry = read_registry(settings)
    notes += [f"{path}: {reason}" for path, reason in registry.errors]
    files = [(spec.path, spec.kind, file_state(spec.annotations, settings)) for spec in registry.specs]
    units, problem = _read_units()
    notes += [problem] if problem else []
    version = _version()
    names = ("simulated", "driver_root", "driver_version", "cuda_version", "gpus")
    engine_names = ("engine", "flavour", "running", "configured", "is_default", "cdi", "gpus_hook_ours", "problems")
    yield {
        **version,
        "programs": programs,
        "forms": {name: _form(path) for name, path in programs.items()},
        "settings": settings.path,
        **{name: to_data(getattr(facts, name)) for name in names},
        "engines": [{name: to_data(getattr(one, name)) for name in engine_names} for one in engines],
        "cdi": [{"file": path, "kind": kind, "state": state.word} for path, kind, state in files],
        "units": units,
        "notes": notes,
    }
    fields = [("ocigpu", f"{__version__}, Python {version['python']}, in {version['library']}")]
    fields += [("programs" if not number else "", f"{path} ({_form(path)})" if path else f"{name}: not found")
               for number, (name, path) in enumerate(programs.items())]  # fmt: skip
    fields += [
        ("sim GPUs", _simulation(version["prebuilt"])),
        ("settings", settings.path or "the defaults: there is no file"),
        ("host", show.host_line(facts)),
        ("driver", show.driver_line(facts) if facts.driver_version or facts.gpus else "none"),
    ]
    models: dict[str, int] = {}
    for gpu in facts.gpus:
        models[gpu.model] = models.get(gpu.model, 0) + 1
    fields += [
        ("GPUs" if not number else "", f"{many} x {model}") for number, (model, many) in enumerate(models.items())
    ]
    show.fields(fields)
    rows = [
        (
            f"{one.engine} ({one.flavour})" if one.flavour else one.engine,
            "running" if one.running else "-",
            "default" if one.is_default else "yes" if one.configured else "no",
            one.cdi,
            ("yes" if one.gpus_hook_ours else "no") if one.engine == "docker" else "-",
        )
        for one in engines
    ]
    for headers, lines in (
        (("engine", "state", "configured", "cdi", "--gpus"), rows),
        (("cdi file", "kind", "state"), [(path, kind, state.word) for path, kind, state in files]),
        (("unit", "enabled", "active"), [(one["unit"], one["enabled"], one["active"]) for one in units]),
    ):
        if lines:
            print()
            show.table(headers, lines, fold=False)
    notes += [] if engines else ["no container engine was found"]
    notes += [] if files else ["no CDI specification"]
    show.notes([*notes, *(f"{one.engine}: {text}" for one in engines for text in one.problems)], apart=True)


def _read_units() -> tuple[list[dict[str, Any]], str]:
    """Return the states of our units that systemd knows (systemctl(1), show), and why they are not known."""
    from ocigpu.engines.places import BOOTED

    if not os.path.isdir(BOOTED):
        return [], ""
    from ocigpu.system.programs import run_program

    command = ["systemctl", "show", "--property=Id,LoadState,UnitFileState,ActiveState", *UNITS]
    try:
        output = run_program(command, SECONDS).output
    except OSError as error:
        return [], f"units: systemctl: {error.strerror or 'no answer in time'}"
    found = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in output.split("\n\n")]
    return [
        {"unit": one["Id"], "enabled": one.get("UnitFileState") or "-", "active": one.get("ActiveState", "-")}
        for one in found
        if one.get("LoadState") == "loaded"
    ], ""
