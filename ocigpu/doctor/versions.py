"""Versions of installed programs: from this machine's programs, else from the package database below the root."""

import re

from ocigpu.doctor.files import LARGE_TEXT, RootFiles
from ocigpu.doctor.findings import KNOWN
from ocigpu.engines.places import parse_release
from ocigpu.system.programs import run_program

SECONDS = 5


def read_engine_releases(files: RootFiles) -> dict[str, str]:
    """Return the release of each installed engine, {"podman": "4.3.1"}; an engine of unknown release is left out.

    The program comes first: an engine of another origin (/usr/local, a bind mount) leaves its package's version behind.
    """
    packages = _dpkg_versions(files)
    found = {}
    for engine, known in KNOWN["engines"].items():
        release = _ask(files, known["programs"]) if files.live else ""
        release = release or next((packages[name] for name in known["packages"] if name in packages), "")
        if release:
            found[engine] = release
    return found


def _dpkg_versions(files: RootFiles) -> dict[str, str]:
    """Return the upstream versions of the engines' packages that dpkg has installed (deb-version(7))."""
    wanted = {name for known in KNOWN["engines"].values() for name in known["packages"]}
    found = {}
    for paragraph in (files.text("/var/lib/dpkg/status", LARGE_TEXT) or "").split("\n\n"):
        name = paragraph.partition("\n")[0].removeprefix("Package: ")
        if name in wanted and "\nStatus: install ok installed" in paragraph:
            version = next((line[9:] for line in paragraph.splitlines() if line.startswith("Version: ")), "")
            match = re.match(r"\d+(\.\d+)+", version.rpartition(":")[2])
            if match:
                found[name] = match[0]
    return found


def _ask(files: RootFiles, paths: list[str]) -> str:
    """Return the version a program of this machine prints, "" for none or if it does not answer in time."""
    path = files.program(*paths)
    if not path:
        return ""
    try:
        done = run_program([path, "--version"], SECONDS)
    except OSError:
        return ""
    return parse_release(done.output)
