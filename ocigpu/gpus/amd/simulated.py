"""What amdgpu shows of its GPUs, for a simulated host; sources as in :mod:`ocigpu.gpus.amd.facts`."""

from typing import TYPE_CHECKING

from ocigpu.gpus.vendors import Simulated

if TYPE_CHECKING:
    from ocigpu.gpus.vendors import Board

RENDER = 128
SPREAD = 0x9E37_79B9_7F4A_7C15
"""Its multiples are unlike each other (2**64 by the golden ratio)."""
DRM_MAJOR = 226
FIRST_BUS = 0x41
"""Another vendor's GPUs may be on the buses before."""
RAS_BLOCKS = ("umc", "sdma", "gfx", "mmhub", "xgmi_wafl")
SIMDS = 4
"""Of a compute unit (CDNA)."""
CLOCK_MHZ = {"gfx942": 2100, "gfx950": 2400}
PROGRAMS = {"amd-smi": "ocigpu.gpus.amd.amd_smi", "rocminfo": "ocigpu.gpus.amd.rocminfo"}
VIDEO, RENDER_GROUP = 44, 109
"""Groups of card and render nodes, with numbers of Debian's; amdgpu's are mode 0660 by udev's rules."""


def simulate(count: int, board: "Board", first_card: int, kfd_major: int) -> Simulated:
    """Return the files, links and nodes of a host with so many GPUs of this model, and what the GPUs are."""
    files = {"sys/class/kfd/kfd/dev": f"{kfd_major}:0\n", "sys/module/amdgpu/version": f"{board.driver_version}\n"}
    files["sys/class/kfd/kfd/topology/nodes/0/properties"] = _properties(cpu_cores_count=96, simd_count=0)
    links = {}
    nodes = [("dev/kfd", kfd_major, 0, 0o660)]
    groups = {"dev/kfd": RENDER_GROUP}
    gpus = []
    for index in range(count):
        bus, card = FIRST_BUS + index, first_card + index
        address = f"0000:{bus:02x}:00.0"
        directory = f"sys/bus/pci/devices/{address}"
        unique_id = (index + 1) * SPREAD & 0xFFFF_FFFF_FFFF_FFFF
        files |= {
            f"{directory}/vendor": "0x1002\n",
            f"{directory}/device": f"0x{board.device_id:04x}\n",
            f"{directory}/class": "0x120000\n",
            f"{directory}/numa_node": f"{2 * index // count}\n",
            f"{directory}/product_name": f"{board.name} OAM\n",
            f"{directory}/current_compute_partition": "SPX\n",
            f"{directory}/available_compute_partition": "SPX, DPX, QPX, CPX\n",
            f"{directory}/current_memory_partition": "NPS1\n",
            f"{directory}/unique_id": f"{unique_id:016x}\n",
            **{f"{directory}/ras/{block}_err_count": "ue: 0\nce: 0\n" for block in RAS_BLOCKS},
            f"{directory}/gpu_busy_percent": "0\n",
            f"{directory}/mem_busy_percent": "0\n",
            f"{directory}/mem_info_vram_used": f"{256 << 20}\n",
            f"{directory}/mem_info_vram_total": f"{board.memory_mib << 20}\n",
            f"{directory}/hwmon/hwmon{index}/power1_average": "140000000\n",
            f"{directory}/hwmon/hwmon{index}/power1_cap": f"{board.power_watts * 10**6}\n",
            f"{directory}/hwmon/hwmon{index}/temp1_input": "40000\n",
            f"{directory}/hwmon/hwmon{index}/temp2_input": "45000\n",
            f"{directory}/hwmon/hwmon{index}/temp3_input": "42000\n",
            f"{directory}/drm/card{card}/dev": f"{DRM_MAJOR}:{card}\n",
            f"{directory}/drm/renderD{RENDER + card}/dev": f"{DRM_MAJOR}:{RENDER + card}\n",
            f"sys/class/kfd/kfd/topology/nodes/{index + 1}/properties": _properties(
                simd_count=board.multiprocessors * SIMDS,
                simd_per_cu=SIMDS,
                gfx_target_version=target_version(board.architecture),
                max_engine_clk_fcompute=CLOCK_MHZ[board.architecture],
                vendor_id=0x1002,
                device_id=board.device_id,
                location_id=bus << 8,
                domain=0,
                drm_render_minor=RENDER + card,
                unique_id=unique_id,
            ),
        }
        files[f"sys/class/kfd/kfd/topology/nodes/{index + 1}/gpu_id"] = f"{unique_id >> 48}\n"
        banks = f"sys/class/kfd/kfd/topology/nodes/{index + 1}/mem_banks/0/properties"
        files[banks] = _properties(heap_type=1, size_in_bytes=board.memory_mib << 20)
        # each is connected with each, as those of a board of eight are
        for number, other in enumerate(other for other in range(count) if other != index):
            files[f"sys/class/kfd/kfd/topology/nodes/{index + 1}/io_links/{number}/properties"] = _properties(
                type=11, node_from=index + 1, node_to=other + 1, weight=15, min_bandwidth=50_000, max_bandwidth=50_000
            )
        links[f"{directory}/driver"] = "../../drivers/amdgpu"
        links[f"sys/bus/pci/drivers/amdgpu/{address}"] = f"../../devices/{address}"
        nodes.append((f"dev/dri/card{card}", DRM_MAJOR, card, 0o660))
        nodes.append((f"dev/dri/renderD{RENDER + card}", DRM_MAJOR, RENDER + card, 0o660))
        groups |= {nodes[-2][0]: VIDEO, nodes[-1][0]: RENDER_GROUP}
        gpus.append({"index": index, "uuid": f"0x{unique_id:x}", "bus_id": address})
    return Simulated(files, links, tuple(nodes), tuple(gpus), groups, PROGRAMS)


def target_version(architecture: str) -> int:
    """Return KFD's number of an architecture: "gfx942", major, minor and stepping, is 90402."""
    digits = architecture.removeprefix("gfx")
    return int(digits[:-2]) * 10_000 + int(digits[-2], 16) * 100 + int(digits[-1], 16)


def _properties(**values: int) -> str:
    return "".join(f"{name} {value}\n" for name, value in values.items())
