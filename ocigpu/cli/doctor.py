"""``ocigpu doctor``: what is wrong with this host's GPU containers, and the commands that put it right."""

from typing import Annotated

import typer

from ocigpu.cli.common import JsonOption, print_json, print_table, settings_path, told_when_slow
from ocigpu.core.errors import UsageError, printable

DOCTOR_EPILOG = """\
Nothing is changed and no container is started. As an ordinary user less can be looked at; what was not is named.
The names of findings stay the same from release to release; docs/DOCTOR.md explains each.

\b
Exit status:
  0  nothing is wrong; there may be notes, and things that were not checked
  1  the command failed
  2  the command line could not be understood
  3  warnings: some containers will not get what they ask for
  4  errors: containers do not get GPUs, or lose them

\b
Examples:
  ocigpu doctor
  ocigpu doctor --all
  ocigpu doctor --json | jq '.findings[] | select(.severity == "error") | .name'
  ocigpu doctor --bundle /tmp/support.tar.gz
  ocigpu sim create /tmp/gpus --fault missing-uvm && ocigpu doctor --root /tmp/gpus
"""


def doctor_command(
    everything: Annotated[bool, typer.Option("--all", help="Show also what is well, with what was looked at.")] = False,
    root: Annotated[
        str,
        typer.Option(
            "--root", metavar="DIR", help="Examine the host whose root this is: a simulated one, a mounted disk."
        ),
    ] = "",
    bundle: Annotated[
        str,
        typer.Option("--bundle", metavar="FILE", help="Also write an archive (tar.gz) for support, without secrets."),
    ] = "",
    config: Annotated[
        str,
        typer.Option(
            "--config", metavar="FILE", help="Settings file.  [default: $OCIGPU_CONFIG, else /etc/ocigpu/config.toml]"
        ),
    ] = "",
    json: JsonOption = False,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks and examine nothing.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/DOCTOR.md: all checks.")] = False,
) -> int:
    """Find out why containers do not get their GPUs; prints evidence and the commands that help."""
    from ocigpu.doctor.report import exit_status, render, render_markdown, run_checks, to_data
    from ocigpu.doctor.table import CHECKS

    if list_checks or markdown:
        if list_checks and markdown:
            raise UsageError("--list and --markdown exclude each other")
        if markdown:
            print(render_markdown(), end="")
        elif json:
            print_json([{"name": item.name, "title": item.title, "meaning": item.meaning} for item in CHECKS])
        else:
            print_table(("name", "finds"), [(item.name, item.title) for item in CHECKS], fold=False)
        return 0
    from ocigpu.doctor.host import Host

    host = Host(root, config if root else settings_path(config))
    with told_when_slow("still checking: a GPU that nothing keeps awake, or a daemon, takes its time"):
        findings = run_checks(host)
    if json:
        print_json(to_data(host, findings))
    else:
        for line in render(host, findings, everything):
            print(line)
    if bundle:
        from ocigpu.doctor.archive import write_archive

        names = write_archive(bundle, host, findings)
        if not json:
            print(f"wrote {printable(bundle)} ({len(names)} files): look at left-out.txt in it before you pass it on")
    return exit_status(findings)
