"""Which specification defines a device, who wins, what a broken file costs, and what is read only once."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ocigpu
from ocigpu.cdi import cache, document, registry
from ocigpu.cdi.registry import Registry, Resolved, read_registry
from ocigpu.core import rawjson
from ocigpu.core.codes import CODES
from ocigpu.core.errors import CdiError
from ocigpu.core.settings import Settings
from ocigpu.system import store as cache_files

YAML = """\
cdiVersion: 0.6.0
kind: {kind}
annotations: {{made.by/hand: "yes"}}
devices:
- name: "{name}"
  containerEdits: {{env: ["DEVICE={name}"]}}
containerEdits: {{env: ["COMMON={kind}"]}}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three directories "0", "1", "2" of rising priority, and a cache of our own; files count as long unchanged."""
    monkeypatch.setattr(cache_files, "SYSTEM_DIRECTORY", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(cache, "SETTLED_NS", -(10**12))
    for number in range(3):
        (tmp_path / str(number)).mkdir(0o755)
    return tmp_path


def settings(place: Path, *names: str) -> Settings:
    return Settings(cdi_spec_dirs=tuple(str(place / name) for name in names or ("0", "1", "2")))


def spec(kind: str = "x.com/gpu", common: str = "", **devices: str) -> str:
    """Return a specification in JSON: devices by name, each with the value of its variable."""
    document: dict[str, Any] = {
        "cdiVersion": "0.6.0",
        "kind": kind,
        "devices": [
            {"name": name.lstrip("_"), "containerEdits": {"env": [f"WHERE={value}"]}} for name, value in devices.items()
        ],
    }
    if common:
        document["containerEdits"] = {"env": [f"COMMON={common}"]}
    return json.dumps(document)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o644)
    return str(path)


def env_of(resolved: Resolved) -> list[str]:
    return [entry for edits in resolved.edits for entry in edits.get("env", [])]


def refusal(found: Registry, *names: str) -> CdiError:
    with pytest.raises(CdiError) as caught:
        found.resolve(names)
    assert "\n" not in caught.value.message
    return caught.value


# --- what is read


def test_only_yaml_and_json_of_one_level_are_read_in_order_of_names(place: Path) -> None:
    for number, name in enumerate(("b.json", "a.yaml", "c.yml", "d.YAML", "e", "json", ".f.json")):
        write(place / "0" / name, spec(f"x.com/k{number}", _0="a"))
    (place / "0/sub").mkdir()
    (place / "0/sub.yaml").mkdir()
    write(place / "0/sub/x.json", spec(_0="a"))
    found = read_registry(settings(place, "0", "missing"))
    assert [Path(item.path).name for item in found.specs] == [".f.json", "a.yaml", "b.json"]
    assert found.errors == ()
    assert found.devices() == (
        ("x.com/k0=0", str(place / "0/b.json")),
        ("x.com/k1=0", str(place / "0/a.yaml")),
        ("x.com/k6=0", str(place / "0/.f.json")),
    )


def test_a_specification_comes_with_all_that_belongs_to_it(place: Path) -> None:
    path = write(place / "1/a.yaml", YAML.format(kind="x.com/gpu", name="GPU-1:2.3"))
    (item,) = read_registry(settings(place)).specs
    assert (item.path, item.priority, item.kind, item.version) == (path, 1, "x.com/gpu", "0.6.0")
    assert item.annotations == {"made.by/hand": "yes"}
    assert item.edits == {"env": ["COMMON=x.com/gpu"]}
    assert item.device_names() == ("GPU-1:2.3",)
    assert item.find("GPU-1:2.3") == {"containerEdits": {"env": ["DEVICE=GPU-1:2.3"]}}
    assert item.find("GPU-1:2") is None
    assert item.find("2.3") is None


def test_without_directories_or_files_there_is_nothing(place: Path) -> None:
    assert read_registry(settings(place, "missing")) == Registry((), ())
    assert read_registry(Settings(cdi_spec_dirs=())) == Registry((), ())
    assert read_registry(settings(place)) == Registry((), ())
    assert not (place / "cache").exists(), "nothing to keep"


def test_links_are_followed(place: Path) -> None:
    (place / "link").symlink_to("1")
    (place / "0/b.json").symlink_to("../1/a.json")
    (place / "0/gone.json").symlink_to("nowhere")
    (place / "0/dir.json").symlink_to("../2")
    write(place / "1/a.json", spec(_0="a"))
    found = read_registry(settings(place, "0", "link"))
    assert found.devices() == (("x.com/gpu=0", str(place / "link/a.json")),)
    assert found.errors == (
        (str(place / "0/dir.json"), "not a regular file"),
        (str(place / "0/gone.json"), "No such file or directory"),
    )


# --- order of edits


def test_the_edits_of_a_file_come_once_before_its_first_device(place: Path) -> None:
    write(place / "0/a.json", spec("a.com/gpu", common="A", _0="a0", _1="a1"))
    write(place / "1/b.json", spec("b.com/gpu", common="B", _0="b0", _1="b1"))
    resolved = read_registry(settings(place)).resolve(
        ["b.com/gpu=1", "a.com/gpu=1", "b.com/gpu=0", "a.com/gpu=0", "b.com/gpu=1"]
    )
    expected = ["COMMON=B", "WHERE=b1", "COMMON=A", "WHERE=a1", "WHERE=b0", "WHERE=a0"]
    assert env_of(resolved) == expected
    assert [Path(item.path).name for item in resolved.specs] == ["b.json", "a.json"]
    assert [Path(path).name[0] for path in resolved.files] == ["b", "b", "a", "a", "b", "a"]


def test_many_devices_are_found_as_few_are(place: Path) -> None:
    write(place / "0/a.json", spec(**{f"_{number}": f"low{number}" for number in range(40)}))
    write(place / "1/b.json", spec(**{f"_{number}": f"high{number}" for number in range(0, 40, 2)}))
    names = [f"x.com/gpu={number}" for number in range(40)]
    resolved = read_registry(settings(place)).resolve(names)
    assert env_of(resolved) == [f"WHERE={'low' if number % 2 else 'high'}{number}" for number in range(40)]
    one_by_one = [env_of(read_registry(settings(place)).resolve([name])) for name in names]
    assert [entry for entries in one_by_one for entry in entries] == env_of(resolved)
    assert refusal(read_registry(settings(place)), *names, "x.com/gpu=40").message.endswith("devices x.com/gpu=40")


# --- precedence and conflicts


def test_the_highest_directory_wins(place: Path) -> None:
    low = write(place / "0/z.json", spec(_0="low", _1="low"))
    high = write(place / "2/a.json", spec(_0="high"))
    found = read_registry(settings(place))
    assert env_of(found.resolve(["x.com/gpu=0", "x.com/gpu=1"])) == ["WHERE=high", "WHERE=low"]
    assert found.devices() == (("x.com/gpu=0", high), ("x.com/gpu=1", low))
    assert found.shadowed() == (("x.com/gpu=0", low, high),)
    assert found.conflicts() == ()


def test_two_definitions_in_the_winning_directory_are_a_conflict_of_this_device_only(place: Path) -> None:
    first, second = (write(place / f"1/{name}.json", spec(_0=name, **{name: name})) for name in "ab")
    write(place / "0/c.json", spec(_0="low"))
    found = read_registry(settings(place))
    error = refusal(found, "x.com/gpu=0")
    assert error.code == "OCIGPU-CDI-5"
    assert error.message == f'conflicting device "x.com/gpu=0" (specs "{second}", "{first}")'
    assert found.conflicts() == (("x.com/gpu=0", (first, second)),)
    assert found.devices() == (("x.com/gpu=a", first), ("x.com/gpu=b", second))
    assert env_of(found.resolve(["x.com/gpu=b"])) == ["WHERE=b"]


@pytest.mark.parametrize("others", [0, 20], ids=["searched", "in a table"])
def test_a_conflict_below_the_winner_does_not_matter(place: Path, others: int) -> None:
    more = {f"_{number}": "x" for number in range(1, others + 1)}
    for name in "ab":
        write(place / f"0/{name}.json", spec(_0=name))
    write(place / "1/c.json", spec(_0="winner", **more))
    found = read_registry(settings(place))
    assert env_of(found.resolve(["x.com/gpu=0", *(f"x.com/gpu={number}" for number in range(1, others + 1))]))[0] == (
        "WHERE=winner"
    )
    assert found.conflicts() == ()
    assert [path for _, path, _ in found.shadowed()] == [str(place / "0/a.json"), str(place / "0/b.json")]


def test_the_same_name_of_another_kind_is_another_device(place: Path) -> None:
    write(place / "1/a.json", spec("x.com/gpu", _0="gpu"))
    write(place / "1/b.json", spec("x.com/nic", _0="nic"))
    assert env_of(read_registry(settings(place)).resolve(["x.com/nic=0", "x.com/gpu=0"])) == ["WHERE=nic", "WHERE=gpu"]


# --- names that lead nowhere


def test_all_unknown_devices_are_named(place: Path) -> None:
    write(place / "0/a.json", spec(_0="a"))
    error = refusal(read_registry(settings(place)), "x.com/gpu=7", "x.com/gpu=0", "y.com/gpu=0")
    assert error.code == "OCIGPU-CDI-4"
    assert error.message == "unresolvable CDI devices x.com/gpu=7, y.com/gpu=0"
    assert error.hint == "Devices of x.com/gpu that are defined: 0; all: ocigpu cdi list"


def test_the_hint_says_what_there_is_instead_of_an_unknown_device(place: Path) -> None:
    assert refusal(read_registry(settings(place)), "y.com/gpu=0").hint == CODES["OCIGPU-CDI-4"].fix
    write(place / "0/a.json", spec(**{f"_{number}": "a" for number in range(30)}))
    found = read_registry(settings(place))
    assert refusal(found, "y.com/gpu=0").hint == "Kinds that are defined: x.com/gpu; all: ocigpu cdi list"
    assert str(refusal(found, "x.com/gpu=77").hint).count(",") == 8


def test_files_that_could_not_be_used_are_named_with_an_unknown_device(place: Path) -> None:
    bad = [write(place / f"0/{number}.json", "{") for number in range(5)]
    message = refusal(read_registry(settings(place)), "x.com/gpu=0").message
    assert message.startswith(f"unresolvable CDI devices x.com/gpu=0 and 5 files could not be used: {bad[0]}: line 1")
    assert message.endswith("; ...")
    for path in bad[1:]:
        os.unlink(path)
    assert " and 1 file could not be used: " in refusal(read_registry(settings(place)), "x.com/gpu=0").message


def test_very_many_unknown_devices_make_one_short_message(place: Path) -> None:
    names = [f"x.com/gpu={number}" for number in range(1000)]
    assert refusal(read_registry(settings(place)), *names).message.endswith("x.com/gpu=19 and 980 more")


def test_what_is_no_name_is_refused(place: Path) -> None:
    assert refusal(read_registry(settings(place)), "gpu0").code == "OCIGPU-CDI-1"


# --- broken files


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("", "no data", id="empty"),
        pytest.param("{", "line 1", id="no JSON"),
        pytest.param("a: [", "", id="no YAML"),
        pytest.param('{"cdiVersion": "0.6.0"}', "kind", id="breaks rules"),
        pytest.param(spec(), "devices", id="no devices"),
        pytest.param(spec("gpu", _0="a"), "kind", id="kind without a vendor"),
    ],
)
def test_a_broken_file_is_an_error_of_its_own(place: Path, text: str, reason: str) -> None:
    bad = write(place / "0/bad.yaml", text)
    write(place / "0/good.json", spec(_0="a"))
    for _ in range(2):  # from the file and from the cache
        found = read_registry(settings(place))
        ((path, message),) = found.errors
        assert path == bad
        assert reason in message
        assert bad not in message
        assert env_of(found.resolve(["x.com/gpu=0"])) == ["WHERE=a"]


@pytest.mark.parametrize("name", ["\x1b[2J\n.json", "x" * 240 + ".json", os.fsdecode(b"\xff.json")])
def test_the_path_of_a_broken_file_is_no_part_of_the_reason(place: Path, name: str) -> None:
    path = write(place / "0" / name, "{")
    ((found, message),) = read_registry(settings(place)).errors
    assert (found, message) == (path, "line 1 column 2: Expecting property name enclosed in double quotes")


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_is_refused(place: Path, mode: int) -> None:
    path = write(place / "0/a.json", spec(_0="a"))
    read_registry(settings(place))  # in the cache by now
    os.chmod(path, mode)
    found = read_registry(settings(place))
    assert found == Registry((), ((path, f"owner {os.geteuid()}, mode {mode:04o}: others may write"),))


@pytest.mark.root
def test_a_file_of_somebody_else_is_refused(place: Path) -> None:
    path = write(place / "0/a.json", spec(_0="a"))
    os.chown(path, 4321, 0)
    assert read_registry(settings(place)).errors == ((path, "owner 4321, mode 0644: others may write"),)


def test_a_directory_that_others_may_write_is_refused(place: Path) -> None:
    write(place / "0/a.json", spec(_0="a"))
    write(place / "1/a.json", spec(_1="b"))
    (place / "0").chmod(0o1777)
    found = read_registry(settings(place))
    assert found.errors == ((str(place / "0"), f"owner {os.geteuid()}, mode 1777: others may write"),)
    assert [name for name, _ in found.devices()] == ["x.com/gpu=1"]


def test_what_is_no_directory_or_no_file_is_an_error(place: Path) -> None:
    write(place / "file", "")
    os.mkfifo(place / "0/fifo.yaml", 0o644)
    found = read_registry(settings(place, "file", "0"))
    assert found.errors == (
        (str(place / "file"), "Not a directory"),
        (str(place / "0/fifo.yaml"), "not a regular file"),
    )


def test_a_directory_of_very_many_files_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_FILES", 2)
    for number in range(3):
        write(place / f"0/{number}.json", spec(_0="a"))
    assert read_registry(settings(place)).errors == ((str(place / "0"), "more than 2 specifications"),)


# --- the cache


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that were parsed, in order."""
    paths: list[str] = []
    original = document.read_document

    def read(path: str) -> Any:
        paths.append(Path(path).name)
        return original(path)

    monkeypatch.setattr(document, "read_document", read)
    return paths


