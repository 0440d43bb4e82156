"""Files of specifications: every kind of bad file gets one line, in bounded time and memory; good ones read back."""

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support import machine
from support.products import one_in

import ocigpu
from ocigpu.cdi import document, yaml_child
from ocigpu.cdi.check import check_spec
from ocigpu.cdi.document import find_lines, parse_document, read_document
from ocigpu.cdi.values import MAX_BYTES, MAX_DEPTH, MAX_NODES
from ocigpu.cdi.write import dump_yaml
from ocigpu.core.errors import CdiError
from ocigpu.system.files import state_of

VENDOR = Path(__file__).parents[1] / "recorded/vendor-cdi-8gpu.yaml"
PACKAGES = [str(Path(ocigpu.__file__).parent.parent), str(Path(yaml.__file__).parent.parent)]


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    children = Path("/proc/thread-self/children")
    before = children.read_text()
    yield
    assert children.read_text() == before


def refusal(text: bytes) -> str:
    with pytest.raises(CdiError) as caught:
        parse_document(text, "x.yaml")
    return refusal_message(caught.value, "x.yaml")


def refusal_message(error: CdiError, what: str) -> str:
    """Return the cause, of an error of one line that names what was read."""
    assert error.code == "OCIGPU-CDI-2"
    assert error.render("ocigpu").count("\n") == 1
    assert error.message.startswith(f"read {what}: ")
    return error.message.removeprefix(f"read {what}: ")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine does not make a document too large."""
    monkeypatch.setattr(document, "DEADLINE", 120.0)


# Good documents


def test_the_vendors_specification_of_eight_gpus_is_read() -> None:
    data, state = read_document(str(VENDOR))
    assert data == yaml.safe_load(VENDOR.read_bytes())
    assert len(data["devices"]) == 17
    assert state_of(state) == state_of(VENDOR.stat())
    assert stat.S_ISREG(state.st_mode)
    assert check_spec(data).problems == ()


@pytest.mark.parametrize("name", ["spec.json", "spec.yaml"])
@pytest.mark.parametrize("text", ['{"a": [1, true, null]}', "a: [1, true, null]", "{a: [1, true, null]}"])
def test_the_name_of_a_file_does_not_choose_its_reader(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_document(str(path))[0] == {"a": [1, True, None]}


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{}")
    (tmp_path / "b.json").symlink_to("a")
    data, state = read_document(str(tmp_path / "b.json"))
    assert (data, state_of(state)) == ({}, state_of((tmp_path / "a").stat()))


SCALARS = [
    # octal, in both ways of writing it, and other numbers
    ("0666", 438), ("0o660", 432), ("-0o17", -15), ("00", 0), ("0", 0), ("-5", -5), ("+5", 5), ("0x1F", 31),
    ("0b101", 5), ("1_000", 1000), ("08", 8.0), ("1.50", 1.5), (".5", 0.5), ("5.", 5.0), ("1e3", 1000.0),
    ("-1.5E-2", -0.015),
    ("9223372036854775807", 2**63 - 1), ("18446744073709551615", 2**64 - 1), ("18446744073709551616", 2.0**64),
    ("-9223372036854775808", -(2**63)), ("1" + "0" * 500, "1" + "0" * 500), ("1e999", "1e999"),
    # truth values and null
    ("true", True), ("Yes", True), ("on", True), ("y", True), ("FALSE", False), ("no", False), ("Off", False),
    ("N", False), ("tRUE", "tRUE"), ("~", None), ("null", None), ("NULL", None), ("", None), ("nULL", "nULL"),
    # text
    ("2001-12-14", "2001-12-14"), ("190:20:30", "190:20:30"), ("0.7.0", "0.7.0"), ("1.2.3", "1.2.3"), ("0x", "0x"),
    ("a b", "a b"), ("=", "="), ("'1'", "1"), ('"true"', "true"), ('"\\u00e9"', "é"), ("é", "é"),
    ("|\n  x\n  y", "x\ny\n"), (">-\n  x\n  y", "x y"), ("/dev/nvidia0", "/dev/nvidia0"), ("+", "+"), (".", "."),
    # tags
    ("!!str 5", "5"), ("! 5", "5"), ("!!int '5'", 5), ("!!float 5", 5.0), ("!!bool 'yes'", True), ("!!null ''", None),
    ("!!seq [1]", [1]), ("!!map {a: 1}", {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize("parser", ["libyaml", "python"])
def test_scalars_mean_what_they_mean_to_the_reference_library(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", parser == "libyaml")
    text = "".join(f"- {scalar}\n" for scalar, _ in SCALARS)
    found = parse_document(text.encode(), "x")
    for (scalar, value), got in zip(SCALARS, found, strict=True):
        assert (got, type(got)) == (value, type(value)), scalar


@pytest.mark.parametrize("parser", ["libyaml", "python"])
@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("a: &x [1, {b: 2}]\nc: *x", {"a": [1, {"b": 2}], "c": [1, {"b": 2}]}),
        ("a: &x 5\n*x : b", {"a": 5, "5": "b"}),
        ("1: a\ntrue: b\n-2: c", {"1": "a", "true": "b", "-2": "c"}),
        ("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}", {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}}),
        ("a: &x {p: 1}\nb: {q: 3, <<: [*x, {p: 9, r: 4}]}", {"a": {"p": 1}, "b": {"q": 3, "p": 1, "r": 4}}),
        ("'<<': 1", {"<<": 1}),
        ("%YAML 1.1\n---\na: 1\n...\n", {"a": 1}),
        ("\ufeffa: 1", {"a": 1}),
        ("[]", []),
        ("text", "text"),
        ("a: [b,\n  c]", {"a": ["b", "c"]}),
    ],
)
def test_yaml_becomes_plain_data(parser: str, text: str, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", parser == "libyaml")
    assert parse_document(text.encode(), "x") == data


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(DATA)
def test_data_written_as_yaml_reads_back_equal(data: Any) -> None:
    text = yaml.safe_dump(data, default_style='"', allow_unicode=True).encode()
    assert yaml_child.build(yaml, text) == data


LIKE_SCALARS = st.sampled_from([scalar for scalar, _ in SCALARS if "\n" not in scalar])


@given(st.dictionaries(TEXT | LIKE_SCALARS, DATA | LIKE_SCALARS, min_size=1))
def test_what_we_write_as_yaml_reads_back_equal(data: Any) -> None:
    assert yaml_child.build(yaml, dump_yaml(data).encode()) == data


@given(st.dictionaries(TEXT, DATA))
def test_an_object_written_as_json_reads_back_equal(data: Any) -> None:
    assert parse_document(json.dumps(data).encode(), "x") == data


@given(st.dictionaries(TEXT, DATA))
def test_json_means_the_same_to_both_readers(data: Any) -> None:
    text = json.dumps(data, ensure_ascii=False)
    if all(character.isprintable() for character in text):  # YAML has no unescaped control characters
        assert yaml_child.build(yaml, text.encode()) == parse_document(text.encode(), "x")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"a: 1\n---\nb: 2\n", 2),
        (b"a: 1\n---\n]", 2),
        (b"a: 1\n...\nb: 2\n", 3),
        (b'{"a": 1}{"b": 2}', 1),
        (b'{"a": 1}\n---\n{"b": 2}', 2),
        (b'{"a": 1} ] x: {', 1),
    ],
)
def test_the_first_document_counts_as_for_the_reference_library(text: bytes, line: int) -> None:
    """Podman 4.3.1 takes the devices of the first, whatever follows (seen with files like these)."""
    notes: list[str] = []
    assert parse_document(text, "x", notes) == {"a": 1}
    assert notes == [f"line {line}: a second document, which engines pass over"]


@pytest.mark.parametrize("text", [b"a: 1\n", b"---\na: 1\n...\n", b"a: 1\n# more\n", b'{"a": 1}\n'])
def test_one_document_is_no_remark(text: bytes) -> None:
    notes: list[str] = []
    assert parse_document(text, "x", notes) == {"a": 1}
    assert not notes


LINES = b"""\
cdiVersion: 0.6.0
devices:
- name: a
- name: &x b
  containerEdits: &edits
    mounts: [{hostPath: /a},
      {hostPath: /b}]
