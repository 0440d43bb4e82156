"""CDI specifications as text and as files.

YAML and JSON look as the CDI library writes them (container-device-interface, pkg/cdi/producer): readers of both exist
that compare texts.  Writing needs no YAML library: the data is of four types.
"""

import errno
import os

from ocigpu.core import rawjson
from ocigpu.core.errors import CdiError
from ocigpu.system.files import replace_path
from ocigpu.system.state import make_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEFAULT_OUTPUT = "/var/run/cdi/nvidia.yaml"
"""Below /run, as with the vendor's service: after a reboot no engine finds the specification of before."""
EXTENSIONS = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}
FORMATS = ("yaml", "json")
_FIELDS = (
    "cdiVersion", "kind", "name", "annotations", "devices", "containerEdits",
    "env", "deviceNodes", "netDevices", "hooks", "mounts", "intelRdt", "additionalGids",
    "path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid",
)  # fmt: skip
"""Order of fields in a text; others come after, as they are."""
_RANKS = {name: rank for rank, name in enumerate(_FIELDS)}
_RANKS_OF = {
    "netDevices": {"hostInterfaceName": 0, "name": 1},
    "hooks": {"hookName": 0, "path": 1, "args": 2, "env": 3, "timeout": 4},
    "mounts": {"hostPath": 0, "containerPath": 1, "options": 2, "type": 3},
}
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)
_PLAIN_FIRST = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/._-")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+=:,@ ")
_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf", "~"))
"""What a YAML 1.1 or 1.2 reader may take for something else than text."""
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
"""Of JSON (RFC 8259 section 7)."""


def dump_json(spec: "dict[str, Any]") -> str:
    """Return a specification as one line of JSON without a final newline."""
    import json

    return json.dumps(ordered(spec), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def dump_yaml(spec: "dict[str, Any]") -> str:
    """Return a specification as a YAML document: "---", four spaces for a level, text quoted where it must be."""
    lines = ["---"]
    _add_lines(ordered(spec), "", "", lines, _Texts())
    return "\n".join((*lines, ""))


def ordered(spec: "dict[str, Any]") -> "dict[str, Any]":
    """Return the specification with its fields in the order in which the CDI library writes them."""
    result: dict[str, Any] = _ordered(spec, "")
    return result


def _ordered(value: "Any", field: str) -> "Any":
    if isinstance(value, list):
        return [item if isinstance(item, str) else _ordered(item, field) for item in value]
    if not isinstance(value, dict):
        return value
    ranks = _RANKS_OF.get(field, _RANKS)
    names = sorted(value) if field == "annotations" else sorted(value, key=lambda name: ranks.get(name, len(ranks)))
    return {name: item if isinstance(item := value[name], str) else _ordered(item, name) for name in names}


class _Texts(dict[str, str]):
    """Texts in YAML form, each converted once: most occur many times."""

    def __missing__(self, text: str) -> str:
        written = self[text] = text if _is_plain(text) else _quoted(text)
        return written


def _add_lines(value: "Any", first: str, indent: str, lines: list[str], texts: _Texts) -> None:
    """Add the lines of a mapping or list: ``first`` is before the first one, ``indent`` before the others."""
    if isinstance(value, dict):
        deeper = " " * (len(indent) // 4 * 4 + 4)  # the next column that 4 divides
        for name, item in value.items():
            if isinstance(item, (dict, list)) and item:
                lines.append(f"{first}{texts[name]}:")
                _add_lines(item, deeper, deeper, lines, texts)
            else:
                lines.append(f"{first}{texts[name]}: {_scalar(item, texts)}")
            first = indent
        return
    for item in value:
        if isinstance(item, (dict, list)) and item:
            _add_lines(item, f"{first}- ", f"{indent}  ", lines, texts)
        else:
            lines.append(f"{first}- {_scalar(item, texts)}")
        first = indent


def _scalar(value: "Any", texts: _Texts) -> str:
    if isinstance(value, str):
        return texts[value]
    return rawjson.dump(value)  # numbers, true, false, null, and [] and {} that are empty


def _is_plain(text: str) -> bool:
    """Return whether every YAML reader takes the bare text for text."""
    if not text or not _PLAIN.issuperset(text) or text[-1] in ": " or ": " in text:
        return False
    word = text.lstrip("+-.").lower()
    if word[:1].isdigit():  # as numbers, dates and times begin, perhaps after a sign or point
        parts = text.split(".")
        return len(parts) == 3 and all(map(str.isdigit, parts))  # a version
    return text[0] in _PLAIN_FIRST and word[:1] not in ("", " ") and word not in _WORDS


def _quoted(text: str) -> str:
    """Return the text in double quotes (YAML 1.2, section 5.7): JSON's escapes, and those of other unprintables."""
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _escape(ord(c))) for c in text) + '"'


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def target_of(path: str, form: str = "") -> tuple[str, str]:
    """Return (path, format) of the file to write: the extension decides, in upper or lower case.

    A path without a known extension gets that of ``form`` ("json" or "yaml"; "" is yaml).
    """
    found = EXTENSIONS.get(os.path.splitext(path)[1].lower())
    if found:
        return path, found
    chosen = form or FORMATS[0]
    return f"{path}.{chosen}", chosen


def with_suffix(path: str, suffix: str) -> str:
    """Return the path with the suffix before its extension; "", which is standard output, stays."""
    start, extension = os.path.splitext(path)
    return f"{start}{suffix}{extension}" if path else ""


def dump(spec: "dict[str, Any]", form: str) -> str:
    """Return the specification as text in the format ``form``, "json" or "yaml"."""
    return dump_json(spec) if form == "json" else dump_yaml(spec)


def write_spec(spec: "dict[str, Any]", path: str, form: str) -> None:
    """Write a specification as the file ``path``, mode 0644, atomically replacing an existing one.

    ``path`` and ``form`` as :func:`target_of` gives them.  Missing directories are made (0755).  The text is first
    written under another name in the directory, which no engine reads, and then renamed.  Raises CdiError OCIGPU-CDI-8;
    then an existing file is unchanged.
    """
    try:
        text = dump(spec, form).encode()
    except (UnicodeEncodeError, ValueError, TypeError) as error:
        raise CdiError("OCIGPU-CDI-8", f"write {path}: {error}") from error
    try:
        write_file(path, text)
    except OSError as error:
        hint = "Run it as root, or write elsewhere: --output FILE" if error.errno in _NOT_PERMITTED else None
        raise CdiError("OCIGPU-CDI-8", f"write {path}: {error.strerror or error}", hint) from error


def write_file(path: str, content: bytes) -> None:
    """Write a file, mode 0644, atomically replacing an existing one; missing directories are made (0755).

    Raises OSError.
    """
    if directory := os.path.dirname(path):
        make_directory(directory, 0o755)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    replace_path(path, content, 0o644)
