"""``nvidia-ctk``: command lines of public roles, installers and guides, and what they leave behind.

Lines and expectations are those of public text (Ansible roles, cloud-init and user data, driver containers, guides of
kind, k3s and MicroShift); where they name files below /etc, these are below the test's directory.
"""

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import requirements
from support.process import run
from support.product import SimulatedHost

from ocigpu import VENDOR_VERSION, __version__
from ocigpu.cli import vendor_ctk
from ocigpu.cli.front.main import main
from ocigpu.engines import carry_out, checker, configure, places

V2 = """\
version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true
"""
JOURNALD = '{\n  "log-driver": "journald",\n  "features": {"buildkit": true}\n}\n'
FORMER = '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}\n'
ENTRY = {"path": "nvidia-container-runtime"}


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files lie: @ in a command line.  The toolkit's settings and ours are there too."""
    monkeypatch.setenv("NVIDIA_CTK_CONFIG_FILE_PATH", str(tmp_path / "nvidia-container-runtime/config.toml"))
    monkeypatch.setenv("OCIGPU_CONFIG", str(tmp_path / "ocigpu/config.toml"))
    for name in ("NVIDIA_CTK_QUIET", "NVIDIA_CTK_DEBUG", "NVIDIA_CTK_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def engine_of(monkeypatch: pytest.MonkeyPatch, release: tuple[int, int]) -> None:
    """Let the installed engines be of this release, and none of them check what is written for it."""
    for module in (checker, configure):
        monkeypatch.setattr(module, "program_version", lambda *_: release)
    monkeypatch.setattr(carry_out, "check", lambda *_: "")


def ctk(etc: Path, line: str) -> int:
    return main(["nvidia-ctk", *(word.replace("@", str(etc)) for word in shlex.split(line))])


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        pytest.param("", "", {"runtimes": {"nvidia": ENTRY}}, id="docker is the default"),
        pytest.param("--runtime=docker", "", {"runtimes": {"nvidia": ENTRY}}, id="install guide"),
        pytest.param(
            "--runtime=docker --set-as-default",
            JOURNALD,
            {
                "log-driver": "journald",
                "features": {"buildkit": True},
                "runtimes": {"nvidia": ENTRY},
                "default-runtime": "nvidia",
            },
            id="user data of a cloud",
        ),
        pytest.param(
            "--runtime docker --nvidia-set-as-default",
            "",
            {"runtimes": {"nvidia": ENTRY}, "default-runtime": "nvidia"},
            id="words of their own",
        ),
        pytest.param(
            "--runtime=docker --set-as-default --cdi.enabled",
            JOURNALD,
            {
                "log-driver": "journald",
                "features": {"buildkit": True, "cdi": True},
                "runtimes": {"nvidia": ENTRY},
                "default-runtime": "nvidia",
            },
            id="kind with GPUs",
        ),
        pytest.param("--runtime=docker --set-as-default=false", FORMER, json.loads(FORMER), id="it was done before"),
        pytest.param(
            "--runtime=docker --nvidia-runtime-name=gpu --runtime-path=/opt/bin/nvidia-container-runtime --enable-cdi",
            "",
            {"runtimes": {"gpu": {"path": "/opt/bin/nvidia-container-runtime"}}, "features": {"cdi": True}},
            id="aliases",
        ),
    ],
)
def test_docker_is_configured(
    etc: Path, monkeypatch: pytest.MonkeyPatch, line: str, before: str, after: dict[str, Any]
) -> None:
    engine_of(monkeypatch, (28, 0))
    file = etc / "daemon.json"
    if before:
        file.write_text(before)
    assert ctk(etc, f"runtime configure {line} --config=@/daemon.json") == 0
    assert json.loads(file.read_text()) == after
    assert main(["engine", "remove", "docker", "--engine-config", str(file)]) == 0
    assert (file.read_text() if file.exists() else "") == before


def runtimes(*files: Path) -> dict[str, Any]:
    """Return what containerd or CRI-O would be told: programs by name, the default, CDI."""
    found: dict[str, Any] = {}
    for file in files:
        data = tomllib.loads(file.read_text()) if file.exists() else {}
        for plugin in data.get("plugins", {}).values():
            engine = plugin.get("containerd", {})
            for name, entry in engine.get("runtimes", {}).items():
                found[name] = entry.get("options", {}).get("BinaryName", "")
                assert not found[name] or entry["runtime_type"] == "io.containerd.runc.v2"
            found["default"] = engine.get("default_runtime_name", found.get("default"))
            found["cdi"] = plugin.get("enable_cdi", found.get("cdi"))
        runtime = data.get("crio", {}).get("runtime", {})
        found |= {name: entry["runtime_path"] for name, entry in runtime.get("runtimes", {}).items()}
        found["default"] = runtime.get("default_runtime", found.get("default"))
    found.pop("runc", None)
    return {name: value for name, value in found.items() if value is not None}


