"""AMD's GPUs and their partitions."""

from ocigpu.gpus.vendors import Vendor, late

VENDOR = Vendor(
    "amd",
    modes=("amd",),
    read_fingerprint=late("amd.facts:read_amd_fingerprint"),
    offer=late("amd.offers:offer"),
    kinds=("amd", "amd.com"),
    subsystems=("kfd",),
    has_driver=late("amd.facts:has_driver"),
    parse_request=late("amd.request:parse_request"),
    request_devices=late("amd.request:request_devices"),
    select_devices=late("amd.plan:select_devices"),
    read_facts=late("amd.facts:read_facts"),
    read_now=late("amd.facts:read_facts"),
    make_plan=late("amd.plan:make_plan"),
    check=late("amd.checks:check"),
    read_usage=late("amd.usage:read_usage"),
    read_links=late("amd.usage:read_links"),
    read_parts=late("amd.parts:read_parts"),
    offer_claimed=late("amd.offers:offer_claimed"),
    read_node=late("amd.on_node:read_node"),
    sample=late("amd.on_node:sample"),
    read_labels=late("amd.labels:read_labels"),
    simulate=late("amd.simulated:simulate"),
)
