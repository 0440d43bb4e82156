"""The commands of ``ocigpu``: output, exit status and errors, on recorded facts."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fixtures import Run

from ocigpu import __version__
from ocigpu.cli.containers.plan import join_reasons
from ocigpu.cli.front import show
from ocigpu.cli.front.common import load_settings
from ocigpu.cli.front.main import COMMANDS, main
from ocigpu.cli.front.show import Progress
from ocigpu.core.facts import HostFacts, facts_from_json
from ocigpu.core.settings import KEYS
from ocigpu.core.toml import toml_value

PACKAGE = Path(__file__).resolve().parents[2] / "ocigpu"
Record = Callable[[HostFacts], str]
LIBRARY_LINK = "/usr/lib64/libcuda.so.1 -> libcuda.so.550.163.01"


def write_bundle(path: Path, env: list[str], rootfs: bool = True) -> Path:
    path.mkdir()
    if rootfs:
        (path / "rootfs/usr/lib64").mkdir(parents=True)
    config = {
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs"},
        "process": {"env": env, "args": ["true"]},
        "linux": {"namespaces": [{"type": "mount"}]},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


# plan


def test_plan_shows_host_request_grant_and_each_action_with_its_reason(
    run: Run, record: Record, facts: HostFacts
) -> None:
    status, out, err = run("plan", "--facts", record(facts), "--gpus", "0,2")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("host          this host (recorded in ")
    assert "driver        550.163.01, CUDA 12.4, 8 GPUs (from nvml)" in lines
    assert "request       NVIDIA_VISIBLE_DEVICES=0,2" in lines
    assert "granted       GPU 0  GPU-4d4f434b-0000-0000-0000-000000000000  Mock NVIDIA A100-SXM4-40GB" in lines
    assert "              GPU 2  GPU-4d4f434b-0000-0000-0000-000000000002  Mock NVIDIA A100-SXM4-40GB" in lines
    groups = {tuple(line.split()[:3]): line for line in lines[lines.index("") + 2 : -2]}
    assert len(groups) <= 12
    nodes = groups["+", "2", "nodes"]
    assert "/dev/nvidia0, nvidia2 " in nodes
    assert "granted by NVIDIA_VISIBLE_DEVICES=0,2" in nodes
    assert "/usr/bin/nvidia-cuda-mps-control and 4 more " in groups["+", "5", "files"]
    assert groups["~", "merge", "/etc/ld.so.cache"].endswith("; the image's is extended: it is current")
    assert lines[-1] == "plan: 38 to add, 2 to change, 0 to hide; nothing was changed (every step: --steps)"


def test_plan_shows_every_step_below_its_reason(run: Run, record: Record, facts: HostFacts) -> None:
    status, out, _ = run("plan", "--facts", record(facts), "--gpus", "0,2", "--steps")
    assert status == 0
    lines = out.splitlines()
    place = lines.index("    +  node /dev/nvidia2 195:2")
    assert lines[place - 1].startswith("GPU 2 (")
    assert lines[place - 1].endswith("granted by NVIDIA_VISIBLE_DEVICES=0,2")
    assert f"    +  link {LIBRARY_LINK}" in lines
    assert not any("/dev/nvidia1 " in line for line in lines)
    steps = [line for line in lines if line.startswith(("    + ", "    ~ "))]
    assert f"plan: {len(steps) - 2} to add, 2 to change, 0 to hide; nothing was changed" in lines


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (["a b"], "a b"),
        (["driver file, needed by a", "driver file, needed by b"], "driver file, needed by a, b"),
        (["GPU 0 is granted", "GPU 1 is granted", "GPU 1 is granted"], "GPU 0, 1 is granted"),
        (["this", "that one"], "this; that one"),
        (["a", "a b"], "a b"),
        (["node of GPU 0, for b", "node of GPU 1, for b"], "node of GPU 0, 1, for b"),
        (["needed by a, b", "needed by b, c"], "needed by a, b, c"),
        ([f"GPU {number} is granted" for number in range(64)], "GPU ... is granted"),
    ],
)
def test_several_reasons_are_said_as_one(reasons: list[str], expected: str) -> None:
    assert join_reasons(reasons) == expected


def test_plan_of_a_simulated_host_says_so_in_its_first_line(run: Run, record: Record, facts: HostFacts) -> None:
    _, out, _ = run("plan", "--facts", record(facts._replace(simulated=True)), "--gpus", "0")
    assert out.splitlines()[0].startswith("host          SIMULATED host /: no real GPU")


def test_plan_as_json_is_the_plan_with_its_request(run: Run, record: Record, facts: HostFacts) -> None:
    status, out, _ = run("plan", "--facts", record(facts), "--env", "NVIDIA_VISIBLE_DEVICES=3", "--json")
    data = json.loads(out)
    assert status == 0
    assert data["gpus"] == [facts.gpus[3].uuid]
    assert data["request"]["devices"] == ["3"]
    assert {"action", "reason"} <= set(data["actions"][0])


def test_plan_names_mig_devices_and_their_gpu(run: Run, record: Record, mig_facts: HostFacts) -> None:
    status, out, err = run("plan", "--facts", record(mig_facts), "--gpus", "1:1")
    assert (status, err) == (0, "")
    assert "granted       MIG 1:1  MIG-bbbbbbbb-0000-0000-0000-000000000000  3g.20gb" in out


def test_plan_without_a_gpu_says_so(run: Run, record: Record, facts: HostFacts) -> None:
    _, out, _ = run("plan", "--facts", record(facts), "--gpus", "none", "--capabilities", "utility")
    assert "granted       no GPU: driver files and control nodes only" in out
    assert "capabilities  utility" in out


def test_plan_shows_requirements_and_extras(run: Run, record: Record, facts: HostFacts) -> None:
    _, out, _ = run(
        "plan", "--facts", record(facts), "--gpus", "0", "--privileged", "-e", "NVIDIA_REQUIRE_CUDA=cuda>=12.0",
        "-e", "NVIDIA_MIG_CONFIG_DEVICES=all",
    )  # fmt: skip
    assert "requires      NVIDIA_REQUIRE_CUDA=cuda>=12.0" in out
    assert "also          MIG configuration all" in out


@pytest.mark.parametrize("rootfs", [True, False], ids=["rootfs there", "rootfs not mounted yet"])
def test_plan_reads_the_request_of_a_bundle_and_leaves_it_alone(
    run: Run, record: Record, facts: HostFacts, tmp_path: Path, rootfs: bool
) -> None:
    bundle = write_bundle(tmp_path / "bundle", ["NVIDIA_VISIBLE_DEVICES=5"], rootfs)
    before = sorted((path, path.stat().st_mtime_ns) for path in bundle.rglob("*"))
    status, out, err = run("plan", "--facts", record(facts), "--bundle", bundle)
    assert (status, err) == (0, "")
    assert "granted       GPU 5" in out
    assert sorted((path, path.stat().st_mtime_ns) for path in bundle.rglob("*")) == before


@pytest.mark.parametrize(
    ("namespaces", "code"),
    [
        pytest.param([], "OCIGPU-SPEC-3", id="no mount namespace"),
        pytest.param([{"type": "mount"}], "OCIGPU-SPEC-3", id="a root that cannot be opened"),
    ],
)
def test_plan_refuses_a_bundle_that_the_shim_would_refuse(
    run: Run, record: Record, facts: HostFacts, tmp_path: Path, namespaces: list[dict[str, str]], code: str
) -> None:
    bundle = write_bundle(tmp_path / "bundle", ["NVIDIA_VISIBLE_DEVICES=5"], rootfs=False)
    (bundle / "rootfs").symlink_to("rootfs")  # a loop: ELOOP, whoever asks
    config = json.loads((bundle / "config.json").read_text())
    config["linux"]["namespaces"] = namespaces
    (bundle / "config.json").write_text(json.dumps(config))
    status, out, err = run("plan", "--facts", record(facts), "--bundle", bundle)
    assert (status, out) == (1, "")
    assert code in err
    assert ("no mount namespace" if not namespaces else "open rootfs") in err


def test_an_explicit_driver_root_wins_over_a_simulated_host(tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text(f'[simulation]\nroot = "{tmp_path}"\n')
    settings.chmod(0o644)
    chosen = load_settings(str(settings), "/driver")
    assert (chosen.driver_root, chosen.simulation_root) == ("/driver", "")


@pytest.mark.parametrize("value", ["", "void", None])
def test_plan_for_nothing_says_so_without_looking_at_the_host(run: Run, tmp_path: Path, value: str | None) -> None:
    bundle = write_bundle(tmp_path / "bundle", [] if value is None else [f"NVIDIA_VISIBLE_DEVICES={value}"])
    status, out, err = run("plan", "--facts", "/nowhere", "--bundle", bundle)
    assert (status, err) == (0, "")
    assert out.startswith("nothing is requested: config.json would stay as it is")
    status, out, _ = run("plan", "--facts", "/nowhere", "--bundle", bundle, "--json")
    assert (status, json.loads(out)["actions"]) == (0, [])


def test_text_of_an_image_cannot_control_the_terminal(run: Run, record: Record, facts: HostFacts) -> None:
    status, out, err = run("plan", "--facts", record(facts), "--gpus", "0", "-e", "NVIDIA_REQUIRE_X=\x1b[2Jdriver>1")
    assert "\x1b" not in out + err
    assert status == 1


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["plan", "--gpus", "9"], 1, "OCIGPU-DEV-1"),
        (["plan", "--gpus", "0", "--capabilities", "magic"], 1, "OCIGPU-REQ-2"),
        (["plan", "--env", "NOTHING"], 2, '--env "NOTHING" is not NAME=VALUE'),
        (["plan", "--gpus", "0", "--env", "NVIDIA_VISIBLE_DEVICES=1"], 2, "say the same thing"),
        (["plan", "--gpus", "0", "--bundle", "."], 2, "--bundle says everything"),
        (["plan", "--bundle", "/nowhere"], 1, "OCIGPU-SPEC-1: read /nowhere/config.json: No such file or directory"),
        (["plan", "--gpus", "0", "--config", "/nowhere"], 1, "OCIGPU-SET-1: settings /nowhere"),
        (["plan", "--frobnicate"], 2, "no such option: --frobnicate"),
        (["list", "--facts", "/nowhere"], 1, "OCIGPU-HOST-3: facts /nowhere: No such file or directory"),
        (["frobnicate"], 2, "no such command 'frobnicate'"),
        (["sim", "create"], 2, "missing argument"),
        (["sim", "create", "/tmp/x", "--gpus", "many"], 2, "--gpus"),
        (["explain", "OCIGPU-DEF-1"], 2, 'there is no error code "OCIGPU-DEF-1"'),
        (["explain", "OCIGPU-DVE-1"], 2, "\nhint: did you mean OCIGPU-DEV-1 or "),
        (["engine", "configure", "dokcer"], 2, "\nhint: did you mean docker?"),
        (["sim", "create", "/tmp/x", "--model", "h1000"], 1, "\nhint: did you mean h100? models: "),
        (["sim", "create", "/tmp/x", "--fault", "nvml"], 1, "\nhint: did you mean nvml-broken or nvml-hangs?"),
        (["config", "get", "cdi.defaultkind"], 2, "\nhint: did you mean cdi.default-kind?"),
        (["demo", "--gpus", "65"], 2, "--gpus"),
        (["demo", "--runtime", "/nowhere"], 1, "OCIGPU-DEMO-1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_error_is_a_line_with_a_code_a_hint_and_the_right_status(
    run: Run, record: Record, facts: HostFacts, arguments: list[str], status: int, text: str
) -> None:
    if arguments[0] == "plan" and "--facts" not in arguments:
        arguments = [*arguments, "--facts", record(facts)]
    found, out, err = run(*arguments)
    assert (found, out) == (status, "")
    assert err.startswith("ocigpu: OCIGPU-")
    assert text in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"gpus": 1}', '"x"', "null", "[" * 100_000])
def test_a_file_that_holds_no_facts_is_an_error(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "facts"
    path.write_text(text)
    status, _, err = run("list", "--facts", path)
    assert (status, err.splitlines()[0]) == (1, f"ocigpu: OCIGPU-HOST-3: facts {path}: not recorded facts")


def test_help_names_exit_status_and_examples(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    for text in (
        "Exit status of every command",
        "  2  the command line could not be understood",
        "Examples:",
        "OCIGPU_CONFIG",
    ):
        assert text in out


ALL = sorted({" ".join(name.split()[:depth]) for name in COMMANDS for depth in (1, 2, 3)})
"""Every command and every group."""


@pytest.mark.parametrize("command", ALL)
def test_every_command_has_help_with_examples(run: Run, command: str) -> None:
    status, out, _ = run(*command.split(), "--help")
    assert status == 0
    assert f"ocigpu {command}" in out.partition("Examples:")[2]


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"ocigpu {__version__}\n", "")


# list and facts


def test_list_has_a_row_for_each_gpu_and_mig_device(run: Run, record: Record, mig_facts: HostFacts) -> None:
    broken = mig_facts.gpus[7]._replace(error="fallen off the bus")
    host = mig_facts._replace(gpus=(*mig_facts.gpus[:7], broken), notes=("NVML said little",))
    status, out, err = run("list", "--facts", record(host))
    assert (status, err) == (0, "")
    rows = [line.split("  ") for line in out.splitlines()]
    first = [row for row in rows if row[0] in [*map(str, range(8)), "1:0", "1:1"]]
    assert [row[0] for row in first] == ["0", "1", "1:0", "1:1", "2", "3", "4", "5", "6", "7"]
    assert first[0][-1] == "ok"
    assert first[-1][-1] == "fallen off the bus"
    assert "MIG 3g.20gb" in out
    assert out.endswith("note: NVML said little\n")


def test_list_as_json_has_the_gpus(run: Run, record: Record, facts: HostFacts) -> None:
    data = json.loads(run("list", "--facts", record(facts), "--json")[1])
    assert [gpu["index"] for gpu in data["gpus"]] == list(range(8))
    assert (data["simulated"], data["source"]) == (False, "nvml")


def test_list_without_gpus_has_no_table(run: Run, record: Record, facts: HostFacts) -> None:
    status, out, _ = run("list", "--facts", record(facts._replace(gpus=())))
    assert status == 0
    assert "0 GPUs" in out
    assert "UUID" not in out


def test_facts_as_json_can_be_read_again(run: Run, record: Record, mig_facts: HostFacts) -> None:
    out = run("facts", "--facts", record(mig_facts), "--json")[1]
    assert facts_from_json(json.loads(out)) == mig_facts


def test_facts_lists_nodes_libraries_and_files(run: Run, record: Record, facts: HostFacts) -> None:
    out = run("facts", "--facts", record(facts))[1]
    for text in ("/dev/nvidia-uvm", "510:1", "libcuda.so.1", "/usr/bin/nvidia-smi", "nvidia-caps 235"):
        assert text in out


# config


def test_config_check_accepts_a_good_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('mode = "hook"\nno-cgroups = true\n')
    path.chmod(0o644)
    assert run("config", "check", path) == (0, f"{path}: ok (2 of {len(KEYS)} keys differ from the defaults)\n", "")


def test_config_check_makes_the_shim_forget_the_former_settings(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file can be changed and its time set back."""
    monkeypatch.setattr("ocigpu.system.store.SYSTEM_DIRECTORY", str(tmp_path / "ocigpu"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "ocigpu").mkdir(0o700)
    (tmp_path / "ocigpu/next-0-0").touch(0o600)
    run("config", "check")
    assert list((tmp_path / "ocigpu").iterdir()) == []


def test_config_check_names_every_problem(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('mod = "hook"\nno-cgroups = 1\n')
    path.chmod(0o644)
    status, out, err = run("config", "check", path)
    assert (status, out) == (1, "")
    assert err.splitlines() == [
        f'{path}: unknown key "mod": did you mean mode?',
        f'ocigpu: OCIGPU-SET-2: {path}: no-cgroups: expected a bool, found "1"',
        "hint: all keys: ocigpu config keys",
    ]


@pytest.mark.parametrize(
    ("text", "mode", "code"),
    [("mode = ", 0o644, "OCIGPU-SET-1"), ("\udcff", 0o644, "OCIGPU-SET-1"), ("", 0o666, "OCIGPU-SET-3")],
    ids=["not TOML", "not UTF-8", "writable by others"],
)
def test_config_check_refuses_what_the_hot_path_refuses(
    run: Run, tmp_path: Path, text: str, mode: int, code: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    path.chmod(mode)
    status, _, err = run("config", "check", path)
    assert (status, err.split()[1]) == (1, code + ":")


def test_config_show_tells_where_a_value_is_from(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[driver]\nroot = "/opt/driver"\n')
    path.chmod(0o644)
    monkeypatch.setenv("OCIGPU_CONFIG", str(path))
    lines = run("config", "show")[1].splitlines()
    assert lines[0] == f"file  {path}"
    values = {line.split()[0]: line.split()[1:] for line in lines[3:]}
    assert values["driver.root"] == ['"/opt/driver"', "file"]
    assert values["no-cgroups"] == ["false", "default"]
    assert json.loads(run("config", "show", "--json")[1])["settings"]["driver.root"] == "/opt/driver"


def test_config_keys_lists_all_of_them(run: Run) -> None:
    out = run("config", "keys")[1]
    assert [line.split()[0] for line in out.splitlines()[1:]] == [key.name for key in KEYS]
    assert len(json.loads(run("config", "keys", "--json")[1])["keys"]) == len(KEYS)


@given(
    st.one_of(
        st.text(), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False),
        st.lists(st.text(), max_size=3).map(tuple),
    )
)  # fmt: skip
def test_a_value_is_shown_as_toml(value: object) -> None:
    import tomllib

    try:
        str(value).encode()
    except UnicodeEncodeError:  # lone surrogates have no TOML spelling
        return
    read = tomllib.loads(f"x = {toml_value(value)}")["x"]
    assert (tuple(read) if isinstance(read, list) else read) == value


# the program


def test_a_reader_that_stops_early_is_no_error_message(record: Record, facts: HostFacts) -> None:
    command = [sys.executable, "-m", "ocigpu.cli.front.main", "facts", "--json", "--facts", record(facts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def run_on_terminal(columns: int, *arguments: str) -> str:
    """Return what ``ocigpu`` writes on a terminal, without its colours and styles."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "ocigpu.cli.front.main", *arguments]
    output = b""
    with subprocess.Popen(command, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        while True:
            try:
                data = os.read(parent, 65536)
            except OSError:  # EIO: the other end is closed (pty(7))
                break
            output += data
    os.close(parent)
    assert process.returncode == 0, output
    return re.sub(r"\x1b\[[0-9;]*m", "", output.decode().replace("\r\n", "\n"))


def test_on_a_terminal_a_plan_is_folded_to_its_width(record: Record, facts: HostFacts) -> None:
    table = run_on_terminal(60, "plan", "--gpus", "0", "--facts", record(facts)).split("\n\n")[1]
    assert max(len(line) for line in table.splitlines()) <= 60


@pytest.mark.parametrize("columns", [60, 200])
def test_on_a_terminal_names_of_gpus_stay_in_one_piece(record: Record, facts: HostFacts, columns: int) -> None:
    output = run_on_terminal(columns, "list", "--facts", record(facts))
    assert all(gpu.uuid in output for gpu in facts.gpus)


def test_colour_is_for_terminals_where_nobody_objects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bold = "\x1b[1mNAME\x1b[0m\nvalue\n"
    for terminal, variable, expected in ((True, "", bold), (True, "1", "NAME\nvalue\n"), (False, "", "NAME\nvalue\n")):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        monkeypatch.setenv("NO_COLOR", variable)
        show.table(("name",), [("value",)])
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("terminal", "variables", "coloured"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_variables_decide_on_colours(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, variables: dict[str, str], coloured: bool
) -> None:
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.setenv(name, variables.get(name, ""))
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert ("\x1b" in show.styled("text", "1")) == coloured


def test_a_name_that_the_terminal_cannot_show_ends_no_command(
    monkeypatch: pytest.MonkeyPatch, record: Record, facts: HostFacts
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="iso8859-1")
    monkeypatch.setattr(sys, "stdout", stream)
    named = facts._replace(gpus=tuple(gpu._replace(model="\u51e6\u7406") for gpu in facts.gpus))
    assert main(["list", "--facts", record(named)]) == 0
    assert b"\\u51e6\\u7406" in stream.buffer.getvalue()


def test_a_narrow_terminal_does_without_dispensable_columns_and_dims_secondary_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"COLUMNS": "20", "TERM": "xterm", "NO_COLOR": "", "FORCE_COLOR": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = [("0", "NVIDIA L40S", "train", "docker")]
    show.table(("gpu", "model", "name", "engine"), rows, dim=("engine",), dispensable=("model", "engine"))
    assert capsys.readouterr().out == "\x1b[1mGPU  NAME   ENGINE\x1b[0m\n0    train  \x1b[2mdocker\x1b[0m\n"


def test_an_error_on_a_terminal_has_its_code_in_colour(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    coloured = "ocigpu: \x1b[31mOCIGPU-ARG-1\x1b[0m: no such command"
    assert run("plna")[2].startswith(coloured)
    assert "\n\x1b[1mhint:\x1b[0m see: " in run("plna")[2]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("plna")[2]


def test_a_table_that_no_terminal_is_wide_enough_for_is_blocks_of_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "24")
    show.table(
        ("key", "type", "what it is"), [("mode", "string", "how containers get GPUs"), ("a key of them", "", "b")]
    )
    assert capsys.readouterr().out.splitlines() == [
        "KEY         mode",
        "TYPE        string",
        "WHAT IT IS  how",
        "            containers",
        "            get GPUs",
        "",
        "KEY         a key of",
        "            them",
        "WHAT IT IS  b",
    ]


@pytest.mark.parametrize("words", ["config keys", "config show", "engine status", "explain DEV-1", "explain"])
def test_on_a_narrow_terminal_nothing_but_names_is_wider(words: str) -> None:
    lines = run_on_terminal(40, *words.split()).splitlines()
    assert not [line for line in lines if len(line) > 40 and len(line.split()) > 2]


def test_text_is_folded_below_itself_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    show.fields([("name", "words and more words, of it"), ("to do", "a command of more than a line")], whole=("to do",))
    show.notes(["something is to be said here"])
    assert capsys.readouterr().out.splitlines() == [
        "name   words and more words,",
        "       of it",
        "to do  a command of more than a line",
        "note: something is to be said",
        "      here",
    ]


def test_a_defect_is_one_line_and_a_traceback_only_on_request(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("ocigpu.cli.settings.config.load_settings", broken)
    status, _, err = run("config", "show")
    assert (status, err.splitlines()[0]) == (1, "ocigpu: OCIGPU-INT-1: ZeroDivisionError: a defect")
    monkeypatch.setenv("OCIGPU_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["config", "show"])


def test_an_interrupt_is_silent(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ocigpu.cli.settings.config.load_settings", interrupted)
    status, out, err = run("config", "show")
    assert (status, out, err.strip()) == (130, "", "")


def test_progress_is_plain_lines_outside_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(delay=1000) as progress:
        progress.begin()
        progress("compiling libcuda.so.1")
        progress("making device nodes")
    assert capsys.readouterr().err == "compiling libcuda.so.1\nmaking device nodes\n"


def test_progress_that_comes_late_starts_with_the_step_it_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(delay=1000) as progress:
        progress("over already")
        progress("compiling libcuda.so.1")
        progress.begin()
    assert capsys.readouterr().err == "compiling libcuda.so.1\n"


def test_progress_of_a_quick_operation_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(delay=1000) as progress:
        progress("not yet")
    assert capsys.readouterr().err == ""


def test_every_command_that_a_hint_of_the_hot_path_names_exists() -> None:
    names = {name.split()[0] for name in COMMANDS}
    rooms = ("core", "system", "gpus", "cdi", "bundle", "provision", "entry")
    sources = [*PACKAGE.glob("*.py"), *(path for room in rooms for path in (PACKAGE / room).rglob("*.py"))]
    # only what a sentence introduces as a command: "see: ocigpu list", "run: ocigpu config check"
    named = {
        (path.name, word)
        for path in sources
        for word in re.findall(r"(?:see|none|[Rr]un): ocigpu ([a-z-]+)", path.read_text(encoding="utf-8"))
    }
    assert named
    assert {(file, word) for file, word in named if word not in names} == set()


def test_what_is_slow_says_so_and_leaves_the_alarm_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with Progress("still at it", delay=0.001):
        while not (told := capsys.readouterr().err):
            signal.sigtimedwait((), 0.001)
    assert told == "still at it\n"
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_data_that_takes_time_is_made_for_json_only(capsys: pytest.CaptureFixture[str]) -> None:
    made = []

    def command() -> "show.Answer":
        yield lambda: {"made": made.append(1) or len(made)}, 3
        print("for people")

    assert (show.answer(command(), json=False), made, capsys.readouterr().out) == (3, [], "for people\n")
    assert (show.answer(command(), json=True), made) == (3, [1])
    assert json.loads(capsys.readouterr().out)["made"] == 1
