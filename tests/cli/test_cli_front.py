"""The front of ``ocigpu``: what it reads of a command line is what typer reads, and what it imports is little."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import requirements
from support.fixtures import Run
from support.product import PROGRAMS

import ocigpu
from ocigpu.cli.front.arguments import HelpWanted, parameters_of, parse
from ocigpu.cli.front.described import make_app
from ocigpu.cli.front.described import run as run_typer
from ocigpu.cli.front.main import COMMANDS, LENIENT, find_command, load_command, main
from ocigpu.cli.front.manual import read_page
from ocigpu.core.errors import UsageError
from ocigpu.core.facts import HostFacts

PACKAGE = Path(ocigpu.__file__).parent


def read_by_typer(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the values that typer gives the command, or None for those of a command line that it refuses."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("ocigpu.cli.front.described.call", lambda _, values: given.append(values))
    # one command alone would have no name
    app = make_app({"list": None, "facts": None, name: load_command(name)}, LENIENT)
    with contextlib.redirect_stdout(None), contextlib.suppress(Exception):
        run_typer(app, [*name.split(), *words])
    return given[0] if given else None


def read_by_us(name: str, words: list[str]) -> Any:
    try:
        return parse(words, parameters_of(load_command(name), read_page(name)), name in LENIENT)
    except (HelpWanted, UsageError):
        return None


VALUES = (
    "",
    "x",
    "0",
    "7",
    "64",
    "65",
    "-1",
    "0.05",
    "2.5",
    "inf",
    "nan",
    "1_0",
    " 3 ",
    "a,b",
    "-",
    "--",
    "-q",
    "--json",
    "ü\udc80",
)
ODD = ("--", "-", "--nope", "--nope=1", "-x", "--no-json", "-qf", "--help", "-h", "-qh")


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, list[str], dict[str, str]]:
    name = draw(st.sampled_from(list(COMMANDS)))
    parameters = parameters_of(load_command(name), read_page(name))
    flags = [(flag, parameter) for parameter in parameters for flag in parameter.flags]
    words: list[str] = []
    for _ in range(draw(st.integers(0, 5))):
        value = draw(st.sampled_from(VALUES))
        kind = draw(st.sampled_from(("option", "option", "option", "joined", "value", "odd")))
        if not flags or kind == "value":
            words.append(value)
        elif kind == "odd":
            words.append(
                draw(
                    st.sampled_from(("--", "-", "--nope", "--nope=1", "-x", "--no-json", "-qf", "--help", "-h", "-qh"))
                )
            )
        else:
            flag, parameter = draw(st.sampled_from(flags))
            if kind == "joined":
                words.append(f"{flag}{'=' if flag.startswith('--') else ''}{value}")
            else:
                words += [flag] if parameter.kind is bool else [flag, value]
    variables = [parameter.variable for parameter in parameters if parameter.variable]
    chosen = draw(st.lists(st.sampled_from(variables), max_size=2)) if variables else []
    values = st.sampled_from(("", "x", "1", "true", "no", "maybe", " on "))
    return name, words, {variable: draw(values) for variable in chosen}


@settings(max_examples=300, deadline=None)
@given(command_lines())
@example(("sim create", ["/x", "--gpus", "64"], {}))
@example(("sim create", ["/x"], {}))
@example(("plan", ["-e", "A=1", "-eB=2", "--env=C=3"], {}))
@example(("cdi validate", ["a", "--", "--json"], {}))
@example(("cdi generate", ["--csv.file", "a", "--devices=0,1"], {"NVIDIA_CTK_QUIET": "yes"}))
def test_what_is_read_is_what_typer_reads(line: tuple[str, list[str], dict[str, str]]) -> None:
    name, words, variables = line
    with pytest.MonkeyPatch.context() as monkeypatch:
        for variable in [name for name in os.environ if name.startswith(("NVIDIA_", "OCIGPU_"))]:
            monkeypatch.delenv(variable)
        for variable, text in variables.items():
            monkeypatch.setenv(variable, text)
        ours = read_by_us(name, words)
        if ours is not None:
            assert repr(ours) == repr(read_by_typer(name, words, monkeypatch))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_command_line_is_read_without_typer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option once, by its first name and by its last, with a value in its range."""
    parameters = parameters_of(load_command(name), read_page(name))
    words: list[str] = []
    for parameter in parameters:
        words += [word for flag in parameter.flags for word in ((flag,) if parameter.kind is bool else (flag, "2"))]
    words += ["2" for parameter in parameters if not parameter.flags]
    ours = read_by_us(name, words)
    assert ours is not None
    assert ours == read_by_typer(name, words, monkeypatch)
    assert all(ours[parameter.name] != parameter.default for parameter in parameters)


