"""``ocigpu chart``: values for NVIDIA's Helm charts, converted for ours."""

import contextlib
import sys

from ocigpu.cli.front import show
from ocigpu.cli.front.common import check_one_of
from ocigpu.cli.front.optional import needing
from ocigpu.cli.settings.config import write_text
from ocigpu.core.errors import OsErrorAs, SettingsError, printable


def import_command(files: list[str], from_: str = "", output: str = "-", force: bool = False) -> "show.Answer":
    with needing("ocigpu chart needs PyYAML, pydantic and tomlkit"):
        from ocigpu.cli.settings import charts
    if from_:
        check_one_of("--from", from_, tuple(charts.CHARTS))
    texts = []
    for file in files:
        with OsErrorAs(SettingsError, charts.CODE, f"read {printable(file)}", ""):
            if file == "-":
                texts.append(("standard input", sys.stdin.buffer.read(charts.MAX_BYTES + 1)))
            else:
                with open(file, "rb") as source:
                    texts.append((file, source.read(charts.MAX_BYTES + 1)))
    result = charts.import_values(texts, from_)
    text = charts.render_values(result)
    written = output != "-" and write_text(output, text, force)
    yield {
        "charts": [{"file": file, "chart": chart} for file, chart in result.charts],
        "output": output,
        "written": written,
        "keys": [
            {
                "file": entry.file,
                "key": entry.key,
                "value": charts.shorten(entry.value),
                "became": entry.became,
                "to": list(entry.to),
                "remark": entry.remark,
            }
            for entry in result.entries
        ],
        "notes": list(result.notes),
        "node_lines": list(result.node_lines),
        "text": text,
    }
    with contextlib.redirect_stdout(sys.stderr):
        rows = [
            (entry.key, entry.became, ", ".join(entry.to), entry.remark) for entry in charts.grouped(result.entries)
        ]
        if rows:
            show.table(("NVIDIA's key", "became", "here", "remark"), rows)
            print()
        counts = {became: [entry.became for entry in result.entries].count(became) for became in charts.WORDS}
        print(", ".join(f"{count} {became}" for became, count in counts.items() if count) or "no keys")
        show.notes(result.notes)
        if result.node_lines:
            show.notes([f"each node's {charts.NODE_FILE} must contain these lines, and the chart does not write it:"])
            print(*(f"      {line}" for line in result.node_lines), sep="\n")
    if output == "-":
        print(text, end="")
    else:
        print(f"{printable(output)}: {'written' if written else 'unchanged'}", file=sys.stderr)
