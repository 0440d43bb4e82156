"""What ``amd-smi`` prints of a simulated host: list, static, metric and version, from the files of its kernel.

Subcommands, names of values and their form are those of amd-smi 26.2 (ROCm 7.2), as AMD's documentation of the tool and
recorded outputs show them; what amdgpu's files do not say is "N/A".
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ocigpu.core.errors import HostError, printable
from ocigpu.core.facts import Gpu
from ocigpu.gpus.amd.facts import DRIVER, TOPOLOGY, AmdGpu, describe_host, read_driven, read_properties
from ocigpu.gpus.amd.usage import read_gauge
from ocigpu.gpus.tree import Roots, list_names, read_text

TOOL, ROCM = "26.2.1", "7.2.0"
MIB = 1 << 20
NO = "N/A"
SUBCOMMANDS = {
    "version": "versions of the tool, its library and the driver",
    "list": "the GPUs",
    "static": "what does not change",
    "metric": "use, power, clocks, temperatures",
}
VENDOR = "Advanced Micro Devices Inc. [AMD/ATI]"


def roots_of(root: str) -> Roots:
    """Return where a simulated host's files are."""
    return Roots(root, f"{root}/dev", f"{root}/proc", f"{root}/sys", True)


def read_line(path: str) -> str:
    """Return the text of a small file, "" where it cannot be read."""
    try:
        return printable((read_text(path, 256) or "").strip())
    except HostError:
        return ""


def architecture_of(number: int) -> str:
    """Return the name of an architecture by KFD's number: 90402 is "gfx942"."""
    return f"gfx{number // 10_000}{number // 100 % 100:x}{number % 100:x}" if number else NO


class Card:
    """One GPU or partition, with the files that describe it."""

    def __init__(self, sys_root: str, index: int, gpu: AmdGpu, fact: Gpu, nodes: dict[int, tuple[str, dict[str, int]]]):
        self.index, self.gpu, self.fact, self.sys = index, gpu, fact, sys_root
        self.directory = f"{sys_root}/bus/pci/devices/{gpu.address}"
        self.node, self.properties = nodes.get(fact.minor, ("", {}))

    def text(self, name: str) -> str:
        return read_line(f"{self.directory}/{name}") or NO

    def gauge(self, name: str, unit: str, divisor: int = 1) -> Any:
        """Return a number of a file with its unit."""
        return measured(read_gauge(f"{self.directory}/{name}", divisor), unit)

    def sensor(self, name: str, unit: str, divisor: int) -> Any:
        """Return a number of the GPU's hwmon directory."""
        names = list_names(f"{self.directory}/hwmon")[:1]
        return self.gauge(f"hwmon/{names[0]}/{name}", unit, divisor) if names else NO

    @property
    def device_id(self) -> int:
        text = self.text("device")
        return int(text, 16) if text.startswith("0x") else 0

    @property
    def uuid(self) -> str:
        """The UUID that amd-smi makes of a GPU's unique id, its device and the partition."""
        serial = f"{self.gpu.unique_id:016x}"
        part = max(self.gpu.partition, 0)
        return f"{serial[:2]}{255 - part:02x}{self.device_id:04x}-0000-1000-80{serial[2:4]}-{serial[4:]}"


def read_cards(root: str) -> list[Card]:
    """Return the GPUs of a simulated host in their order; raises HostError without any."""
    roots = roots_of(root)
    facts = read_driven(roots)
    properties = read_properties(roots.sys)
    nodes = {values.get("drm_render_minor", 0): (name, values) for name, values in properties.items()}
    pairs = zip(facts.gpus, describe_host(facts).gpus, strict=True)
    return [Card(roots.sys, index, gpu, fact, nodes) for index, (gpu, fact) in enumerate(pairs)]


def measured(number: int | None, unit: str) -> Any:
    """Return a number with its unit as in JSON, "N/A" for None."""
    return NO if number is None else {"value": number, "unit": unit}


def list_card(card: Card) -> dict[str, Any]:
    """Return what ``amd-smi list`` says of a GPU."""
    kfd = read_gauge(f"{card.sys}/{TOPOLOGY}/{card.node}/gpu_id")
    return {
        "bdf": card.gpu.address,
        "uuid": card.uuid,
        "kfd_id": NO if kfd is None else kfd,
        "node_id": int(card.node) if card.node.isdigit() else NO,
        "partition_id": max(card.gpu.partition, 0),
    }