def test_values_of_a_variable_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, value in (("1", True), ("off", False), ("maybe", None)):
        monkeypatch.setenv("NVIDIA_CTK_QUIET", word)
        ours = read_by_us("cdi generate", [])
        assert (ours and ours["quiet"]) == value


# what is wrong is typer's to say


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pln"], "did you mean 'plan'"),
        (["cdi", "lst"], "did you mean 'list'"),
        (["list", "--jsn"], "--json"),
        (["list", "extra"], "extra"),
        (["attach"], "missing argument"),
        (["attach", "c"], "missing option"),
        (["plan", "--env"], "--env"),
        (["sim", "create", "/x", "--gpus", "99"], "--gpus"),
        (["sim", "create", "/x", "--gpus", "many"], "--gpus"),
        (["--nope"], "--nope"),
        (["cdi", "generate", "--quiet=1"], "--quiet"),
    ],
)
def test_a_mistake_is_two_lines_and_status_2(run: Run, words: list[str], message: str) -> None:
    status, output, error = run(*words)
    assert (status, output) == (2, "")
    first, second = error.splitlines()
    assert first.startswith("ocigpu: OCIGPU-ARG-1: ")
    assert message.lower() in first.lower()
    assert second.startswith("hint: ")


def test_who_types_no_command_sees_one_screen(run: Run) -> None:
    status, output, error = run()
    lines = output.splitlines()
    assert (status, error) == (2, "")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    named = set(re.findall(r"[a-z-]+", output.partition("Every day:")[2]))
    assert {name.split()[0] for name in COMMANDS} <= named
    listed = output.partition("More commands:")[2].partition("ocigpu COMMAND")[0]
    named = {word for line in listed.splitlines() for word in line[14:].split()}
    assert named <= {name.split()[0] for name in COMMANDS} | {"help", "version", "completion"}


@pytest.mark.parametrize("group", sorted({name.rpartition(" ")[0] for name in COMMANDS} - {""}))
def test_a_group_without_a_command_shows_its_help(run: Run, group: str) -> None:
    assert run(*group.split()) == (2, run(*group.split(), "--help")[1], "")


@pytest.mark.parametrize("name", LENIENT)
def test_options_of_the_vendors_reach_a_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-x", "--vendors-own=1", "--vendors-other", "2"]
    assert read_by_us(name, words)["words"] == read_by_typer(name, words, monkeypatch)["words"] == words


# help


def test_help_is_the_same_by_every_way(run: Run) -> None:
    for words in (["cdi"], ["cdi", "diff"], ["plan"], ["exporter"]):
        help_text = run("help", *words)
        assert help_text[0] == 0
        assert help_text == run(*words, "--help") == run(*words, "-h")
    assert run("help") == run("--help")
    assert run("version") == run("--version")
    assert run("exporter", "--kubernetes", "--help") == run("help", "exporter")


def test_help_is_asked_for_where_an_option_can_be(run: Run) -> None:
    assert run("plan", "--gpus", "0", "--help")[1].startswith("Usage: ocigpu plan")
    assert run("plan", "--nope", "--help")[0] == 2
    assert run("explain", "--", "--help")[0] == 1


