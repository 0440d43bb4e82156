"""The kernel's messages, read without taking them from anybody."""

import errno
import os
import re

from ocigpu.core.errors import HostError, printable
from ocigpu.doctor.files import RootFiles
from ocigpu.system.files import open_regular

MAX_LINES = 20_000
_FILES = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog", "/var/log/audit/audit.log")
_TAIL = 4 << 20
DENIED = re.compile(r'apparmor="DENIED"|avc: +denied')
_OURS = re.compile(r"nvidia|ocigpu|/dev/dri", re.IGNORECASE)


def read_kernel_log(files: RootFiles) -> list[str]:
    """Return the last messages of the kernel, and of the audit daemon, oldest first.

    This machine's ring buffer is /dev/kmsg (a reader takes nothing from others: Documentation/ABI/testing/dev-kmsg),
    which by default only root may read.  Elsewhere, and for what auditd keeps to itself, the log files.
    Raises HostError when the ring buffer and every log file are unreadable or not there.
    """
    lines, reasons = [], []
    if files.live:
        try:
            lines += _read_kmsg()
        except OSError as error:
            reasons.append(f"/dev/kmsg: {error.strerror}")
    found = False
    for path in _FILES[3:] if files.live and not reasons else _FILES:
        try:
            lines += read_tail(files.find(path))
            found = found or files.exists(path)
        except OSError as error:
            reasons.append(f"{path}: {error.strerror}")
    if not lines and not found and (reasons or not files.live):
        raise HostError("OCIGPU-HOST-3", f"the kernel's log: {'; '.join(reasons) or 'no log file'}")
    return lines[-MAX_LINES:]


def _read_kmsg() -> list[str]:
    """Return the messages: a record is "priority,number,time,flags;text" and lines that begin with a space."""
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    lines: list[str] = []
    try:
        while len(lines) < MAX_LINES:
            try:
                record = os.read(fd, 8192)
            except OSError as error:
                if error.errno == errno.EPIPE:  # this record was overwritten: the next is read
                    continue
                if error.errno == errno.EAGAIN:
                    break
                raise
            if not record:
                break
            text = record.decode("utf-8", "replace").split("\n", 1)[0]
            lines.append(printable(text.partition(";")[2], 1000))
    finally:
        os.close(fd)
    return lines


def read_tail(path: str) -> list[str]:
    """Return the last lines of a log file, 4 MiB at most; none for no path.  Raises OSError."""
    if not path:
        return []
    with open_regular(path) as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL))
        return [printable(line, 1000) for line in file.read(_TAIL).decode("utf-8", "replace").splitlines()]


def denials(lines: list[str]) -> list[str]:
    """Return the lines in which SELinux or AppArmor refuses an access to the driver's or to our files."""
    return [line for line in lines if DENIED.search(line) and _OURS.search(line)]
