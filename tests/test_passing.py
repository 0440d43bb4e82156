"""What the stub of ocigpu-runtime passes on without Python: never a request, and all else as Python would."""

import functools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import requirements
from support.process import wait_for
from support.product import STUBS, PublicCopy, write_stub

from ocigpu import RUNTIME_SPEC, VENDOR_VERSION, __version__, runtime
from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.core.tokens import MOUNT_DIRECTORIES
from ocigpu.core.vendors import FIRST, VENDORS
from ocigpu.entry import arguments
from ocigpu.entry import pass_through as passing
from ocigpu.gpus.vendors import parse_request
from ocigpu.system import store as cache
from ocigpu.system.settings_file import read_settings

SHELLS = pytest.mark.parametrize(
    "place",
    [(), ("dash",), ("bash", "--posix"), ("busybox", "sh")],
    ids=lambda words: (*words, "compiled")[0],
    indirect=True,
)
"""What the stub is run by: no shell runs the compiled one.  Without this mark a test has that and /bin/sh."""
SH = pytest.mark.parametrize("place", [("/bin/sh",)], ids=["sh"], indirect=True)
PYTHON_DECIDES = 127
"""The status of a stub whose interpreter is gone."""
RECORDER = """#!/bin/sh
{{
  echo "$#"; for word; do printf '<%s>\\n' "$word"; done
  tr '\\0' '\\n' <"/proc/$$/environ" | grep -v '^OCIGPU_RUNTIME_PID=\\|^_=' | sort
  for number in 0 1 2 3; do readlink "/proc/$$/fd/$number" || echo closed; done
  [ "$OCIGPU_RUNTIME_PID" = $$ ] && pwd
}} >"{0}" 2>/dev/null
exit 7
"""
ANY_RUN = "/run-of-any-place" + "/" * 200
"""What stands in a stub for the directory of its cache directory: of a length that every path can be brought to."""


# --- words

NAMES = st.text(
    st.sampled_from(["A", "b", "_", "-", ".", "/", "=", '"', "\\", "é", " ", "\n", "\U0001f600"]), max_size=6
)
VARIABLES = st.one_of(
    st.sampled_from(["NVIDIA_VISIBLE_DEVICES", "NVIDIA_IMEX_CHANNELS", "AMD_VISIBLE_DEVICES", "CUDA_VERSION", "PATH"]),
    NAMES,
)
VALUES = st.one_of(st.sampled_from(["all", "none", "void", "", "0", "nvidia.com/gpu=0", "9.0", "?"]), NAMES)


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], Settings]:
    """Return a configuration and settings that have a good chance to see a request in it."""
    swarm = draw(st.lists(NAMES, max_size=2))
    prefixes = draw(st.lists(NAMES.filter(bool), max_size=2))
    keys = st.one_of(st.sampled_from(["cdi.k8s.io/", *prefixes]), NAMES)
    variables = st.tuples(st.one_of(VARIABLES, st.sampled_from(["x", *swarm])), VALUES).map("=".join)
    folders = st.sampled_from([*MOUNT_DIRECTORIES, "/var/run/./x/..//nvidia-container-devices", "/run", "/x"])
    destinations = st.tuples(folders, st.sampled_from(["/0", "/all", "/cdi/nvidia.com/gpu/0", ""])).map("".join)
    mounts = st.fixed_dictionaries({"source": st.just("/dev/null"), "destination": destinations})
    annotations = st.dictionaries(st.tuples(keys, NAMES).map("".join), VALUES, max_size=2)
    sets = st.sampled_from([{}, {"bounding": ["CAP_SYS_ADMIN"]}])
    config = {
        "process": {"env": draw(st.lists(variables, max_size=3)), "capabilities": draw(sets)},
        "annotations": draw(annotations),
        "mounts": draw(st.lists(mounts, max_size=2)),
    }
    settings = Settings(
        mode=draw(st.sampled_from(["auto", "hook", "cdi"])),
        swarm_resource=",".join(swarm),
        cdi_annotation_prefixes=tuple(draw(st.sampled_from([("cdi.k8s.io/",), tuple(prefixes)]))),
        accept_nvidia_visible_devices_as_volume_mounts=draw(st.booleans()),
        accept_nvidia_visible_devices_envvar_when_unprivileged=draw(st.booleans()),
    )
    return config, settings


def asks(config: dict[str, Any], settings: Settings) -> bool:
    """Return whether anything is to be done or said about a container."""
    try:
        request = parse_request(config, settings)
    except OcigpuError:
        return True
    return request.selection != "nothing" or bool(request.notes)


def test_every_letter_of_a_word_is_seen_when_it_is_escaped() -> None:
    nothing = Settings(swarm_resource="", cdi_annotation_prefixes=())
    words = {
        chr(code): passing.find_words(nothing._replace(cdi_annotation_prefixes=(chr(code),))) for code in range(128)
    }
    letters = [letter for letter, found in words.items() if passing.ANY_CONFIG not in found]
    for letter in letters:
        for form in (f"\\u{ord(letter):04x}", f"\\u{ord(letter):04X}"):
            assert json.loads(f'"{form}"') == letter
            assert any(word in form for word in passing.ESCAPES)
    assert len(letters) == 26 + 26 + 10 + 3
    assert not any(word in form for word in passing.ESCAPES for form in ("\\u003c", "\\u003e", "\\u0026", "\\u2028"))