def test_help_follows_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    narrow = run("plan", "--help")[1].partition("Examples")[0]
    monkeypatch.setenv("COLUMNS", "100")
    wide = run("plan", "--help")[1].partition("Examples")[0]
    assert [max(map(len, text.splitlines())) <= width for text, width in ((narrow, 60), (wide, 100))] == [True, True]
    assert narrow.split() == wide.split()


# what is imported

SCRIPT = """\
import sys
before = set(sys.modules)
sys.path += sys.argv[1:3]
from ocigpu.cli.front.main import main
main(sys.argv[3:])
sys.stdout.flush()
print("", *sorted(set(sys.modules) - before), sep="\\n@", file=sys.stderr)
"""
FRONT = {"ocigpu", "ocigpu.cli", "ocigpu.cli.front.main", "ocigpu.cli.front.manual", "ocigpu.cli.front.arguments"}
FRONT |= {"ocigpu.cli.front", "ocigpu.core", "ocigpu.core.errors", "ocigpu.core.record", "ocigpu.core.signatures"}
LIGHT = {
    "os",
    "stat",
    "_stat",
    "posixpath",
    "genericpath",
    "os.path",
    "_collections_abc",
    "errno",
    "_collections",
    "gc",
}
if sys.version_info >= (3, 14):  # its os imports them
    LIGHT |= {"abc", "_abc"}
HEAVY = {
    "asyncio", "ast", "click", "concurrent", "dataclasses", "email", "http", "importlib.metadata", "importlib.util",
    "inspect", "logging", "multiprocessing", "pathlib", "prctl", "pydantic", "pydantic_core", "pynvml", "pyroute2",
    "rich", "shutil", "socket", "ssl", "subprocess", "tempfile", "tomlkit", "typer", "urllib", "yaml",
}  # fmt: skip
"""Modules that cost many milliseconds, and no command of every day needs."""


def imported_by(*words: str, environment: dict[str, str] | None = None) -> tuple[set[str], str]:
    """Return the modules that a command has loaded at its end, and its output."""
    site = os.path.dirname(os.path.dirname(pytest.__file__))
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-I", "-S", "-c", SCRIPT, str(PACKAGE.parent), site, *words],
        capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"], **(environment or {})},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return {line[1:] for line in done.stderr.splitlines() if line.startswith("@") and line[1:]}, done.stdout


HELP_LINES = [["--version"], ["--help"], ["plan", "--help"], ["cdi", "generate", "--help"], ["cdi", "-h"]]


@pytest.mark.parametrize("words", HELP_LINES)
def test_version_and_help_import_nothing_but_the_front(words: list[str]) -> None:
    loaded, output = imported_by(*words)
    assert output
    assert loaded <= FRONT | LIGHT


@pytest.fixture(scope="module")
def simulated(session_directory: Path) -> Iterator[Path]:
    requirements.require(requirements.compiler())
    directory = session_directory / "front-host"
    assert main(["sim", "create", str(directory), "--gpus", "2"]) == 0
    yield directory
    assert main(["sim", "remove", str(directory)]) == 0


@pytest.mark.parametrize("words", [["list"], ["ps"], ["plan", "--gpus", "all"], ["cdi", "generate"]])
@pytest.mark.parametrize("in_json", [False, True])
def test_a_command_of_every_day_imports_nothing_heavy(simulated: Path, words: list[str], in_json: bool) -> None:
    environment = {"OCIGPU_CONFIG": str(simulated / "config.toml")}
    loaded, output = imported_by(*words, *(["--json"] if in_json else []), environment=environment)
    assert output
    assert not loaded & HEAVY
    assert not loaded & {
        "ocigpu.cli.front.described",
        "ocigpu.doctor",
        "ocigpu.sim",
        "ocigpu.kubernetes",
        "ocigpu.runtime",
    }
    commands = {f"ocigpu.cli.{target.rpartition('.')[0]}" for target in COMMANDS.values()}
    own, _, _ = COMMANDS[find_command(words)[0]].rpartition(".")
    assert loaded & commands <= {f"ocigpu.cli.{own}", "ocigpu.cli.cdi.files"}  # what its commands share


