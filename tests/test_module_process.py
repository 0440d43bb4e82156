"""Modules in processes of their own: real ones, which answer, stop half-way, or do not end."""

import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.process import wait_for

from ocigpu.kubernetes.node.reader import ChildReader
from ocigpu.system.module_process import ModuleProcess

CHILD = """
import sys, signal

def main(what, *words):
    if what == "half":
        print("whole"); print("half", end="", flush=True)
        sys.stdin.read()
    elif what == "lines":
        for line in sys.stdin:
            print(*words, len(line), flush=True)
        sys.exit(3)
    elif what == "deaf":
        print("ready", flush=True)
        signal.pause()
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleProcess]:
    (tmp_path / "module_child.py").write_text(CHILD)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = ModuleProcess()
    yield found
    found.close()


def read_lines(process: ModuleProcess, count: int) -> list[bytes]:
    lines: list[bytes] = []
    while len(lines) < count:
        more, ended = process.wait(60)
        lines += more
        assert not ended
    return lines


def test_lines_go_both_ways_until_the_input_ends(process: ModuleProcess) -> None:
    process.start("module_child", "lines", "a b")
    long = b"x" * 300_000  # more than a pipe takes at once
    process.send(b"x")
    process.send(long)
    assert read_lines(process, 2) == [b"a b 2", b"a b 300001"]
    assert process.close(60) == 3
    assert (process.child, process.fileno(), process.close()) == (None, -1, None)


def test_half_a_line_is_waited_for_by_nobody(process: ModuleProcess) -> None:
    process.start("module_child", "half")
    assert read_lines(process, 1) == [b"whole"]
    wait_for("its half line", lambda: process.read() == ([], False) and process.unfinished == b"half")
    process.child.send_signal(signal.SIGSTOP)
    assert process.wait(0) == ([], False)
    assert process.close() == -signal.SIGKILL


def test_a_process_that_does_not_end_with_its_input_is_killed(process: ModuleProcess) -> None:
    process.start("module_child", "deaf")
    assert read_lines(process, 1) == [b"ready"]
    assert process.is_running()
    assert process.close(0.1) == -signal.SIGKILL
    assert not process.is_running()


def test_its_environment_is_empty_when_it_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alone_child.py").write_text("import os\ndef main(): print(os.getcwd(), 'SECRET' in os.environ)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("SECRET", "x")
    process = ModuleProcess(alone=True)
    process.start("alone_child")
    assert read_lines(process, 1) == [b"/ False"]
    assert process.close(60) == 0


READER = """
import sys
from ocigpu.kubernetes.node.reader import answer_requests

def read(request):
    print("this is no answer")
    if request == ["end"]:
        sys.exit(4)
    return request * 2

def main():
    answer_requests(read, lambda problem: problem)
"""


def test_requests_and_answers_are_objects_whatever_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reader_child.py").write_text(READER)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    reader: ChildReader[Any] = ChildReader("reader_child", lambda problem: problem)

    def ask(request: object) -> object:
        reader.ask(request, 0.0)
        assert reader.busy
        while (answer := reader.answer(0.0)) is None:
            select.select([reader], [], [], 60)
        assert not reader.busy
        return answer

    large = ["x" * 200_000]
    assert ask(large) == large * 2
    assert ask({}) == "TypeError: unsupported operand type(s) for *: 'dict' and 'int'"
    assert ask(["end"]) == "the process that reads the host ended (status 4)"
    assert ask([1]) == [1, 1], "it is started again"
    reader.close()
