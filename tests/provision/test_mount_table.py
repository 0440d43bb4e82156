"""The mount table of a container's namespace: mount points have names that others chose."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ocigpu.provision.mounts import parse_mount_table

LINE = "36 35 98:0 / {} rw,noatime master:1 - ext3 /dev/root rw\n"
BREAKS = ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("character", BREAKS, ids=ascii)
def test_only_a_newline_ends_a_line(character: str) -> None:
    """str.splitlines() takes all of these for ends of lines, and the kernel writes them as they are."""
    table = parse_mount_table(LINE.format(f"/a{character}b") + LINE.format("/c").replace("36", "37", 1))
    assert {mount: fields[4] for mount, fields in table.items()} == {36: f"/a{character}b", 37: "/c"}


@pytest.mark.parametrize(
    "text",
    [
        "\n",
        "36 35\n",
        LINE.format("/a").replace("36", "x"),
        LINE.format("/a").replace("36", "\u0663"),
        LINE.format("/a").replace("36", "9" * 5000),
        LINE.format("/a").replace(" - ", " "),
        LINE.format("/a").replace(" ext3 /dev/root rw", ""),
    ],
    ids=["empty line", "short", "no number", "a digit of another script", "long number", "no end of fields", "no type"],
)
def test_another_text_is_an_error_with_a_number(text: str) -> None:
    with pytest.raises(OSError, match="mountinfo"):
        parse_mount_table(text)


def test_no_mounts_are_an_empty_table() -> None:
    assert parse_mount_table("") == {}


READ = """
import os, sys
os.chdir("/proc/self")
from ocigpu.provision.mounts import read_mount_table
print(ascii([fields[4] for fields in read_mount_table().values() if fields[4].startswith(sys.argv[1])]))
"""


@pytest.mark.root
def test_the_kernel_writes_other_ends_of_lines_as_they_are(tmp_path: Path) -> None:
    names = [f"{tmp_path}/a{character}b" for character in BREAKS]
    for name in names:
        os.mkdir(name)
    mounts = 'mount --make-rprivate /; for name; do mount -t tmpfs none "$name"; done; exec "$python" -c "$read" "$dir"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", mounts, "sh", *names],
        env={**os.environ, "python": sys.executable, "read": READ, "dir": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ascii(names)
