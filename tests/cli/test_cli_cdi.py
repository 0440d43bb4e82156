"""``ocigpu cdi`` on a simulated host: what is written, what is said about it, and what bad input does."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import requirements
from support.fixtures import Run
from support.products import one_in

from ocigpu.cli.front.main import main
from ocigpu.engines.status import EngineStatus

SMALL = {
    "cdiVersion": "0.3.0",
    "kind": "vendor.com/thing",
    "devices": [{"name": "a", "containerEdits": {"env": ["A=1"], "deviceNodes": [{"path": "/root/dev/null"}]}}],
    "containerEdits": {"mounts": [{"hostPath": "/root/etc", "containerPath": "/etc/thing", "options": ["bind"]}]},
}


@pytest.fixture(scope="module")
def host(session_directory: Path) -> Iterator[Path]:
    """A simulated host with two A100, of which the second is cut into MIG devices."""
    requirements.require(requirements.compiler())
    directory = session_directory / "cdi-host"
    arguments = ["--gpus", "2", "--model", "a100", "--driver-version", "550.163.01", "--mig", "1:1g.5gb,2g.10gb"]
    assert main(["sim", "create", str(directory), *arguments]) == 0
    yield directory
    assert main(["sim", "remove", str(directory)]) == 0


@pytest.fixture
def cdi(
    host: Path, run: Run, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Call with arguments: runs ``ocigpu cdi`` on the simulated host; its specification directories are low and high.

    A note on the hook's program depends on where the tests run and is left out.
    """
    for name in list(os.environ):
        if name.startswith("NVIDIA_CTK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OCIGPU_CDI_MAX_VERSION", "1.1.0")  # whatever engines this machine has
    monkeypatch.setattr("ocigpu.system.store.SYSTEM_DIRECTORY", str(tmp_path_factory.mktemp("run") / "ocigpu"))
    low, high = tmp_path / "low", tmp_path / "high"
    low.mkdir()
    high.mkdir()
    settings = tmp_path / "config.toml"
    settings.write_text(f'[simulation]\nroot = "{host}"\n[cdi]\nspec-dirs = ["{low}", "{high}"]\n')
    settings.chmod(0o644)

    def call(*arguments: str | os.PathLike[str]) -> tuple[int, str, str]:
        monkeypatch.setenv("OCIGPU_CONFIG", str(settings))
        status, out, err = run("cdi", *arguments)
        return status, out, "".join(line for line in err.splitlines(keepends=True) if not line.startswith("note: hook"))

    return call


def write(path: Path, spec: Any) -> Path:
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    path.chmod(0o644)
    return path


def give_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def device_names(spec: dict[str, Any]) -> list[str]:
    return [device["name"] for device in spec["devices"]]


# generate


def test_only_the_specification_goes_to_standard_output(cdi: Run) -> None:
    status, out, err = cdi("generate")
    assert status == 0
    spec = yaml.safe_load(out)
    assert out.startswith("---\ncdiVersion: 0.6.0\nkind: nvidia.com/gpu\n")
    names = device_names(spec)
    assert [name for name in names if "-" not in name] == ["0", "1:0", "1:1", "all"]
    assert [name[:4] for name in names if "-" in name] == ["GPU-", "MIG-", "MIG-"]
    assert "ocigpu/fingerprint" in spec["annotations"]
    assert err == "Generated CDI specification with version 0.6.0: nvidia.com/gpu, 7 devices\n"
    assert cdi("generate", "--quiet") == (0, out, "")


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        pytest.param(["--device-name-strategy", "type-index"], {}, ["all", "gpu0", "mig1:0", "mig1:1"], id="strategy"),
        pytest.param(
            ["--device-name-strategy", "type-index,index", "--no-all-device"],
            {},
            ["0", "1:0", "1:1", "gpu0", "mig1:0", "mig1:1"],
            id="comma list",
        ),
        pytest.param(["--device", "0", "--devices=1:1", "--cdi-class=x"], {}, ["0", "1:1", "all"], id="ids"),
        pytest.param([], {"DEVICE_NAME_STRATEGIES": "index", "DEVICE_IDS": "1:0,0"}, ["0", "1:0", "all"], id="env"),
        pytest.param(
            ["--device-id", "0", "--device-name-strategy", "index"],
            {"DEVICE_NAME_STRATEGIES": "uuid", "DEVICE_IDS": "1:0", "NO_ALL_DEVICE": "true"},
            ["0"],
            id="an option goes before its variable",
        ),
        pytest.param(["--device-id", "none"], {}, ["none"], id="none"),
    ],
)  # fmt: skip
def test_devices_and_their_names_are_those_that_were_asked_for(
    cdi: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], variables: dict[str, str], expected: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"NVIDIA_CTK_CDI_GENERATE_{name}", value)
    status, out, err = cdi("generate", "--json", *arguments)
    assert status == 0, err
    assert [name for name in device_names(json.loads(out)) if "-" not in name] == expected


@pytest.mark.parametrize(
    ("arguments", "name", "format_name", "note"),
    [
        pytest.param([], "a.yaml", "yaml", "", id="yaml"),
        pytest.param([], "a.json", "json", "", id="json by name"),
        pytest.param([], "a", "yaml", "", id="no extension"),
        pytest.param(["--format", "JSON"], "a", "json", "", id="no extension, json"),
        pytest.param([], "a.conf", "yaml", "", id="other extension"),
        pytest.param(["--format", "json"], "a.yaml", "yaml", "the name says yaml", id="contradiction"),
        pytest.param([], "a.yml", "yaml", "engines read only files", id="short extension"),
        pytest.param([], "a.JSON", "json", "engines read only files", id="upper case"),
    ],
)
def test_the_name_of_the_file_decides_its_format(
    cdi: Run, tmp_path: Path, arguments: list[str], name: str, format_name: str, note: str
) -> None:
    directory = tmp_path / "new" / "sub"
    status, out, err = cdi("generate", "--output", directory / name, *arguments)
    assert (status, out) == (0, "")
    (written,) = directory.iterdir()
    assert written.name == (name if "." in name and name != "a.conf" else f"{name}.{format_name}")
    assert written.read_text().startswith("{" if format_name == "json" else "---\n")
    assert written.stat().st_mode & 0o7777 == 0o644
    assert ("note: " in err) == bool(note)
    assert note in err
    assert f"Generated CDI specification with version 0.6.0 to {written}" in err