- {name: c, containerEdits: *edits}
? [odd]
: 1
kind: x
---
]
"""


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("cdiVersion", 1),
        ("devices", 3),
        ("devices[0]", 3),
        ("devices[0].containerEdits", 3),
        ("devices[1].name", 4),
        ("devices[1].containerEdits.mounts[1].hostPath", 7),
        ("devices[2].containerEdits", 8),
        ("devices[2].containerEdits.mounts[0]", 8),
        ("devices[9]", 3),
        ("annotations", 0),
        ("", 0),
    ],
)
def test_the_line_of_a_place_is_found_or_that_of_what_it_is_in(tmp_path: Path, place: str, line: int) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(LINES.replace(b"? [odd]\n: 1\n", b""))
    assert find_lines(str(path), [place]) == ({place: line} if line else {})


@pytest.mark.parametrize("text", [b"a: [", b"", b"? [odd]\n: 1\n", b"a: &x [*x]", b"x" * 100, b"\0"])
def test_lines_of_what_cannot_be_read_are_none(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(text)
    assert find_lines(str(path), ["devices[0]", "b.c"]) == {}
    assert find_lines(str(tmp_path / "none"), ["devices"]) == {}


# Bad documents

Text = bytes | Callable[[], bytes]
"""A document, or a large one that is made only where it is read: workers of the suite are copied by each fork."""
BAD: list[tuple[str, Text, str]] = [
    ("nothing", b"", "no data"),
    ("blanks", b" \n\t\n", "no data"),
    ("a comment", b"# nothing\n", "no data"),
    ("an empty document", b"---\n", "no data"),
    ("null", b"null", "no data"),
    ("a duplicate key", b"a: 1\nb:\n  c: 1\n  c: 2\n", 'line 4 column 3: duplicate key "c"'),
    ("a duplicate key of other types", b"1: a\n'1': b", 'line 2 column 1: duplicate key "1"'),
    ("a duplicate merge", b"a: {<<: {b: 1}, <<: {c: 1}}", 'duplicate key "<<"'),
    ("a merge of text", b"a: {<<: x}", 'the value of "<<" is not an object'),
    ("a duplicate key in JSON", b'{"a": 1, "a": 2}', 'duplicate key "a"'),
    ("JSON that ends early", b'{"a": [1', "line 1 column 9"),
    ("NaN in JSON", b'{"a": "\xc3\xa9", "b": NaN, "a": 1}', "NaN is not JSON"),
    ("a key that is a list", b"? [1]\n: 2", "line 1 column 3: a key that is not text"),
    ("a key that is null", b"~: 2", "line 1 column 1: a key that is not text"),
    ("a key that is a float", b"1.5: 2", "line 1 column 1: a key that is not text"),
    ("an alias of nothing", b"a: *x", 'line 1 column 4: alias "x" of nothing before it'),
    ("an alias inside itself", b"a: &x [*x]", 'alias "x" of nothing before it'),
    ("not a number", b"a: .nan", "line 1 column 4: .nan is not a number of JSON"),
    ("infinity", b"a: -.Inf", "-.Inf is not a number of JSON"),
    ("a tag of a program", b"a: !!python/object/apply:os.system [id]", "python/object/apply:os.system"),
    ("a tag of its own", b"a: !x 5", 'tag "!x" is not supported'),
    ("binary data", b"a: !!binary aGk=", "is not supported"),
    ("a tag that does not fit", b"a: !!int x", 'not for "x"'),
    ("a tab", b"a:\n\t- b", "line 2 column 1"),
    ("an open list", b"a: [", "line "),
    ("an open quote", b'a: "', "line "),
    ("bad indentation", b"a: 1\n b: 2", "line 2"),
    ("an unknown directive's version", b"%YAML 3.0\n---\na: 1", "line 1 column 1"),
    ("NUL", b"a: \0", "control characters are not allowed"),
    ("not UTF-8", b"a: \xff", "invalid"),
    ("an escape sequence", b"a: \x1b[2J", "control characters are not allowed"),
    ("the sequence in a key", b'"\\e[2J": 1\n"\\e[2J": 2', r'duplicate key "\x1b[2J"'),
    ("deep JSON", lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deep"),
    ("deep flow", b"[" * 100, f"line 1 column 65: nested deeper than {MAX_DEPTH}"),
    ("very deep flow", lambda: b"[" * 100_000, "line 1 column"),  # PyYAML 6.0.4 and later refuse 1,001 themselves
    ("deep blocks", lambda: b"- " * 5_000_000, f"nested deeper than {MAX_DEPTH}"),
    ("deep keys", lambda: b"? " * 5_000_000, "a key that is not text"),
    ("deep objects", lambda: b"a: {" * 100_000, "line 1 column"),
    ("a flow list of 15 MiB", lambda: b"[" + b"1," * (15 << 19) + b"]", f"more than {MAX_NODES} values"),
    ("an object of 15 MiB", lambda: b'{"a":[' + b"1," * (15 << 19) + b"1]}", f"more than {MAX_NODES} values"),
    ("a block list of 15 MiB", lambda: b"-\n" * (15 << 19), f"line {MAX_NODES} column 2: more than {MAX_NODES} values"),
    ("a tag of 15 MiB", lambda: b"!" * (15 << 20), "is not supported"),
    ("anchors", lambda: b"&a " * (5 << 20), "no data"),
    ("too large", lambda: b"#" * (MAX_BYTES + 1), "larger than 16 MiB"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "cause"), one_in(4, [row[1:] for row in BAD]), ids=[row[0] for row in BAD])
def test_a_bad_document_is_refused_in_one_line(text: Text, cause: str) -> None:
    assert cause in refusal(text() if callable(text) else text)


def laughs(leaf: bytes) -> bytes:
    """Return ten levels of ten aliases each: 10,000,000,000 times the leaf."""
    levels = [b"a0: &a0 [" + b",".join([leaf] * 10) + b"]"]
    levels += [b"a%d: &a%d [%s]" % (level, level, b",".join([b"*a%d" % (level - 1)] * 10)) for level in range(1, 10)]
    return b"\n".join(levels)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (lambda: laughs(b"x"), f"line 7 column 10: more than {MAX_NODES} values, counting each alias in full"),
        (lambda: laughs(b"[]"), "counting each alias in full"),
        (lambda: b"a: &a '" + b"x" * (1 << 20) + b"'\nb: [" + b"*a," * 1000 + b"]", "more than 16 MiB of text"),
        (lambda: b"a: &a {b: c}\n" + b"d: {<<: [" + b"*a," * 700_000 + b"]}", "counting each alias in full"),
    ],
    ids=["text", "lists", "long text", "merges"],
)
def test_aliases_count_in_full(text: Callable[[], bytes], cause: str) -> None:
    assert cause in refusal(text())


@pytest.mark.rest
def test_ten_thousand_devices_are_read_and_checked(tmp_path: Path) -> None:
    item = "- {name: d%d, containerEdits: {deviceNodes: [{path: /dev/a, major: 195}]}}\n"
    path = tmp_path / "big.yaml"
    path.write_text("cdiVersion: 0.3.0\nkind: v.com/cc\ndevices:\n" + "".join(item % i for i in range(10_000)))
    checked = check_spec(read_document(str(path))[0])
    assert checked.problems == ()
    assert len(checked.spec["devices"]) == 10_000


@pytest.mark.rest
def test_a_hundred_thousand_devices_are_too_many() -> None:
    text = "cdiVersion: 0.3.0\nkind: v.com/cc\ndevices:\n" + "- {name: d, containerEdits: {env: [A=b]}}\n" * 100_000
    checked = check_spec(parse_document(text.encode(), "x"))
    assert [problem.message for problem in checked.errors] == ["100000 devices, more than 65536"]


MEASURE = """\
import resource, sys
sys.path[:0] = sys.argv[2:]
from ocigpu.cdi.document import find_lines, parse_document
from ocigpu.core.errors import CdiError
with open(sys.argv[1], "rb") as file:
    text = file.read()