@given(requests(), st.booleans(), st.booleans(), st.integers(0, 3))
def test_every_request_contains_a_word_however_it_is_written(
    case: tuple[dict[str, Any], Settings], ascii_only: bool, slashes: bool, escaped: int
) -> None:
    config, settings = case
    text = json.dumps(config, ensure_ascii=ascii_only)
    if slashes:
        text = text.replace("/", "\\/")
    if escaped:
        letter = "N_d"[escaped - 1]
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    words = passing.find_words(settings)
    assert not any("\n" in word or "'" in word or not word for word in words)
    if asks(config, settings):
        assert any(word in text for word in words)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {"cdi.k8s.io"}),
        ({"swarm_resource": " A_B , DOCKER_RESOURCE_GPU,"}, {"cdi.k8s.io", "A_B", "DOCKER_RESOURCE_GPU"}),
        ({"cdi_annotation_prefixes": ("example.com/gpu-",)}, {"example.com"}),
        ({"cdi_annotation_prefixes": ("/",)}, {"{"}),
        ({"cdi_annotation_prefixes": ("é'\\",), "swarm_resource": '"'}, {"{"}),
    ],
)
def test_words_follow_the_settings(settings: dict[str, Any], more: set[str]) -> None:
    usual = {"NVIDIA_", "AMD_VISIBLE_DEVICES", "CUDA_VERSION", "ocigpu/declared", "nvidia-container-devices"}
    others = {variable for name, (_, variable, _) in VENDORS.items() if variable and name != FIRST}
    expected = usual | others | {*passing.ESCAPES} | more
    assert set(passing.find_words(Settings(**settings))) == expected


# --- the stub

REPOSITORY = Path(__file__).resolve().parents[1]
WRITTEN = {
    "escaped": '{"process": {"env": ["NVI\\u0044IA\\u005fVISIBLE_DEVICES=0"]}}',
    "annotated": '{"annotations": {"cdi.k8s.io\\/x": "nvidia.com\\/gpu=0"}}',
    "ampersand": '{"process": {"args": ["sh", "-c", "a \\u003c b \\u0026\\u0026 c \\ud83d\\ude00"]}}',
}
"""Configurations by the name of their bundle."""


def newer_than(path: Path, time_ns: int) -> bool:
    path.touch()
    return path.stat().st_ctime_ns > time_ns


@functools.cache
def stub_text(kind: str, **values: str | Path) -> bytes:
    """Return a stub's file for any place: one is compiled once."""
    with tempfile.TemporaryDirectory() as directory:
        return write_stub(Path(directory, "stub"), kind, "ocigpu-runtime", run=ANY_RUN, **values).read_bytes()


class Place:
    """A stub with a cache directory of its own, a recording runtime behind it, and bundles.

    ``shell``: what runs the stub, if it is not compiled.
    """

    def __init__(self, directory: Path, shell: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self.shell = shell
        self.kind = "sh" if shell else "compiled"
        self.cache = directory / "run/ocigpu"
        self.cache.parent.mkdir()
        self.programs = directory / "programs"
        self.programs.mkdir()
        self.record = directory / "record"
        self.runtime = self.programs / "low-level"
        self.runtime.write_text(RECORDER.format(self.record))
        self.runtime.chmod(0o755)
        self.settings = directory / "etc/config.toml"
        self.settings.parent.mkdir()
        self.settings.write_text('[runtime]\nruntimes = ["low-level"]\n')
        self.settings.chmod(0o644)
        self.bundles = directory / "bundles"
        for name, variable in (
            ("plain", "A=b"),
            ("a \n b", "A=b"),
            ("-dash", "A=b"),
            ("asking", "NVIDIA_VISIBLE_DEVICES=0"),
        ):
            (self.bundles / name).mkdir(parents=True)
            (self.bundles / name / "config.json").write_text(json.dumps({"process": {"env": [variable]}}))
        for name, text in WRITTEN.items():
            (self.bundles / name).mkdir()
            (self.bundles / name / "config.json").write_text(text)
        (self.bundles / "config.json").write_text("{}")
        (self.bundles / "pipe").mkdir()
        os.mkfifo(self.bundles / "pipe/config.json")
        self.environment = {
            "PATH": f"{self.programs}:/usr/bin:/bin", "OCIGPU_CONFIG": str(self.settings), "A": "b c", "E": ""
        }  # fmt: skip
        self.settle()
        self.stubs = {"full": self.write_stub("full"), "short": self.write_stub("short")}

    @property
    def next(self) -> Path:
        config, search = self.environment["OCIGPU_CONFIG"], os.fsencode(self.environment["PATH"])
        return self.cache / f"next-{len(config)}-{len(search)}-{os.path.basename(config)}"

    def write_stub(self, name: str, **values: str | Path) -> Path:
        """Write a stub that remembers nothing ("full"), or one that lacks its interpreter."""
        run, path = self.cache.parent if name == "short" else self.directory / "forgotten", self.directory / name
        values |= {} if name == "full" else {"interpreter": "/nonexistent/python3"}
        path.write_bytes(
            stub_text(self.kind, **values).replace(ANY_RUN.encode(), str(run).ljust(len(ANY_RUN), "/").encode())
        )
        path.chmod(0o755)
        return path

    def settle(self) -> None:
        """Make everything as old as on a machine that was installed yesterday."""
        for path in (self.directory, *self.directory.rglob("*")):
            os.utime(path, (time.time() - 86400, time.time() - 86400))

    def remember(self, monkeypatch: pytest.MonkeyPatch, settings: Settings | None = None) -> None:
        monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(self.cache))
        monkeypatch.setattr(passing, "__file__", str(self.directory / "package/entry/pass_through.py"))  # settled, too
        for name in ("PATH", "OCIGPU_CONFIG"):
            monkeypatch.setenv(name, self.environment[name])
        passing.remember(str(self.runtime), settings or read_settings(str(self.settings)), time.time_ns())

    def run(self, stub: str, *words: str, redirected: str = "", **options: Any) -> tuple[int, str]:
        """Return the status, and what the low-level runtime saw ("" when it did not start).

        ``redirected``: redirections of a shell.
        """
        self.record.unlink(missing_ok=True)
        options.setdefault("cwd", self.bundles / "plain")
        env = {**self.environment, **options.pop("env", {})}
        command = [*self.shell, str(self.stubs.get(stub, stub)), *words]
        if redirected:
            command = ["/bin/sh", "-c", f'"$@" {redirected}', "sh", *command]
        with (self.directory / "full").open() as given:
            done = subprocess.run(
                command, stdin=given, stdout=given.fileno(),
                stderr=subprocess.DEVNULL, env=env, timeout=60, **options,
            )  # fmt: skip
        return done.returncode, self.record.read_text() if self.record.exists() else ""

    def passes(self, *words: str, **options: Any) -> bool:
        status, seen = self.run("short", *(words or ("state", "c1")), **options)
        assert (status, bool(seen)) in {(7, True), (PYTHON_DECIDES, False)}
        return bool(seen)


