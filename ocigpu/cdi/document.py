"""Files of CDI specifications: bounded reading, JSON here, YAML in a forked child with limits and a deadline.

The file's name does not matter.  A text that begins with "{" is read as JSON, and as YAML if it is not JSON; all other
texts are YAML.
"""

import os

from ocigpu import is_snapshot
from ocigpu.cdi.values import MAX_BYTES, MAX_NODES
from ocigpu.core import rawjson
from ocigpu.core.config_json import parse_json
from ocigpu.core.errors import CdiError, SpecError, printable
from ocigpu.system.child import Child, execute_main
from ocigpu.system.files import open_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

DEADLINE = 10.0
"""Seconds that the reading of one YAML document may take; 10,000 devices take about one."""
MAX_ANSWER = 64 << 20


def read_document(path: str, notes: "list[str] | None" = None) -> "tuple[Any, os.stat_result]":
    """Return the data of the specification file at ``path``, and its stat(2) from before it was read.

    Symbolic links are followed.  ``notes``: as of :func:`parse_document`.  Raises CdiError OCIGPU-CDI-2 for anything
    but a readable regular file of at most 16 MiB with a document in it.  Must be called from a process with one thread:
    YAML is read by a forked child.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        hint = "Check the path, or write it: ocigpu cdi generate --output FILE"
        raise _cannot_read(path, str(error.strerror), hint) from error
    except OSError as error:
        raise _cannot_read(path, str(error.strerror)) from error
    except ValueError as error:  # a NUL character in the path
        raise _cannot_read(path, "not a path") from error
    return parse_document(text, path, notes), status


def parse_document(text: bytes, what: str, notes: "list[str] | None" = None) -> "Any":
    """Return the data of the first JSON or YAML document; ``what`` names it in messages.

    ``notes`` gets a sentence if other documents follow: engines ignore them.  Raises CdiError OCIGPU-CDI-2 for missing
    data, duplicate keys, data that JSON cannot express, and beyond the limits of this module.  Must be called from a
    process with one thread.
    """
    if len(text) > MAX_BYTES:
        raise _cannot_read(what, f"larger than {MAX_BYTES >> 20} MiB")
    if not text.strip():
        raise _cannot_read(what, "no data")
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MAX_NODES:  # cheap, and before anything is built
        raise _cannot_read(what, f"more than {MAX_NODES} values")
    if not text.lstrip().startswith(b"{"):
        return _parse_yaml(text, what, notes)
    try:
        return parse_json(text, f"read {printable(what, 300)}", "OCIGPU-CDI-2")
    except SpecError as error:
        deep = isinstance(error.__cause__, RecursionError)
        problem = _cannot_read(what, "nested too deep") if deep else CdiError(error.code, error.message)
    try:
        return _parse_yaml(text, what, notes)
    except CdiError:
        raise problem from None  # a text that begins with "{" is meant as JSON


def _cannot_read(what: str, cause: str, hint: str | None = None) -> CdiError:
    return CdiError("OCIGPU-CDI-2", f"read {printable(what, 300)}: {printable(cause, 400)}", hint)


def find_lines(path: str, places: "Iterable[str]") -> "dict[str, int]":
    """Return the line of each place in a file, such as "devices[3].containerEdits", or of its parent.

    An unknown place is left out.  Never raises for the file's contents.
    """
    wanted = {place: [place] for place in places}
    for names in wanted.values():
        while cut := max(names[-1].rfind("."), names[-1].rfind("[")) if names[-1] else 0:
            if cut < 0:
                break
            names.append(names[-1][:cut])
    try:
        with open_regular(path) as file:
            text = file.read(MAX_BYTES + 1)
        found = _parse_yaml(text, path, None, {name for names in wanted.values() for name in names if name})
    except (OSError, CdiError):
        return {}
    lines = {place: next((found[name] for name in names if name in found), 0) for place, names in wanted.items()}
    return {place: line for place, line in lines.items() if line}


def _parse_yaml(text: bytes, what: str, notes: "list[str] | None", places: "set[str] | None" = None) -> "Any":
    def work(pipe: int) -> bytes:
        if is_snapshot():  # which has a slower reader of YAML, that refuses other texts
            file = os.memfd_create("yaml", 0)
            os.write(file, text)
            why = execute_main("ocigpu.cdi.yaml_child", pipe, parent, file, DEADLINE, "\n".join(places or ()))
            return rawjson.dump({"error": f"it is YAML, which the ordinary Python reads: {why}"}).encode()
        from ocigpu.cdi.yaml_child import answer_in_child  # only the child pays for it

        return answer_in_child(parent, pipe, text, DEADLINE, places)

    parent = os.getpid()
    try:
        answer, status = Child(work, DEADLINE).collect(MAX_ANSWER)
    except TimeoutError as error:
        raise _cannot_read(what, f"not understood within {DEADLINE:g} s: too large or too involved") from error
    except OverflowError as error:
        raise _cannot_read(what, f"more than {MAX_ANSWER >> 20} MiB of data") from error
    import json  # rawjson would look for repeated names, which our own answer does not contain

    try:
        result = json.loads(answer)
    except (ValueError, RecursionError) as error:
        cause = f"was ended by signal {-status}" if status < 0 else "gave no answer"
        raise _cannot_read(what, f"the process that reads YAML {cause}") from error
    if "missing" in result:
        hint = "Install PyYAML for the Python that runs ocigpu, or write the specification as JSON."
        raise _cannot_read(what, f"it is YAML, and PyYAML cannot be imported: {result['missing']}", hint)
    if "error" in result:
        raise _cannot_read(what, result["error"])
    if result["data"] is None:
        raise _cannot_read(what, "no data")
    if "more" in result and notes is not None:
        notes.append(f"line {result['more']}: a second document, which engines pass over")
    return result["data"]
