"""``ocigpu doctor``: what is wrong with this host's GPU containers, and the commands that put it right."""

import io
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TextIO

from ocigpu.cli.front import show
from ocigpu.cli.front.common import settings_path
from ocigpu.core.errors import UsageError, printable

if TYPE_CHECKING:
    from ocigpu.doctor.findings import Finding
    from ocigpu.doctor.host import Host

WATCH_SECONDS = 10
FORMATS = ("text", "json", "junit", "prometheus")


def doctor_command(
    all_: bool = False,
    root: str = "",
    fix: bool = False,
    yes: bool = False,
    format_: str = "",
    output: str = "",
    archive: str = "",
    html: str = "",
    config: str = "",
    json: bool = False,
    list_: bool = False,
    markdown: bool = False,
    tenants: bool = False,
    claims: bool = False,
    since: str = "",
    watch: bool = False,
) -> int:
    from ocigpu.doctor.findings import CHECKS, CLAIMS, TENANTS
    from ocigpu.doctor.report import exit_status, render, render_markdown, render_part, run_checks, to_data

    parts = {
        "tenants": (tenants, TENANTS, "GPUs for virtual machines of tenants"),
        "claims": (claims, CLAIMS, "GPUs for resource claims"),
    }
    asked = [name for name, part in parts.items() if part[0]]
    if len(asked) > 1:
        raise UsageError("--tenants and --claims exclude each other")
    if asked and (fix or archive or html or markdown or format_ not in ("", "text", "json")):
        raise UsageError(
            f"--{asked[0]} reports as text or JSON; it cannot be combined with --fix, --archive, --html or --markdown"
        )
    _, checks, title = parts[asked[0]] if asked else (False, CHECKS, "")
    if list_ or markdown:
        if list_ and markdown:
            raise UsageError("--list and --markdown exclude each other")
        if markdown:
            print(render_markdown(), end="")
        elif json:
            show.data(
                {"checks": [{"name": item.name, "title": item.title, "meaning": item.meaning} for item in checks]}
            )
        else:
            show.table(("name", "finds"), [(item.name, item.title) for item in checks], fold=False)
        return 0
    form = format_ or ("json" if json else "text")
    if form not in FORMATS or (json and form != "json"):
        raise UsageError(f"--format is one of {', '.join(FORMATS)}; --json is short for --format json")
    if output and (form == "text" or asked or since):
        raise UsageError("--output is for a whole report as --format json, junit or prometheus")
    if (fix and form != "text") or (yes and not fix):
        raise UsageError("--fix reports as text, and --yes belongs to it")
    if fix and not yes and not (sys.stdin and sys.stdin.isatty()):
        raise UsageError("--fix asks before each fix, but standard input is not a terminal", "run all: --fix --yes")
    if (since or watch) and (fix or archive or html or form not in ("text", "json")):
        raise UsageError(
            "--since and --watch report as text or JSON; they cannot be combined with --fix, --archive or --html"
        )
    if watch and (since or form == "json"):
        raise UsageError("--watch reports as text, and excludes --since")
    before = _read_before(since) if since else []
    from ocigpu.doctor.host import Host

    def examine(names: tuple[str, ...] = ()) -> "tuple[Host, list[Finding]]":
        host = Host(root, config if root else settings_path(config))
        with show.Progress("still checking: a GPU that nothing keeps awake, or a daemon, takes its time"):
            return host, run_checks(host, names, checks)

    def report() -> None:
        lines = render_part(title, host, findings, all_) if title else render(host, findings, all_)
        show.report(lines)

    host, findings = examine()
    if fix and root and not (host.simulated and _is_own(root)):
        raise UsageError(f"--fix --root {root}: not on another machine's disk, whose links may lead to this machine")
    if since:
        return _report_since(since, before, host, findings, form)
    with _written_to(output):
        if form == "json":
            show.data(to_data(host, findings))
        elif form == "text":
            report()
        else:
            from ocigpu.doctor import formats

            print(getattr(formats, f"render_{form}")(host, findings), end="")
    if fix and carry_out_fixes(findings, lambda name: examine((name,))[1], yes):
        print()
        host, findings = examine()
        report()
    if archive:
        from ocigpu.doctor.archive import write_archive

        names = write_archive(archive, host, findings)
        if form == "text":
            print(f"wrote {printable(archive)} ({len(names)} files): read left-out.txt in it before you pass it on")
    if html:
        from ocigpu.doctor.formats import write_html

        write_html(html, host, findings)
        if form == "text":
            print(f"wrote {printable(html)}: review it before you pass it on")
    if watch:
        _watch(findings, lambda: examine()[1])
    return exit_status(findings)


