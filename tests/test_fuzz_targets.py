"""What `make fuzz` runs for hours, for a second each: the inputs that are kept, and some that are damaged."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.process import processor_seconds

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from fuzz import targets  # noqa: E402 - of the directory that a line before adds

SEEDS = {
    name: [path.read_bytes() for path in sorted((ROOT / "fuzz/corpus" / name).iterdir())] for name in targets.TARGETS
}
NAMES = pytest.mark.parametrize("name", targets.TARGETS)


@pytest.fixture(autouse=True, scope="module")
def directory() -> Iterator[None]:
    yield
    targets.clean()


@NAMES
def test_every_kept_input_is_read_or_refused_in_one_line(name: str) -> None:
    assert SEEDS[name]
    for data in (b"", *SEEDS[name]):
        targets.run(name, data)


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """An input of the corpus with some places overwritten, cut out, or with words put in."""
    data = bytearray(draw(st.sampled_from(SEEDS[name])))
    words = st.sampled_from([word.encode() for word in targets.TARGETS[name].words])
    for place in draw(st.lists(st.integers(0, max(len(data), 1)), max_size=6)):
        text = draw(words | st.binary(max_size=4))
        data[place : place + draw(st.sampled_from([0, len(text), 40]))] = text
    return bytes(data)


@NAMES
def test_damaged_inputs_are_read_or_refused_in_one_line(name: str, times: Callable[[int], int]) -> None:
    @given(st.binary(max_size=200) | damaged(name))
    @settings(max_examples=times(150))
    def run(data: bytes) -> None:
        targets.run(name, data)

    run()


@NAMES
def test_long_inputs_take_seconds_at_most(name: str) -> None:
    """The loops that grow with the square of something would need minutes."""
    words = [word.encode() for word in targets.TARGETS[name].words]
    for piece in (
        b"a",
        b".",
        b"[",
        b'{"":',
        b"\0",
        b"\n",
        b",",
        b"=",
        b"/a",
        b"1",
        b" ",
        *words[:40:8],
        *SEEDS[name][:2],
    ):
        with processor_seconds(60):
            targets.run(name, piece * (60_000 // len(piece)))
