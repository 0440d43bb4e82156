"""A specification put together from a draft, as far as the rules of CDI are concerned."""

from typing import Any

from ocigpu.cdi.check import check_spec
from ocigpu.cdi.draft import Draft


def spec_of(draft: Draft) -> dict[str, Any]:
    """Return the draft as a specification; an assertion fails when the rules find anything wrong with it."""
    spec: dict[str, Any] = {
        "cdiVersion": draft.max_version or "1.0.0",
        "kind": f"{draft.vendor}/{draft.device_class}",
        "devices": [{"name": device.name, "containerEdits": device.edits} for device in draft.devices],
    }
    if draft.common:
        spec["containerEdits"] = draft.common
    checked = check_spec(spec)
    assert not checked.errors, [problem.text for problem in checked.errors]
    return spec