OURS = {"nvidia": "/usr/bin/nvidia-container-runtime"}
DEFAULT = {**OURS, "default": "nvidia"}


@pytest.mark.parametrize(
    ("line", "release", "file", "expected"),
    [
        pytest.param("--runtime=containerd --config=@/config.toml", (1, 7), "config.toml", OURS, id="guide of k8s"),
        pytest.param(
            "--runtime containerd --config @/config.toml --set-as-default", (1, 7), "config.toml", DEFAULT, id="kubeadm"
        ),
        pytest.param(
            "--runtime=containerd --config=@/config.toml --drop-in-config=@/conf.d/99-nvidia.toml --set-as-default "
            "--cdi.enabled",
            (2, 1),
            "conf.d/99-nvidia.toml",
            {**DEFAULT, "cdi": True},
            id="drop-in",
        ),
        pytest.param(
            "--runtime=containerd --config=@/config.toml --drop-in-config=@/conf.d/98-nvidia.toml",
            (1, 7),
            "config.toml",
            OURS,
            id="drop-in that containerd 1.7 would take for the whole table",
        ),
        pytest.param(
            '--runtime=containerd --config=@/config.toml --drop-in-config=""',
            (2, 1),
            "config.toml",
            OURS,
            id="installer that stages the file",
        ),
        pytest.param(
            "--runtime=containerd --config-source=file --config=@/config.toml --drop-in-config=@/conf.d/50-mokka.toml "
            "--nvidia-runtime-name=nvidia --nvidia-runtime-path=/usr/bin/nvidia-container-runtime "
            "--nvidia-set-as-default --cdi.enabled",
            (2, 1),
            "conf.d/50-mokka.toml",
            {**DEFAULT, "cdi": True},
            id="every option",
        ),
        pytest.param(
            "--runtime=crio --set-as-default --drop-in-config=@/crio.conf.d/99-nvidia.conf",
            (1, 30),
            "crio.conf.d/99-nvidia.conf",
            DEFAULT,
            id="MicroShift",
        ),
        pytest.param(
            "--runtime=crio --set-as-default=false --config=@/crio.conf.d/99-nvidia.conf",
            (1, 30),
            "crio.conf.d/99-nvidia.conf",
            OURS,
            id="MicroShift before 1.18 of the toolkit",
        ),
    ],
)
def test_containerd_and_crio_are_configured(
    etc: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    release: tuple[int, int],
    file: str,
    expected: dict[str, Any],
) -> None:
    engine_of(monkeypatch, release)
    monkeypatch.setattr(vendor_ctk, "find_program", lambda _root, name: f"/usr/bin/{name}")
    own = Path(places.CONTAINERD)
    as_it_was = own.read_bytes() if own.exists() else None
    before = {"config.toml": V2} if "containerd" in line else {}
    for name, text in before.items():
        (etc / name).write_text(text)
    assert ctk(etc, f"runtime configure {line}") == 0
    assert runtimes(etc / file) == expected
    assert runtimes(etc / "config.toml", etc / file) == expected, "the main file has nothing else"
    imports = tomllib.loads((etc / "config.toml").read_text()).get("imports", []) if before else [str(etc / file)]
    assert file == "config.toml" or str(etc / file) in imports
    engine, main_file = ("containerd", "config.toml") if before else ("crio", "")
    words = ["--engine-config", str(etc / main_file)] if main_file else ["--drop-in", str(etc / file)]
    assert main(["engine", "remove", engine, *words]) == 0
    assert {path.name: path.read_text() for path in etc.rglob("*") if path.is_file()} == before
    assert (own.read_bytes() if own.exists() else None) == as_it_was, "this machine's own file"