@pytest.fixture(params=[(), ("/bin/sh",)], ids=STUBS)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    requirements.require(requirements.root())
    place = Place(tmp_path, request.param)
    place.remember(monkeypatch)
    assert place.next.stat().st_mode & 0o777 == 0o600
    return place


PASSED = [
    [],
    [""],
    ["state", "c1"],
    ["--root", "/r", "--log=x", "kill", "c1", "KILL"],
    ["delete", "--force", "c 1\n*"],
    ["--version"],
    ["create", "c1"],
    ["run", "c1"],
    ["create", ""],
    ["--root", "/r", "--log", "l", "--log-format", "json", "create", "--bundle", "../plain", "--pid-file", "p", "c1"],
    ["--systemd-cgroup", "--debug", "create", "--no-pivot", "--bundle=../plain", "c1"],
    ["create", "--bundle", "", "c1"],
    ["create", "--bundle", "../asking", "--bundle", "../plain", "c1"],
    ["create", "--pid-file", "--bundle", "--bundle", "..", "c1"],
    ["create", "--bundle", "../a \n b", "c1"],
    ["create", "--bundle", ".././-dash", "c1"],
    ["create", "--bundle", "create", "--bundle", "..", "c1"],
    ["create", "--bundle", "../ampersand", "c1"],
]
NOT_PASSED = [
    ["create", "--bundle", "../asking", "c1"],
    ["run", "--bundle=../asking", "c1"],
    ["create", "--bundle", "../plain", "--bundle", "../asking", "c1"],
    ["create", "--bundle=../plain", "--bundle=../asking", "c1"],
    ["create", "--bundle", "../escaped", "c1"],
    ["create", "--bundle", "../annotated", "c1"],
    ["create", "--bundle"],
    ["create", "--bundle", "../nothing", "c1"],
    ["create", "--bundle", "../pipe", "c1"],
    ["create", "-b", "../plain", "c1"],
    ["create", "-b../plain", "c1"],
    ["create", "-db", "../plain", "c1"],
    ["create", "-bundle", "../asking", "c1"],
    ["create", "c1", "--bundle", "../asking"],
    ["create", "--config=../asking/config.json", "c1"],
    ["create", "--config", "../asking/config.json", "c1"],
    ["create", "-f", "../asking/config.json", "c1"],
    ["create", "--", "c1"],
    ["--", "create", "c1"],
    ["-debug", "create", "c1"],
    ["--option-of-tomorrow", "value", "create", "c1"],
    ["--option-of-tomorrow", "create", "c1"],
    ["--bundle", "create", "c1"],
    ["--root", "create", "run", "--bundle", "../asking", "c1"],
    ["delete", "create"],
    ["exec", "c1", "npm", "run"],
]


@SHELLS
@pytest.mark.product(single=True)
@pytest.mark.parametrize("words", PASSED, ids=" ".join)
def test_what_passes_arrives_as_from_python(place: Place, words: list[str]) -> None:
    status, seen = place.run("full", *words)
    assert seen.splitlines()[:1] == [str(len(words))]
    assert place.run("short", *words) == (status, seen)
    assert status == 7