@pytest.mark.rest
def test_kinds_by_memory_are_specifications_of_their_own(cdi: Run, tmp_path: Path) -> None:
    """NVML of the simulated host knows no addressing modes: no memory is coherent."""
    arguments = ["generate", "--feature-flag", "enable-coherent-annotations", "--device-name-strategy", "index"]
    status, out, err = cdi(*arguments, "--output", tmp_path / "a.yaml")
    assert (status, out) == (0, "")
    specs = {path.name: yaml.safe_load(path.read_text()) for path in tmp_path.glob("a*")}
    assert {name: (spec["kind"], device_names(spec)) for name, spec in specs.items()} == {
        "a.yaml": ("nvidia.com/gpu", ["0", "1:0", "1:1", "all"]),
        "a.noncoherent.yaml": ("nvidia.com/gpu.noncoherent", ["0", "all"]),
    }
    assert f" to {tmp_path}/a.noncoherent.yaml: nvidia.com/gpu.noncoherent, 2 devices" in err
    assert list(yaml.safe_load_all(cdi(*arguments)[1])) == [specs["a.yaml"], specs["a.noncoherent.yaml"]]
    (tmp_path / "a.noncoherent.yaml").unlink()
    before = (tmp_path / "a.yaml").stat().st_ino  # a file that is written again is another one
    refresh = ["refresh", *arguments[1:], "--output", tmp_path / "a.yaml"]
    assert cdi(*refresh)[0] == 0
    written = (tmp_path / "a.noncoherent.yaml").stat().st_ino
    assert cdi(*refresh)[0] == 0
    assert (tmp_path / "a.noncoherent.yaml").stat().st_ino == written
    assert (tmp_path / "a.yaml").stat().st_ino == before


def test_an_old_engines_version_is_kept(cdi: Run, tmp_path: Path) -> None:
    status, out, err = cdi("generate", "--max-version", "v0.5.0")
    assert status == 0
    spec = yaml.safe_load(out)
    assert spec["cdiVersion"] == "0.5.0"
    assert "annotations" not in spec
    assert "left out for CDI 0.5.0: annotations" in err
    status, out, err = cdi("generate", "--max-version", "0.3.0", "--output", tmp_path / "a.yaml")
    assert (status, out) == (1, "")
    assert "OCIGPU-CDI-7" in err
    assert not (tmp_path / "a.yaml").exists()


def test_hooks_and_their_program_are_those_that_were_asked_for(cdi: Run) -> None:
    arguments = ["generate", "--json", "--nvidia-ctk-path", "/opt/nvidia-cdi-hook", "--disable-hooks", "update-ldcache"]
    status, out, _ = cdi(*arguments, "--vendor", "example.com", "--cdi-class", "device")
    assert status == 0
    spec = json.loads(out)
    assert spec["kind"] == "example.com/device"
    hooks = spec["containerEdits"]["hooks"]
    assert {hook["path"] for hook in hooks} == {"/opt/nvidia-cdi-hook"}
    names = {hook["args"][1] for hook in hooks}
    assert "create-symlinks" in names
    assert "update-ldcache" not in names
    hooks = json.loads(cdi(*arguments, "--enable-hook", "update-ldcache")[1])["containerEdits"]["hooks"]
    assert "update-ldcache" in {hook["args"][1] for hook in hooks}


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        pytest.param(["--mode", "nvm"], '--mode: invalid discovery mode: "nvm"', "did you mean nvml?", id="mode"),
        pytest.param(["--mode", "NVML"], '--mode: invalid discovery mode: "NVML"', "valid: auto, csv", id="case"),
        pytest.param(["--format", "toml"], '--format: invalid output format: "toml"', "valid: yaml, json", id="format"),
        pytest.param(["--json", "--format", "yaml"], "contradict", "", id="two formats"),
        pytest.param(["--device-name-strategy", "index,uid"], 'strategy: "uid"', "did you mean uuid?", id="strategy"),
        pytest.param(["--disable-hook", "update-ldcach"], 'hook: "update-ldcach"', "mean update-ldcache?", id="hook"),
        pytest.param(["--enable-hook", "all"], "enabling all hooks is not supported", "hooks: ", id="enable all"),
        pytest.param(["--enable-hook", "x\x1b[2J"], r'invalid hook: "x\x1b[2J"', "valid: create-symlinks", id="escape"),
        pytest.param(
            ["--feature-flag", "disable-ipc-discovery"], 'flag: "disable-ipc-discovery"', "disable-ipc-discoverer?",
            id="feature flag",
        ),
        pytest.param(["--max-version", "0.7.1"], '--max-version: invalid CDI version: "0.7.1"', "0.7.0", id="version"),
        pytest.param(["--vendor", "_x"], "--vendor: invalid CDI vendor name", "", id="vendor"),
        pytest.param(["--class", "a/b"], "--class: invalid CDI class name", "", id="class"),
        pytest.param(["--devise", "0"], "no such option", "ocigpu cdi generate --help", id="unknown option"),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_named_with_what_is_valid(
    cdi: Run, tmp_path: Path, arguments: list[str], message: str, hint: str
) -> None:
    output = write(tmp_path / "old.yaml", "old")
    status, out, err = cdi("generate", "--output", output, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("ocigpu: OCIGPU-ARG-1: ")
    first, _, second = err.partition("\n")
    assert message in first
    assert hint in second
    assert output.read_text() == "old"


@pytest.mark.parametrize("command", ["diff", "refresh"])
def test_relatives_of_generate_refuse_the_same_options(cdi: Run, command: str) -> None:
    status, _, err = cdi(command, "--mode", "nvm")
    assert (status, "did you mean nvml?" in err) == (2, True)


def test_an_output_that_cannot_be_written_is_an_error_and_leaves_nothing(cdi: Run, tmp_path: Path) -> None:
    (tmp_path / "directory.yaml").mkdir()
    write(tmp_path / "file", "")
    before = sorted(tmp_path.rglob("*"))
    for output in (tmp_path / "file" / "a.yaml", Path("/proc/a.yaml")):
        status, out, err = cdi("generate", "--output", output)
        assert (status, out) == (1, "")
        assert err.startswith(f"ocigpu: OCIGPU-CDI-8: write {output}: ")
        assert "Generated" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["generate", "refresh"])