try:
    parse_document(text, "x")
    print("read")
except CdiError:
    print("refused")
with open("/proc/self/status") as file:  # the rusage of this process counts the one that started it too
    print(next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM")))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
"""


def bare_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program as the installed ones are run: isolated, and without the modules of the site."""
    command = [os.path.realpath(sys.executable), "-I", "-S", "-c", *arguments, *PACKAGES]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("text", "limit"),
    one_in(
        3,
        [
            (lambda: laughs(b"x"), 64),
            (lambda: b"[" * (15 << 20), 64),
            (lambda: b"[" + b"1," * (15 << 19) + b"]", 64),
            (lambda: b"-\n" * (15 << 19), 64),
            (lambda: b'{"a":[' + b"{}," * (5 << 20) + b"1]}", 64),
            (lambda: b"a: '" + b"x" * (15 << 20) + b"'", 160),
        ],
    ),
    ids=["aliases", "depth", "flow list", "block list", "JSON", "text"],
)
def test_memory_is_bounded_here_and_in_the_child(text: Callable[[], bytes], limit: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(text())
    outcome, ours, childs = bare_python(MEASURE, str(tmp_path / "x")).stdout.split()
    assert outcome == ("read" if limit > 100 else "refused")
    assert int(ours) < limit
    assert int(childs) < 1024


# Bad files


def file_refusal(path: Path) -> str:
    with pytest.raises(CdiError) as caught:
        read_document(str(path))
    return refusal_message(caught.value, str(path))


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "directory.yaml").mkdir()
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "link.yaml").symlink_to("directory.yaml")
    (tmp_path / "null.yaml").symlink_to("/dev/zero")
    for name in ("directory", "fifo", "link", "null"):
        assert file_refusal(tmp_path / f"{name}.yaml") == "not a regular file"