def kept(place: Path) -> Path:
    (path,) = (place / "cache").iterdir()
    return path


def contents(found: Registry) -> Any:
    """What specifications say, wherever their text stands."""
    return found.errors, [(spec._replace(text=b"", begin=0, end=0), spec.lines()) for spec in found.specs]


def test_an_unchanged_file_is_parsed_once(place: Path, reads: list[str]) -> None:
    write(place / "0/a.yaml", YAML.format(kind="x.com/gpu", name="0"))
    write(place / "0/b.json", spec("y.com/gpu", _0="b"))
    first = read_registry(settings(place))
    assert reads == ["a.yaml", "b.json"]
    assert contents(read_registry(settings(place))) == contents(first)
    assert reads == ["a.yaml", "b.json"]


def test_in_a_new_process_without_yaml_a_parsed_file_is_still_known(place: Path) -> None:
    """The hot path reads no YAML for a file that has not changed."""
    write(place / "0/a.yaml", YAML.format(kind="x.com/gpu", name="0"))
    script = f"""\
import sys
sys.path.insert(0, {str(Path(ocigpu.__file__).parents[1])!r})
import ocigpu.system.store, ocigpu.cdi.cache
ocigpu.system.store.SYSTEM_DIRECTORY = {str(place / "cache")!r}
ocigpu.cdi.cache.SETTLED_NS = -10**12
from ocigpu.cdi.registry import read_registry
from ocigpu.core.settings import Settings
found = read_registry(Settings(cdi_spec_dirs=({str(place / "0")!r},)))
print(found.devices(), found.errors, sorted(name for name in sys.modules if name.startswith("ocigpu.cdi.")))
"""
    env = {"XDG_RUNTIME_DIR": str(place)}
    command = [sys.executable, "-c", script]
    cold = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    warm = subprocess.run([sys.executable, "-I", "-S", *command[1:]], env=env, capture_output=True, text=True).stdout
    assert "ocigpu.cdi.document" in cold
    assert f"(('x.com/gpu=0', '{place}/0/a.yaml'),) ()" in cold
    assert f"(('x.com/gpu=0', '{place}/0/a.yaml'),) ()" in warm
    for name in ("document", "check", "yaml_child"):
        assert f"ocigpu.cdi.{name}" not in warm


