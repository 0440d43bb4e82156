"""What programs that stay have in common."""

import math
import os
import signal
import threading
from pathlib import Path

import pytest
from support.lines import Lines

from ocigpu.system.service import Backoff, FollowedFile, Signals, split_address


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (":9400", ("", 9400)),
        ("[::1]:80", ("::1", 80)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("h:009400", ("h", 9400)),
        ("h:0000000", ("h", 0)),
        ("h:0000099999", None),
        ("h:65536", None),
        ("h:" + "9" * 5000, None),
        ("h:٨٠", None),
        ("h:", None),
        ("9400", None),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, found: tuple[str, int] | None) -> None:
    assert split_address(text) == found


def test_a_failure_is_tried_again_ever_more_rarely_until_it_works() -> None:
    retry = Backoff(2.0, 10.0)
    assert retry.due == 0.0
    assert [retry.failed(100.0) for _ in range(5)] == [2.0, 4.0, 8.0, 10.0, 10.0]
    assert retry.due == 110.0
    retry.reset(7.0)
    assert (retry.delay, retry.due) == (0.0, 7.0)
    assert retry.failed(0.0) == 2.0


def test_a_line_is_logged_once_until_another_one_or_nothing_is_to_be_said() -> None:
    log = Lines()
    for text in ("a", "a", "b", "a", "", "a"):
        log.once("topic", "info", text)
    assert log.lines == ["info: a", "info: b", "info: a", "info: a"]
    assert log.forget("topic")
    assert not log.forget("topic")
    log.new("notes", "warning", ("one", "two"))
    log.new("notes", "warning", ("two", "three"))
    assert log.lines[4:] == ["warning: one", "warning: two", "warning: three"]


def test_a_file_that_comes_changes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    followed = FollowedFile(str(path))
    for change in (lambda: path.write_text("a"), lambda: path.write_text("bb"), path.unlink):
        assert not followed.has_changed()
        change()
        assert followed.has_changed()
    assert not FollowedFile("").has_changed()


@pytest.mark.parametrize("hangup", [False, True])
def test_signals_end_a_wait_and_are_as_before_afterwards(hangup: bool) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with Signals((signal.SIGTERM,), hangup) as signals:
        assert (signal.getsignal(signal.SIGHUP) == before[1]) is not hangup
        if hangup:
            os.kill(os.getpid(), signal.SIGHUP)
            signals.wait(math.inf)
            assert signals.take_again()
            assert not signals.take_again()
        threading.Thread(target=signals.wake).start()
        signals.wait(math.inf)
        reader, writer = os.pipe()
        os.write(writer, b"x")
        assert signals.wait(math.inf, reader) == [reader]
        assert not signals.stopping
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.wait(math.inf) == []
        assert signals.stopping
    os.close(reader)
    os.close(writer)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
