"""The targets: what the vendor's stack adds on the same work, and which share of that ocigpu may."""

from typing import Any, NamedTuple

from bench.containers import STEP, WITH_STEP
from bench.hosts import MODES
from bench.output import Output, milliseconds, times

# What the vendor's toolkit of August 2026 adds, in times of what bare runc takes on its machine (2 cores, runc 1.1.5,
# emulated NVML; create+start+delete, 8 GPUs, medians of 60): its milliseconds are another machine's.
DEFAULT_ADDS = 3.25
HOOKLESS_ADDS = 0.69
LEGACY_ADDS = 0.97
NOTHING_ADDS = 0.37
SHIM_START = 4 / 32
GENERATE_TAKES = 114 / 32
"""``cdi generate`` with 2,013 entries in the loader's cache."""
SAME = 1.1
"""What still counts as not growing."""


class Target(NamedTuple):
    """``figure`` and ``limit`` in ``unit``; nothing where the figure was not measured."""

    text: str
    figure: float | None
    limit: float
    unit: str


def targets(results: dict[str, Any]) -> list[Target]:
    """Return the targets with the figures of these results; a measured peer takes the place of the constants."""

    def total(table: str, row: str, column: str = "total") -> float | None:
        found: float | None = results.get(table, {}).get(row, {}).get(column)
        return found

    def added(table: str, row: str, column: str = "total") -> float | None:
        figure, base = total(table, row, column), total(table, "bare runc", column)
        if row in WITH_STEP:
            base = total(table, STEP)  # the simulated host's own step is not what mode spec adds
        return None if figure is None or base is None else figure - base

    # on what the vendor's figures were measured on, where that was measured
    some = "plain-8" if "plain-8" in results else "container-8"
    none = "plain-0" if "plain-0" in results else "container-0"
    bare = total(some, "bare runc") or 0.0
    default = added(some, "peer") or DEFAULT_ADDS * bare
    nothing = added(none, "peer") or NOTHING_ADDS * (total(none, "bare runc") or bare)
    shim = added("pass-through", "peer", "state") or SHIM_START * bare
    spec, edited = added(some, "spec"), added(some, "edited")
    ratio = (bare + spec) / (bare + edited) if spec is not None and edited is not None else None
    reading = {size: results.get(f"ldcache-{size}") for size in results.get("ldcache-sizes", [])}
    largest = reading[max(reading)] if reading else None
    smallest = reading[min(reading)] if reading else None
    interpreter = total("interpreter", "python -I -S", "ms") or 0.0
    found = [
        Target("pass-through, added", added("pass-through", "ocigpu", "state"), 1.0, "ms"),
        Target("pass-through, added: 1/4 of the vendor's", added("pass-through", "ocigpu", "state"), shim / 4, "ms"),
        Target("spec, added: 1/8 of the vendor's default", added(some, "spec"), default / 8, "ms"),
        Target("spec, added: 1/2 of its hookless CDI", added(some, "spec"), HOOKLESS_ADDS * bare / 2, "ms"),
        Target("spec, over runc on the edited bundle", ratio, 1.35, "x"),
        Target("hook, added: less than its legacy mode", added(some, "hook"), LEGACY_ADDS * bare, "ms"),
        Target("no GPU, added: 1/4 of the vendor's", added(none, "ocigpu"), nothing / 4, "ms"),
        Target(
            "discovery, 2,000 entries: 1/2 of its cdi generate",
            largest["first"] + interpreter if largest and interpreter else None,
            GENERATE_TAKES * bare / 2,
            "ms",
        ),
        Target(
            "discovery, from 40 to 2,000 entries: no growth",
            largest["first"] / smallest["first"] if largest and smallest else None,
            SAME,
            "x",
        ),
    ]
    for mode in MODES:
        one, many = added("container-1", mode), added("container-64", mode)
        found.append(Target(f"{mode}, added: from 1 to 64 GPUs", many / one if one and many else None, 2.0, "x"))
    memory = results.get("memory", {})
    found += [Target(f"peak memory: {name}", value / 1024, 24.0, "MiB") for name, value in memory.items()]
    return [target for target in found if target.figure is not None]


def show_targets(out: Output, results: dict[str, Any]) -> None:
    """Print each target, the figure, and whether it is reached."""
    rows = []
    for target in targets(results):
        assert target.figure is not None
        form = times if target.unit == "x" else milliseconds
        reached = "yes" if target.figure <= target.limit else f"no, by {form(target.figure - target.limit)}"
        rows.append(
            [target.text, f"{form(target.figure)} {target.unit}", f"{form(target.limit)} {target.unit}", reached]
        )
    if rows:
        out.table("targets", ["", "measured", "at most", "reached"], rows)
    if any("peer" in table for table in results.values() if isinstance(table, dict)):
        out.say("", "The vendor's default mode, shim and container without GPU are the measured peer's.")
    if "plain-8" in results:
        out.say("", "Containers: on the plain directory, as the vendor's figures.")
    out.say("", "The vendor's other figures are ratios to bare runc, measured on another machine, times this one's.")
