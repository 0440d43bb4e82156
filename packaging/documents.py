"""documents.py SHARE LIBRARY...: writes man pages and shell completion of the commands below SHARE.
documents.py docs: writes the pages of docs/ that are made of the program.

LIBRARY: directories in which ocigpu and what it imports are found.  Everything comes from the commands themselves:
their parsers, help and usage texts, and tables.  Only SHARE, or docs/, is changed.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator

MARK = "written by packaging/install.sh"


def main(share: str) -> None:
    pages = {path.replace(" ", "-"): make_page(path, *found) for path, *found in walk()}
    pages["ocigpu-runtime"] = page_of_runtime()
    pages["ocigpu-hook"] = page_of_hook()
    pages["ocigpu-container-cli"] = page_of_container_cli()
    for name, page in pages.items():
        write(f"{share}/man/man1/{name}.1", page)
    for shell, path in (
        ("bash", "bash-completion/completions/ocigpu"),
        ("zsh", "zsh/site-functions/_ocigpu"),
        ("fish", "fish/vendor_completions.d/ocigpu.fish"),
    ):
        write(f"{share}/{path}", make_completion(shell))


def write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text.rstrip("\n") + "\n")


def walk(name: str = "") -> Iterator[tuple]:
    """Yield (path, page, paths below) of the program, its groups and its commands, each after the one above it."""
    from ocigpu.cli.front.main import COMMANDS
    from ocigpu.cli.front.manual import ROOT, read_page, words_below

    below = [f"{name} {word}".strip() for word in words_below(name, COMMANDS)]
    yield f"{ROOT} {name}".rstrip(), read_page(name or ROOT), [f"{ROOT} {child}" for child in below]
    for child in below:
        yield from walk(child)


def usage_of(page, below: list[str]) -> str:
    return "[OPTIONS] COMMAND [ARGUMENT]..." if below else page.usage


def tables_of(page) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield "Arguments" and "Options" with (term, text) of each."""
    for title, words in (("Arguments", page.arguments), ("Options", page.options.values())):
        if words:
            yield title, [(word.term, word.help) for word in words]


# The pages of docs/


def make_docs() -> dict[str, str]:
    """Return the text of each page of docs/ that is made of the program, by its name."""
    from ocigpu.cli.containers import explain
    from ocigpu.doctor import messages, report

    return {
        "COMMANDS.md": render_commands(),
        "SETTINGS.md": render_settings(),
        "METRICS.md": render_metrics(),
        "ERRORS.md": explain.render_markdown(),
        "TROUBLESHOOTING.md": messages.render_markdown(),
        "DOCTOR.md": report.render_markdown(),
    }


def render_commands() -> str:
    pages = list(walk())
    lines = ["# Commands", "", "Every command with its `--help`. This page is generated: `make docs`.", ""]
    for path, page, _ in pages[1:]:
        indent = "  " * (path.count(" ") - 1)
        lines.append(f"{indent}- [{path}](#{path.replace(' ', '-')}): {page.short}")
    for path, page, below in pages:
        lines += ["", f"## {path}", "", page.help, "", f"    {path} {usage_of(page, below)}"]
        for title, rows in tables_of(page):
            lines += ["", f"### {title}", "", *(f"- `{term}`: {text}" for term, text in rows)]
        for title, body in page.sections.items():
            lines += ["", f"### {title}", "", body]
    return "\n".join(lines) + "\n"