@pytest.mark.parametrize("words", [["list"], ["plan", "--gpus", "all"], ["cdi", "generate"]])
def test_a_command_imports_nothing_dearer_than_a_start_does_but_the_first_time(
    simulated: Path, tmp_path: Path, words: list[str]
) -> None:
    requirements.require(requirements.root())  # who has a cache directory
    path = tmp_path / "config.toml"  # settings that nobody has read yet
    path.write_text(f"# {words}\n" + (simulated / "config.toml").read_text())
    environment = {"OCIGPU_CONFIG": str(path)}
    assert "tomllib" in imported_by(*words, environment=environment)[0]
    loaded, output = imported_by(*words, environment=environment)
    assert output
    assert not loaded & {"collections", "contextlib", "enum", "functools", "json", "re", "signal", "tomllib", "typing"}


def test_generate_imports_nothing_of_other_commands_and_hosts(simulated: Path) -> None:
    loaded, output = imported_by("cdi", "generate", environment={"OCIGPU_CONFIG": str(simulated / "config.toml")})
    assert output
    assert not loaded & {f"ocigpu.cdi.{name}" for name in ("cache", "compare", "document", "refresh", "registry")}
    assert not loaded & {f"ocigpu.gpus.{name}.facts" for name in ("amd", "tegra", "vfio", "wsl")}
    assert not loaded & {"ocigpu.cdi.transform", "ocigpu.gpus.nvidia.request", "ocigpu.gpus.nvidia.require"}


def test_generate_finds_out_who_reads_a_file_without_the_parsers_of_configurations(simulated: Path) -> None:
    requirements.require(requirements.root())  # who has a cache directory
    config = simulated / "etc/containers/containers.conf"
    config.parent.mkdir(parents=True)
    config.write_text('# cdi_spec_dirs = ["/elsewhere"]\n[engine]\nruntime = "crun"\n')
    environment = {"OCIGPU_CONFIG": str(simulated / "config.toml")}
    words = ("cdi", "generate", "--quiet", "--output", str(simulated / "elsewhere/gpus.yaml"))
    parsers = {"tomllib", "tomlkit", "json", "re", "typing"}
    for _ in range(2):  # the first reads the settings
        loaded, _ = imported_by(*words, environment=environment)
    assert "ocigpu.engines.status" in loaded
    assert not loaded & parsers
    config.write_text('[engine]\ncdi_spec_dirs = ["/elsewhere"]\n')
    assert "tomllib" in imported_by(*words, environment=environment)[0]
    shutil.rmtree(config.parent)


COMPLETED = [
    ([""], "plan"),
    (["p"], "plan"),
    (["cdi", ""], "generate"),
    (["plan", "--"], "--devices"),
    (["plan", "--devices", "0", "--j"], "--json"),
]


@pytest.mark.parametrize(("words", "expected"), COMPLETED)
def test_tab_imports_nothing_but_the_front(words: list[str], expected: str) -> None:
    loaded, output = imported_by(*words, environment={"_OCIGPU_COMPLETE": "words"})
    assert expected in [line.partition("\t")[0] for line in output.splitlines()]
    assert loaded <= FRONT | LIGHT | {"ocigpu.cli.front.complete"}


# TAB


UUID = "GPU-4d4f434b-0000-0000-0000-00000000000"


