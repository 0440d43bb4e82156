"""``python -m ocigpu.kubernetes.exporter``: print docs/METRICS.md, from metrics.md beside this and the tables."""

from pathlib import Path

from ocigpu.kubernetes.exporter.metrics import METRICS, NOT_FROM_NVML
from ocigpu.kubernetes.exporter.options import OPTIONS, REFUSED
from ocigpu.kubernetes.options import ANYTHING


def document() -> str:
    """Return docs/METRICS.md."""
    refused: list[tuple[str, ...]] = []
    ignored: list[tuple[str, ...]] = []
    for each in REFUSED:
        rows = ignored if each.harmless == ANYTHING else refused
        rows.append((_flags(each.flags), _code(each.variables), each.refused))
    tables: dict[str, list[tuple[str, ...]]] = {
        "metrics": [(f"`{each.name}`", each.kind, each.source, "yes" * each.default) for each in METRICS],
        "missing": [(f"`{prefix}*`", why) for prefix, why in NOT_FROM_NVML],
        "obeyed": [(_flags(option.flags), _code(option.variables), option.meaning) for option in OPTIONS],
        "refused": refused,
        "ignored": ignored,
    }
    text = Path(__file__).with_name("metrics.md").read_text(encoding="utf-8")
    for name, table in tables.items():
        text = text.replace(f"{{{name}}}", "\n".join(f"| {' | '.join(row)} |" for row in table))
    return text


def _flags(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{'-' if len(name) < 3 else '--'}{name}`" for name in names)


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(document(), end="")