def test_what_cannot_be_opened_names_the_kernels_reason(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.yaml"))
    assert file_refusal(tmp_path / "missing.yaml") == "No such file or directory"
    assert file_refusal(tmp_path / "loop.yaml") == "Too many levels of symbolic links"
    assert file_refusal(tmp_path / "socket.yaml") == "No such device or address"
    with pytest.raises(CdiError, match="not a path"):
        read_document("a\0b")


@pytest.mark.root
def test_an_unreadable_file_is_refused() -> None:
    path = Path(f"/tmp/{machine.NAME}.yaml")
    path.write_text("a: 1")
    path.chmod(0)
    try:
        os.seteuid(65534)
        assert file_refusal(path) == "Permission denied"
    finally:
        os.seteuid(0)
        path.unlink()


def test_a_sparse_giant_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "giant.yaml"
    path.touch()
    os.truncate(path, 1 << 40)
    assert file_refusal(path) == "larger than 16 MiB"
    os.truncate(path, MAX_BYTES)
    assert "NUL" in file_refusal(path) or "control characters" in file_refusal(path)


def test_a_name_with_control_characters_is_shown_escaped(tmp_path: Path) -> None:
    with pytest.raises(CdiError, match=r"x\\n\\x1b\.yaml: No such file"):
        read_document(str(tmp_path / "x\n\x1b.yaml"))


# The child


def test_the_child_is_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "DEADLINE", 0.0)
    assert refusal(b"a: 1") == "not understood within 0 s: too large or too involved"