def test_containerd_itself_sees_the_entry(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (etc / "config.toml").write_text(V2)
    assert ctk(etc, "runtime configure --runtime=containerd --config=@/config.toml --set-as-default") == 0
    assert f'msg="Wrote updated config to {etc}/config.toml"' in capsys.readouterr().err
    imports = tomllib.loads((etc / "config.toml").read_text()).get("imports", [])  # containerd >= 2.1 has drop-ins
    assert runtimes(etc / "config.toml", *map(Path, imports))["default"] == "nvidia"
    assert ctk(etc, "runtime configure --runtime=containerd --config=@/config.toml --set-as-default") == 0
    assert "Nothing to do in" in capsys.readouterr().err
    requirements.require(requirements.programs("containerd"))
    dump = etc / "dump.toml"
    dump.write_text(run(["containerd", "--config", etc / "config.toml", "config", "dump"]).stdout)
    assert runtimes(dump)["default"] == "nvidia"


def test_an_engine_without_cdi_is_configured_without_it(
    etc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_of(monkeypatch, (20, 10))
    assert ctk(etc, "runtime configure --runtime=docker --config=@/daemon.json --cdi.enabled") == 0
    assert json.loads((etc / "daemon.json").read_text()) == {"runtimes": {"nvidia": ENTRY}}
    assert "docker 20.10 has no CDI; 25.0 is the first: it stays off" in capsys.readouterr().err


def test_a_dry_run_prints_the_file_and_writes_nothing(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (etc / "daemon.json").write_text(JOURNALD)
    assert ctk(etc, "--quiet runtime configure --runtime=docker --config=@/daemon.json --dry-run") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["runtimes"] == {"nvidia": ENTRY}
    assert said.err == ""
    assert (etc / "daemon.json").read_text() == JOURNALD


def test_an_oci_hook_is_printed_or_written(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "runtime configure --config-mode=oci-hook --nvidia-runtime-hook-path=/opt/x/nvidia-container-runtime-hook"
    assert ctk(etc, line) == 0
    hook = json.loads(capsys.readouterr().out)
    assert hook["hook"]["args"] == ["nvidia-container-runtime-hook", "prestart"]
    assert hook["hook"]["env"][0].endswith(":/bin:/opt/x")
    assert ctk(etc, f"{line} --oci-hook-path=@/hooks.d/nvidia.json") == 0
    assert json.loads((etc / "hooks.d/nvidia.json").read_text()) == hook


# config


@pytest.mark.parametrize(
    ("sets", "text", "ours"),
    [
        pytest.param("nvidia-container-runtime.mode=cdi", r'mode\s*=\s*"cdi"', {"mode": "cdi"}, id="node group of EKS"),
        pytest.param("nvidia-container-cli.no-cgroups", "no-cgroups = true", {"no-cgroups": True}, id="rootless"),
        pytest.param("nvidia-container-cli.no-cgroups=true", "no-cgroups = true", {"no-cgroups": True}, id="WSL"),
        pytest.param(
            "accept-nvidia-visible-devices-as-volume-mounts=true",
            "accept-nvidia-visible-devices-as-volume-mounts = true",
            {"accept-nvidia-visible-devices-as-volume-mounts": True},
            id="kind",
        ),
        pytest.param(
            "nvidia-container-runtime.log-level=error",
            'log-level = "error"',
            {"runtime": {"log-level": "error"}},
            id="node group of Deckhouse",
        ),
        pytest.param(
            "nvidia-container-runtime.runtimes=crun:runc",
            r'runtimes = \["crun", *"runc"\]',
            {"runtime": {"runtimes": ["crun", "runc"]}},
            id="a list",
        ),
        pytest.param(
            "nvidia-container-cli.root=/run/nvidia/driver",
            'root = "/run/nvidia/driver"',
            {"driver": {"root": "/run/nvidia/driver"}},
            id="driver container",
        ),
        pytest.param("nvidia-container-cli.load-kmods=false", "load-kmods = false", {}, id="no meaning here"),
    ],
)
@pytest.mark.parametrize(
    "before", [None, "# mine\ndisable-require = false\n\n[nvidia-container-cli]\nload-kmods = true\n"]
)
def test_a_setting_is_in_the_toolkits_file_and_obeyed(
    etc: Path, before: str | None, sets: str, text: str, ours: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = etc / "nvidia-container-runtime/config.toml"
    if before is not None:
        theirs.parent.mkdir()
        theirs.write_text(before)
    (etc / "ocigpu").mkdir()
    own = etc / "ocigpu/config.toml"
    own.write_text("# kept\n")
    assert ctk(etc, f"config --in-place --set {sets}") == 0
    assert re.search(rf"^{text}$", theirs.read_text(), re.MULTILINE), "what roles grep for"
    name = re.escape(sets.partition("=")[0].rpartition(".")[2])
    assert len(re.findall(rf"^#?{name} =", theirs.read_text(), re.MULTILINE)) == 1, "no comment is left beside it"
    assert before is None or theirs.read_text().startswith("# mine\n")
    assert tomllib.loads(own.read_text()) == ours
    assert own.read_text().startswith("# kept\n")
    assert ours or "has no meaning for ocigpu" in capsys.readouterr().err
    first = theirs.read_text(), own.read_text()
    assert ctk(etc, f"config -i --set={sets}") == 0
    assert (theirs.read_text(), own.read_text()) == first


def test_packages_make_the_default_file(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As NVIDIA's own packages do after an installation."""
    assert ctk(etc, "--quiet config --config-file=@/new/config.toml --in-place") == 0
    text = (etc / "new/config.toml").read_text()
    assert ctk(etc, "config default") == 0
    assert capsys.readouterr().out == text
    assert "#no-cgroups = false\n" in text, "what people uncomment with sed"
    assert main(["config", "import", str(etc / "new/config.toml"), "--output", str(etc / "imported.toml")]) == 0
    assert "0 left out" not in capsys.readouterr().out
    assert not (etc / "ocigpu").exists()


def test_another_file_has_no_part_in_our_settings(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctk(etc, "config --config-file=@/other.toml --set nvidia-container-runtime.mode=cdi") == 0
    assert tomllib.loads(capsys.readouterr().out)["nvidia-container-runtime"]["mode"] == "cdi"
    assert ctk(etc, "config -c @/other.toml -o @/copy.toml --set features.ignore-imex-channel-requests") == 0
    assert tomllib.loads((etc / "copy.toml").read_text())["features"] == {"ignore-imex-channel-requests": True}
    assert sorted(path.name for path in etc.iterdir()) == ["copy.toml"]


def test_nil_takes_a_feature_out_of_both_files(etc: Path) -> None:
    for value in ("true", "nil"):
        assert ctk(etc, f"config -i --set features.ignore-imex-channel-requests={value}") == 0
    for name in ("nvidia-container-runtime", "ocigpu"):
        assert "ignore-imex" not in (etc / name / "config.toml").read_text()


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        pytest.param("runtime configure --bogus", 1, 'no such option: "--bogus"', id="unknown option"),
        pytest.param("runtime configure --runtime=podman", 1, 'unrecognized runtime "podman"', id="unknown engine"),
        pytest.param(
            "runtime configure --config-source=command", 1, "is not supported: the engine's", id="unsupported"
        ),
        pytest.param(
            "runtime configure --runtime=docker --drop-in-config=/x", 1, "does not support drop-in", id="docker"
        ),
        pytest.param("runtime configure --runtime=crio --runtime-path=x", 1, "not an absolute path", id="path"),
        pytest.param("runtime configure --dry-run=perhaps", 1, "neither true nor false", id="bool"),
        pytest.param("config -i --set nvidia-container-runtime.mod=cdi", 1, "undefined field", id="unknown key"),
        pytest.param(
            "config -i --set nvidia-container-runtime.mode=csv", 1, "leave mode at auto", id="cannot be obeyed"
        ),
        pytest.param("config -i --set disable-require=perhaps", 1, "neither true nor false", id="value"),
        pytest.param("config -i --set nvidia-container-runtime.mode", 1, "expected key=value", id="no value"),
        pytest.param("cdi generate --mode=bogus", 1, "invalid discovery mode", id="mode"),
        pytest.param("cdi generate --bogus", 1, "no such option", id="option of cdi"),
        pytest.param("bogus", 1, 'no such option: "bogus"', id="no command"),
        pytest.param("runtime bogus", 3, 'No help topic for "bogus"', id="unknown command"),
        pytest.param("hook create-symlinks --bogus", 1, "unknown option", id="hook"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    etc: Path, line: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctk(etc, line) == status
    said = capsys.readouterr()
    assert message in said.err.splitlines()[0]
    assert len([text for text in said.err.splitlines() if not text.startswith("hint: ")]) == 1
    assert said.out == ""
    assert list(etc.iterdir()) == []


def test_a_file_that_is_refused_stays_as_it_is(etc: Path) -> None:
    theirs = etc / "nvidia-container-runtime/config.toml"
    theirs.parent.mkdir()
    theirs.write_text("mode = \n")
    assert ctk(etc, "config -i --set nvidia-container-runtime.mode=cdi") == 1
    assert theirs.read_text() == "mode = \n"
    assert not (etc / "ocigpu").exists()


# cdi, system, version


@pytest.fixture
def gpus(etc: Path, simulated_host: SimulatedHost, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCIGPU_CONFIG", str(simulated_host.settings))
    return etc


def devices(text: str) -> list[str]:
    return [device["name"] for device in yaml.safe_load(text)["devices"]]


@pytest.mark.parametrize(
    ("line", "first"),
    [
        pytest.param("", {"0", "all"}, id="install guide"),
        pytest.param("--device-name-strategy=uuid", {"all"}, id="batch nodes"),
        pytest.param("--device-name-strategy=type-index", {"gpu0", "all"}, id="rootless Podman"),
        pytest.param("--mode=auto --device-name-strategy=index", {"0", "all"}, id="check of an installer"),
        pytest.param("--nvidia-ctk-path=/usr/bin/nvidia-ctk", {"0", "all"}, id="NixOS"),
    ],
)
def test_a_specification_is_generated(
    gpus: Path, simulated_host: SimulatedHost, line: str, first: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctk(gpus, f"cdi generate --output=@/cdi/nvidia.yaml {line}") == 0
    text = (gpus / "cdi/nvidia.yaml").read_text()
    expected = {*first, simulated_host.gpus[0]} if "uuid" in line or "strategy" not in line else first
    assert expected <= set(devices(text))
    assert ("nvidia-ctk" in text) == ("ctk-path" in line)
    capsys.readouterr()
    assert ctk(gpus, "cdi list --spec-dir=@/cdi") == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == sorted(f"nvidia.com/gpu={name}" for name in devices(text))
    assert f"Found {len(devices(text))} CDI devices" in said.err


def test_json_goes_to_standard_output(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctk(gpus, "cdi generate --device-name-strategy=type-index --format=json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "nvidia.com/gpu"


def test_the_management_specification_of_a_driver_container(
    gpus: Path, simulated_host: SimulatedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """As containers of drivers make one: generated with the driver's root, then moved to where the host has it."""
    line = "--vendor=management.nvidia.com --class=gpu --nvidia-ctk-path=/usr/local/nvidia/toolkit/nvidia-ctk"
    assert ctk(gpus, f"cdi generate --mode=management {line} --output=@/made.yaml") == 0
    root = f"{simulated_host.directory}"
    moved = f"--from={root} --to=/run/nvidia/driver --input=@/made.yaml --output=@/management.yaml"
    assert ctk(gpus, f"cdi transform root {moved}") == 0
    spec = yaml.safe_load((gpus / "management.yaml").read_text())
    assert spec["kind"] == "management.nvidia.com/gpu"
    assert any(mount["hostPath"].startswith("/run/nvidia/driver/") for mount in spec["containerEdits"]["mounts"])
    assert root not in (gpus / "management.yaml").read_text().replace(f"driver-proc={root}", "")


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        pytest.param("create-dev-char-symlinks --create-all --dry-run", "dev/char/", id="udev rule"),
        pytest.param(
            "create-dev-char-symlinks --create-all --load-kernel-modules --dry-run", "to do", id="with modules"
        ),
        pytest.param("create-device-nodes --control-devices --dry-run", "to do", id="driver container"),
        pytest.param("create-device-nodes", "", id="nothing is asked for"),
    ],
)
def test_nodes_and_links_of_the_host(
    gpus: Path, line: str, seen: str, simulated_host: SimulatedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(simulated_host.directory / "dev/char", ignore_errors=True)  # other tests have made them, too
    assert ctk(gpus, f"system {line}") == 0
    assert seen in capsys.readouterr().out


def test_variables_are_read_where_the_toolkit_reads_them(
    gpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DRY_RUN", "CREATE_ALL"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("DEV_CHAR_PATH", str(gpus / "char"))
    assert ctk(gpus, "system create-dev-char-symlinks") == 0
    assert f"{gpus}/char/" in capsys.readouterr().out
    assert not (gpus / "char").exists()
    monkeypatch.setenv("NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", str(gpus / "cdi.yaml"))
    monkeypatch.setenv("NVIDIA_CTK_QUIET", "true")
    assert ctk(gpus, "cdi generate") == 0
    assert devices((gpus / "cdi.yaml").read_text())
    assert capsys.readouterr().err == ""


def test_the_roots_of_the_settings_that_are_named_count(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (gpus / "ctk.toml").write_text('[nvidia-container-cli]\nroot = "/nowhere/driver"\n')
    assert ctk(gpus, "--config=@/ctk.toml cdi generate") == 1
    assert "/nowhere/driver" in capsys.readouterr().err


def test_the_version_is_where_scripts_look_for_it(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctk(etc, "--version") == 0
    assert capsys.readouterr().out == f"NVIDIA Container Toolkit CLI version {VENDOR_VERSION}\nocigpu: {__version__}\n"
