"""``python newest.py [MADE]``: exit status 1 if Debian has a newer Python or musl than a snapshot is linked from.

A newer one has mended faults, of security as a rule.  Python's is in sources.txt: the second line then needs another
address and sum.  musl is that of the distribution on which build.sh ran: upgrade it there, and build again.  MADE: the
directory that build.sh has made; by default the musl.txt beside this file counts, which packages contain.
"""

import lzma
import pathlib
import re
import subprocess
import sys
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).parent
INDEXES = (
    "https://deb.debian.org/debian/dists/{0}/main/source/Sources.xz",
    "https://deb.debian.org/debian-security/dists/{0}-security/main/source/Sources.xz",
)
PYTHON, SUITE = "python3.13", "trixie"


def find_version(package: str, index: str) -> str:
    """Return the version of a package in an index, "" if it has none, or is missing; raises OSError."""
    try:
        with urllib.request.urlopen(index, timeout=60) as answer:  # noqa: S310 - of INDEXES
            text = lzma.decompress(answer.read()).decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:  # testing and unstable have no index for security
            return ""
        raise
    for entry in text.split("\n\n"):
        if entry.startswith(f"Package: {package}\n"):
            return re.search(r"^Version: (?:\d+:)?(\S+)$", entry, re.MULTILINE)[1]
    return ""


def is_newest(package: str, carried: str, suite: str) -> bool:
    """Print both versions of a package; tell whether the one that is carried is the newest."""
    found = [version for index in INDEXES if (version := find_version(package, index.format(suite)))]
    compare = ["dpkg", "--compare-versions", carried, "lt"]
    older = [version for version in found if subprocess.run([*compare, version], check=False).returncode == 0]
    print(f"{package}: carried {carried}, in Debian's {suite} {', '.join(found) or 'none'}")
    return bool(found) and not older


def main(made: pathlib.Path) -> int:
    """Compare both; returns the exit status."""
    sources = (HERE / "sources.txt").read_text(encoding="utf-8")
    carried = re.search(rf"{re.escape(PYTHON)}_(\S+)\.debian\.tar", sources)[1]
    newest = is_newest(PYTHON, carried, SUITE)
    name, suite, *version = (made / "musl.txt").read_text(encoding="utf-8").split()
    if name == "debian" and version:
        newest = is_newest("musl", version[0], suite) and newest
    else:
        print(f"musl: carried {' '.join(version) or 'an unknown version'}, not compared: it is of {name} {suite}")
    return 0 if newest else 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]) if sys.argv[1:] else HERE))