def complete(run: Run, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.setenv("_OCIGPU_COMPLETE", "words")
    status, output, error = run(*words)
    monkeypatch.delenv("_OCIGPU_COMPLETE")
    assert (status, error) == (0, "")
    return [line.partition("\t")[0] for line in output.splitlines()]


def test_tab_completes_every_command_and_option(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMMANDS:
        *above, last = name.split()
        assert last in complete(run, monkeypatch, *above, "")
        flags = {flag for word in read_page(name).options.values() for flag in word.flags if flag.startswith("--")}
        assert set(complete(run, monkeypatch, *name.split(), "--")) == flags | {"--help"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan", "--devices", ""], ["0", "1", "1:0", "1:1", "2", "3", "4", "5", "6", "7", "all"]),
        (["plan", "--devices", "0,"], ["0,0", "0,1", "0,1:0", "0,1:1", "0,2", "0,3", "0,4", "0,5", "0,6", "0,7"]),
        (["attach", "web", "--gpu", f"{UUID}7"], [f"{UUID}7"]),
        (["demo", "--model=l4"], ["--model=l4", "--model=l40s"]),
        (["demo", "--model", "=", "l4"], ["l4", "l40s"]),
        (["completion", "="], ["bash", "zsh", "fish"]),
        (["explain", "OCIGPU-DEMO-"], ["OCIGPU-DEMO-1", "OCIGPU-DEMO-2"]),
        (["explain", "uvm-"], ["uvm-missing"]),
        (["doctor", "--format", "j"], ["json", "junit"]),
        (["sim", "exec", "-q", "nvidia-smi", "--"], []),
        (["sim", "exec", "--gpus", "2", "--mod"], ["--model"]),
        (["explain", "we"], ["web"]),
        (["verify", ""], ["web"]),
        (["attach", "--json", "w"], ["web"]),
        (["attach", "--gpu", "0", "w"], ["web"]),
        (["verify", "web", ""], []),
        (["sim", "create", "/x", "--model", "h1"], ["h100"]),
        (["demo", "--model", "l4"], ["l4", "l40s"]),
        (["sim", "create", "/x", "--fault", "xid"], ["xid-79"]),
        (["engine", "configure", "po"], ["podman"]),
        (["device-plugin", "--log-format", ""], ["text", "json"]),
        (["completion", "z"], ["zsh"]),
        (["diff", "web", "--runtime-mode", ""], ["hook", "spec", "cdi"]),
        (["help", "cdi", "tr"], ["transform"]),
        (["help", "to"], ["top", "topology"]),
        (["list", "--config", ""], []),
        (["nope", ""], []),
    ],
)
def test_tab_completes_values(
    run: Run, monkeypatch: pytest.MonkeyPatch, mig_facts: HostFacts, words: list[str], expected: list[str]
) -> None:
    from ocigpu.containers.believed import Container

    web = Container("4f2a" * 16, "web", "docker", "runc", "running", 7, 1, "/b", "/b/rootfs", "/s")
    hostile = web._replace(id="$(id)", name="web $(reboot)")
    monkeypatch.setattr("ocigpu.gpus.vendors.read_facts", lambda *_: mig_facts)
    monkeypatch.setattr("ocigpu.containers.find.find_containers", lambda _: ([web, hostile], []))
    assert complete(run, monkeypatch, *words) == expected


def test_an_error_while_completing_is_silent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete(run, monkeypatch, "plan", "--config", "/nonexistent", "--gpus", "") == []


def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    """A real bash: words up to the cursor go to the program, what it prints becomes the replies."""
    program = tmp_path / "ocigpu"
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})"
    code = f"{path}; from ocigpu.cli.front.main import main; sys.exit(main())"
    program.write_text(f"#!{os.path.realpath(sys.executable)} -IS\n{code}\n")
    program.chmod(0o755)
    script = """
        eval "$("$1" completion bash)"; COMP_WORDS=("$1" cdi g ); COMP_CWORD=2; _ocigpu "$1"; echo "${COMPREPLY[@]}"
        COMP_WORDS=("$1" "" x); COMP_CWORD=1; _ocigpu "$1"; echo "${#COMPREPLY[@]}"
        COMP_WORDS=("$1" list --config ""); COMP_CWORD=3; _ocigpu "$1"; echo "${#COMPREPLY[@]}"; complete -p ocigpu
    """
    done = subprocess.run(["bash", "-c", script, "bash", program], capture_output=True, text=True, timeout=60)
    groups = {name.split()[0] for name in COMMANDS}
    assert done.stdout.splitlines() == ["generate", str(len(groups)), "0", "complete -o default -F _ocigpu ocigpu"]
    assert done.stderr == ""


