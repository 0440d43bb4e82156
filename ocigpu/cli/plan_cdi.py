"""``ocigpu plan`` for a container that names CDI devices: what their specifications would give it."""

import copy
from collections.abc import Callable
from typing import Any

from ocigpu.bundle.inject import inject
from ocigpu.bundle.policy import owns_device_policy
from ocigpu.cdi.compare import edit_rows
from ocigpu.cdi.conditions import check_conditions
from ocigpu.cdi.generate import merge_edits
from ocigpu.cdi.registry import read_registry
from ocigpu.cli.cdi_files import file_state
from ocigpu.cli.common import count, print_fields, print_json, print_notes, print_table
from ocigpu.core.facts import HostFacts, to_data
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.request import Request


def show_cdi_plan(
    request: Request, container: dict[str, Any], settings: Settings, json: bool, read_host: Callable[[], HostFacts]
) -> None:
    """Print what the request's devices stand for; nothing is changed.

    The edits are made to a copy of ``container`` (a config.json, or {}), so that what the shim would refuse is an error
    here too: raises CdiError OCIGPU-CDI-4 to -6, and RequestError OCIGPU-REQ-2 to -4.
    """
    resolved = read_registry(settings).resolve(request.cdi_devices)
    unseen = check_conditions(request, resolved.specs, read_host)
    root = owns_device_policy()
    warnings = inject(
        copy.deepcopy(container),
        resolved.edits,
        declare_rules=root and not settings.no_cgroups,
        files=resolved.files,
        rootless=not root,
    )
    notes = [*request.notes, *unseen, *warnings]
    files = [(spec.path, file_state(spec.annotations, settings)) for spec in resolved.specs]
    edits = merge_edits(resolved.edits)
    if json:
        print_json(
            {
                "mode": "cdi",
                "devices": list(request.cdi_devices),
                "files": [{"file": path, "state": state.word, "reasons": list(state.reasons)} for path, state in files],
                "containerEdits": edits,
                "notes": notes,
                "request": to_data(request),
            }
        )
        return
    print_fields(
        [
            ("request", request.source),
            *(("devices" if number == 0 else "", name) for number, name in enumerate(request.cdi_devices)),
            *(("from", f"{path} ({state.describe()})") for path, state in files),
            ("mode", "cdi"),
        ]
    )
    print()
    rows = edit_rows(edits)
    print_table(("edit", "details"), rows)
    print()
    print_notes(notes)
    print(f"{count(len(rows), 'edit')} from {count(len(files), 'CDI specification')}; nothing was changed")
