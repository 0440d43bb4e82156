"""documents.py SHARE LIBRARY...: writes man pages and shell completion of the commands below SHARE.

LIBRARY: directories in which ocigpu and what it imports are found.  Everything comes from the commands themselves:
their parsers, help texts and usage texts.  Only SHARE is changed.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator

MARK = "written by packaging/install.sh"


def main(share: str) -> None:
    from typer.main import get_command

    from ocigpu.cli.main import app

    pages = dict(make_pages(get_command(app), "ocigpu", None))
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


# Completion


def make_completion(shell: str) -> str:
    """Return typer's script for a shell; it asks the command itself for what can follow."""
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="ocigpu", complete_var="_OCIGPU_COMPLETE", shell=shell)
    if shell != "zsh":
        return f"# {MARK}\n{script}"
    # "#compdef" has to be the first line.  When zsh loads the file it runs it, for the first completion too.
    first, _, rest = script.partition("\n")
    return f'{first}\n# {MARK}\n{rest}\n[[ $zsh_eval_context[-1] != loadautofunc ]] || _ocigpu_completion "$@"\n'


# Man pages (man-pages(7), groff_man(7))


def make_pages(command, path: str, parent) -> Iterator[tuple[str, str]]:
    """Yield name and text of the page of a command of typer and of all commands below it."""
    import typer

    context = typer.Context(command, info_name=path.rpartition(" ")[2], parent=parent, **command.context_settings)
    name = path.replace(" ", "-")
    visible = {key: child for key, child in getattr(command, "commands", {}).items() if not child.hidden}
    pieces = " ".join(command.collect_usage_pieces(context))
    parts = [
        header(name, command.get_short_help_str(200)),
        f".SH SYNOPSIS\n\\fB{roff(path)}\\fR {roff(pieces)}",
        ".SH DESCRIPTION\n" + paragraphs(command.help or ""),
    ]
    records = [
        (parameter.param_type_name, parameter.get_help_record(context))
        for parameter in command.get_params(context)
        if not getattr(parameter, "hidden", False)
    ]
    for kind, title in (("argument", "ARGUMENTS"), ("option", "OPTIONS")):
        rows = [record for found, record in records if found == kind and record]
        if rows:
            parts.append(f".SH {title}\n" + "\n".join(f".TP\n{bold(term)}\n{roff(text)}" for term, text in rows))
    if visible:
        rows = [(f"{name}-{key}", child.get_short_help_str(200)) for key, child in visible.items()]
        parts.append(".SH COMMANDS\n" + "\n".join(f".TP\n\\fB{roff(page)}\\fR(1)\n{roff(text)}" for page, text in rows))
    parts.append(sections(command.epilog or ""))
    parts.append(see_also([path.rpartition(" ")[0].replace(" ", "-")] if parent else list(OTHERS)))
    yield name, "\n".join(filter(None, parts))
    for key, child in visible.items():
        yield from make_pages(child, f"{path} {key}", context)


OTHERS = ("ocigpu-runtime", "ocigpu-hook", "ocigpu-container-cli")


def page_of_runtime() -> str:
    from ocigpu import runtime

    synopsis = "ocigpu-runtime [OPTIONS OF THE LOW-LEVEL RUNTIME] COMMAND [ARGUMENTS]"
    return "\n".join(
        [
            header("ocigpu-runtime", "an OCI runtime that gives containers their NVIDIA GPUs"),
            f".SH SYNOPSIS\n{bold(synopsis)}",
            ".SH DESCRIPTION\n" + paragraphs((runtime.__doc__ or "").strip()),
            see_also(["ocigpu", "ocigpu-config-keys", "ocigpu-hook"]),
        ]
    )


def page_of_hook() -> str:
    from ocigpu.hook import USAGE

    return "\n".join(
        [
            header("ocigpu-hook", "an OCI hook that gives a container its NVIDIA GPUs"),
            ".SH SYNOPSIS\n" + verbatim(USAGE.partition("\n\n")[0].removeprefix("usage: ")),
            ".SH DESCRIPTION\n" + verbatim(USAGE.partition("\n\n")[2]),
            see_also(["ocigpu", "ocigpu-runtime"]),
        ]
    )


def page_of_container_cli() -> str:
    """Return the page with the help of the command and, where it is known, of each command below it."""
    from ocigpu.entry.container_cli.main import main as container_cli

    def help_of(*words: str) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            container_cli([*words, "--help"])
        return output.getvalue()

    commands = re.findall(r"^    ([a-z]+)  ", help_of(), re.MULTILINE)
    parts = [
        header("ocigpu-container-cli", "reports GPUs and driver files with the options of nvidia-container-cli"),
        ".SH DESCRIPTION\n" + verbatim(help_of()),
    ]
    parts += [f".SH {name.upper()}\n{verbatim(text)}" for name in commands if (text := help_of(name))]
    return "\n".join([*parts, see_also(["ocigpu"])])


def header(name: str, summary: str) -> str:
    from ocigpu import __version__

    title = f'.\\" {MARK}\n.TH {roff(name).upper()} 1 "" "ocigpu {__version__}" "ocigpu"'
    summary = summary[:1].lower() + summary[1:].rstrip(".")
    return f"{title}\n.nh\n.ad l\n.SH NAME\n{roff(name)} \\- {roff(summary)}"


def see_also(names: list[str]) -> str:
    return ".SH SEE ALSO\n" + ",\n".join(f"\\fB{roff(name)}\\fR(1)" for name in names)


def sections(epilog: str) -> str:
    """Return an epilog's paragraphs: one that begins with a line "Title:" becomes a section."""
    parts = []
    for paragraph in split(epilog):
        title, colon, rest = paragraph.lstrip("\b\n").partition(":\n")
        if colon and "\n" not in title:
            parts.append(f".SH {roff(title).upper()}\n{verbatim(rest)}")
        else:
            parts.append(paragraphs(paragraph) if parts else f".SH NOTES\n{paragraphs(paragraph)}")
    return "\n".join(parts)


def split(text: str) -> list[str]:
    return [paragraph for paragraph in re.split(r"\n[ \t]*\n", text.strip("\n")) if paragraph.strip("\b\n ")]


def paragraphs(text: str) -> str:
    """Return help text; a paragraph that begins with a backspace keeps its lines, as in typer's help."""
    return "\n.PP\n".join(
        verbatim(paragraph.lstrip("\b\n")) if paragraph.startswith("\b") else roff(paragraph)
        for paragraph in split(text)
    )


def verbatim(text: str) -> str:
    return f".nf\n{roff(text.rstrip())}\n.fi"


def bold(text: str) -> str:
    return f"\\fB{roff(text)}\\fR"


def roff(text: str) -> str:
    """Return text in which nothing means anything to roff."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("\b", "")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.path += sys.argv[2:]
    main(sys.argv[1])