def test_another_shell_is_named(run: Run) -> None:
    assert run("completion", "tcsh")[2].splitlines()[0].endswith('SHELL is one of bash, zsh, fish, not "tcsh"')


# the end

LEAVE = "import sys; sys.path.append(sys.argv[1]); from ocigpu import leave; print('printed'); CODE\nleave(3)"
THREAD = "threading.Thread(target=lambda: (time.sleep(0.1), print('of a thread'))).start()"
DAEMON = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
class Last:
    def __del__(self):
        print("taken apart")
last = Last()
"""
ENDS = {
    "at once": ("", "printed\n"),
    "with a function for the end": ("import atexit; atexit.register(print, 'at the end')", "printed\nat the end\n"),
    "with a thread": (f"import threading, time; {THREAD}", "printed\nof a thread\n"),
    "with a thread that nobody waits for": (DAEMON, "printed\n"),
    "without an output": ("sys.stdout.flush(); sys.stdout = None", "printed\n"),
}


def left(code: str, output: int | TextIO = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", "-S", "-c", LEAVE.replace("CODE", code), str(PACKAGE.parent)]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)


@pytest.mark.parametrize("case", ENDS)
def test_a_program_leaves_with_all_that_it_had_to_say(case: str) -> None:
    code, text = ENDS[case]
    done = left(code)
    assert (done.returncode, done.stdout, done.stderr) == (3, text, "")


def test_a_program_that_cannot_say_it_all_fails() -> None:
    with open("/dev/full", "w") as full:
        done = left("", full)
    assert done.returncode not in (0, 3)
    assert "No space left on device" in done.stderr


def test_the_doctor_of_a_node_without_claims_imports_no_types(simulated: Path) -> None:
    loaded, output = imported_by("doctor", environment={"OCIGPU_CONFIG": str(simulated / "config.toml")})
    assert output
    assert not loaded & {"pydantic", "typer", "grpc", "lightkube", "ssl"}


def shell(command: str) -> "subprocess.CompletedProcess[str]":
    script = f"{sys.executable} -m ocigpu.cli {command}"
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent)


@pytest.mark.parametrize("words", ["version", "help", "config keys", "explain DEV-3 --json"])
def test_a_full_disk_behind_standard_output_is_said_once(words: str) -> None:
    """And the exit status is a documented one: Python alone would end with 120."""
    done = shell(f"{words} > /dev/full")
    assert done.returncode == 1
    first, hint = done.stderr.splitlines()
    assert first == "ocigpu: OCIGPU-INT-4: write: No space left on device"
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("words", "status"), [("version", 0), ("explain DEV-3 --json", 0), ("config keys", 0), ("no", 2)]
)
def test_standard_files_may_be_closed(words: str, status: int, closed: str) -> None:
    done = shell(f"{words} {closed}")
    assert done.returncode == status
    assert bool(done.stderr) == bool(status and "2>" not in closed)


@pytest.mark.parametrize("words", [["--version"], ["explain", "OCIGPU-DEV-3"], ["list", "--help"], ["no-such"], []])
def test_the_package_run_as_a_module_is_the_program(words: list[str], tmp_path: Path) -> None:
    said = [
        subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True)
        for command in ([sys.executable, "-m", "ocigpu"], [PROGRAMS / "ocigpu"])
    ]
    module, program = ((done.returncode, done.stdout, done.stderr) for done in said)
    assert module == program
    assert program[1] or program[2]
