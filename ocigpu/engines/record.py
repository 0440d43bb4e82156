"""The changes to a file, kept beside it as FILE.ocigpu-record, and its original, FILE.ocigpu-backup."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import OcigpuError
from ocigpu.engines.document import Applied, ValueChange
from ocigpu.engines.files import aside

BACKUP, RECORD = ".ocigpu-backup", ".ocigpu-record"


class EngineRecord(NamedTuple):
    """The changes of "ocigpu engine configure" to one file.

    ``created``: the first text of a new file, None for a file that existed.  ``digest``: of the text that was written.
    ``others``: other files changed with it.  ``links``: links that were made.
    """

    created: str | None
    digest: str
    applied: tuple[Applied, ...]
    directories: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


def backup_path(path: str) -> str:
    """Return where the file from before the first change is kept."""
    return aside(path, BACKUP)


def record_path(path: str) -> str:
    """Return where the record of a file is kept."""
    return aside(path, RECORD)


def digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def dump_record(record: EngineRecord) -> str:
    """Return a record as text."""
    changes = [
        {**entry.change._asdict(), **{key: value for key, value in entry._asdict().items() if key != "change"}}
        for entry in record.applied
    ]
    data = {"note": 'for "ocigpu engine remove"; see FILE.ocigpu-backup for the file from before', **record._asdict()}
    data["applied"] = changes
    return json.dumps(data, indent=2) + "\n"


def parse_record(path: str, text: str) -> EngineRecord:
    """Return the record in a text; raises OcigpuError OCIGPU-ENG-1 for an invalid one."""
    try:
        data = json.loads(text)
        if not isinstance(data["created"], str | None) or not all(entry["keys"] for entry in data["applied"]):
            raise ValueError
        applied = tuple(
            Applied(
                ValueChange(tuple(map(str, entry["keys"])), entry["value"], bool(entry["append"])),
                int(entry["present"]),
                entry["before"],
                str(entry["raw"]),
                bool(entry["header"]),
            )
            for entry in data["applied"]
        )
        return EngineRecord(
            data["created"],
            str(data["digest"]),
            applied,
            _texts(data["directories"]),
            _texts(data["others"]),
            _texts(data["links"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OcigpuError(
            "OCIGPU-ENG-1", f"{path}: not a record of ocigpu", "remove it, and check the file that it belongs to"
        ) from error


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(str, values))