@contextmanager
def _written_to(path: str) -> "Iterator[None]":
    """Write what is printed in the block to a file, replaced in one step: its readers see the old one or the new one.

    Does nothing without a path; raises UsageError if the file cannot be written.
    """
    if not path:
        yield
        return
    from ocigpu.cdi.write import write_file

    directory = os.path.dirname(path)
    if directory and not os.path.isdir(directory):  # nobody would read it there
        hint = f"If it is node_exporter's --collector.textfile.directory: mkdir -p {shlex.quote(directory)}"
        raise UsageError(f"--output {printable(path)}: there is no directory {printable(directory)}", hint)
    with redirect_stdout(io.StringIO()) as printed:
        yield
    try:
        write_file(path, printed.getvalue().encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UsageError(f"--output {printable(path)}: {error.strerror}") from error


def _read_before(path: str) -> "list[Finding]":
    from ocigpu.doctor.changes import read_report

    return read_report(path)


def _report_since(path: str, before: "list[Finding]", host: "Host", findings: "list[Finding]", form: str) -> int:
    """Report what has changed since a report was written; returns the exit status of what is new."""
    from ocigpu.doctor import changes as changed
    from ocigpu.doctor.report import exit_status, to_data

    changes = changed.compare(before, findings)
    if form == "json":
        show.data({**to_data(host, findings), "since": changed.to_data(changes)})
    else:
        counts = f"{len(changes.new)} new, {len(changes.gone)} gone, {len(changes.same)} unchanged"
        print(f"since {printable(path)}: {counts}")
        show.report(changed.render_changes(changes))
    return exit_status(list(changes.new))


def _watch(before: "list[Finding]", examine: "Callable[[], list[Finding]]") -> None:
    """Look again and again, and report what has changed, until somebody ends it."""
    import time

    from ocigpu.doctor import changes as changed

    print(f"\nlooking again every {WATCH_SECONDS} s: + is new, - is gone; Ctrl-C ends it", flush=True)
    while True:
        time.sleep(WATCH_SECONDS)
        now = examine()
        changes = changed.compare(before, now)
        if changes:
            print(f"\n{time.strftime('%H:%M:%S')}")
            show.report(changed.render_changes(changes))
            sys.stdout.flush()
        # what could not be looked at now is remembered
        before = [*now, *changes.unchecked]


def _is_own(root: str) -> bool:
    """Whether nobody else could have put links below a directory whose files are to be changed."""
    found = os.stat(root)
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def carry_out_fixes(findings: "list[Finding]", examine: Callable[[str], "list[Finding]"], yes: bool) -> int:
    """Carry out the fixes that are known to be safe, each when the answer is yes; return how many were tried."""
    from ocigpu.doctor.report import sort_bad

    tried = 0
    for number, item in enumerate(sort_bad(findings), 1):
        if not item.safe:
            continue
        again = [one for one in examine(item.name) if one.is_still(item)] if tried else [item]
        if not again:  # what was done for another has helped
            print(f"\n{number}. {item.name}: already resolved")
            continue
        print(f"\n{number}. {item.name}: {printable(item.text)}")
        for line in item.safe:
            print(f"    {printable(line, 1000)}")
            if not yes:
                run_fix(line, ("--dry-run",))
        if not yes and not show.confirm("Carry it out?", piped=True):
            continue
        tried += 1
        failed = next((line for line in item.safe if run_fix(line)), "")
        gone = not any(one.is_still(item) for one in examine(item.name))
        result = "done: it is gone" if gone else "done, and it is still there"
        print(f"    {f'failed: {printable(failed, 1000)}' if failed else result}")
        for line in item.fixes:
            if line not in item.safe:
                print(f"    left to you: {printable(line, 1000)}")
    if not tried:
        print("\nnothing was carried out: --fix runs only what is known to be safe")
    return tried


def run_fix(line: str, more: tuple[str, ...] = (), output: "TextIO | None" = None) -> int:
    """Carry out a fix as it is printed, and return its exit status; ``--dry-run`` shows it, where a command can.

    ``output``: where it prints, standard output unless something else is given.
    """
    import contextlib
    import shlex
    import subprocess

    from ocigpu.cli.front.main import find_command, main
    from ocigpu.cli.front.manual import read_page

    words = shlex.split(line, comments=True)
    if words[0] == "ocigpu":
        command = find_command(words[1:])[0]
        if more and "--dry-run" not in read_page(command).options:
            return 0
        with contextlib.redirect_stdout(output or sys.stdout):
            return main([*words[1:], *more])
    if more:
        return 0
    sys.stdout.flush()
    return subprocess.run(["/bin/sh", "-c", line], check=False, stdout=output).returncode