def _asic(card: Card) -> dict[str, Any]:
    units = card.properties.get("simd_count", 0) // max(1, card.properties.get("simd_per_cu", 1))
    return {
        "market_name": card.text("product_name").removesuffix(" OAM"),
        "vendor_id": card.text("vendor"),
        "vendor_name": VENDOR,
        "subvendor_id": card.text("vendor"),
        "device_id": card.text("device"),
        "subsystem_id": card.text("device"),
        "rev_id": "0x00",
        "asic_serial": f"0x{card.gpu.unique_id:016X}",
        "oam_id": card.index,
        "num_compute_units": units or NO,
        "target_graphics_version": architecture_of(card.properties.get("gfx_target_version", 0)),
    }


def _bus(card: Card) -> dict[str, Any]:
    speed = {"max_pcie_width": 16, "max_pcie_speed": measured(32, "GT/s"), "pcie_interface_version": "Gen 5"}
    return {"bdf": card.gpu.address, **speed, "slot_type": "OAM"}


def _limit(card: Card) -> dict[str, Any]:
    cap = card.sensor("power1_cap", "W", 10**6)
    return {
        "max_power": cap,
        "min_power": measured(0, "W"),
        "socket_power": cap,
        "slowdown_edge_temperature": NO,
        "slowdown_hotspot_temperature": measured(100, "C"),
        "slowdown_vram_temperature": measured(105, "C"),
        "shutdown_edge_temperature": NO,
        "shutdown_hotspot_temperature": measured(110, "C"),
        "shutdown_vram_temperature": measured(115, "C"),
    }


def _driver(card: Card) -> dict[str, Any]:
    return {"name": DRIVER, "version": read_line(f"{card.sys}/module/{DRIVER}/version") or NO}


def _board(card: Card) -> dict[str, Any]:
    unknown = dict.fromkeys(("model_number", "product_serial", "fru_id"), NO)
    return {**unknown, "product_name": card.text("product_name"), "manufacturer_name": "AMD"}


def _partition(card: Card) -> dict[str, Any]:
    names = {"accelerator_partition": "current_compute_partition", "memory_partition": "current_memory_partition"}
    return {**{name: card.text(file) for name, file in names.items()}, "partition_id": max(card.gpu.partition, 0)}


def _numa(card: Card) -> dict[str, Any]:
    node = read_gauge(f"{card.directory}/numa_node")
    return dict.fromkeys(("node", "affinity"), NO if node is None else node)


def _vram(card: Card) -> dict[str, Any]:
    size = card.gauge("mem_info_vram_total", "MB", MIB)
    return {"type": "HBM", "vendor": "UNKNOWN", "size": size, "bit_width": 8192}


def _usage(card: Card) -> dict[str, Any]:
    gfx, umc = (card.gauge(f"{name}_busy_percent", "%") for name in ("gpu", "mem"))
    return {"gfx_activity": gfx, "umc_activity": umc, "mm_activity": NO}


def _power(card: Card) -> dict[str, Any]:
    voltages = dict.fromkeys(("gfx_voltage", "soc_voltage", "mem_voltage", "throttle_status"), NO)
    return {"socket_power": card.sensor("power1_average", "W", 10**6), **voltages, "power_management": "ENABLED"}


def _clock(card: Card) -> dict[str, Any]:
    most = measured(card.properties.get("max_engine_clk_fcompute"), "MHz")
    return {"gfx_0": {"clk": NO, "min_clk": NO, "max_clk": most, "clk_locked": "DISABLED", "deep_sleep": NO}}


def _temperature(card: Card) -> dict[str, Any]:
    names = {"edge": "temp1_input", "hotspot": "temp2_input", "mem": "temp3_input"}
    return {name: card.sensor(file, "C", 1000) for name, file in names.items()}


def _pcie(_card: Card) -> dict[str, Any]:
    return {"width": 16, "speed": measured(32, "GT/s"), "bandwidth": NO, "replay_count": 0}


def _ecc(_card: Card) -> dict[str, Any]:
    kinds = ("total_correctable", "total_uncorrectable", "total_deferred", "cache_correctable", "cache_uncorrectable")
    return {f"{kind}_count": 0 for kind in kinds}


def _fan(_card: Card) -> dict[str, Any]:
    return dict.fromkeys(("speed", "max", "rpm", "usage"), NO)


