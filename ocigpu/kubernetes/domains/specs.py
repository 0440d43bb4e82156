"""The CDI specification of a ComputeDomain's claim: channels for its pods, and what an IMEX daemon needs."""

from collections.abc import Sequence
from typing import Any

from ocigpu.cdi.edits import Draft, DraftDevice, hook_options, make_draft, node_edit
from ocigpu.cdi.generate import assemble, merge_edits
from ocigpu.gpus.nvidia.imex import read_channels, read_management_node
from ocigpu.gpus.nvidia.offers import offer_management
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.gpus.tree import find_roots
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef
from ocigpu.kubernetes.dra.specs import NodeView, spec_kind
from ocigpu.kubernetes.node.on_host import on_the_host


def make_domain_spec(
    claim: ClaimRef, allotted: Sequence[Allotted], driver: str, view: NodeView, clique: str
) -> dict[str, Any]:
    """Return the specification of a claim's channels and daemons.

    Without a clique there is no multi-node NVLink: pods get no channel, and the daemon runs no nvidia-imex.  Raises
    HostError, RequestError or CdiError if the host lacks something.
    """
    options = view.options
    wanted = GenerateOptions(
        mode="management",
        all_device=False,
        hook_path=options.cdi_hook_path,
        disabled_hooks=options.cdi_disable_hooks,
        feature_flags=options.cdi_feature_flags,
    )
    roots = find_roots(view.settings)
    draft = Draft("", "", "", (), {}, all_device=False)
    if clique and any(each.device.kind == "daemon" for each in allotted):
        # as NVIDIA's driver does: nvidia-imex talks to all GPUs of the node
        offer = offer_management(view.node.facts, wanted, view.settings)
        draft = make_draft(offer, wanted, hook_options(wanted, view.settings))
    managed = [device.edits for device in draft.devices]
    devices = []
    for each in allotted:
        edits: dict[str, Any] = {"env": [f"COMPUTE_DOMAIN_UUID={each.config.domain}"]}
        if each.device.kind == "daemon":
            edits["env"].append(f"CLIQUE_ID={clique}")
            nodes = [read_management_node(roots)] if clique else []
        else:
            nodes = list(read_channels(roots, each.config.every)) if clique else []
        edits["deviceNodes"] = [node_edit(node, "rw") for node in nodes]
        merged = merge_edits([*(managed if each.device.kind == "daemon" else []), edits])
        devices.append(DraftDevice(f"{claim.uid}-{each.device.name}", _once(merged)))
    vendor, _, device_class = spec_kind(driver).partition("/")
    draft = draft._replace(vendor=vendor, device_class=device_class, devices=tuple(devices), all_device=False)
    spec = assemble(draft, wanted, "").spec
    spec.pop("annotations")  # it is the claim's, however the host changes
    return on_the_host(spec, options, view.settings)


def _once(edits: dict[str, Any]) -> dict[str, Any]:
    """Return edits with one entry for each node, the last: nodes of the host may be in two lists."""
    nodes = {node["path"]: node for node in edits.get("deviceNodes", ())}
    return {**edits, "deviceNodes": list(nodes.values())} if nodes else edits