def render_settings() -> str:
    from ocigpu.core.settings import KEYS
    from ocigpu.core.toml import toml_value

    lines = [
        "# Settings",
        "",
        "The keys of `/etc/ocigpu/config.toml`, or of the file that `--config` or `OCIGPU_CONFIG` names. A key with a",
        "dot is in a table: `driver.root` is `root` in `[driver]`. `ocigpu config check` finds mistakes in a file,",
        "`ocigpu config default` prints one with all keys, `ocigpu config import` converts NVIDIA's. This page is",
        "generated: `make docs`.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for key in KEYS:
        choices = f" ({', '.join(f'`{word}`' for word in key.choices)})" if key.choices else ""
        meaning = f"{key.meaning}{choices}".replace("*", "\\*")
        lines.append(f"| `{key.name}` | {key.kind} | `{toml_value(key.default)}` | {meaning} |")
    return "\n".join(lines) + "\n"


def render_metrics() -> str:
    """Return the text beside the exporter's modules, filled in with the tables."""
    from importlib.resources import files

    from ocigpu.exporter.metrics import METRICS, NOT_FROM_NVML
    from ocigpu.exporter.options import OPTIONS, REFUSED
    from ocigpu.kubernetes.leases import metrics as leases
    from ocigpu.system.options import ANYTHING

    def row(option, text: str) -> tuple[str, ...]:
        flags = ", ".join(f"`{'-' if len(name) < 3 else '--'}{name}`" for name in option.flags)
        return flags, ", ".join(f"`{name}`" for name in option.variables), text

    tables = {
        "metrics": [(f"`{each.name}`", each.kind, each.source, "yes" * each.default) for each in METRICS],
        "leases": [(f"`{name}`", *words) for name, words in leases.METRICS.items()],
        "missing": [(f"`{prefix}*`", why) for prefix, why in NOT_FROM_NVML],
        "obeyed": [row(option, option.meaning) for option in OPTIONS],
        "refused": [row(option, option.refused) for option in REFUSED if option.harmless != ANYTHING],
        "ignored": [row(option, option.refused) for option in REFUSED if option.harmless == ANYTHING],
    }
    text = files("ocigpu.exporter").joinpath("metrics.md").read_text(encoding="utf-8")
    for name, rows in tables.items():
        text = text.replace(f"{{{name}}}", "\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    return text


# Completion


def make_completion(shell: str) -> str:
    """Return the script of a shell, marked; "#compdef" has to be the first line."""
    from ocigpu.cli.front.complete import render_script

    first, newline, rest = render_script(shell).partition("\n")
    mark = f"# {MARK}\n"
    return first + newline + mark + rest if first.startswith("#") else mark + first + newline + rest


# Man pages (man-pages(7), groff_man(7))


def make_page(path: str, page, below: list[str]) -> str:
    """Return the man page of a command."""
    name = path.replace(" ", "-")
    parts = [
        header(name, page.short),
        f".SH SYNOPSIS\n\\fB{roff(path)}\\fR {roff(usage_of(page, below))}",
        f".SH DESCRIPTION\n{blocks(page.help)}",
    ]
    for title, rows in tables_of(page):
        parts.append(f".SH {title.upper()}\n" + "\n".join(f".TP\n{bold(term)}\n{roff(text)}" for term, text in rows))
    from ocigpu.cli.front.manual import read_page

    rows = [(child.replace(" ", "-"), read_page(child.partition(" ")[2]).short) for child in below]
    if rows:
        parts.append(".SH COMMANDS\n" + "\n".join(f".TP\n\\fB{roff(page)}\\fR(1)\n{roff(text)}" for page, text in rows))
    parts += [f".SH {roff(title).upper()}\n{blocks(body)}" for title, body in page.sections.items()]
    parts.append(see_also([path.rpartition(" ")[0].replace(" ", "-")] if " " in path else list(OTHERS)))
    return "\n".join(parts)


OTHERS = ("ocigpu-runtime", "ocigpu-hook", "ocigpu-container-cli")


def page_of(name: str, summary: str, parts: list[str], *others: str) -> str:
    return "\n".join([header(name, summary), *parts, see_also(["ocigpu", *others])])


def page_of_runtime() -> str:
    from ocigpu import runtime

    synopsis = "ocigpu-runtime [OPTIONS OF THE LOW-LEVEL RUNTIME] COMMAND [ARGUMENTS]"
    parts = [f".SH SYNOPSIS\n{bold(synopsis)}", ".SH DESCRIPTION\n" + prose((runtime.__doc__ or "").strip())]
    summary = "an OCI runtime that gives containers their NVIDIA GPUs"
    return page_of("ocigpu-runtime", summary, parts, "ocigpu-config-keys", "ocigpu-hook")


def page_of_hook() -> str:
    from importlib.resources import files

    usage, _, text = files("ocigpu.entry").joinpath("hook_usage.txt").read_text(encoding="utf-8").partition("\n\n")
    parts = [".SH SYNOPSIS\n" + verbatim(usage.removeprefix("usage: ")), ".SH DESCRIPTION\n" + verbatim(text)]
    return page_of("ocigpu-hook", "an OCI hook that gives a container its NVIDIA GPUs", parts, "ocigpu-runtime")


def page_of_container_cli() -> str:
    """Return the page with the help of the command and, where it is known, of each command below it."""
    from ocigpu.entry.container_cli.main import main as container_cli

    def help_of(*words: str) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            container_cli([*words, "--help"])
        return output.getvalue()

    commands = re.findall(r"^    ([a-z]+)  ", help_of(), re.MULTILINE)
    parts = [".SH DESCRIPTION\n" + verbatim(help_of())]
    parts += [f".SH {name.upper()}\n{verbatim(text)}" for name in commands if (text := help_of(name))]
    summary = "reports GPUs and driver files with the options of nvidia-container-cli"
    return page_of("ocigpu-container-cli", summary, parts)


def header(name: str, summary: str) -> str:
    from ocigpu import __version__

    title = f'.\\" {MARK}\n.TH {roff(name).upper()} 1 "" "ocigpu {__version__}" "ocigpu"'
    summary = summary[:1].lower() + summary[1:].rstrip(".")
    return f"{title}\n.nh\n.ad l\n.SH NAME\n{roff(name)} \\- {roff(summary)}"


def see_also(names: list[str]) -> str:
    return ".SH SEE ALSO\n" + ",\n".join(f"\\fB{roff(name)}\\fR(1)" for name in names)


def blocks(text: str) -> str:
    """Return Markdown: what is indented by four is shown as it is."""
    parts = re.split(r"((?:^    .*\n?)+)", text, flags=re.MULTILINE)
    shown = [verbatim(part.replace("\n    ", "\n")[4:]) if part.startswith("    ") else prose(part) for part in parts]
    return "\n.PP\n".join(part for part in shown if part)


def prose(text: str) -> str:
    return "\n.PP\n".join(roff(paragraph) for paragraph in re.split(r"\n\n+", text.strip("\n")) if paragraph)


def verbatim(text: str) -> str:
    return f".nf\n{roff(text.rstrip())}\n.fi"


def bold(text: str) -> str:
    return f"\\fB{roff(text)}\\fR"


def roff(text: str) -> str:
    """Return text in which nothing means anything to roff."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


if __name__ == "__main__":
    if sys.argv[1:] == ["docs"]:
        for page, text in make_docs().items():
            write(f"docs/{page}", text)
    else:
        sys.path += sys.argv[2:]
        main(sys.argv[1])
        from ocigpu import leave

        leave(0)  # a library in another language was seen to abort the interpreter's end, once in twenty
