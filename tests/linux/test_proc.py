"""What procfs tells of processes: mount points and programs have names that others chose."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ocigpu.system.proc import Mount, ProcessStat, is_running, parse_mounts, parse_stat, read_stat

LINE = "36 35 98:0 / {} rw,noatime master:1 - ext3 /dev/root rw\n"
BREAKS = ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("character", BREAKS, ids=ascii)
def test_only_a_newline_ends_a_line(character: str) -> None:
    """str.splitlines() takes all of these for ends of lines, and the kernel writes them as they are."""
    table = parse_mounts(LINE.format(f"/a{character}b") + LINE.format("/c").replace("36", "37", 1))
    assert {number: mount.point for number, mount in table.items()} == {36: f"/a{character}b", 37: "/c"}


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
        parse_mounts(text)


def test_no_mounts_are_an_empty_table() -> None:
    assert parse_mounts("") == {}


READ = """
import sys
from ocigpu.system.proc import read_mounts
print(ascii([mount.point for mount in read_mounts().values() if mount.point.startswith(sys.argv[1])]))
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


def test_every_field_of_a_mount_is_read() -> None:
    """Optional fields are none or several; four characters are in octal, another backslash stands for itself."""
    table = parse_mounts(
        r"36 35 98:0 /a\040b /c\011\134x\9 rw,noatime shared:1 master:2 - ext3 /dev/my\040disk rw,errors=continue" "\n"
        "37 36 0:5 / /d ro - tmpfs none rw\n"
    )  # fmt: skip
    assert table == {
        36: Mount(
            36, 35, "98:0", "/a b", "/c\t\\x\\9", ("rw", "noatime"), ("shared:1", "master:2"),
            "ext3", "/dev/my disk", ("rw", "errors=continue"),
        ),
        37: Mount(37, 36, "0:5", "/", "/d", ("ro",), (), "tmpfs", "none", ("rw",)),
    }  # fmt: skip


STAT = "7 ({}) S 1 7 7 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 4242 1000 10"


@pytest.mark.parametrize("name", ["cat", "a) Z 9", ") R 1 1 1 1 1", "x\ny", ""])
def test_a_process_may_have_any_name(name: str) -> None:
    assert parse_stat(STAT.format(name)) == ProcessStat("S", 1, 4242)


@pytest.mark.parametrize("text", ["", "7 (cat) S 1 7", STAT.replace("4242", "x")])
def test_another_text_is_no_stat(text: str) -> None:
    with pytest.raises(OSError, match="stat"):
        parse_stat(text)


def test_a_process_that_has_ended_or_started_at_another_time_does_not_run() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    path = f"/proc/{pid}/stat"
    assert read_stat(path).ended
    assert not is_running(read_stat(path).start, path)
    os.waitpid(pid, 0)
    assert not is_running(0, path)
    own = read_stat("/proc/self/stat")
    assert own.parent == os.getppid()
    assert is_running(own.start, "/proc/self/stat")
    assert not is_running(own.start + 1, "/proc/self/stat")
