"""Every check, in the order in which causes come before their effects.  docs/DOCTOR.md is generated from it."""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Check(NamedTuple):
    """One cause that is looked for: a stable name, what is asked, why it matters, and who answers.

    ``run``: "module.function" of this package; the function takes a Host and returns at least one finding.  It may
    raise OcigpuError or OSError for what cannot be read: then the check counts as not made, with that reason.
    """

    name: str
    title: str
    meaning: str
    run: str


CHECKS = tuple(
    Check(name, **entry)
    for name, entry in tomllib.loads(Path(__file__).with_name("checks.toml").read_text(encoding="utf-8")).items()
)