def test_a_refused_file_is_remembered_too(place: Path, reads: list[str]) -> None:
    write(place / "0/a.json", spec("gpu", _0="a"))
    first = read_registry(settings(place))
    assert len(first.errors) == 1
    assert read_registry(settings(place)) == first
    assert reads == ["a.json"]


def test_a_file_that_could_not_be_read_is_tried_again(place: Path, reads: list[str]) -> None:
    """That it took too long may have been the machine's fault."""
    write(place / "0/a.yaml", "a: [")
    read_registry(settings(place))
    read_registry(settings(place))
    assert reads == ["a.yaml", "a.yaml"]


@pytest.mark.parametrize("how", ["content", "replaced", "time", "moved"])
def test_a_changed_file_is_parsed_again(place: Path, reads: list[str], how: str) -> None:
    path = place / "0/a.json"
    write(path, spec(_0="a"))
    read_registry(settings(place))
    if how == "content":
        write(path, spec(_0="other"))
    elif how == "replaced":
        write(place / "0/new", spec(_0="b"))
        os.utime(place / "0/new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        os.rename(place / "0/new", path)
    elif how == "time":
        os.utime(path, ns=(0, 0))
    else:
        os.rename(path, place / "1/a.json")
    found = read_registry(settings(place))
    assert reads == ["a.json", "a.json"]
    expected = {"content": "WHERE=other", "replaced": "WHERE=b"}.get(how, "WHERE=a")
    assert env_of(found.resolve(["x.com/gpu=0"])) == [expected]


def test_a_file_of_the_same_size_and_time_is_parsed_again(place: Path, reads: list[str]) -> None:
    """Written in place, its time put back: the time of the change of its state is not ours to set."""
    path = Path(write(place / "0/a.json", spec(_0="a")))
    read_registry(settings(place))
    before = path.stat()
    path.write_text(spec(_0="b"))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # ends with the next tick of the kernel's clock
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    same = (before.st_ino, before.st_size, before.st_mtime_ns)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == same
    assert env_of(read_registry(settings(place)).resolve(["x.com/gpu=0"])) == ["WHERE=b"]
    assert reads == ["a.json", "a.json"]


def test_a_link_that_leads_elsewhere_is_parsed_again(place: Path, reads: list[str]) -> None:
    for name in ("one", "two"):
        write(place / name, spec(_0=name))
    link = place / "0/a.json"
    for name in ("one", "two", "two"):
        link.unlink(missing_ok=True)
        link.symlink_to(place / name)
        assert env_of(read_registry(settings(place)).resolve(["x.com/gpu=0"])) == [f"WHERE={name}"]
    assert reads == ["a.json", "a.json"]


def test_what_happens_in_a_directory_counts_and_not_its_time(place: Path, reads: list[str]) -> None:
    """A file that comes by a rename or hard link is found, which watchers of the reference library miss."""
    write(place / "0/a.json", spec("a.com/gpu", _0="a"))
    read_registry(settings(place))
    os.utime(place / "0", ns=(5, 5))
    (place / "0/other").touch()
    read_registry(settings(place))
    assert reads == ["a.json"]
    os.rename(write(place / "b", spec("b.com/gpu", _0="b")), place / "0/b.json")
    os.link(write(place / "c", spec("c.com/gpu", _0="c")), place / "0/c.json")
    os.utime(place / "0", ns=(5, 5))
    assert [name for name, _ in read_registry(settings(place)).devices()] == [f"{kind}.com/gpu=0" for kind in "abc"]
    os.unlink(place / "0/a.json")
    os.utime(place / "0", ns=(5, 5))
    assert [name for name, _ in read_registry(settings(place)).devices()] == ["b.com/gpu=0", "c.com/gpu=0"]
    assert reads == ["a.json", "b.json", "c.json"]


def test_a_directory_that_is_named_twice_counts_where_it_is_named_last(place: Path) -> None:
    for number in range(2):
        write(place / f"{number}/a.json", spec(_0=str(number)))
    found = read_registry(settings(place, "0", "1", "0"))
    assert env_of(found.resolve(["x.com/gpu=0"])) == ["WHERE=0"]
    assert found.shadowed() == (("x.com/gpu=0", str(place / "1/a.json"), str(place / "0/a.json")),)
    assert found.conflicts() == ()


def test_a_file_of_a_moment_ago_is_not_kept(place: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]) -> None:
    """Another write could follow within the same tick of the clock."""
    monkeypatch.setattr(cache, "SETTLED_NS", 10**15)
    write(place / "0/a.json", spec(_0="a"))
    for _ in range(2):
        assert len(read_registry(settings(place)).devices()) == 1
    assert reads == ["a.json", "a.json"]


