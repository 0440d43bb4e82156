"""``ocigpu refresh``: what the next containers are started with, read anew."""

from ocigpu.cli import show
from ocigpu.cli.common import load_settings
from ocigpu.gpus.cached import refresh_facts


def refresh_command(config: str = "", json: bool = False) -> None:
    done = refresh_facts(load_settings(config))
    age = round(done.age, 1) if done.age >= 0 else None
    if json:
        show.data(
            {
                "kept": not done.problem,
                "path": done.path,
                "problem": done.problem,
                "age_before": age,
                "driver_version": done.facts.driver_version,
                "gpus": len(done.facts.gpus),
                "notes": list(done.facts.notes),
            }
        )
        return
    show.fields(
        [
            ("host", show.host_line(done.facts)),
            ("driver", show.driver_line(done.facts)),
            ("kept", f"no, every start reads the host anew: {done.problem}" if done.problem else done.path),
            ("before", "none that still held" if age is None else f"{age} s old"),
        ]
    )
    show.notes(done.facts.notes)
