"""``ocigpu cdi validate``: every broken rule in specification files, and what they mean for each other and engines."""

import os
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from ocigpu.cdi.cache import LoadedSpec, parse_text, render_text
from ocigpu.cdi.check import Problem
from ocigpu.cdi.loader_links import describe_left, left_to_ldconfig, read_host_soname
from ocigpu.cdi.registry import Registry, read_registry
from ocigpu.cdi.versions import VERSIONS, engines_that_refuse, is_older, minimum_version, parse_version, requirements
from ocigpu.cli.cdi.files import (
    STANDARD_INPUT,
    Overlap,
    check_file,
    file_name,
    find_overlaps,
    settings_with_dirs,
)
from ocigpu.cli.front import show
from ocigpu.core.errors import CdiError, printable
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import ANNOTATION


class Validated(NamedTuple):
    """One file: its problems, and its specification, {} when it cannot be used."""

    path: str
    problems: tuple[Problem, ...]
    spec: dict[str, Any]


def validate_command(
    files: list[str] | None = None, spec_dir: list[str] | None = None, config: str = ""
) -> "show.Answer":
    settings = settings_with_dirs(config, spec_dir)
    found = [(path, "") for path in files] if files else _find_files(settings)
    checked = [_validate(*file) for file in found]
    overlaps = _find_overlaps(checked, settings.cdi_spec_dirs)
    failed = not all(file.spec for file in checked) or any(overlap.kind == "conflict" for overlap in overlaps)
    data = [_file_data(file) for file in checked]
    yield {"valid": not failed, "files": data, "overlaps": [overlap._asdict() for overlap in overlaps]}, int(failed)
    for file in checked:
        _print_file(file)
    for overlap in overlaps:
        print(printable(overlap.describe()))
    if not checked:
        print(printable(f"no specification in {', '.join(settings.cdi_spec_dirs)}"))


def _find_files(settings: Settings) -> list[tuple[str, str]]:
    """Return (file, why it is not used although it may be valid) for all files of the directories."""
    registry = read_registry(settings)
    reasons = dict(registry.errors)
    return sorted([*((spec.path, "") for spec in registry.specs), *reasons.items()])


def _validate(path: str, reason: str = "") -> Validated:
    try:
        checked = check_file(path)
    except CdiError as error:
        unusable = reason or error.message
    else:
        if checked.errors:
            return Validated(path, checked.problems, {})
        if not reason:
            return Validated(path, (*checked.problems, *_left_links(checked.spec)), checked.spec)
        unusable = reason
    text = unusable.removeprefix(f"read {printable(file_name(path), 300)}: ")
    return Validated(path, (Problem("", text, "usable file", "error"),), {})


def _left_links(spec: dict[str, Any]) -> tuple[Problem, ...]:
    """Return a warning when libraries get their SONAME links from the hook program alone."""
    left = left_to_ldconfig(spec, read_host_soname)
    if not left:
        return ()
    about = "as files of NVIDIA's toolkit up to 1.17 do; the vendor's program and ocigpu-hook make them"
    return (Problem("", f"{describe_left(left)}, {about}", "soname-links", "warning"),)


def _find_overlaps(files: Iterable[Validated], directories: tuple[str, ...]) -> list[Overlap]:
    """Return which devices of valid files are defined twice; files elsewhere are compared with those beside them."""
    groups: dict[str, list[LoadedSpec]] = {}
    ranks = {os.path.abspath(directory): rank for rank, directory in enumerate(directories)}
    usable = {os.path.abspath(file.path): file for file in files if file.spec and file.path != STANDARD_INPUT}
    for path, file in usable.items():  # each once, however often it is named
        directory = os.path.dirname(path)
        place, priority = ("", ranks[directory]) if directory in ranks else (directory, 0)
        loaded, _ = parse_text(render_text(file.spec), path, priority)
        if loaded:
            groups.setdefault(place, []).append(loaded)
    registries = (Registry(tuple(sorted(group, key=lambda spec: spec.priority)), ()) for group in groups.values())
    return [overlap for registry in registries for overlap in find_overlaps(registry)]


def _refusals(spec: dict[str, Any]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the engine releases that refuse a specification for its version, and what needs that version."""
    version = parse_version(spec["cdiVersion"])
    engines = engines_that_refuse(version)
    if not engines:
        return [], []
    oldest = min((engine.newest for engine in engines), key=VERSIONS.index)
    reasons = [need._asdict() for need in requirements(spec) if is_older(oldest, need.version)]
    return [engine._asdict() for engine in engines], reasons


def _file_data(file: Validated) -> dict[str, Any]:
    engines, reasons = _refusals(file.spec) if file.spec else ([], [])
    return {
        "file": file.path,
        "valid": bool(file.spec),
        "version": file.spec.get("cdiVersion", ""),
        "kind": file.spec.get("kind", ""),
        "devices": len(file.spec.get("devices", ())),
        "problems": [problem._asdict() for problem in file.problems],
        "refused_by": engines,
        "needs": reasons,
    }


def _print_file(file: Validated) -> None:
    name = file_name(file.path)
    if file.spec:
        spec = file.spec
        about = f"version {spec['cdiVersion']}, {spec['kind']}, {show.count(len(spec['devices']), 'device')}"
        print(printable(f"{name}: valid ({about})"))
    else:
        print(printable(f"{name}: invalid"))
    for problem in file.problems:
        print(printable(f"  {problem.severity}: {problem.text} [{problem.rule}]"))
    if file.spec:
        _print_refusals(file.spec)


def _print_refusals(spec: dict[str, Any]) -> None:
    engines, reasons = _refusals(spec)
    if not engines:
        return
    print("  too new for these releases (all later ones take it), by the newest version that they accept:")
    newest = sorted({engine["newest"] for engine in engines}, key=VERSIONS.index, reverse=True)
    for version in newest:
        releases = groupby((engine for engine in engines if engine["newest"] == version), key=itemgetter("name"))
        names = "; ".join(f"{name} {', '.join(engine['releases'] for engine in group)}" for name, group in releases)
        print(f"    {version}: {names}")
    needed = minimum_version(spec)
    if is_older(needed, parse_version(spec["cdiVersion"])):
        print(f"  although nothing in it needs more than {needed}")
    by_reason: dict[tuple[str, str], list[str]] = {}
    for need in reasons:
        by_reason.setdefault((need["version"], need["why"]), []).append(need["where"])
    for (version, why), places in sorted(by_reason.items(), reverse=True):
        more = f" and {show.count(len(places) - 1, 'other place')}" if len(places) > 1 else ""
        where = "" if places == [why] else f": {places[0]}{more}"
        print(printable(f"  what needs {version}: {why}{where}"))
    newer = {need["why"] for need in reasons if is_older("0.5.0", need["version"])}
    if (
        ANNOTATION in spec.get("annotations", {})
        and newer <= {"annotations", "additional groups"}
        and "0.5.0" in newest
    ):
        print("  for the engines that accept 0.5.0: ocigpu cdi generate --max-version 0.5.0")
