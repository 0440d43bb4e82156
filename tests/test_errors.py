"""What nobody was prepared for becomes one line with a code."""

import errno

import pytest

from ocigpu.core.errors import RequestError, as_own_error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "INT-4: start a process: Resource tempor"),
        (OSError(errno.EMFILE, "Too many open files"), "INT-4: open a file: Too many open files"),
        (OSError(errno.ENOSPC, "No space left on device", "/run/x"), "INT-4: write /run/x: No space left on device"),
        (OSError(errno.ENOMEM, "Cannot allocate memory", 7), "INT-4: get memory: Cannot allocate memory"),
        (MemoryError(), "INT-4: get memory: Cannot allocate memory"),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "/x"),
            "INT-1: FileNotFoundError: [Errno 2] No such file: '/x'",
        ),
        (OSError("no number"), "INT-1: OSError: no number"),
        (ZeroDivisionError("a defect"), "INT-1: ZeroDivisionError: a defect"),
        (RequestError("OCIGPU-REQ-1", "ours"), "REQ-1: ours"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_the_system_refuses_is_no_defect(error: Exception, shown: str) -> None:
    assert as_own_error(error).render("program").startswith(f"program: OCIGPU-{shown}")
