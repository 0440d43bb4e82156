"""Settings of NVIDIA's toolkit: what each of its keys becomes, and that none is dropped in silence."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ocigpu.cli.front.main import main
from ocigpu.cli.settings.vendor import VENDOR_KEYS, Import, import_settings, render_import
from ocigpu.core.errors import SettingsError
from ocigpu.core.settings import KEYS, Settings, find_problems, parse_settings
from ocigpu.system.settings_file import MAX_BYTES

RUNTIME = "nvidia-container-runtime"
CLI = "nvidia-container-cli"

TOOLKIT_DEFAULT = """\
#accept-nvidia-visible-devices-as-volume-mounts = false
#accept-nvidia-visible-devices-envvar-when-unprivileged = true
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
#debug = "/var/log/nvidia-container-toolkit.log"
environment = []
#ldcache = "/etc/ld.so.cache"
ldconfig = "@/sbin/ldconfig.real"
load-kmods = true
#no-cgroups = false
#path = "/usr/bin/nvidia-container-cli"
#root = "/run/nvidia/driver"
#user = "root:video"

[nvidia-container-runtime]
#debug = "/var/log/nvidia-container-runtime.log"
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]

[nvidia-container-runtime.modes]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]

[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"

[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = "ldconfig"

[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false

[nvidia-ctk]
path = "nvidia-ctk"
"""

IMPORTED: dict[str, tuple[str, Any, str, Any]] = {
    "disable-require": ("disable-require", True, "disable-require", True),
    "swarm-resource": ("swarm-resource", "A,B", "swarm-resource", "A,B"),
    "variables": (
        *("accept-nvidia-visible-devices-envvar-when-unprivileged", False),
        *("accept-nvidia-visible-devices-envvar-when-unprivileged", False),
    ),
    "mounts": (
        *("accept-nvidia-visible-devices-as-volume-mounts", True),
        *("accept-nvidia-visible-devices-as-volume-mounts", True),
    ),
    "capabilities": (
        *("supported-driver-capabilities", " compute , utility,"),
        *("supported-driver-capabilities", "compute,utility"),
    ),
    "all capabilities": (
        *("supported-driver-capabilities", "compute,all"),
        *("supported-driver-capabilities", "all"),
    ),
    "no capabilities": ("supported-driver-capabilities", "", "supported-driver-capabilities", ""),
    "root": (f"{CLI}.root", "/run/nvidia/driver", "driver.root", "/run/nvidia/driver"),
    "log of the CLI": (f"{CLI}.debug", "/var/log/cli.log", "hook.log", "/var/log/cli.log"),
    "no log of the CLI": (f"{CLI}.debug", "/dev/null", "hook.log", ""),
    "ldcache": (f"{CLI}.ldcache", "/opt/ld.so.cache", "driver.ldcache", "/opt/ld.so.cache"),
    "no-cgroups": (f"{CLI}.no-cgroups", True, "no-cgroups", True),
    "ldconfig": (f"{CLI}.ldconfig", "@/sbin/ldconfig.real", "ldconfig", "/sbin/ldconfig.real"),
    "no ldconfig": (f"{CLI}.ldconfig", "", "ldconfig", ""),
    "log": (f"{RUNTIME}.debug", "/var/log/x.log", "runtime.log", "/var/log/x.log"),
    "no log": (f"{RUNTIME}.debug", "/dev/null", "runtime.log", ""),
    "level": (f"{RUNTIME}.log-level", "debug", "runtime.log-level", "debug"),
    "level by another name": (f"{RUNTIME}.log-level", "WARN", "runtime.log-level", "warning"),
    "level that is finer": (f"{RUNTIME}.log-level", "trace", "runtime.log-level", "debug"),
    "level that is coarser": (f"{RUNTIME}.log-level", "panic", "runtime.log-level", "error"),
    "runtimes": (f"{RUNTIME}.runtimes", ["/opt/runc", "crun"], "runtime.runtimes", ("/opt/runc", "crun")),
    "mode auto": (f"{RUNTIME}.mode", "auto", "mode", "auto"),
    "mode legacy": (f"{RUNTIME}.mode", "legacy", "mode", "legacy"),
    "mode jit-cdi": (f"{RUNTIME}.mode", "jit-cdi", "mode", "jit-cdi"),
    "mode cdi": (f"{RUNTIME}.mode", "cdi", "mode", "cdi"),
    "specifications": (f"{RUNTIME}.modes.cdi.spec-dirs", ["/a", "/b"], "cdi.spec-dirs", ("/a", "/b")),
    "kind": (f"{RUNTIME}.modes.cdi.default-kind", "example.com/gpu", "cdi.default-kind", "example.com/gpu"),
    "prefixes": (f"{RUNTIME}.modes.cdi.annotation-prefixes", ["x/"], "cdi.annotation-prefixes", ("x/",)),
    "compatibility off": (f"{RUNTIME}.modes.legacy.cuda-compat-mode", "disabled", "cuda-compat-mode", "disabled"),
    "compatibility": (f"{RUNTIME}.modes.legacy.cuda-compat-mode", "ldconfig", "cuda-compat-mode", "ldconfig"),
    "compatibility by hook": (f"{RUNTIME}.modes.legacy.cuda-compat-mode", "hook", "cuda-compat-mode", "ldconfig"),
    "compatibility by mount": (f"{RUNTIME}.modes.legacy.cuda-compat-mode", "mount", "cuda-compat-mode", "ldconfig"),
    "no groups": (
        *("features.no-additional-gids-for-device-nodes", True),
        *("features.no-additional-gids-for-device-nodes", True),
    ),
    "imex": ("features.ignore-imex-channel-requests", True, "features.ignore-imex-channel-requests", True),
}
"""Their key and value, our key and value."""

LEFT_OUT: dict[str, tuple[str, Any, str]] = {
    "unknown capability": ("supported-driver-capabilities", "compute,gpu", '"gpu" is not a driver capability'),
    "relative root": (f"{CLI}.root", "driver", "not an absolute path"),
    "path": (f"{CLI}.path", "/usr/bin/nvidia-container-cli", "nvidia-container-cli is not called"),
    "environment": (f"{CLI}.environment", ["A=B"], "nvidia-container-cli is not called"),
    "relative log": (f"{CLI}.debug", "log", "not an absolute path"),
    "relative ldcache": (f"{CLI}.ldcache", "ld.so.cache", "not an absolute path"),
    "load-kmods": (f"{CLI}.load-kmods", True, "ocigpu system create-device-nodes --load-kernel-modules"),
    "no-pivot": (f"{CLI}.no-pivot", True, "nothing is pivoted"),
    "user": (f"{CLI}.user", "root:video", "given up its privileges"),
    "the image's ldconfig": (f"{CLI}.ldconfig", "/sbin/ldconfig", "nothing of an image is executed"),
    "relative ldconfig": (f"{CLI}.ldconfig", "@ldconfig", "not an absolute path"),
    "ctk": ("nvidia-ctk.path", "nvidia-ctk", "hook.path"),
    "unknown level": (f"{RUNTIME}.log-level", "loud", "no level of a log"),
    "empty runtime": (f"{RUNTIME}.runtimes", ["runc", ""], "has an empty entry"),
    "mode csv": (f"{RUNTIME}.mode", "csv", "leave mode at auto"),
    "no mode": (f"{RUNTIME}.mode", "", "no mode of NVIDIA's runtime"),
    "csv files": (f"{RUNTIME}.modes.csv.mount-spec-path", "/etc/x", "--csv.file"),
    "csv compatibility": (f"{RUNTIME}.modes.csv.compat-container-root", "/x", "--csv.compat-container-root"),
    "relative specifications": (f"{RUNTIME}.modes.cdi.spec-dirs", ["cdi"], "not an absolute path"),
    "empty specifications": (f"{RUNTIME}.modes.cdi.spec-dirs", [""], "has an empty entry"),
    "odd kind": (f"{RUNTIME}.modes.cdi.default-kind", "gpu", "vendor"),
    "empty prefix": (f"{RUNTIME}.modes.cdi.annotation-prefixes", [""], "has an empty entry"),
    "feature flags": (f"{RUNTIME}.modes.jit-cdi.nvcdi-feature-flags", ["x"], "ocigpu cdi generate --help"),
    "disabled hooks": (f"{RUNTIME}.modes.jit-cdi.nvcdi-disable-hooks", ["x"], "ocigpu cdi generate --help"),
    "odd compatibility": (f"{RUNTIME}.modes.legacy.cuda-compat-mode", "", "none of disabled, hook, ldconfig, mount"),
    "hook": ("nvidia-container-runtime-hook.path", "/usr/bin/h", "hook.path"),
    "mode detection": ("nvidia-container-runtime-hook.skip-mode-detection", True, "no mode to detect"),
    "compat of containers": ("features.allow-cuda-compat-libs-from-container", True, "cuda-compat-mode"),
    "ldconfig of containers": ("features.allow-ldconfig-from-container", True, "nothing of an image is executed"),
    "unknown fields": ("features.allow-unknown-oci-spec-fields", True, "always survive"),
    "no compat hook": ("features.disable-cuda-compat-lib-hook", True, "there is no such hook"),
    "no channels": ("features.disable-imex-channel-creation", True, "never made on the host"),
    "experimental": (f"{RUNTIME}.experimental", True, "older toolkits"),
    "discover-mode": (f"{RUNTIME}.discover-mode", "legacy", "today: mode"),
    "experimental CLI": (f"{CLI}.experimental", True, "older toolkits"),
    "gds": ("features.gds", True, "NVIDIA_GDS=enabled"),
    "mofed": ("features.mofed", True, "NVIDIA_MOFED=enabled"),
    "nvswitch": ("features.nvswitch", True, "NVIDIA_NVSWITCH=enabled"),
    "gdrcopy": ("features.gdrcopy", True, "NVIDIA_GDRCOPY=enabled"),
    "unknown": ("disable-requires", True, "no key of NVIDIA's toolkit, which ignores it: disable-require was meant?"),
    "unknown table": ("prometheus.port", 9, "no key of NVIDIA's toolkit, which ignores it"),
    "our own key": ("driver.root", "/x", "a key of ocigpu's own settings, not of NVIDIA's: is this the right file?"),
    "our own key in quotes": ("'driver.root'", "/x", "no key of NVIDIA's toolkit, which ignores it"),
}
"""Their key and value, and a part of the reason."""


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value)


def read(text: str) -> Import:
    return import_settings(text.encode(), "vendor.toml")


def settings_of(result: Import) -> Any:
    """Return our settings of what is written for an import, which both readers accept."""
    document = tomllib.loads(render_import(result, "vendor.toml"))
    assert find_problems(document) == []
    return parse_settings(document)


@pytest.mark.parametrize(("name", "value", "ours", "becomes"), IMPORTED.values(), ids=IMPORTED)
def test_a_key_that_means_something_here_is_imported(name: str, value: Any, ours: str, becomes: Any) -> None:
    result = read(f"{name} = {toml(value)}")
    assert result.left_out == ()
    assert [(item.vendor, item.ours) for item in result.imported] == [(name, ours)]
    assert getattr(settings_of(result), ours.replace(".", "_").replace("-", "_")) == becomes


@pytest.mark.parametrize(("name", "value", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_any_other_key_is_named_with_the_reason(name: str, value: Any, reason: str) -> None:
    result = read(f"{name} = {toml(value)}")
    assert result.imported == ()
    (item,) = result.left_out
    assert item.vendor.strip('"') == name.strip("'")
    assert reason in item.reason
    assert f"#   {item.vendor}: {item.reason}\n" in render_import(result, "vendor.toml")
    settings_of(result)


def test_every_key_of_the_toolkit_is_in_these_tables() -> None:
    tested = {row[0] for row in (*IMPORTED.values(), *LEFT_OUT.values())}
    assert set(VENDOR_KEYS) <= tested
    assert {key.name for key in VENDOR_KEYS.values() if key.ours} <= {row[0] for row in IMPORTED.values()}


def test_the_toolkits_default_file_changes_none_of_our_defaults_but_ldconfig() -> None:
    result = read(TOOLKIT_DEFAULT)
    assert settings_of(result) == parse_settings({"ldconfig": "/sbin/ldconfig.real"})
    set_there = TOOLKIT_DEFAULT.count("\n") - sum(
        not line or line.startswith(("#", "[")) for line in TOOLKIT_DEFAULT.splitlines()
    )
    assert len(result.imported) + len(result.left_out) == set_there
    assert "DOCKER_RESOURCE_GPU" not in render_import(result, "vendor.toml"), "a sample is no comment"


def test_compat_by_a_hook_that_is_disabled_is_disabled() -> None:
    text = "nvidia-container-runtime.modes.legacy.cuda-compat-mode = '{}'\nfeatures.disable-cuda-compat-lib-hook = {}"
    for mode, off, ours in (("hook", "true", "disabled"), ("hook", "false", "ldconfig"), ("mount", "true", "ldconfig")):
        result = read(text.format(mode, off))
        assert settings_of(result).cuda_compat_mode == ours
        assert [item.vendor for item in result.left_out] == ["features.disable-cuda-compat-lib-hook"]


def test_comments_on_a_key_go_with_it() -> None:
    text = """\
# about the file

# we asked the vendor
# in March
disable-require = true  # until then
#swarm-resource = "X"
accept-nvidia-visible-devices-as-volume-mounts = true

[nvidia-container-cli]
# a driver container
root = "/driver"
# nothing here needs it
path = "/x"
"""
    rendered = render_import(read(text), "vendor.toml")
    assert "# we asked the vendor\n# in March\n# until then\ndisable-require = true\n" in rendered
    assert "# a driver container\n# nvidia-container-cli.root\nroot = " in rendered
    assert "about the file" not in rendered
    assert "swarm-resource" not in rendered


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disable-require = 'yes'", """disable-require: expected true or false, found "'yes'\""""),
        ("disable-require = 1", "disable-require: expected true or false, found"),
        ("swarm-resource = ['x']", "swarm-resource: expected a text, found"),
        ("[nvidia-container-runtime]\nruntimes = 'runc'", f"{RUNTIME}.runtimes: expected a list of texts"),
        ("[nvidia-container-runtime]\nruntimes = [1]", f"{RUNTIME}.runtimes: expected a list of texts"),
        ("[nvidia-container-cli.load-kmods]\nx = 1", f"{CLI}.load-kmods: expected true or false"),
        ("nvidia-ctk.path = true\nfeatures.gds = 'x'", 'nvidia-ctk.path: expected a text, found "True"; features.gds'),
    ],
    ids=["text", "number", "list", "text-for-list", "numbers", "table", "several"],
)
def test_values_of_a_wrong_type_are_an_error(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(text)
    assert caught.value.code == "OCIGPU-SET-2"
    assert caught.value.message.startswith(f"vendor.toml: {message}")


@pytest.mark.parametrize(
    "data",
    [b"[", b"\xff", b"a = 1\na = 2", b"#" * (MAX_BYTES + 1), b"a" + b".a" * 300 + b" = 1", b"a = " + b"[" * 5000],
    ids=["syntax", "bytes", "twice", "large", "dots", "deep"],
)
def test_what_is_no_usable_toml_is_an_error(data: bytes) -> None:
    with pytest.raises(SettingsError, match=r"^vendor\.toml: ") as caught:
        import_settings(data, "vendor.toml")
    assert caught.value.code == "OCIGPU-SET-1"


@pytest.mark.parametrize(
    "text",
    [
        "[disable-require]",
        "nvidia-container-cli = 3",
        "nvidia-container-cli = { root = '/x', no-cgroups = true }",
        "features.ignore-imex-channel-requests = true\n[nvidia-container-runtime]\nmodes.cdi.default-kind = 'a.b/c'",
        '"a\\nb" = 1\n"#x" = "\\u001b[31m"',
        "when = 2024-01-01\nnumber = inf",
        "[[features]]\ngds = true",
        f"other = 0x{'f' * 5000}",
        f"swarm-resource = [0x{'f' * 5000}]",
        "# a\tb \x9b31m\ndisable-require = true # \x9b0m",
        "",
    ],
    ids=[
        *("empty-table", "value-for-table", "inline", "dotted", "controls", "odd-types", "array", "large", "larges"),
        *("comments", "nothing"),
    ],
)
def test_odd_files_give_settings_or_an_error_of_ours(text: str) -> None:
    try:
        result = read(text)
    except SettingsError:
        return
    settings_of(result)
    assert all(line.isprintable() for line in render_import(result, "a\nb").splitlines())


def test_the_command_writes_what_check_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "vendor.toml", tmp_path / "new" / "config.toml"
    shutil.copy("/bin/true", tmp_path / "ldconfig")
    source.write_text(TOOLKIT_DEFAULT.replace("/sbin/ldconfig.real", str(tmp_path / "ldconfig")))
    assert main(["config", "import", str(source), "--output", str(target), "--dry-run"]) == 0
    assert not target.parent.exists()
    assert f"would be written to {target}:\n\n# Settings of ocigpu" in capsys.readouterr().out
    assert main(["config", "import", str(source), "--output", str(target)]) == 0
    assert f"{target}: written, 10 keys imported, 6 left out" in capsys.readouterr().out
    assert main(["config", "check", str(target)]) == 0
    assert main(["config", "import", str(source), "--output", str(target)]) == 0, "what is equal is left alone"
    capsys.readouterr()
    before = target.read_text()
    source.write_text("disable-require = true")
    assert main(["config", "import", str(source), "--output", str(target)]) == 1
    assert "OCIGPU-SET-4" in capsys.readouterr().err
    assert target.read_text() == before
    assert main(["config", "import", str(source), "--output", str(target), "--force"]) == 0
    assert "disable-require = true" in target.read_text()
    capsys.readouterr()
    source.write_text("disable-require = 1")
    assert main(["config", "import", str(source), "--output", str(target), "--force"]) == 1
    assert "disable-require = true" in target.read_text()


def test_the_command_prints_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "vendor.toml"
    source.write_text("disable-require = true\nfeatures.gds = true")
    assert main(["config", "import", str(source), "--output", "-"]) == 0
    captured = capsys.readouterr()
    assert tomllib.loads(captured.out) == {"disable-require": True}
    assert captured.err.startswith("left out: features.gds: ")
    assert main(["config", "import", str(source), "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["imported"] == [{"from": "disable-require", "key": "disable-require", "value": True, "remark": ""}]
    assert (document["written"], document["left_out"][0]["from"]) == (False, "features.gds")
    assert main(["config", "import", str(tmp_path / "missing")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_what_will_not_hold_on_this_host_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of Ubuntu names its ldconfig.real; all but that stays what the file says."""
    source = tmp_path / "vendor.toml"
    for there in (False, True):
        program = tmp_path / "ldconfig.real"
        if there:
            shutil.copy("/bin/true", program)
        runtimes = '["runc"]' if there else '["nvidia-runc-that-is-not-there"]'
        root = tmp_path if there else tmp_path / "driver"
        source.write_text(
            f'nvidia-container-cli.ldconfig = "@{program}"\nnvidia-container-cli.root = "{root}"\n'
            f"nvidia-container-runtime.runtimes = {runtimes}\n"
        )
        assert main(["config", "import", str(source), "--dry-run", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found["imported"]) == (3 if there else 2)
        assert [item["from"] for item in found["left_out"]] == ([] if there else ["nvidia-container-cli.ldconfig"])
        if there and not shutil.which("runc"):
            continue
        assert [line.partition(":")[0] for line in found["absent"]] == (
            [] if there else ["driver.root", "runtime.runtimes"]
        )


@pytest.mark.parametrize(("content", "why"), [(None, "does not exist"), ("#!/bin/sh\n", "is a script")])
def test_an_ldconfig_that_this_host_cannot_run_is_left_out(
    content: str | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ours, program = (tmp_path / name for name in ("vendor.toml", "ours.toml", "ldconfig"))
    source.write_text(f'nvidia-container-cli.ldconfig = "@{program}"\ndisable-require = true\n')
    if content is not None:
        program.write_text(content)
        program.chmod(0o755)
    assert main(["config", "import", str(source), "--output", str(ours)]) == 0
    text = f"on this host {program} {why}: its own ldconfig is found without this key"
    assert text in " ".join(capsys.readouterr().out.split())
    assert tomllib.loads(ours.read_text()) == {"disable-require": True}
    assert text in ours.read_text()


def test_the_default_file_says_what_the_defaults_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    assert main(["config", "default"]) == 0
    text = capsys.readouterr().out
    assert main(["config", "default", "--output", str(path)]) == 0
    assert path.read_text() == text
    assert parse_settings(tomllib.loads(text)) == Settings()
    active = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in text.splitlines()
    )
    document = tomllib.loads(active)
    assert find_problems(document) == []
    assert parse_settings(document) == Settings()
    assert active.count(" = ") - sum(" = " in key.meaning for key in KEYS) == len(KEYS)
    assert main(["config", "check", str(path)]) == 0


@pytest.mark.parametrize(
    ("mode", "told"), [("", True), ("auto", True), ("jit-cdi", True), ("legacy", False), ("cdi", False)]
)
def test_who_had_every_driver_file_is_told_of_capabilities(mode: str, told: bool) -> None:
    result = read(f'[nvidia-container-runtime]\nmode = "{mode}"\n' if mode else "disable-require = false\n")
    assert [note for note in result.notes if "NVIDIA_DRIVER_CAPABILITIES=all" in note] == list(result.notes)
    assert len(result.notes) == told
    comments = " ".join(line.lstrip("# ") for line in render_import(result, "x").splitlines() if line.startswith("#"))
    assert all(note in comments for note in result.notes)
