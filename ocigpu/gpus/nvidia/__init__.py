"""NVIDIA's GPUs, MIG devices, and what opt-in variables bring."""

from ocigpu.gpus.vendors import Vendor, late

VENDOR = Vendor(
    "nvidia",
    modes=("nvml", "management", "gds", "mofed", "gdrcopy", "nvswitch", "imex"),
    read_fingerprint=late("nvidia.fingerprint:read_nvidia"),
    offer=late("nvidia.offers:offer"),
    has_driver=late("nvidia.fingerprint:has_driver"),
    parse_request=late("nvidia.request:parse_request"),
    request_devices=late("nvidia.request:request_devices"),
    select_devices=late("nvidia.selection:select_devices"),
    read_facts=late("cached:read_facts"),
    read_now=late("nvidia.discover:read_host_facts"),
    make_plan=late("nvidia.plan:make_plan"),
    offer_claimed=late("nvidia.offers:offer_claimed"),
    sharing=("TimeSlicing", "MPS"),
    read_node=late("nvidia.on_node:read_node"),
    find_silence=late("nvidia.hardware:nvml_silence"),
    watch_faults=late("nvidia.on_node:watch_faults"),
    sample=late("nvidia.on_node:sample"),
)
