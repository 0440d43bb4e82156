"""The settings file, read by all parts: hot path, operator's commands and services."""

import errno
import os
from binascii import crc32

from ocigpu import is_snapshot
from ocigpu.core import rawjson
from ocigpu.core.errors import SettingsError
from ocigpu.core.settings import DEFAULT_PATH, Settings, parse_settings
from ocigpu.system.files import open_regular, read_bounded, why_replaceable, why_untrusted
from ocigpu.system.store import open_cache, read_kept, write_kept

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

MAX_BYTES = 64 << 10
MAX_DOTS = 250
"""In a line: the parser's time grows with the square of the parts of a key, to a quarter of a minute for 64 KiB."""
PREFIX = "settings-"
SPARE = 16
"""Files of other settings that may stay in the cache."""


def read_settings(path: str = "", keep: bool = False) -> Settings:
    """Return the settings of the file ``path``, or of :data:`DEFAULT_PATH` when empty (missing: the defaults).

    A named file must exist.  A file that users other than root and the caller could have written or put there is
    refused (OCIGPU-SET-3), because its values decide what root executes.  The parsed values come from the cache if it
    holds exactly this text.  ``keep``: store them there for the next start.
    """
    document = read_document(path, keep)
    return Settings() if document is None else parse_settings(document, path or DEFAULT_PATH)


def is_snapshot_refused(path: str) -> bool:
    """Tell whether this is a snapshot, and the settings at ``path`` say to do without; writes nothing.

    False for settings that cannot be read: whoever needs them reports why.
    """
    if not is_snapshot():
        return False
    try:
        with open_regular(path or DEFAULT_PATH) as file:
            text = file.read(MAX_BYTES)
        # Few files have the key, so few are parsed twice.  TOML may write a letter of it as an escape.
        return (b"no-snapshot" in text or b"\\" in text) and read_settings(path).features_no_snapshot
    except (OSError, ValueError, SettingsError):
        return False


def read_document(path: str = "", keep: bool = False) -> "dict[str, Any] | None":
    """Return the content of the settings file, None without one; see :func:`read_settings`."""
    named = bool(path)
    path = path or DEFAULT_PATH
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if cause := why_untrusted(status.st_uid, status.st_mode) or why_replaceable(path):
                raise SettingsError("OCIGPU-SET-3", f"settings {path}: {cause}")
            data = read_bounded(file, MAX_BYTES)  # half of a file could mean anything
    except FileNotFoundError as error:
        if not named:
            return None
        hint = "See what names this file: --config, or OCIGPU_CONFIG in the environment."
        raise SettingsError("OCIGPU-SET-1", f"settings {path}: {error.strerror}", hint) from error
    except OSError as error:
        hints = {errno.EFBIG: "", errno.EACCES: "Let this user read it and enter its directories, or run this as root."}
        raise SettingsError(
            "OCIGPU-SET-1", f"settings {path}: {error.strerror}", hints.get(error.errno or 0)
        ) from error
    directory = open_cache(create=keep)
    try:
        return parse_toml(data) if directory < 0 else _parse_kept(data, directory, keep)
    except (ValueError, RecursionError) as error:  # tomllib.TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise SettingsError("OCIGPU-SET-1", f"settings {path}: {error}") from error
    finally:
        if directory >= 0:
            os.close(directory)


def parse_toml(data: bytes) -> "dict[str, Any]":
    """Return a parsed TOML document; raises ValueError, and RecursionError for too deep nesting."""
    import tomllib  # only when there is a file that no start has read yet: it costs about 8 ms

    if any(line.count(b".") > MAX_DOTS for line in data.split(b"\n")):
        raise ValueError(f"a line with more than {MAX_DOTS} dots")
    return tomllib.loads(data.decode())


def _parse_kept(data: bytes, directory: int, keep: bool) -> "dict[str, Any]":
    """Return what :func:`parse_toml` would, from the cache where that has the same bytes: no date is trusted."""
    name = f"{PREFIX}{crc32(data):08x}"
    kept = read_kept(directory, name, 2)
    try:
        if kept and kept[1] == data:
            document: dict[str, Any] = rawjson.parse(kept[0].decode())
            return document
    except (ValueError, RecursionError):  # written by another version
        pass
    document = parse_toml(data)
    if not keep:
        return document
    try:
        text = rawjson.dump(document).encode()
    except (ValueError, TypeError, RecursionError):  # a date or a NaN: not a value of our settings
        return document
    write_kept(directory, name, (text, data), PREFIX, SPARE)
    return document
