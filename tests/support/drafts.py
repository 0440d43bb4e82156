"""Drafts of offers, and specifications put together from them, as far as the rules of CDI are concerned."""

from typing import Any

from ocigpu.cdi.check import check_spec
from ocigpu.cdi.edits import Draft, HookOptions, hook_options, make_draft
from ocigpu.core.settings import Settings
from ocigpu.gpus.offer import DeviceOffer, GenerateOptions
from ocigpu.gpus.vendors import load_vendor

HOOK = HookOptions("/usr/bin/ocigpu-hook")


def draft_of(offer: DeviceOffer, options: GenerateOptions | None = None, hook: HookOptions = HOOK) -> Draft:
    """Return an offer in the words of specifications."""
    return make_draft(offer, options or GenerateOptions(), hook)


def draft_from(source: str, options: GenerateOptions, settings: Settings) -> Draft:
    """Return what a source of devices offers on the host of the settings, in the words of specifications."""
    return make_draft(load_vendor(source).offer(options, settings), options, hook_options(options, settings))


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
