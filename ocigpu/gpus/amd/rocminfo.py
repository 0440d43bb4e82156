"""What ``rocminfo`` prints of a simulated host: HSA's agents, the processor and each GPU, from KFD's topology.

Layout and names are those of rocminfo of ROCm 6 and 7 on an MI300X and an MI300A, as recorded outputs show it.
"""

import sys
from collections.abc import Sequence

from ocigpu.gpus.amd.amd_smi import Card, architecture_of, read_cards, read_line, roots_of
from ocigpu.gpus.amd.facts import DRIVER, TOPOLOGY, parse_numbers, read_properties
from ocigpu.gpus.tree import list_names, read_text

LDS_KIB = {"gfx950": 160}
"""Memory of a workgroup; 64 KiB before."""


def main(root: str, arguments: Sequence[str]) -> int:
    """Print all agents; returns the exit status, 2 for any argument: the real program has none but --support."""
    if arguments:
        print(f"rocminfo: unknown argument {arguments[0]!r}", file=sys.stderr)
        return 2
    sys.stdout.write("\n".join(_report(root)) + "\n")
    return 0


def _report(root: str) -> list[str]:
    sys_root = roots_of(root).sys
    lines = [
        f"ROCk module version {read_line(f'{sys_root}/module/{DRIVER}/version')} is loaded",
        *_title("HSA System Attributes", "="),
        *_values(
            0,
            ("Runtime Version", "1.18"),
            ("Runtime Ext Version", "1.14"),
            ("System Timestamp Freq.", "1000.000000MHz"),
            ("Sig. Max Wait Duration", f"{2**64 - 1} (0x{2**64 - 1:X}) (timestamp count)"),
            ("Machine Model", "LARGE"),
            ("System Endianness", "LITTLE"),
            ("Mwaitx", "DISABLED"),
            ("XNACK enabled", "NO"),
            ("DMAbuf Support", "YES"),
        ),
        "",
        *_title("HSA Agents", "="),
    ]
    cards = {card.node: card for card in read_cards(root)}
    for number, (name, values) in enumerate(sorted(read_properties(sys_root).items(), key=_by_number), 1):
        lines += _title(f"Agent {number}", "*", width=7)
        lines += _gpu(cards[name], values, sys_root) if name in cards else _processor(name, values)
    return [*lines, "*** Done ***"]


def _by_number(item: tuple[str, dict[str, int]]) -> int:
    return int(item[0]) if item[0].isdigit() else 0


def _title(text: str, mark: str, width: int = 0) -> list[str]:
    line = f"{mark * (width or len(text)):<25}"
    return [line, f"{text:<25}", line]


def _values(depth: int, *pairs: tuple[str, object]) -> list[str]:
    return [f"{'  ' * depth}{f'{name}:':<25}{value!s:<35}" for name, value in pairs]


def _both(number: int) -> str:
    return f"{number}(0x{number:x})"


def _processor(name: str, values: dict[str, int]) -> list[str]:
    product = "Simulated processor"
    return _values(
        1,
        ("Name", product),
        ("Uuid", "CPU-XX"),
        ("Marketing Name", product),
        ("Vendor Name", "CPU"),
        ("Feature", "None specified"),
        ("Profile", "FULL_PROFILE"),
        ("Queue Type", "MULTI"),
        ("Node", name),
        ("Device Type", "CPU"),
        ("Chip ID", _both(0)),
        ("BDFID", 0),
        ("Internal Node ID", name),
        ("Compute Unit", values.get("cpu_cores_count", 0)),
        ("SIMDs per CU", 0),
        ("Features", "None"),
        ("ISA Info", ""),
    )


def _gpu(card: Card, values: dict[str, int], sys_root: str) -> list[str]:
    architecture = architecture_of(values.get("gfx_target_version", 0))
    units = values.get("simd_count", 0) // max(1, values.get("simd_per_cu", 1))
    return [
        *_values(
            1,
            ("Name", architecture),
            ("Uuid", f"GPU-{card.gpu.unique_id:016x}"),
            ("Marketing Name", card.text("product_name").removesuffix(" OAM")),
            ("Vendor Name", "AMD"),
            ("Feature", "KERNEL_DISPATCH"),
            ("Profile", "BASE_PROFILE"),
            ("Float Round Mode", "NEAR"),
            ("Max Queue Number", _both(128)),
            ("Queue Min Size", _both(64)),
            ("Queue Max Size", _both(131_072)),
            ("Queue Type", "MULTI"),
            ("Node", card.node),
            ("Device Type", "GPU"),
            ("Chip ID", _both(card.device_id)),
            ("ASIC Revision", _both(1)),
            ("Cacheline Size", _both(128)),
            ("Max Clock Freq. (MHz)", values.get("max_engine_clk_fcompute", 0)),
            ("BDFID", values.get("location_id", 0)),
            ("Internal Node ID", card.node),
            ("Compute Unit", units),
            ("SIMDs per CU", values.get("simd_per_cu", 0)),
            ("Features", "KERNEL_DISPATCH"),
            ("Fast F16 Operation", "TRUE"),
            ("Wavefront Size", _both(64)),
            ("Workgroup Max Size", _both(1024)),
            ("Max Waves Per CU", _both(32)),
            ("Max Work-item Per CU", _both(2048)),
            ("Grid Max Size", _both(2**32 - 1)),
            ("Pool Info", ""),
        ),
        *_pool(1, "GLOBAL; FLAGS: COARSE GRAINED", _memory(card, sys_root) >> 10, "TRUE"),
        *_pool(2, "GROUP", LDS_KIB.get(architecture, 64), "FALSE"),
        *_values(1, ("ISA Info", "")),
        f"    {'ISA 1':<25}",
        *_values(
            3,
            ("Name", f"amdgcn-amd-amdhsa--{architecture}:sramecc+:xnack-"),
            ("Machine Models", "HSA_MACHINE_MODEL_LARGE"),
            ("Profiles", "HSA_PROFILE_BASE"),
            ("Fast f16", "TRUE"),
            ("Workgroup Max Size", _both(1024)),
        ),
    ]


def _pool(number: int, segment: str, kib: int, allocatable: str) -> list[str]:
    named = _values(3, ("Segment", segment), ("Size", f"{_both(kib)} KB"), ("Allocatable", allocatable))
    return [f"    {f'Pool {number}':<25}", *named]


def _memory(card: Card, sys_root: str) -> int:
    banks = f"{sys_root}/{TOPOLOGY}/{card.node}/mem_banks"
    texts = [read_text(f"{banks}/{bank}/properties") or "" for bank in list_names(banks)]
    return sum(parse_numbers(text).get("size_in_bytes", 0) for text in texts)
