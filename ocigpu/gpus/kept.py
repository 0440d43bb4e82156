"""Answers that follow from a request and the host's facts, kept in the cache directory as long as the facts hold.

Most starts then need neither the facts nor what makes a plan of them: only that nothing has changed is looked at.
"""

import os
from binascii import crc32

from ocigpu import __version__
from ocigpu.core import rawjson
from ocigpu.core.settings import Settings
from ocigpu.gpus.cached import read_stamp
from ocigpu.system.store import open_cache, read_kept, write_kept

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

KEPT = "nvidia"
"""The vendor of whose devices facts are kept; of others they are read in a moment."""
SPARE = 64
"""Files of other questions of a kind that may stay."""
MAX_QUESTION = 8192
"""Characters of a question whose answer is kept: usual ones have some 1,500, but images decide."""


def find_answer(
    kind: str,
    about: "tuple[Any, ...]",
    settings: Settings,
    make: "Callable[[], dict[str, Any]]",
    known_stamp: str = "",
) -> "dict[str, Any]":
    """Return what ``make`` does, or what it did for an equal question while the host's facts were what they are now.

    ``kind``: beginning of the files' names; ``about``: the request, and what besides settings and facts the answer
    depends on, told apart by its repr.  The answer is JSON data; tuples in it come back as lists.  ``make`` reads the
    facts itself.  ``known_stamp``: what tells the host's state, where it was read just now; the facts need not be kept,
    then.
    """
    if not known_stamp and about[0].vendor != KEPT:
        return make()
    question = repr((__version__, about, settings))
    cache_fd = open_cache(True, settings.simulation_root) if len(question) <= MAX_QUESTION else -1
    if cache_fd < 0:
        return make()
    try:
        name = f"{kind}-{crc32(_encode(question)):08x}"
        stamp = known_stamp or read_stamp(settings, cache_fd)
        answer = _read(cache_fd, name, question, stamp) if stamp else None
        if answer is None:
            answer = make()
            if stamp and (known_stamp or read_stamp(settings, cache_fd) == stamp):  # then it was made of these facts
                parts = [_encode(part) for part in (question, stamp, rawjson.dump(answer))]
                write_kept(cache_fd, name, parts, f"{kind}-", SPARE)
        return answer
    finally:
        os.close(cache_fd)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _read(cache_fd: int, name: str, question: str, stamp: str) -> "dict[str, Any] | None":
    parts = read_kept(cache_fd, name, 3)
    if parts[:2] != [_encode(question), _encode(stamp)]:
        return None
    try:
        answer = rawjson.parse(parts[2].decode())
    except (ValueError, RecursionError):  # written by other code of this version
        return None
    return answer if isinstance(answer, dict) else None