def _memory(card: Card) -> dict[str, Any]:
    total, used = (read_gauge(f"{card.directory}/mem_info_vram_{what}", MIB) for what in ("total", "used"))
    free = None if total is None or used is None else total - used
    values = {"total": measured(total, "MB"), "used": measured(used, "MB"), "free": measured(free, "MB")}
    seen = {f"{name}{kind}_vram": value for kind in ("", "_visible") for name, value in values.items()}
    return {**seen, **{f"{name}_gtt": NO for name in values}}


Section = Callable[[Card], dict[str, Any]]
STATIC: dict[tuple[str, str], Section] = {
    ("-a", "asic"): _asic,
    ("-b", "bus"): _bus,
    ("-l", "limit"): _limit,
    ("-d", "driver"): _driver,
    ("-B", "board"): _board,
    ("-p", "partition"): _partition,
    ("-u", "numa"): _numa,
    ("-v", "vram"): _vram,
}
METRIC: dict[tuple[str, str], Section] = {
    ("-u", "usage"): _usage,
    ("-p", "power"): _power,
    ("-c", "clock"): _clock,
    ("-t", "temperature"): _temperature,
    ("-P", "pcie"): _pcie,
    ("-e", "ecc"): _ecc,
    ("-f", "fan"): _fan,
    ("-m", "mem-usage"): _memory,
}


def main(root: str, arguments: Sequence[str]) -> int:
    """Print what amd-smi prints with these arguments, the usage without any; returns its exit status."""
    parser = argparse.ArgumentParser("amd-smi", description="AMD System Management Interface of a SIMULATED host")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, sections in (("version", {}), ("list", {}), ("static", STATIC), ("metric", METRIC)):
        command = commands.add_parser(name, help=SUBCOMMANDS[name])
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--file", help="write into a file")
        if name != "version":
            command.add_argument("-g", "--gpu", nargs="+", default=["all"], help="index, BDF or UUID")
        for brief, full in sections:
            command.add_argument(brief, f"--{full}", action="append_const", dest="sections", const=(brief, full))
    options = parser.parse_args(list(arguments))
    if not options.command:
        parser.print_help()
        return 0
    cards = read_cards(root)
    if options.command == "version":
        answer: Any = _version(cards[0])
    else:
        chosen = [card for card in cards if {"all", str(card.index), card.gpu.address, card.uuid} & {*options.gpu}]
        if not chosen:
            parser.error(f"no GPU {' '.join(options.gpu)}: 0 to {len(cards) - 1}, a BDF, a UUID or all")
        answer = [{"gpu": card.index, **_describe(card, options)} for card in chosen]
    text = _as_json(answer, options.command) if options.json else _as_text(answer, options.command)
    if options.file:
        with open(options.file, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        sys.stdout.write(text)
    return 0


def _describe(card: Card, options: argparse.Namespace) -> dict[str, Any]:
    if options.command == "list":
        return list_card(card)
    sections = STATIC if options.command == "static" else METRIC
    wanted = getattr(options, "sections", None) or sections
    return {key[1].replace("-", "_"): ask(card) for key, ask in sections.items() if key in wanted}


def _version(card: Card) -> list[dict[str, Any]]:
    versions = {"version": TOOL, "amdsmi_library_version": TOOL, "rocm_version": ROCM}
    return [{"tool": "AMDSMI Tool", **versions, "amdgpu_version": _driver(card)["version"]}]


def _as_json(answer: Any, command: str) -> str:
    wrapped = answer if command in ("list", "version") else {"gpu_data": answer}
    return json.dumps(wrapped, indent=4) + "\n"


def _as_text(answer: Any, command: str) -> str:
    if command == "version":
        (one,) = answer
        return (
            f"AMDSMI Tool: {one['version']} | AMDSMI Library version: {one['amdsmi_library_version']} | "
            f"ROCm version: {one['rocm_version']} | amdgpu version: {one['amdgpu_version']}\n"
        )
    return "\n".join("\n".join(_lines(one, 0)) + "\n" for one in answer)


def _lines(values: dict[str, Any], depth: int) -> list[str]:
    """Return lines as amd-smi writes values: names in capitals, groups indented, numbers with their unit."""
    lines = []
    for name, value in values.items():
        label = f"{'    ' * depth}{name.upper()}:"
        if isinstance(value, dict) and value.keys() == {"value", "unit"}:
            lines.append(f"{label} {value['value']} {'°' * (value['unit'] == 'C')}{value['unit']}")
        elif isinstance(value, dict):
            lines += [label, *_lines(value, depth + 1)]
        else:
            lines.append(f"{label} {value}")
        depth = max(depth, 1)  # all that follows the GPU's number belongs to it
    return lines