@pytest.mark.parametrize("name", ["directory", "directory.yaml", "pipe"])
def test_no_file_is_written_beside_an_output_that_is_none(cdi: Run, tmp_path: Path, command: str, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory.yaml").mkdir()
    before = sorted(tmp_path.rglob("*"))
    status, out, err = cdi(command, "--output", tmp_path / name)
    assert (status, out) == (2, "")
    assert err.startswith("ocigpu: OCIGPU-ARG-1: --output: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_standard_output_can_be_named_by_its_device(cdi: Run) -> None:
    assert cdi("generate", "--output", "/dev/stdout", "-q") == cdi("generate", "-q")
    assert cdi("refresh", "--output", "-")[0] == 2


def test_show_says_that_a_word_is_no_name_and_no_file(cdi: Run) -> None:
    status, _, err = cdi("show", "nvidia.com:0")
    assert status == 1
    assert 'OCIGPU-CDI-1: "nvidia.com:0" is neither a device name' in err
    assert err.endswith("hint: all names: ocigpu cdi list\n")


def test_a_full_disk_behind_standard_output_is_an_error(host: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ocigpu.cli.front.main", "cdi", "generate", "--config", host / "config.toml"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "ocigpu: OCIGPU-CDI-8: write standard output: No space left on device\n"


def test_nothing_found_leaves_the_old_file(cdi: Run, tmp_path: Path) -> None:
    output = write(tmp_path / "old.yaml", "old")
    for arguments in (["--mode", "gds"], ["--device-id", "7"], ["--max-version", "0.4.0"]):
        status, out, err = cdi("generate", "--output", output, *arguments)
        assert (status, out) == (1, "")
        assert err.startswith("ocigpu: OCIGPU-")
        assert output.read_text() == "old"


def test_a_device_that_is_left_out_is_a_warning_or_with_strict_an_error(cdi: Run, host: Path, tmp_path: Path) -> None:
    node = host / "dev" / "nvidia0"
    hidden = host / "hidden"  # on the same file system: a node is renamed there
    output = tmp_path / "a.yaml"
    node.rename(hidden)
    try:
        status, _, err = cdi("generate", "--output", output)
        strict = cdi("generate", "--output", tmp_path / "b.yaml", "--strict")
    finally:
        hidden.rename(node)
    assert status == 0
    assert err.startswith("skipped: GPU 00000000:01:00.0 (device nodes are missing: /dev/nvidia0)")
    assert "0" not in device_names(yaml.safe_load(output.read_text()))
    assert strict[0] == 1
    assert strict[2].endswith("ocigpu: OCIGPU-CDI-7: generate: 1 device would be left out\n")
    assert not (tmp_path / "b.yaml").exists()


def test_a_file_whose_devices_another_one_defines_says_so(cdi: Run, tmp_path: Path) -> None:
    assert cdi("generate", "--output", tmp_path / "low" / "a.yaml")[0] == 0
    err = cdi("generate", "--output", tmp_path / "low" / "b.yaml", "--device-name-strategy", "index")[2]
    assert (
        f"note: conflict: {tmp_path}/low/a.yaml and {tmp_path}/low/b.yaml define nvidia.com/gpu=0 and 3 others" in err
    )
    (tmp_path / "low" / "b.yaml").unlink()
    err = cdi("generate", "--output", tmp_path / "high" / "b.yaml", "--device-name-strategy", "index")[2]
    assert (
        f"note: shadowed: {tmp_path}/high/b.yaml is used for nvidia.com/gpu=0 and 3 others, not {tmp_path}/low" in err
    )


def test_help_names_every_option_and_variable_of_the_vendors_generator(run: Run) -> None:
    text = "".join(run("cdi", "generate", "--help")[1].split())
    for option in (
        "--output", "--format", "--mode", "--discovery-mode", "--device-name-strategy", "--device-id", "--device-ids",
        "--device", "--devices", "--driver-root", "--dev-root", "--library-search-path", "--config-search-path",
        "--nvidia-cdi-hook-path", "--nvidia-ctk-path", "--ldconfig-path", "--vendor", "--cdi-vendor", "--class",
        "--cdi-class", "--csv.file", "--csv.ignore-pattern", "--csv.compat-container-root", "--disable-hook",
        "--disable-hooks", "--enable-hook", "--enable-hooks", "--feature-flag", "--feature-flags", "--no-all-device",
    ):  # fmt: skip
        assert option in text
    for variable in (
        "OUTPUT_FILE_PATH", "GENERATE_OUTPUT_FORMAT", "GENERATE_MODE", "GENERATE_DEVICE_NAME_STRATEGIES",
        "GENERATE_DEVICE_IDS", "GENERATE_LIBRARY_SEARCH_PATHS", "GENERATE_CONFIG_SEARCH_PATHS", "HOOK_PATH",
        "GENERATE_LDCONFIG_PATH", "GENERATE_VENDOR", "GENERATE_CLASS", "GENERATE_CSV_FILES",
        "GENERATE_CSV_IGNORE_PATTERNS", "GENERATE_CSV_CONTAINER_COMPAT_ROOT", "GENERATE_DISABLED_HOOKS",
        "GENERATE_ENABLED_HOOKS", "GENERATE_FEATURE_FLAGS", "GENERATE_NO_ALL_DEVICE",
    ):  # fmt: skip
        assert f"NVIDIA_CTK_CDI_{variable}" in text
    assert "NVIDIA_CTK_DRIVER_ROOT" in text
    assert "NVIDIA_CTK_DEV_ROOT" in text


@pytest.mark.parametrize("command", [["cdi", "refresh"], ["cdi", "diff"], ["watch"]], ids=" ".join)
def test_relatives_of_generate_have_its_options(run: Run, command: list[str]) -> None:
    status, out, _ = run(*command, "--help")
    assert status == 0
    assert "--device-name-strategy" in out
    assert "--csv.ignore-pattern" in out


# list


def test_plan_shows_what_the_specifications_give_a_container(cdi: Run, run: Run, host: Path, tmp_path: Path) -> None:
    specs, settings = tmp_path / "specs", tmp_path / "plan.toml"
    cdi("generate", "--output", specs / "a.json")
    write(settings, f'[simulation]\nroot = "{host}"\n[cdi]\nspec-dirs = ["{specs}"]\n')
    settings.chmod(0o644)
    plan = ("plan", "--config", settings)
    status, out, err = run(*plan, "--gpus", "nvidia.com/gpu=0")
    assert (status, err) == (0, "")
    assert f"from     {specs}/a.json (fresh)\n" in out
    assert re.search(r"^\+ +\d+ nodes +/dev/nvidia", out, re.MULTILINE)
    assert out.endswith(" to hide; nothing was changed (every step: --steps)\n")
    assert len(out.splitlines()) <= 16
    out = run(*plan, "--gpus", "nvidia.com/gpu=0", "--steps")[1]
    assert "\n    +  node /dev/nvidia0" in out
    bundle = tmp_path / "bundle"
    env = ["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"]
    config = {"process": {"env": env}, "root": {"path": "rootfs"}, "linux": {"namespaces": [{"type": "mount"}]}}
    (bundle / "rootfs").mkdir(parents=True)
    before = write(bundle / "config.json", config).read_text()
    data = json.loads(run(*plan, "--bundle", bundle, "--json")[1])
    assert (data["mode"], data["devices"]) == ("cdi", ["nvidia.com/gpu=0"])
    assert "/dev/nvidia0" in [node["path"] for node in data["containerEdits"]["deviceNodes"]]
    assert (bundle / "config.json").read_text() == before
    status, out, err = run(*plan, "--gpus", "nvidia.com/gpu=77")
    assert (status, out) == (1, "")
    assert "OCIGPU-CDI-4" in err


def test_plan_refuses_devices_that_could_not_be_injected(run: Run, tmp_path: Path) -> None:
    gone = {**SMALL, "devices": [{"name": "a", "containerEdits": {"deviceNodes": [{"path": "/dev/is-gone"}]}}]}
    (tmp_path / "specs").mkdir()
    path = write(tmp_path / "specs/a.json", gone)
    settings = write(tmp_path / "plan.toml", f'[cdi]\nspec-dirs = ["{path.parent}"]\n')
    settings.chmod(0o644)
    name = f"{gone['kind']}=a"
    status, out, err = run("plan", "--config", settings, "--gpus", name, "--privileged")
    assert (status, out) == (1, "")
    assert "OCIGPU-CDI-6" in err


def test_list_in_a_pipe_is_names_only(cdi: Run, tmp_path: Path) -> None:
    status, out, err = cdi("list")
    assert (status, out) == (0, "")
    assert err.startswith("Found 0 CDI devices\nno specification in ")
    write(tmp_path / "high" / "b.json", SMALL)
    cdi("generate", "--output", tmp_path / "low" / "a.yaml", "--device-name-strategy", "index")
    kind = "nvidia.com/gpu="
    names = [f"{kind}0", f"{kind}1:0", f"{kind}1:1", f"{kind}all", "vendor.com/thing=a"]
    assert cdi("list", "-q") == (0, "\n".join(names) + "\n", "")
    assert cdi("list", "--spec-dir", tmp_path / "high")[1:] == ("vendor.com/thing=a\n", "Found 1 CDI device\n")
    assert cdi("list", "--spec-dir", f"{tmp_path}/low,{tmp_path}/none", "-q")[1].count("\n") == 4


def test_the_directories_of_list_can_come_from_the_environment(
    cdi: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "high" / "b.json", SMALL)
    monkeypatch.setenv("NVIDIA_CTK_CDI_SPEC_DIRS", f"{tmp_path}/low,{tmp_path}/high")
    assert cdi("list", "-q")[1] == "vendor.com/thing=a\n"


BROKEN = {
    "yaml.yaml": "kind: [",
    "twice.yaml": "cdiVersion: 0.3.0\ncdiVersion: 0.5.0\n",
    "rule.json": '{"cdiVersion": "0.3.0", "kind": "vendor.com/thing", "devices": []}',
    "empty.json": "",
    "bytes.yaml": "\0\1",
}


def test_a_broken_file_is_one_line_and_the_others_stay_usable(cdi: Run, tmp_path: Path) -> None:
    write(tmp_path / "low" / "good.json", SMALL)
    for name, text in BROKEN.items():
        write(tmp_path / "low" / name, text)
    os.symlink("/nonexistent", tmp_path / "high" / "link.json")
    status, out, err = cdi("list", "-q")
    assert (status, out) == (0, "vendor.com/thing=a\n")
    lines = err.splitlines()
    expected = [*(f"{tmp_path}/low/{name}: " for name in sorted(BROKEN)), f"{tmp_path}/high/link.json: "]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)
    assert cdi("list", "--strict")[0] == 1
    data = json.loads(cdi("list", "--json")[1])
    assert [error["file"] + ": " for error in data["errors"]] == expected
    assert [device["device"] for device in data["devices"] if device["usable"]] == ["vendor.com/thing=a"]


def test_list_names_the_state_of_every_definition(cdi: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = tmp_path / "low" / "fresh.yaml"
    cdi("generate", "--output", fresh, "--device-name-strategy", "index", "--no-all-device")
    stale = fresh.read_text().replace("driver=550.163.01", "driver=535.1").replace("nvidia.com/gpu", "old.com/gpu")
    write(tmp_path / "low" / "stale.yaml", stale)
    write(tmp_path / "low" / "one.json", SMALL)
    write(tmp_path / "high" / "two.json", SMALL)
    write(tmp_path / "high" / "x.json", {**SMALL, "kind": "vendor.com/other"})
    write(tmp_path / "high" / "y.json", {**SMALL, "kind": "vendor.com/other"})
    data = json.loads(cdi("list", "--json")[1])["devices"]
    found = {(row["device"], os.path.basename(row["file"])): (row["state"], row["usable"]) for row in data}
    assert found["nvidia.com/gpu=0", "fresh.yaml"] == ("fresh", True)
    assert found["old.com/gpu=1:1", "stale.yaml"] == ("stale", True)
    assert found["vendor.com/thing=a", "two.json"] == ("unknown", True)
    assert found["vendor.com/thing=a", "one.json"] == ("shadowed", False)
    assert found["vendor.com/other=a", "x.json"] == found["vendor.com/other=a", "y.json"] == ("conflict", False)
    reason = "the driver was 535.1 and is 550.163.01"
    assert next(row["reasons"] for row in data if row["device"] == "old.com/gpu=0") == [reason]
    assert f"{tmp_path}/low/stale.yaml: stale: {reason}\n" in cdi("list")[2]

    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", cdi("list")[1]).splitlines()
    assert lines[0].split() == ["DEVICE", "FILE", "VERSION", "STATE"]
    row = next(line for line in lines if line.startswith("old.com/gpu=0 "))
    assert row.split()[1:4] == [f"{tmp_path}/low/stale.yaml", "0.6.0", "stale"]
    assert any(f"shadowed: {tmp_path}/high/two.json is used" in line for line in lines)


# validate


def test_validate_names_every_problem_with_file_path_and_rule(cdi: Run, tmp_path: Path) -> None:
    bad = json.loads(json.dumps(SMALL))
    bad["devices"][0]["containerEdits"]["deviceNodes"][0] = {"path": "", "permissions": "x"}
    bad["containerEdits"]["mounts"][0]["typo"] = 1
    path = write(tmp_path / "bad.json", bad)
    good = write(tmp_path / "good.json", SMALL)
    status, out, err = cdi("validate", good, path, "/nonexistent/file.json")
    assert (status, err) == (1, "")
    assert f"{good}: valid (version 0.3.0, vendor.com/thing, 1 device)\n" in out
    assert f"{path}: invalid\n" in out
    assert "error: devices[0].containerEdits.deviceNodes[0].path: " in out
    assert "error: devices[0].containerEdits.deviceNodes[0].permissions: " in out
    assert "typo" in out
    assert "/nonexistent/file.json: invalid\n  error: No such file or directory" in out
    data = json.loads(cdi("validate", "--json", good, path)[1])
    assert [data["valid"], *(file["valid"] for file in data["files"])] == [False, True, False]
    assert {"where", "message", "rule", "severity"} == set(data["files"][1]["problems"][0])
    assert cdi("validate", good)[0] == 0


def test_validate_says_when_links_are_left_to_the_hook_program(cdi: Run, tmp_path: Path) -> None:
    """NVIDIA's toolkit up to 1.17 writes libcuda.so and leaves libcuda.so.1 to update-ldcache."""
    spec = json.loads(json.dumps(SMALL))
    mount = {"hostPath": "/usr/lib/libcuda.so.550.1", "containerPath": "/usr/lib/libcuda.so.550.1"}
    words = ["nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib"]
    hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": words, "env": ["A=b"]}
    spec["containerEdits"] |= {"mounts": [mount], "hooks": [hook]}
    path = write(tmp_path / "old.json", spec)
    status, out, _ = cdi("validate", path)
    assert status == 0
    assert "warning: the links libcuda.so.1 are left to the program of the hook update-ldcache, as files of" in out
    hook["args"] = ["x", "create-symlinks", "--link", "libcuda.so.550.1::/usr/lib/libcuda.so.1", "+", *words[1:]]
    assert "left to" not in cdi("validate", write(tmp_path / "new.json", spec))[1]


def test_validate_reads_standard_input(cdi: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cdi("generate")[1]
    give_stdin(monkeypatch, made)
    status, out, _ = cdi("validate", "-")
    assert (status, out.splitlines()[0]) == (0, "standard input: valid (version 0.6.0, nvidia.com/gpu, 7 devices)")
    give_stdin(monkeypatch, "")
    status, out, _ = cdi("validate", "-")
    assert (status, out) == (1, "standard input: invalid\n  error: no data [usable file]\n")


def test_validate_names_engines_that_refuse_the_version_and_the_field_that_needs_it(cdi: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    cdi("generate", "--output", path)
    out = cdi("validate", path)[1]
    assert "  too new for these releases (all later ones take it), by the newest version that they accept:\n" in out
    assert "    0.5.0: containerd 1.7.0 to 1.7.11; CRI-O 1.25 to 1.27; Podman 4.3 to 4.6\n" in out
    assert "  what needs 0.6.0: annotations\n" in out
    assert out.endswith("  for the engines that accept 0.5.0: ocigpu cdi generate --max-version 0.5.0\n")
    data = json.loads(cdi("validate", path, "--json")[1])["files"][0]
    assert {"name": "Podman", "releases": "4.3 to 4.6", "newest": "0.5.0"} in data["refused_by"]
    assert {"version": "0.6.0", "where": "annotations", "why": "annotations"} in data["needs"]
    out = cdi("validate", write(tmp_path / "b.json", {**SMALL, "cdiVersion": "1.1.0"}))[1]
    assert "although nothing in it needs more than 0.3.0" in out


def test_validate_without_files_checks_all_and_what_they_do_to_each_other(cdi: Run, tmp_path: Path) -> None:
    assert cdi("validate") == (0, f"no specification in {tmp_path}/low, {tmp_path}/high\n", "")
    one = write(tmp_path / "low" / "one.json", SMALL)
    two = write(tmp_path / "high" / "two.json", SMALL)
    status, out, _ = cdi("validate")
    assert status == 0
    assert f"shadowed: {two} is used for vendor.com/thing=a, not {one}\n" in out
    three = write(tmp_path / "high" / "three.json", SMALL)
    status, out, _ = cdi("validate")
    assert status == 1
    assert f"conflict: {three} and {two} define vendor.com/thing=a: no engine can use those\n" in out
    overlaps = json.loads(cdi("validate", "--json")[1])["overlaps"]
    assert [overlap["kind"] for overlap in overlaps] == ["conflict", "shadowed"]
    three.chmod(0o666)
    status, out, _ = cdi("validate", "--spec-dir", tmp_path / "high")
    assert status == 1
    assert f"{three}: invalid\n" in out
    assert f"{two}: valid" in out


def test_validate_says_why_a_directory_or_a_broken_file_is_not_even_read(cdi: Run, tmp_path: Path) -> None:
    broken = write(tmp_path / "low" / "broken.json", "{")
    broken.chmod(0o666)
    write(tmp_path / "high" / "a.json", SMALL)
    (tmp_path / "high").chmod(0o1777)
    status, out, _ = cdi("validate")
    assert status == 1
    assert f"{tmp_path}/high: invalid\n  error: owner {os.geteuid()}, mode 1777: others may write" in out
    assert f"{broken}: invalid\n  error: owner {os.geteuid()}, mode 0666: others may write" in out


def test_a_file_that_is_named_twice_is_no_conflict(cdi: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "low" / "a.json", SMALL)
    assert cdi("validate", path, tmp_path / "high/../low/a.json")[0] == 0
    assert cdi("validate", "--spec-dir", tmp_path / "low", "--spec-dir", tmp_path / "low")[0] == 0
    assert cdi("list", "--spec-dir", tmp_path / "low", "--spec-dir", tmp_path / "low")[1] == "vendor.com/thing=a\n"


RULES = {
    "version": ({"cdiVersion": "0.7"}, "cdiVersion: invalid version"),
    "kind": ({"kind": "x"}, "kind: invalid kind"),
    "no-devices": ({"devices": []}, "devices: invalid spec, no devices"),
    "empty-edits": ({"devices": [{"name": "a"}]}, "devices[0].containerEdits: invalid device, empty device edits"),
    "device-name": ({"devices": [{"name": "-"}]}, "devices[0].name: device name"),
    "env": ({"containerEdits": {"env": ["x"]}}, "containerEdits.env[0]: invalid environment variable"),
    "hook-name": (
        {"containerEdits": {"hooks": [{"hookName": "x", "path": "/x"}]}},
        "containerEdits.hooks[0].hookName: invalid hook name",
    ),
    "path": (
        {"containerEdits": {"mounts": [{"hostPath": "/a/../b", "containerPath": "/b", "options": ["bind"]}]}},
        "containerEdits.mounts[0].hostPath: path",
    ),
    "unknown-field": ({"garbage": 1}, 'unknown field "garbage"'),
    "intel-rdt": ({"containerEdits": {"intelRdt": {"closID": ".."}}}, "containerEdits.intelRdt.closID: invalid"),
}


@pytest.mark.parametrize("rule", RULES)
def test_validate_names_the_rule(cdi: Run, tmp_path: Path, rule: str) -> None:
    fields, message = RULES[rule]
    path = write(tmp_path / "a.json", {**SMALL, "cdiVersion": "1.1.0", **fields})
    status, out, err = cdi("validate", path)
    assert (status, err) == (1, "")
    (line,) = [line for line in out.splitlines() if f"[{rule}]" in line]
    assert line.startswith(f"  error: {message}")
    assert out.startswith(f"{path}: invalid\n")
    (problem,) = json.loads(cdi("validate", "--json", path)[1])["files"][0]["problems"]
    assert (problem["rule"], problem["severity"]) == (rule, "error")


# show


def test_show_gives_the_edits_of_a_device_with_those_of_its_file(cdi: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "high" / "a.json", SMALL)
    status, out, err = cdi("show", "vendor.com/thing=a")
    assert (status, err) == (0, "")
    assert str(path) in out
    assert "node /root/dev/null" in out
    assert "hostPath /root/etc, options bind" in out
    data = json.loads(cdi("show", "vendor.com/thing=a", "--json")[1])
    edits = {**SMALL["containerEdits"], **SMALL["devices"][0]["containerEdits"]}
    assert (data["device"], data["file"], data["containerEdits"]) == ("vendor.com/thing=a", str(path), edits)
    status, _, err = cdi("show", "vendor.com/thing=b")
    assert (status, err.split(": ")[1]) == (1, "OCIGPU-CDI-4")


def test_show_names_every_device_of_a_large_file(cdi: Run, tmp_path: Path) -> None:
    devices = [{"name": f"device-{number}", "containerEdits": {"env": ["A=1"]}} for number in range(500)]
    out = cdi("show", write(tmp_path / "a.json", {**SMALL, "devices": devices}))[1]
    assert set(re.findall(r"device-\d+", out)) == {device["name"] for device in devices}


def test_show_sums_a_file_up(cdi: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    cdi("generate", "--output", path)
    out = cdi("show", path)[1]
    assert "state    fresh\n" in out
    assert "devices  7: 0, " in out
    data = json.loads(cdi("show", path, "--json")[1])
    assert (data["kind"], data["version"], data["needs"]) == ("nvidia.com/gpu", "0.6.0", "0.6.0")
    assert data["state"] == {"word": "fresh", "reasons": []}
    write(path, path.read_text().replace("driver=550.163.01", "driver=535.1"))
    assert "state    stale: the driver was 535.1 and is 550.163.01\n" in cdi("show", path)[1]
    status, _, err = cdi("show", write(tmp_path / "b.json", BROKEN["rule.json"]))
    assert (status, err.split(": ")[1]) == (1, "OCIGPU-CDI-3")
    status, _, err = cdi("show", "no/such/file")
    assert (status, err.split(": ")[1]) == (1, "OCIGPU-CDI-2")


# diff, refresh


@pytest.mark.rest
def test_diff_and_refresh_agree_on_what_is_different(cdi: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    options = ["--device-name-strategy", "index"]
    status, out, _ = cdi("refresh", "--output", path, *options)
    assert (status, out) == (0, f"{path}: written: there was no file\n")
    written = path.stat()
    assert cdi("diff", path, *options)[:2] == (0, f"{path}: as this host would generate it now\n")
    assert cdi("refresh", "--output", path, *options)[:2] == (0, f"{path}: up to date\n")
    assert cdi("refresh", "--output", path, "--quiet", *options)[:2] == (0, "")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)

    spec = json.loads(path.read_text())
    removed = spec["devices"].pop(0)
    spec["containerEdits"]["mounts"][0]["hostPath"] = "/elsewhere"
    fingerprint = spec["annotations"]["ocigpu/fingerprint"]
    spec["annotations"]["ocigpu/fingerprint"] = fingerprint.replace("driver=550.163.01", "driver=535.1")
    write(path, spec)
    status, out, _ = cdi("diff", path, *options)
    assert status == 1
    lines = out.splitlines()
    assert lines[0].startswith("~ every container: mount ")
    assert "hostPath /elsewhere is now /" in lines[0]
    assert lines[1:] == [
        f'+ device "{removed["name"]}": the device',
        "why: the driver was 535.1 and is 550.163.01",
        f"{path}: 2 differences",
    ]
    status, out, _ = cdi("diff", path, "--json", *options)
    data = json.loads(out)
    assert (status, data["equal"], len(data["differences"])) == (1, False, 2)
    assert data["reasons"] == ["the driver was 535.1 and is 550.163.01"]
    assert cdi("refresh", "--output", path, *options)[1] == (
        f"{path}: written: the driver was 535.1 and is 550.163.01\n"
    )
    assert json.loads(cdi("refresh", "--output", path, "--json", *options)[1])["changed"] is False
    assert cdi("diff", path, *options)[0] == 0


def test_diff_of_a_file_that_cannot_be_used_is_an_error(cdi: Run, tmp_path: Path) -> None:
    for text, code in ((BROKEN["yaml.yaml"], "OCIGPU-CDI-2"), (BROKEN["rule.json"], "OCIGPU-CDI-3")):
        status, out, err = cdi("diff", write(tmp_path / "a", text))
        assert (status, out) == (1, "")
        assert err.startswith(f"ocigpu: {code}: ")
        assert err.count("\n") <= 2


# transform


def test_transform_changes_the_root_and_raises_the_version(
    cdi: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.json", SMALL)
    status, out, err = cdi("transform", "root", "--from", "/root", "--to", "/host", "--input", source)
    assert (status, err) == (0, "")
    spec = yaml.safe_load(out)
    assert spec["cdiVersion"] == "0.5.0"
    assert spec["devices"][0]["containerEdits"]["deviceNodes"] == [
        {"path": "/root/dev/null", "hostPath": "/host/dev/null"}
    ]
    assert spec["containerEdits"]["mounts"][0]["hostPath"] == "/host/etc"
    give_stdin(monkeypatch, json.dumps(SMALL))
    status, out, _ = cdi("transform", "root", "--from", "/elsewhere", "--to", "", "--format", "json")
    assert (status, json.loads(out)) == (0, SMALL)
    target = tmp_path / "new" / "b.json"
    give_stdin(monkeypatch, json.dumps(SMALL))
    arguments = ["--from", "/etc", "--relative-to", "container", "--output", target]
    assert cdi("transform", "root", *arguments) == (0, "", "")
    assert json.loads(target.read_text())["containerEdits"]["mounts"][0]["containerPath"] == "/thing"


@pytest.mark.parametrize(
    ("arguments", "text", "status", "message"),
    [
        pytest.param(["--relative-to", "hosts"], "", 2, "did you mean host?", id="side"),
        pytest.param(["--to", "x"], "", 2, '--to: "x" is not an absolute path', id="relative root"),
        pytest.param([], BROKEN["yaml.yaml"], 1, "OCIGPU-CDI-2", id="no YAML"),
        pytest.param([], BROKEN["twice.yaml"], 1, "OCIGPU-CDI-2", id="duplicate key"),
        pytest.param([], BROKEN["rule.json"], 1, "OCIGPU-CDI-3: standard input: ", id="broken rule"),
        pytest.param([], "", 1, "no data", id="empty"),
        pytest.param(["--input", "/nonexistent"], "", 1, "No such file", id="missing"),
    ],
)
def test_transform_of_bad_input_writes_nothing(
    cdi: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], text: str, status: int, message: str,
) -> None:  # fmt: skip
    give_stdin(monkeypatch, text)
    output = tmp_path / "out.yaml"
    result = cdi("transform", "root", "--output", output, *arguments)
    assert result[:2] == (status, "")
    assert message in result[2]
    assert not output.exists()


@pytest.mark.rest
@pytest.mark.parametrize(
    ("release", "version"),
    one_in(3, [("podman version 4.3.1", "0.5.0"), ("podman version 5.0.0", "0.6.0"), ("", "0.6.0")]),
    ids=["Podman 4.3", "Podman 5", "no engine"],
)
def test_a_directory_of_engines_gets_a_version_that_they_read(
    cdi: Run, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, version: str
) -> None:
    """By generate, refresh and the vendor's words alike; elsewhere, and by --max-version, a file is what it was."""
    monkeypatch.delenv("OCIGPU_CDI_MAX_VERSION")
    engines = {"podman": release.rpartition(" ")[2]} if release else {}
    monkeypatch.setattr("ocigpu.doctor.versions.read_engine_releases", lambda _files: engines)
    monkeypatch.setattr("ocigpu.cli.cdi.generate.USUAL_DIRECTORIES", (str(tmp_path / "high"),))
    file, elsewhere = tmp_path / "high" / "nvidia.yaml", tmp_path / "elsewhere" / "nvidia.yaml"
    for words in (["generate", "--output", file], ["refresh", "--output", file], ["generate", f"--output={file}"]):
        assert cdi(*words)[0] == 0
        assert yaml.safe_load(file.read_text())["cdiVersion"] == version, words
    assert cdi("generate", "--output", elsewhere)[0] == 0
    assert yaml.safe_load(elsewhere.read_text())["cdiVersion"] == "0.6.0"
    assert cdi("generate", "--output", file, "--max-version", "0.6.0")[0] == 0
    assert yaml.safe_load(file.read_text())["cdiVersion"] == "0.6.0"
    below = host / "etc/cdi/nvidia.yaml"  # engines of the simulated host: none
    assert cdi("generate", "--output", below)[0] == 0
    below.unlink()
    below.parent.rmdir()


def test_validate_warns_of_what_engines_pass_over_and_what_no_runtime_mounts(cdi: Run, tmp_path: Path) -> None:
    """Valid for the reference library all the same: Podman and containerd inject these devices."""
    mounts = [
        {"hostPath": "/etc/hostname", "containerPath": "/a", "options": ["ro"]},
        {"hostPath": "tmpfs", "containerPath": "/b", "type": "tmpfs"},
    ]
    devices = [{"name": "a", "containerEdits": {"mounts": mounts}}]
    first = yaml.safe_dump({"cdiVersion": "0.5.0", "kind": "acme.example/one", "devices": devices})
    path = write(tmp_path / "a.yaml", f"{first}---\nkind: second\n")
    status, out, _ = cdi("validate", path)
    assert status == 0
    warnings = [line for line in out.splitlines() if "warning" in line]
    assert len(warnings) == 2, warnings
    assert "mounts[0].options" in warnings[0]
    assert "no such device" in warnings[0]
    assert f"line {first.count(chr(10)) + 1}: a second document" in warnings[1]


def test_refresh_says_who_looks_elsewhere(cdi: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of Podman 5.4 look in /etc/cdi alone; an engine may be told to look elsewhere."""
    usual, file = tmp_path / "usual", tmp_path / "high" / "nvidia.yaml"
    usual.mkdir()
    engines = [
        EngineStatus("docker", "", True, True, "/etc/docker/daemon.json", cdi="on", cdi_spec_dirs=("/opt/cdi",)),
        EngineStatus("podman", "", True, False, "", cdi="on"),
    ]
    monkeypatch.setattr("ocigpu.engines.status.find_engines", lambda: engines)
    monkeypatch.setattr("ocigpu.engines.checker.program_version", lambda _root, _engine: (5, 4))
    monkeypatch.setattr("ocigpu.cli.cdi.generate.USUAL_DIRECTORIES", (str(usual), str(tmp_path / "high")))
    notes = [line for line in cdi("refresh", "--output", file)[2].splitlines() if " looks only in " in line]
    assert notes == [
        "note: docker looks only in /opt/cdi: --output /opt/cdi/nvidia.yaml",
        (
            f"note: podman build --device of 5.4 looks only in {usual}: for builds, ocigpu cdi generate --output"
            f" {usual}/nvidia.yaml after each change of the driver"
        ),
    ]
    assert cdi("generate", "--output", usual / "nvidia.yaml")[0] == 0
    del engines[0]
    assert " looks only in " not in cdi("refresh", "--output", file)[2]
    (usual / "nvidia.yaml").unlink()
    for version in ((4, 3), (5, 8), None):
        monkeypatch.setattr("ocigpu.engines.checker.program_version", lambda *_, version=version: version)
        assert " looks only in " not in cdi("refresh", "--output", file)[2]
