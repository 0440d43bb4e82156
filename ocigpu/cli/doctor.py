"""``ocigpu doctor``: what is wrong with this host's GPU containers, and the commands that put it right."""

from ocigpu.cli import show
from ocigpu.cli.common import settings_path
from ocigpu.core.errors import UsageError, printable


def doctor_command(
    all_: bool = False,
    root: str = "",
    archive: str = "",
    config: str = "",
    json: bool = False,
    list_: bool = False,
    markdown: bool = False,
) -> int:
    from ocigpu.doctor.report import exit_status, render, render_markdown, run_checks, to_data
    from ocigpu.doctor.table import CHECKS

    if list_ or markdown:
        if list_ and markdown:
            raise UsageError("--list and --markdown exclude each other")
        if markdown:
            print(render_markdown(), end="")
        elif json:
            show.data(
                {"checks": [{"name": item.name, "title": item.title, "meaning": item.meaning} for item in CHECKS]}
            )
        else:
            show.table(("name", "finds"), [(item.name, item.title) for item in CHECKS], fold=False)
        return 0
    from ocigpu.doctor.host import Host

    host = Host(root, config if root else settings_path(config))
    with show.Progress("still checking: a GPU that nothing keeps awake, or a daemon, takes its time"):
        findings = run_checks(host)
    if json:
        show.data(to_data(host, findings))
    else:
        for line in render(host, findings, all_):
            print(line)
    if archive:
        from ocigpu.doctor.archive import write_archive

        names = write_archive(archive, host, findings)
        if not json:
            print(f"wrote {printable(archive)} ({len(names)} files): look at left-out.txt in it before you pass it on")
    return exit_status(findings)
