"""``python newest.py``: exit status 1 if Debian's stable has a newer source of Python than sources.txt.

A newer one has mended faults, of security as a rule: then the second line of sources.txt wants its address and sum.
"""

import lzma
import pathlib
import re
import subprocess
import sys
import urllib.request

INDEXES = (
    "https://deb.debian.org/debian/dists/trixie/main/source/Sources.xz",
    "https://deb.debian.org/debian-security/dists/trixie-security/main/source/Sources.xz",
)
PACKAGE = "python3.13"


def find_version(index: str) -> str:
    """Return the version of the package in an index, "" if it has none; raises OSError."""
    with urllib.request.urlopen(index, timeout=60) as answer:  # noqa: S310 - of INDEXES
        text = lzma.decompress(answer.read()).decode()
    for entry in text.split("\n\n"):
        if entry.startswith(f"Package: {PACKAGE}\n"):
            return re.search(r"^Version: (?:\d+:)?(\S+)$", entry, re.MULTILINE)[1]
    return ""


def main() -> int:
    """Print both versions; returns the exit status."""
    sources = pathlib.Path(__file__).with_name("sources.txt").read_text(encoding="utf-8")
    carried = re.search(rf"{re.escape(PACKAGE)}_(\S+)\.debian\.tar", sources)[1]
    found = [version for version in map(find_version, INDEXES) if version]
    compare = ["dpkg", "--compare-versions", carried, "lt"]
    older = [version for version in found if subprocess.run([*compare, version], check=False).returncode == 0]
    print(f"{PACKAGE}: carried {carried}, in Debian {', '.join(found)}")
    return 1 if older or not found else 0


if __name__ == "__main__":
    sys.exit(main())
