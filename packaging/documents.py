"""documents.py SHARE LIBRARY...: writes man pages and shell completion of the commands below SHARE.
documents.py docs: writes the pages of docs/ that are made of the program.
documents.py site DIR [mike]: writes what the site is built of: docs/ with a page for each command, code and message.

LIBRARY: directories in which ocigpu and what it imports are found.  Everything comes from the commands themselves:
their parsers, help and usage texts, and tables.  Only SHARE, docs/ or DIR is changed.
"""

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

MARK = "written by packaging/install.sh"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


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
    from ocigpu.doctor import report

    return {"SETTINGS.md": render_settings(), "METRICS.md": render_metrics(), "DOCTOR.md": report.render_markdown()}


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
    """Return the text beside the exporter's modules, filled in with the tables and other vendors' texts."""
    from importlib.resources import files

    from ocigpu.exporter.metrics import METRICS, NOT_FROM_NVML
    from ocigpu.exporter.options import OPTIONS, REFUSED
    from ocigpu.gpus.amd.sampler import METRICS as OF_AMD
    from ocigpu.kubernetes.dra import metrics as dra
    from ocigpu.kubernetes.leases import metrics as leases
    from ocigpu.system.options import ANYTHING

    def row(option, text: str) -> tuple[str, ...]:
        flags = ", ".join(f"`{'-' if len(name) < 3 else '--'}{name}`" for name in option.flags)
        return flags, ", ".join(f"`{name}`" for name in option.variables), text

    tables = {
        "metrics": [(f"`{each.name}`", each.kind, each.source, "yes" * each.default) for each in METRICS],
        "dra": [(f"`{name}`", *words) for name, words in dra.METRICS.items()],
        "leases": [(f"`{name}`", *words) for name, words in leases.METRICS.items()],
        "missing": [(f"`{prefix}*`", why) for prefix, why in NOT_FROM_NVML],
        "obeyed": [row(option, option.meaning) for option in OPTIONS],
        "refused": [row(option, option.refused) for option in REFUSED if option.harmless != ANYTHING],
        "ignored": [row(option, option.refused) for option in REFUSED if option.harmless == ANYTHING],
    }

    def lines(rows) -> str:
        return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)

    of_amd = files("ocigpu.gpus.amd").joinpath("metrics.md").read_text(encoding="utf-8")
    rows = [(f"`{name}`", "gauge", source) for name, (_, source) in OF_AMD.items()]
    text = files("ocigpu.exporter").joinpath("metrics.md").read_text(encoding="utf-8")
    text = text.replace("{vendors}\n", of_amd.replace("{metrics}", lines(rows)))
    for name, rows in tables.items():
        text = text.replace(f"{{{name}}}", lines(rows))
    return text


# The site


def write_site(target: str, versions: bool) -> None:
    """Write mkdocs.yml and the pages: those of docs/, and those that only the site has.

    ``versions``: the pages offer those that mike has published beside them.
    """
    import shutil

    import yaml

    chapters = make_site()
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(f"{ROOT}/packaging/site", target)
    shutil.copytree(f"{ROOT}/docs", f"{target}/docs", ignore=shutil.ignore_patterns("*.json"))
    shutil.copy(f"{ROOT}/packaging/site/site.css", f"{target}/docs")
    repository = os.environ.get("OCIGPU_REPOSITORY", "").rstrip("/")
    for folder, _, names in os.walk(f"{ROOT}/docs"):
        for name in names:
            path = os.path.relpath(f"{folder}/{name}", f"{ROOT}/docs")
            if name.endswith(".md"):
                with open(f"{folder}/{name}", encoding="utf-8") as file:
                    text = lead_out(file.read(), f"docs/{path}", repository)
                write(f"{target}/docs/{path}", text + (chapters[path].index if path in chapters else ""))
    for chapter in chapters.values():
        for path, text in chapter.pages.items():
            write(f"{target}/docs/{path}", text)
    with open(f"{target}/mkdocs.yml", encoding="utf-8") as file:
        settings, _, menu = file.read().partition("\nnav:\n")
    more = {
        "site_url": os.environ.get("SITE_URL", ""),
        "repo_url": repository,
        "extra": {"generator": False, **({"version": {"provider": "mike", "default": "latest"}} if versions else {})},
        "nav": [with_chapters(entry, chapters) for entry in yaml.safe_load(menu)],
    }
    write(f"{target}/mkdocs.yml", f"{settings}\n{yaml.safe_dump(more, sort_keys=False)}")