@SHELLS
@pytest.mark.product(single=True)
@pytest.mark.parametrize("words", NOT_PASSED, ids=" ".join)
def test_python_decides_about_everything_else(place: Place, words: list[str]) -> None:
    assert not place.passes(*words)


@pytest.mark.product(single=True)
@SHELLS
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ocigpu-runtime", f"ocigpu-runtime {__version__}"),
        ("nvidia-container-runtime", f"NVIDIA Container Runtime version {VENDOR_VERSION}\nocigpu: {__version__}"),
    ],
)
@pytest.mark.parametrize("words", [["--version"], ["--root", "/r", "-version"], ["-v"]], ids=" ".join)
def test_our_version_comes_before_the_low_level_runtimes(place: Place, name: str, line: str, words: list[str]) -> None:
    """By the name by which the program is called, which other tools look for; from Python and without it."""
    for kind, stub in place.stubs.items():
        link = place.directory / f"named-{kind}" / name
        link.parent.mkdir()
        link.symlink_to(stub)
        done = subprocess.run([*place.shell, str(link), *words], env=place.environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (7, f"{line}\nspec: {RUNTIME_SPEC}\n\n", "")


@SHELLS
def test_a_program_of_a_container_prints_its_own_version(place: Place) -> None:
    for stub in place.stubs.values():
        command = [*place.shell, str(stub), "exec", "c1", "python", "--version"]
        done = subprocess.run(command, env=place.environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


@SHELLS
def test_closed_streams_stay_closed(place: Place) -> None:
    for closing in ("<&- >&- 2>&-", "<&-", "2>&-", "3<&0 <&-"):
        for words in (("state", "c1"), ("create", "c1")):
            seen = [place.run(stub, *words, redirected=closing) for stub in place.stubs]
            assert seen[0] == seen[1]
            assert seen[0][0] == 7


@SHELLS
@pytest.mark.parametrize(
    "env",
    [{"OCIGPU_RUNTIME_PID": "1"}, {"PATH": "/usr/bin:/bin"}, {"OCIGPU_CONFIG": "/nonexistent"}, {"OCIGPU_CONFIG": ""}],
    ids=str,
)
def test_another_environment_is_for_python(place: Place, env: dict[str, str]) -> None:
    assert not place.passes(env=env)


@SHELLS
def test_settings_of_one_length_do_not_take_turns(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first = place.settings
    place.settings = first.with_name("second.tml")
    place.settings.write_bytes(first.read_bytes())
    place.settle()
    for path in (place.settings, first):  # settling has touched the directories of both
        place.settings = path
        place.environment["OCIGPU_CONFIG"] = str(path)
        place.remember(monkeypatch)
    assert place.passes()
    assert place.passes(env={"OCIGPU_CONFIG": str(first.with_name("second.tml"))})


@pytest.mark.product(single=True)
@SHELLS
@pytest.mark.parametrize("value", ["", "x"])
@pytest.mark.parametrize(
    "name", ["at", "bundle", "cache", "create", "next", "odd", "runtime", "value", "word", "words"]
)
def test_a_variable_that_a_shell_would_change_arrives_as_it_is(place: Place, name: str, value: str) -> None:
    env = {name: value}
    assert place.run("full", "state", "c1", env=env)[1].count(f"{name}={value}\n") == 1
    assert place.passes(env=env) == (place.kind == "compiled"), "a shell leaves it to Python"
    if place.kind == "compiled":
        assert place.run("full", "state", "c1", env=env) == place.run("short", "state", "c1", env=env)


@SHELLS
def test_a_hostile_environment_changes_nothing(place: Place) -> None:
    script = place.directory / "env.sh"
    script.write_text("echo evil; exit 0\n")
    env = {
        "ENV": str(script), "BASH_ENV": str(script), "IFS": "/o", "CDPATH": "/", "GREP_OPTIONS": "-v", "LC_ALL": "x",
        "POSIXLY_CORRECT": "1", "XDG_RUNTIME_DIR": str(place.directory), "PS4": "$(exit 1)",
    }  # fmt: skip
    assert place.passes(env=env)
    assert place.passes("create", "c1", env=env)
    assert not place.passes("create", "--bundle", "../asking", "c1", env=env)


@SHELLS
def test_options_of_the_shell_from_the_environment_change_nothing(place: Place) -> None:
    """Which bash takes from there."""
    env = {"SHELLOPTS": "allexport:errexit:nounset"}
    for words in (("state", "c1"), ("create", "c1")):
        seen = [place.run(stub, *words, env=env) for stub in place.stubs]
        assert seen[0] == seen[1]
        assert seen[0][0] == 7
    assert not place.passes("create", "--bundle", "../asking", "c1", env=env)


@SH
@pytest.mark.parametrize("grep", ["/nonexistent/grep", "GREP"])
def test_a_broken_grep_is_for_python(place: Place, grep: str) -> None:
    broken = place.directory / "grep"
    broken.write_text("#!/bin/sh\nexit 2\n")
    broken.chmod(0o755)
    place.stubs["short"] = place.write_stub("short", grep=grep.replace("GREP", str(broken)))
    assert place.passes("state", "c1")
    assert not place.passes("create", "c1")


def test_a_grep_that_comes_first_in_path_is_not_asked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.programs / "grep").write_text("#!/bin/sh\nexit 1\n")
    (place.programs / "grep").chmod(0o755)
    place.settle()
    place.remember(monkeypatch)
    assert place.passes("create", "c1")
    assert not place.passes("create", "--bundle", "../asking", "c1")


@SH
def test_the_grep_of_busybox_finds_the_same(place: Place) -> None:
    (place.directory / "grep").symlink_to(str(shutil.which("busybox")))
    place.stubs["short"] = place.write_stub("short", grep=place.directory / "grep")
    names = sorted(path.name for path in place.bundles.iterdir() if path.is_dir())
    passed = [name for name in names if place.passes("create", "--bundle", f"../{name}", "c1")]
    assert passed == ["-dash", "a \n b", "ampersand", "plain"]


def put_back(place: Place, seconds: int) -> None:
    """Write settings in place and give them a time before that of those they replace, as ``cp -p`` does of a backup."""
    before = place.settings.stat()
    with place.settings.open("a") as file:
        file.write('swarm-resource = "X"\n')
    os.utime(place.settings, ns=(0, before.st_mtime_ns + seconds * 10**9))
    assert place.settings.stat().st_ino == before.st_ino


CHANGES = {
    "settings written": lambda place: place.settings.write_text(place.settings.read_text()),
    "settings replaced by older ones": lambda place: (
        shutil.copy2(place.settings, place.directory / "older"),
        os.rename(place.directory / "older", place.settings),
    ),
    "older settings written over them": lambda place: put_back(place, -86400),
    "settings written while the clock was set back": lambda place: put_back(place, -3600),
    "an older directory of programs": lambda place: (
        (place.programs / "x").touch(),
        os.utime(place.programs, ns=(0, place.programs.stat().st_mtime_ns - 10**15)),
    ),
    "no directory of programs": lambda place: os.rename(place.programs, place.directory / "moved"),
    "a mark removed": lambda place: next(place.cache.glob("mark-*")).unlink(),
    "settings removed": lambda place: place.settings.unlink(),
    "runtime removed": lambda place: place.runtime.unlink(),
    "runtime no longer executable": lambda place: place.runtime.chmod(0o000) or place.runtime.write_text(""),
    "another program in PATH": lambda place: (place.programs / "x").touch(),
    "nothing left": lambda place: place.next.unlink(),
    "empty": lambda place: place.next.write_text(""),
    "not a file": lambda place: (place.next.unlink(), place.next.mkdir()),
    "half of it": lambda place: place.next.write_text(place.next.read_text()[:-40]),
    "another's": lambda place: os.chown(place.next, 1234, 0),
    "a link": lambda place: (
        os.rename(place.next, place.directory / "moved"),
        place.next.symlink_to(place.directory / "moved"),
    ),
    "another's directory": lambda place: os.chown(place.cache, 1234, 0),
    "a link as directory": lambda place: (
        os.rename(place.cache, place.directory / "moved"),
        place.cache.symlink_to("moved"),
    ),
}


@pytest.mark.product(single=True)
@SHELLS
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_has_changed_is_for_python(place: Place, change: Any) -> None:
    assert place.passes()
    change(place)
    status, seen = place.run("short", "state", "c1")
    assert (status not in (0, 7), seen) == (True, "")


def test_older_settings_behind_a_link_are_for_python(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = place.directory / "real/config.toml"
    shutil.copytree(place.settings.parent, real.parent)
    place.settings.unlink()
    place.settings.symlink_to(real)
    place.settle()
    place.remember(monkeypatch)
    assert place.passes()
    shutil.copy2(real, place.directory / "older")
    os.rename(place.directory / "older", real)
    assert not place.passes()


@SHELLS
def test_without_words_every_container_is_for_python(place: Place) -> None:
    content = place.next.read_text()
    place.next.write_text(content[: content.index("words='")] + "words=''\n")
    os.utime(place.next)
    assert place.passes()
    assert not place.passes("create", "c1")


def test_settings_that_appear_are_for_python(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    default = place.directory / "none/config.toml"
    monkeypatch.setattr(passing, "DEFAULT_PATH", str(default))
    place.environment["OCIGPU_CONFIG"] = ""
    place.remember(monkeypatch, Settings(runtime_runtimes=("low-level",)))
    assert place.passes()
    shutil.copytree(place.settings.parent, default.parent)
    place.settle()
    os.utime(place.next)
    assert not place.passes()


# --- remembering


def test_what_is_known_is_not_written_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place.next.stat()
    place.remember(monkeypatch)
    assert place.next.stat().st_ino == before.st_ino
    os.utime(place.settings, (time.time() - 10, time.time() - 10))
    assert not place.passes()
    place.remember(monkeypatch)
    assert place.next.stat().st_ino != before.st_ino
    assert place.passes()
    for mark in place.cache.glob("mark-*"):
        mark.unlink()
    place.remember(monkeypatch)
    assert place.passes()


@pytest.mark.parametrize("words", [["state", "c1"], ["start", "c1"], ["kill", "c1", "KILL"], ["delete", "c1"]])
def test_a_command_that_came_to_python_is_the_last_one_of_its_kind(
    place: Place, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """A package manager changes the directories of PATH: no container need be created before commands pass again."""
    os.utime(place.programs, (time.time() - 10, time.time() - 10))
    assert not place.passes(*words)
    monkeypatch.setattr(runtime, "become", lambda *_: None)
    runtime.main([str(place.stubs["full"]), *words])
    assert place.passes(*words)


@SHELLS
def test_a_path_that_appears_with_an_old_time_is_for_python(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.environment["PATH"] = f"{place.directory}/later:{place.environment['PATH']}"
    place.remember(monkeypatch)
    assert place.passes()
    shutil.copytree(place.programs, place.directory / "later")
    os.utime(place.directory / "later", (0, 0))
    assert not place.passes()


def test_settings_of_a_whole_second_are_for_python(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages, archives and images give such times, often one to all of their files."""
    os.utime(place.settings, (1_000_000_000, 1_000_000_000))
    place.next.unlink()
    place.remember(monkeypatch)
    assert not place.next.exists()


def test_settings_that_are_replaced_while_they_are_read_are_not_remembered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.next.unlink()
    settings = read_settings(str(place.settings))
    began = time.time_ns()
    wait_for("a time that can be told from the other", lambda: newer_than(place.directory / "now", began))
    put_back(place, -86400)
    monkeypatch.setattr(time, "time_ns", lambda: began)
    place.remember(monkeypatch, settings)
    assert not place.next.exists()


def test_a_change_within_the_same_second_is_seen(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some shells compare whole seconds; the clock is held, because a machine that stops for a while has others."""
    place.next.unlink()
    os.utime(place.settings)
    later = place.settings.stat().st_mtime_ns + 900_000_000
    with monkeypatch.context() as clock:
        clock.setattr(time, "time_ns", lambda: later)
        place.remember(clock)
    assert not place.next.exists()
    place.settle()
    place.remember(monkeypatch)
    assert place.next.stat().st_mtime_ns <= time.time_ns() - 2_000_000_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OCIGPU_CONFIG", "etc/config.toml"),
        ("OCIGPU_CONFIG", "c.toml"),
        ("PATH", "/a'b"),
        ("PATH", "/a\nb"),
        ("PATH", "/\udcff'"),
    ],
)
def test_what_a_shell_could_misread_is_not_remembered(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    place.next.unlink()
    place.environment[name] = value
    place.remember(monkeypatch, read_settings(str(place.settings)))
    assert not place.next.exists()
    place.environment[name] = str(place.settings) if name == "OCIGPU_CONFIG" else '/a $(b) `c` "$d" \\ \udcff'
    place.remember(monkeypatch)
    assert place.passes()


def test_a_runtime_found_from_the_current_directory_is_not_remembered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.next.unlink()
    place.remember(monkeypatch, Settings(path=str(place.settings), runtime_runtimes=("bin/runc", "runc")))
    assert not place.next.exists()


def test_engines_with_other_paths_are_remembered_beside_each_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for search in ("/usr/bin:/bin", "/usr/bin:/bin:/sbin"):
        place.environment["PATH"] = search
        assert not place.passes()
        place.remember(monkeypatch)
    assert place.passes()
    assert place.passes(env={"PATH": "/usr/bin:/bin"})
    assert not place.passes(env={"PATH": "/bin:/usr/bin"})
    for length in range(passing.SPARE + 2):
        place.environment["PATH"] = "/usr/bin:/bin:" + "/" * length
        place.remember(monkeypatch)
    assert len(list(place.cache.iterdir())) <= passing.SPARE + 1


def test_forgetting(place: Place) -> None:
    for _ in range(2):
        passing.forget()
        assert not place.passes()
    place.cache.rmdir()
    passing.forget()


# --- both forms of the stub

OPTIONS = (*arguments.GLOBAL_WITH_VALUE, *arguments.GLOBAL_FLAGS, *arguments.CREATE_WITH_VALUE, "no-pivot", "configs")
ODD_WORDS = (
    "",
    "-",
    "--",
    "=",
    "--=",
    "create",
    "run",
    "c1",
    "../asking",
    "--bundle=",
    "--bundle=../asking",
    "-b../plain",
)
WORDS = (*ODD_WORDS, *(f"{dash}{name}{end}" for dash in ("--", "-") for name in OPTIONS for end in ("", "=x")))
TEMPLATES = (
    "W create c1", "W x create c1", "W state c1", "create W c1", "create W --bundle c1", "create W ../plain c1",
    "create c1 W", "create W", "--root W create c1", "create --bundle W c1", "--version W create c1", "W W",
)  # fmt: skip
"""Command lines with a word in every place."""
BUNDLES = ("plain", "asking", "escaped", "pipe", "linked", "directory", "to-bundle", "nothing", "empty", "unreadable")
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {}, {"OCIGPU_RUNTIME_PID": ""}, {"OCIGPU_RUNTIME_PID": "1"}, {"PATH": ""}, {"PATH": "/usr/bin:/bin"},
    {"OCIGPU_CONFIG": ""}, {"XDG_RUNTIME_DIR": "/nonexistent"},
)  # fmt: skip


class Twins(Place):
    """A place with both forms of the stub, and bundles of all kinds."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.runtime.write_text(f"#!/bin/sh\nprintf '<%s>' $# \"$@\" >{self.record}\nexit 7\n")
        for name in ("generated", "linked", "directory/config.json", "empty", "unreadable"):
            (self.bundles / name).mkdir(parents=True)
        for name in ("generated", "empty"):
            (self.bundles / name / "config.json").touch()
        (self.bundles / "linked/config.json").symlink_to(self.bundles / "asking/config.json")
        (self.bundles / "unreadable/config.json").symlink_to("/proc/self/mem")
        (self.bundles / "to-bundle").symlink_to("plain")
        self.settle()
        for self.kind in STUBS:
            self.stubs[self.kind] = self.write_stub("short").rename(self.directory / self.kind)

    def decide(self, *words: str, **options: Any) -> tuple[int, str]:
        """Return what both forms decide, as :meth:`run` does."""
        compiled, sh = (self.run(kind, *words, **options) for kind in STUBS)
        assert compiled == sh, f"{words} {options}"
        return compiled


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    requirements.require(requirements.root())
    twins = Twins(tmp_path_factory.mktemp("twins"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        twins.remember(monkeypatch)
    return twins


@pytest.mark.parametrize("template", TEMPLATES)
def test_both_forms_decide_the_same_about_every_word(
    twins: Twins, template: str, share: Callable[..., list[str]]
) -> None:
    words = share(WORDS, 3, TEMPLATES.index(template))
    decided = {twins.decide(*[word if part == "W" else part for part in template.split()])[0] for word in words}
    assert decided <= {7, PYTHON_DECIDES}


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=str)
def test_both_forms_decide_the_same_about_every_bundle(twins: Twins, env: dict[str, str]) -> None:
    passed = []
    for name in BUNDLES:
        for words in (["create", "--bundle", f"../{name}", "c1"], ["run", f"--bundle=../{name}/", "c1"]):
            passed += [name] * (twins.decide(*words, env=env)[0] == 7)
    known = env in ({}, {"OCIGPU_RUNTIME_PID": ""}, {"XDG_RUNTIME_DIR": "/nonexistent"})
    assert passed == (["plain", "plain", "to-bundle", "to-bundle", "empty", "empty"] if known else [])


def test_the_compiled_form_never_passes_more_of_what_is_kept(twins: Twins) -> None:
    """A shell may understand what is damaged."""
    kept = twins.next.read_text()
    lines = kept.splitlines(keepends=True)
    changed = [f"{kept}\n", f"{kept}#", f" {kept}", kept.replace("' mark-", "' none mark-", 1)]
    changed += ["".join(lines[:number] + lines[number + 1 :]) for number in range(len(lines))]
    changed += [kept[:number] for number in range(1, len(kept), 9)]
    changed += [kept[:number] + kept[number + 1 :] for number in range(0, len(kept), 7)]
    try:
        for text in changed:
            twins.next.write_text(text)
            if twins.run("compiled", "create", "c1")[0] == 7:
                assert twins.run("sh", "create", "c1")[0] == 7, text
    finally:
        twins.next.write_text(kept)
    assert twins.decide("create", "c1")[0] == 7


@pytest.mark.parametrize("edge", [1 << 16, (1 << 17) - (1 << 12)])
def test_both_forms_find_a_word_wherever_it_lies(twins: Twins, edge: int) -> None:
    """The compiled one reads 64 KiB at once, and then keeps 4 KiB."""
    text = '"NVIDIA_VISIBLE_DEVICES=0"'
    config = twins.bundles / "generated/config.json"
    words = ["create", "--bundle", "../generated", "c1"]
    for place in range(edge - len(text) - 2, edge + 2):
        config.write_text(" " * place + text + " " * 5000)
        assert twins.decide(*words)[0] == PYTHON_DECIDES
    config.write_text(" " * (3 << 20))
    assert twins.decide(*words)[0] == 7


@pytest.mark.rest
@settings(max_examples=100)
@given(requests(), st.booleans(), st.sampled_from(["", "N", "d", "_"]))
def test_both_forms_decide_the_same_about_a_configuration(
    twins: Twins, case: tuple[dict[str, Any], Settings], ascii_only: bool, escaped: str
) -> None:
    config, chosen = case
    text = json.dumps(config, ensure_ascii=ascii_only)
    text = text.replace(escaped, f"\\u{ord(escaped):04x}") if escaped else text
    (twins.bundles / "generated/config.json").write_text(text)
    usual = twins.next.read_text()
    try:
        words = "\n".join(passing.find_words(chosen))
        twins.next.write_text(usual[: usual.index("words='")] + f"words='{words}'\n")
        passes = twins.decide("create", "--bundle", "../generated", "c1")[0] == 7
    finally:
        twins.next.write_text(usual)
    assert not (passes and asks(config, chosen))


@pytest.mark.parametrize("place", [()], ids=["compiled"], indirect=True)
@pytest.mark.parametrize("name", ["", "next"])
def test_what_others_may_write_is_for_python(place: Place, name: str) -> None:
    """A shell does not see modes."""
    assert place.passes()
    (place.next if name else place.cache).chmod(0o722)
    assert not place.passes()


@pytest.mark.parametrize("place", [()], ids=["compiled"], indirect=True)
def test_what_the_kernel_cannot_execute_is_for_python(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which then says so, as if nothing had been remembered; a shell would read it as a script."""
    place.runtime.write_text("exit 0\n")
    place.settle()
    place.remember(monkeypatch)
    assert place.run("short", "state", "c1") == (PYTHON_DECIDES, "")


def test_a_stub_that_is_compiled_has_neither_a_time_nor_a_place_in_it(tmp_path: Path) -> None:
    found = set()
    for place in (tmp_path, tmp_path / "other"):
        (place / "ocigpu").mkdir(parents=True)
        shutil.copy(REPOSITORY / "ocigpu/__init__.py", place / "ocigpu")
        shutil.copytree(REPOSITORY / "packaging", place / "packaging")
        for name in ("ocigpu-runtime", "ocigpu-hook"):
            words = ["interpreter=/p", "encodings=/e", "library=/l", "site=/s", "config=/c"]
            subprocess.run([place / "packaging/stub.sh", "compiled", name, place / name, *words], check=True, cwd=place)
            found.add((place / name).read_bytes())
    assert len(found) == 2
    assert not any(str(tmp_path).encode() in text for text in found)


# --- the whole of it

SESSION = """
set -e
mount -t tmpfs tmpfs /run
"$1" create --bundle "$2" c1 || [ $? = 7 ]
cat /run/ocigpu/next-* >/dev/null
strace -f -qq -e trace=execve -o "$3" "$1" create --bundle "$2" c1 || [ $? = 7 ]
strace -f -qq -e trace=execve -o "$4" "$1" state c1 || [ $? = 7 ]
"""


def settled_copy(public_copy: PublicCopy, kind: str) -> str:
    subprocess.run([public_copy.runtime, "--version"], capture_output=True)  # makes __pycache__
    os.utime(public_copy.library / "ocigpu", (time.time() - 60, time.time() - 60))
    stub = public_copy.runtime.parent / f"ocigpu-runtime-{kind}"
    return str(write_stub(stub, kind, "ocigpu-runtime", library=public_copy.library, site=public_copy.library))


@pytest.mark.root
def test_the_second_container_starts_without_python(place: Place, public_copy: PublicCopy, tmp_path: Path) -> None:
    requirements.require(requirements.programs("strace", "unshare"))
    stub = settled_copy(public_copy, place.kind)
    place.runtime.write_text("#!/bin/true\n")
    place.settle()
    config = (place.bundles / "plain/config.json").read_bytes()
    traces = tmp_path / "create.trace", tmp_path / "state.trace"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", SESSION, "sh", stub, str(place.bundles / "plain"), *map(str, traces)],
        env=place.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    started = [[line.split('"')[1] for line in trace.read_text().splitlines() if "execve(" in line] for trace in traces]
    grep = [shutil.which("grep")] if place.kind == "sh" else []
    assert started == [[stub, *grep, str(place.runtime)], [stub, str(place.runtime)]]
    assert (place.bundles / "plain/config.json").read_bytes() == config


@pytest.mark.root
@pytest.mark.parametrize("kind", STUBS)
def test_a_user_has_a_cache_of_his_own(public_copy: PublicCopy, session_directory: Path, kind: str) -> None:
    """Neither root's nor that of another user, whatever XDG_RUNTIME_DIR says."""
    stub = settled_copy(public_copy, kind)
    directory = session_directory / f"passing-{kind}"
    directory.mkdir()
    place = Place(directory, () if kind == "compiled" else ("/bin/sh",))
    place.runtime.write_text("#!/bin/true\n")
    short = place.directory / "short"
    run_directory = place.directory / "user"
    run_directory.mkdir()
    os.chown(run_directory, 1234, 1234)
    place.settle()

    def run_as_user(program: str | Path, *words: str, uid: int = 1234, runtime_directory: Path = run_directory) -> int:
        user = ["setpriv", f"--reuid={uid}", "--clear-groups"]
        env = {**place.environment, "XDG_RUNTIME_DIR": str(runtime_directory)}
        return subprocess.run([*user, program, *words], env=env, cwd=place.bundles / "plain", timeout=60).returncode

    assert run_as_user(short, "state", "c1") == PYTHON_DECIDES
    assert run_as_user(stub, "create", "c1") == 0
    (kept,) = (run_directory / "ocigpu").glob("next-*")
    assert kept.stat().st_uid == 1234
    assert run_as_user(short, "state", "c1") == 0
    assert run_as_user(short, "create", "c1") == 0
    assert run_as_user(short, "create", "--bundle", "../asking", "c1") == PYTHON_DECIDES
    for uid in (0, 1235):
        assert run_as_user(short, "state", "c1", uid=uid) == PYTHON_DECIDES
    other = place.directory / "other"
    other.mkdir()
    (other / "ocigpu").symlink_to(run_directory / "ocigpu")
    assert run_as_user(short, "state", "c1", runtime_directory=other) == PYTHON_DECIDES
    os.chown(other, 1234, 1234)
    assert run_as_user(short, "state", "c1", runtime_directory=other) == PYTHON_DECIDES
    namespace = ["unshare", "--user", "--map-root-user", str(short), "state", "c1"]
    assert run_as_user(namespace[0], *namespace[1:]) == 0