def damage(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    return [
        b"",
        content[:-1],
        content[: len(content) // 2],
        content + b"x",
        content.replace(b"WHERE=a", b"WHERE=b"),
        content.replace(b"cdi 3", b"cdi 2"),
        b"\n".join([lines[0], *lines[2:]]),
        b"\0" * len(content),
        b"[]\n",
    ]


@pytest.mark.parametrize("number", range(9))
def test_a_damaged_cache_is_ignored_and_written_again(place: Path, reads: list[str], number: int) -> None:
    write(place / "0/a.json", spec(_0="a"))
    first = read_registry(settings(place))
    path = kept(place)
    content = path.read_bytes()
    damaged = damage(content)[number]
    assert damaged != content
    path.write_bytes(damaged)
    assert read_registry(settings(place)) == first
    assert path.read_bytes() == content
    assert reads == ["a.json", "a.json"]


def test_a_cache_of_another_form_with_the_right_sum_is_ignored(place: Path) -> None:
    path = write(place / "0/a.json", spec(_0="a"))
    first = read_registry(settings(place))
    entry = kept(place)
    for text in (b"", b"7\n", b"{}\n", b"x\n", b'{"kind": 1}\n'):
        head = entry.read_bytes().split(b"\n")[0]
        entry.write_bytes(cache_files.seal(head + b"\n" + text))
        entry.chmod(0o600)
        assert read_registry(settings(place)) == first
    assert path == first.specs[0].path


@pytest.mark.root
def test_a_cache_that_others_could_have_written_is_ignored(place: Path, reads: list[str]) -> None:
    write(place / "0/a.json", spec(_0="a"))
    read_registry(settings(place))
    forged = kept(place).read_bytes()
    os.chown(kept(place), 4321, 4321)
    read_registry(settings(place))
    assert kept(place).stat().st_uid == 0
    kept(place).write_bytes(forged)
    kept(place).chmod(0o644)
    read_registry(settings(place))
    assert reads == ["a.json"] * 3
    os.chown(place / "cache", 4321, 4321)
    assert len(read_registry(settings(place)).devices()) == 1
    assert reads == ["a.json"] * 4


def test_entries_of_files_that_are_gone_go_when_there_are_many(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers of dynamic resources write a file for each claim."""
    monkeypatch.setattr(cache, "SPARE_FILES", 3)
    for number in range(10):
        path = write(place / f"0/claim{number}.json", spec(_0="a"))
        read_registry(settings(place))
        os.unlink(path)
    assert len(list((place / "cache").iterdir())) <= 4


@pytest.mark.rest
def test_several_processes_at_once_find_the_same(place: Path) -> None:
    for number in range(4):
        write(place / f"0/{number}.yaml", YAML.format(kind=f"x.com/k{number}", name="0"))
    expected = read_registry(settings(place)).devices()
    for path in (place / "cache").iterdir():
        path.unlink()
    children = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if read_registry(settings(place)).devices() == expected else 2)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 8
    names = [path.name for path in (place / "cache").iterdir()]
    assert len(names) == 4
    assert not [name for name in names if name.endswith(".tmp")]


def test_one_of_ten_thousand_devices_is_found_without_the_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place / "0/a.json", spec(**{f"_{number}": str(number) for number in range(10_000)}))
    read_registry(settings(place))
    decoded: list[int] = []
    original = rawjson.parse

    def parse(text: str) -> Any:
        decoded.append(len(text))
        return original(text)

    monkeypatch.setattr(rawjson, "parse", parse)
    resolved = read_registry(settings(place)).resolve(["x.com/gpu=9999"])
    assert env_of(resolved) == ["WHERE=9999"]
    assert len(decoded) == 2
    assert sum(decoded) < 200
