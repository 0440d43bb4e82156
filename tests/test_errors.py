"""What nobody was prepared for becomes one line with a code."""

import errno
import ssl

import pytest

from ocigpu.core import errors
from ocigpu.core.errors import HostError, OsErrorAs, RequestError, as_own_error, reason_of


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


def wrapped(cause: Exception) -> Exception:
    """Return an error as a library for HTTP raises it."""
    try:
        raise ValueError(f"it failed: {cause}") from cause
    except ValueError as error:
        return error


def of_tls(reason: str, verify: str = "") -> ssl.SSLError:
    error = ssl.SSLCertVerificationError() if verify else ssl.SSLError()
    error.library, error.reason = "SSL", reason
    if verify:
        error.verify_message = verify
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "Connection refused"),
        (wrapped(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")), "Connection refused"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), "/x: No such file"),
        (of_tls("WRONG_VERSION_NUMBER"), "wrong version number"),
        (wrapped(of_tls("CERTIFICATE_VERIFY_FAILED", "self-signed certificate")), "self-signed certificate"),
        (TimeoutError("timed out"), "timed out"),
        (wrapped(KeyError("x")), "it failed: 'x'"),
        (ValueError(), "ValueError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_of_a_failure_has_no_numbers(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize(
    ("error", "said"),
    [(FileNotFoundError(errno.ENOENT, "No such file", "/x"), "No such file"), (TimeoutError("no answer"), "no answer")],
)
def test_the_error_of_a_block_is_told_as_ours(error: OSError, said: str) -> None:
    with pytest.raises(HostError) as caught, OsErrorAs(HostError, "OCIGPU-MIG-3", "write /x"):
        raise error
    assert caught.value.message == f"write /x: {said}"
    with pytest.raises(ValueError, match="other"), OsErrorAs(HostError, "OCIGPU-MIG-3", "write /x"):
        raise ValueError("other")


def test_a_package_needs_libpq_of_the_distribution_for_postgresql(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "__file__", "/usr/lib/ocigpu/versions/1/library/ocigpu/core/errors.py")
    assert "libpq5" in errors.how_to_install("postgresql")
    assert "libpq" not in errors.how_to_install("tenants")