def test_the_childs_memory_is_limited() -> None:
    script = """
import sys
sys.path[:0] = sys.argv[1:]
from ocigpu.cdi import document, yaml_child
from ocigpu.core.errors import CdiError
yaml_child.MEMORY = 1 << 20
try:
    document.parse_document(b"a: '" + b"x" * (8 << 20) + b"'", "x")
except CdiError as error:
    print(error.message)
"""
    assert bare_python(script).stdout == "read x: it needs too much memory\n"


def test_the_childs_processor_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(module: Any, text: bytes, **_more: Any) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (0, 1))
        while True:
            pass

    monkeypatch.setattr(yaml_child, "build", spin)
    assert refusal(b"a: 1") == f"the process that reads YAML was ended by signal {signal.SIGXCPU.value}"


def test_a_crash_of_the_child_is_an_error_that_names_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_child, "build", lambda *_, **_more: os.kill(os.getpid(), signal.SIGSEGV))
    assert refusal(b"a: 1") == "the process that reads YAML was ended by signal 11"


def test_an_endless_answer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_ANSWER", 100_000)
    assert refusal(b"a: '" + b"x" * 200_000 + b"'") == "more than 0 MiB of data"


def test_without_pyyaml_the_hint_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert parse_document(b'{"a": 1}', "x") == {"a": 1}
    with pytest.raises(CdiError, match="it is YAML, and PyYAML cannot be imported") as caught:
        parse_document(b"a: 1", "x")
    assert "Install PyYAML" in caught.value.hint


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.root
def test_the_child_is_nobody_and_has_nothing_open_but_the_standard_streams_and_its_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(module: Any, text: bytes, **_more: Any) -> Any:
        return [os.getresuid(), os.getresgid(), os.getgroups(), sum(_is_open(number) for number in range(1024))]

    monkeypatch.setattr(yaml_child, "build", look)
    with VENDOR.open():
        assert parse_document(b"a: 1", "x") == [[65534] * 3, [65534] * 3, [65534], 4]


def test_the_caller_may_ignore_the_end_of_its_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert parse_document(b"a: 1", "x") == {"a": 1}
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_standard_streams_that_are_closed_do_not_disturb(tmp_path: Path) -> None:
    script = """
import os, sys
sys.path[:0] = sys.argv[1:]
for descriptor in (0, 1, 2):
    os.close(descriptor)
from ocigpu.cdi.document import find_lines, parse_document
sys.exit(0 if parse_document(b"a: 1", "x") == {"a": 1} else 1)
"""
    assert bare_python(script).returncode == 0