def with_chapters(entry, chapters: "dict[str, Chapter]"):
    """Return an entry of the menu with the pages of each chapter below the chapter's own page."""
    if isinstance(entry, dict):
        title, value = next(iter(entry.items()))
        if isinstance(value, list):
            return {title: [with_chapters(child, chapters) for child in value]}
        if value in chapters:
            return {title: [{"All": value}, *({name: paths} for name, paths in chapters[value].menu.items())]}
    return entry


LINK = re.compile(r"\[(?P<text>[^\]\[]*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def lead_out(text: str, page: str, repository: str) -> str:
    """Return a page whose links to files outside docs/ lead to the repository, or name the file if none is known."""

    def outside(link: re.Match[str]) -> str:
        target, sign, anchor = link["target"].partition("#")
        path = os.path.normpath(f"{os.path.dirname(page)}/{target}")
        if not target or re.match("[a-z]+:", target) or path.startswith("docs/"):
            return link[0]
        if repository:
            return f"[{link['text']}]({repository}/blob/HEAD/{path}{sign}{anchor})"
        return link["text"] if link["text"].strip("`") == path else f"{link['text']} (`{path}`)"

    parts = CODE.split(text)
    return "".join(part if number % 2 else LINK.sub(outside, part) for number, part in enumerate(parts))


# The pages that only the site has: one for each command, code and message.  Their addresses are for ever.


class Chapter(NamedTuple):
    """One of the site's three references.

    ``index``: what its committed page goes on with.  ``pages``: the texts by their paths.  ``menu``: titles with the
    paths below them.
    """

    index: str
    pages: dict[str, str]
    menu: dict[str, list[str]]


def make_site() -> dict[str, Chapter]:
    """Return the chapters by the name of their page in docs/."""
    return {"COMMANDS.md": list_commands(), "ERRORS.md": list_codes(), "TROUBLESHOOTING.md": list_messages()}


def list_commands() -> Chapter:
    from ocigpu.cli.front.manual import ROOT as PROGRAM
    from ocigpu.cli.front.manual import read_page

    def path_of(command: str) -> str:
        return f"COMMANDS/{command.replace(' ', '-')}.md"

    walked = {path: (page, below) for path, page, below in walk()}
    pages = {path_of(path): render_command(path, page, below) for path, (page, below) in walked.items()}
    menu = {}
    lines = []
    for title, names in read_page(PROGRAM).groups.items():
        listed = [path for name in names for path in walked if f"{path} ".startswith(f"{PROGRAM} {name} ")]
        menu[title] = [path_of(path) for path in listed]
        lines += ["", f"## {title}", ""]
        for path in listed:
            lines.append(f"{'    ' * (path.count(' ') - 1)}- [{path}]({path_of(path)}): {walked[path][0].short}")
    menu["Other programs"] = []
    lines += ["", "## Other programs", ""]
    for name, (summary, text) in other_programs().items():
        pages[path_of(name)] = f"{front(name, f'{name}: {summary}', summary)}# {name}\n\n{summary}\n\n{text}\n"
        menu["Other programs"].append(path_of(name))
        lines.append(f"- [{name}]({path_of(name)}): {summary}")
    return Chapter("\n".join(lines) + "\n", pages, {"The program": [path_of(PROGRAM)], **menu})


def render_command(path: str, page, below: list[str]) -> str:
    above = path.rpartition(" ")[0]
    lines = [front(path, f"{path}: {page.short}", page.short) + f"# {path}", "", link(page.help), ""]
    lines += ["```text", f"{path} {usage_of(page, below)}", "```", ""]
    if below:
        walked = {name: found for name, found, _ in walk(path.partition(" ")[2])}
        lines += ["## Commands", ""]
        lines += [f"- [{name}]({name.replace(' ', '-')}.md): {walked[name].short}" for name in below]
    for title, rows in tables_of(page):
        lines += ["", f"## {title}"]
        for term, text in rows:
            lines += ["", f"`{term}`", f":   {link(text)}"]
    for title, body in page.sections.items():
        lines += ["", f"## {title}", "", link(body)]
    if above:
        lines += ["", f"Part of [{above}]({above.replace(' ', '-')}.md)."]
    return "\n".join(lines) + "\n"


def other_programs() -> dict[str, tuple[str, str]]:
    """Return a sentence and the text about each of the programs that are no commands of ocigpu."""
    from importlib.resources import files

    from ocigpu import runtime

    runtime_usage = fenced("ocigpu-runtime [OPTIONS OF THE LOW-LEVEL RUNTIME] COMMAND [ARGUMENTS]")
    about_runtime = (runtime.__doc__ or "").strip().replace("``", "`")
    usage = files("ocigpu.entry").joinpath("hook_usage.txt").read_text(encoding="utf-8")
    container_cli = "\n".join(f"## {name}\n\n{fenced(text)}\n" for name, text in helps_of_container_cli().items())
    return {
        "ocigpu-runtime": (
            "An OCI runtime that gives containers their GPUs.",
            f"{runtime_usage}\n\n{about_runtime}",
        ),
        "ocigpu-hook": ("An OCI hook that gives a container its GPUs.", fenced(usage)),
        "ocigpu-container-cli": (
            "Reports GPUs and driver files with the options of nvidia-container-cli.",
            container_cli.replace("## \n\n", ""),
        ),
    }


def list_codes() -> Chapter:
    from ocigpu.cli.containers.explain import read_examples
    from ocigpu.core.codes import AREAS, CODES

    pages: dict[str, str] = {}
    menu: dict[str, list[str]] = {}
    lines: list[str] = []
    for name, entry in CODES.items():
        path, area = f"ERRORS/{name}.md", name.split("-")[1]
        title = f"{area}: {AREAS[area]}"
        if title not in menu:
            lines += ["", f"## {title}", ""]
        menu.setdefault(title, []).append(path)
        lines.append(f"- [{name}]({path}): {escape(entry.cause).replace('](../', '](')}")
        more = read_examples()[name]
        example = f"{name}: {more['example']}"
        body = [f"# {name}", "", f"**{escape(entry.cause)}**", "", fenced(example), "", escape(more["text"]), ""]
        run, _, command = entry.fix.partition("Run: ")
        fix = f"Run `{command}`." if command and not run else escape(entry.fix)
        body += ["## What to do", "", fix, "", "`ocigpu doctor` looks for causes on a host, and"]
        body += [f"`ocigpu explain {name}` prints this page. [All codes](../ERRORS.md)"]
        pages[path] = front(name, f"{name}: {entry.cause}", f"{entry.cause} {entry.fix}") + "\n".join(body) + "\n"
    return Chapter("\n".join(lines) + "\n", pages, menu)


def list_messages() -> Chapter:
    """Return a page for each message, listed by the program that says it, where its title begins with one."""
    from collections import Counter

    from ocigpu.doctor.messages import MESSAGES

    programs = Counter(entry.title.partition(": ")[0] for entry in MESSAGES)
    found: dict[str, list] = {}
    for entry in sorted(MESSAGES, key=lambda entry: entry.title.lower()):
        program = entry.title.partition(": ")[0]
        found.setdefault(program if programs[program] > 1 else "Others", []).append(entry)
    found["Others"] = found.pop("Others")
    lines: list[str] = []
    for title, entries in found.items():
        lines += ["", f"## {title}", ""]
        lines += [f"- [`{entry.texts[0]}`]({path_of_message(entry)}): {escape(entry.title)}" for entry in entries]
    pages = {path_of_message(entry): render_message(entry) for entry in MESSAGES}
    menu = {title: [path_of_message(entry) for entry in entries] for title, entries in found.items()}
    return Chapter("\n".join(lines) + "\n", pages, menu)


def path_of_message(entry) -> str:
    """Return the path of a message's page, from what programs print: it is what people look for."""
    words = re.sub(r"[^a-z0-9]+", "-", entry.texts[0].lower()).strip("-")
    return f"TROUBLESHOOTING/{words if len(words) <= MAX_NAME else words[: MAX_NAME + 1].rpartition('-')[0]}.md"


MAX_NAME = 70


def render_message(entry) -> str:
    from ocigpu.doctor.messages import PROGRAMS

    title = entry.title if ": " in entry.title else entry.title[:1].upper() + entry.title[1:]
    lines = [front(title, f"{entry.texts[0]} ({title})", entry.meaning) + f"# {escape(entry.texts[0])}", ""]
    lines += [f"**{escape(title)}.** Programs print this as follows; `...` stands for anything:", ""]
    lines += [fenced("\n".join(entry.texts)), ""]
    lines += [escape(entry.meaning), "", "## What to do", ""]
    lines += [f"- `{step}`" if step.partition(" ")[0] in PROGRAMS else f"- {escape(step)}" for step in entry.steps]
    lines += ["", "## On your machine", "", "This finds the message in a log, and says which cause holds there:", ""]
    lines += [fenced("docker logs CONTAINER 2>&1 | ocigpu explain -", "sh"), ""]
    if entry.findings:
        names = ", ".join(f"`{name}`" for name in entry.findings)
        lines += [f"[Findings of `ocigpu doctor`](../DOCTOR.md) with this cause: {names}.", ""]
    lines += [f"[Source]({entry.source}) · [All messages](../TROUBLESHOOTING.md)"]
    return "\n".join(lines) + "\n"


def front(title: str, heading: str, description: str) -> str:
    """Return the head of a page: its title in menus, in a browser and in search engines."""
    words = {"title": title, "heading": heading, "description": description}
    return "".join(["---\n", *(f"{name}: {json.dumps(value)}\n" for name, value in words.items()), "---\n"])


def fenced(text: str, language: str = "text") -> str:
    return f"``` {{ .{language} .wrap }}\n{text.strip(chr(10))}\n```"


def escape(text: str) -> str:
    """Return Markdown that shows a text as it is, for a page of a chapter: its pages and codes are links."""
    return link(re.sub(r"([\\`*_<>\[\]#])", r"\\\1", text))


def link(text: str) -> str:
    """Return the Markdown of a page of a chapter with links where it names a page of docs/ or a code."""
    from ocigpu.core.codes import CODES

    def lead(name: re.Match[str]) -> str:
        if name[0] in CODES:
            return f"[{name[0]}](../ERRORS/{name[0]}.md)"
        return f"[{name[1]}](../{name[1]})" if os.path.exists(f"{ROOT}/docs/{name[1]}") else name[0]

    parts = re.split(r"((?:^    .*\n?)+|`[^`\n]+`)", text, flags=re.MULTILINE)
    names = re.compile(r"\bdocs/([\w/-]+\.md)|\bOCIGPU-[A-Z]+-[0-9]+")
    return "".join(part if number % 2 else names.sub(lead, part) for number, part in enumerate(parts))


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
    helps = helps_of_container_cli()
    parts = [".SH DESCRIPTION\n" + verbatim(helps.pop(""))]
    parts += [f".SH {name.upper()}\n{verbatim(text)}" for name, text in helps.items()]
    summary = "reports GPUs and driver files with the options of nvidia-container-cli"
    return page_of("ocigpu-container-cli", summary, parts)


def helps_of_container_cli() -> dict[str, str]:
    """Return what --help prints, under "" and under each command that has its own."""
    from ocigpu.entry.container_cli.main import main as container_cli

    def help_of(*words: str) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            container_cli([*words, "--help"])
        return output.getvalue()

    commands = re.findall(r"^    ([a-z]+)  ", help_of(), re.MULTILINE)
    return {"": help_of(), **{name: text for name in commands if (text := help_of(name))}}


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
    elif sys.argv[1:2] == ["site"]:
        sys.path.insert(0, ROOT)
        write_site(sys.argv[2], sys.argv[3:] == ["mike"])
    else:
        sys.path += sys.argv[2:]
        main(sys.argv[1])
        from ocigpu import leave

        leave(0)  # a library in another language was seen to abort the interpreter's end, once in twenty
