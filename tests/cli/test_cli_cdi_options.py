"""Every option of ``ocigpu cdi generate`` that NVIDIA's generator has: all its names and its variable say the same."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.cli.cdi.generate import GenerateRequest, read_generate_request
from ocigpu.cli.front.arguments import call as call_command
from ocigpu.cli.front.arguments import parameters_of, parse, takes
from ocigpu.cli.front.manual import read_page
from ocigpu.core.settings import Settings
from ocigpu.gpus.offer import GenerateOptions

Ask = Callable[..., GenerateRequest]
CDI = "NVIDIA_CTK_CDI_"
GENERATE = f"{CDI}GENERATE_"


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Call with arguments and variables: returns what a command is given for them."""
    for name in list(os.environ):
        if name.startswith("NVIDIA_CTK_"):
            monkeypatch.delenv(name)
    settings = tmp_path / "config.toml"
    settings.write_text("")
    settings.chmod(0o644)
    monkeypatch.setenv("OCIGPU_CONFIG", str(settings))

    def call(*arguments: str, **variables: str) -> GenerateRequest:
        @takes(read_generate_request)
        def command(request: GenerateRequest) -> GenerateRequest:
            return request

        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        values = parse(arguments, parameters_of(command, read_page("cdi generate")))
        request = call_command(command, values)
        for name in variables:
            monkeypatch.delenv(name)
        assert isinstance(request, GenerateRequest)
        return request._replace(settings=request.settings._replace(path=""))

    return call


OPTIONS = {
    "--mode --discovery-mode": (f"{GENERATE}MODE", "gds", {"mode": "gds"}),
    "--device-name-strategy": (
        f"{GENERATE}DEVICE_NAME_STRATEGIES", "uuid,type-index", {"name_strategies": ("uuid", "type-index")},
    ),
    "--device-id --device-ids --device --devices": (
        f"{GENERATE}DEVICE_IDS", "0,GPU-1234", {"device_ids": ("0", "GPU-1234")},
    ),
    "--library-search-path": (
        f"{GENERATE}LIBRARY_SEARCH_PATHS", "/a:/b,/c", {"library_search_paths": ("/a", "/b", "/c")},
    ),
    "--config-search-path": (f"{GENERATE}CONFIG_SEARCH_PATHS", "/a:/b,/c", {"config_search_paths": ("/a", "/b", "/c")}),
    "--nvidia-cdi-hook-path --nvidia-ctk-path": (f"{CDI}HOOK_PATH", "/opt/hook", {"hook_path": "/opt/hook"}),
    "--vendor --cdi-vendor": (f"{GENERATE}VENDOR", "a.org", {"vendor": "a.org"}),
    "--class --cdi-class": (f"{GENERATE}CLASS", "thing", {"device_class": "thing"}),
    "--csv.file": (f"{GENERATE}CSV_FILES", "/a.csv,/b.csv", {"csv_files": ("/a.csv", "/b.csv")}),
    "--csv.ignore-pattern": (
        f"{GENERATE}CSV_IGNORE_PATTERNS", "**/a,/b*", {"csv_ignore_patterns": ("**/a", "/b*")},
    ),
    "--csv.compat-container-root": (
        f"{GENERATE}CSV_CONTAINER_COMPAT_ROOT", "/opt/compat", {"csv_compat_container_root": "/opt/compat"},
    ),
    "--disable-hook --disable-hooks": (
        f"{GENERATE}DISABLED_HOOKS", "all,chmod", {"disabled_hooks": ("all", "chmod")},
    ),
    "--enable-hook --enable-hooks": (f"{GENERATE}ENABLED_HOOKS", "chmod", {"enabled_hooks": ("chmod",)}),
    "--feature-flag --feature-flags": (
        f"{GENERATE}FEATURE_FLAGS", "disable-ipc-discoverer,disable-nvsandbox-utils",
        {"feature_flags": ("disable-ipc-discoverer", "disable-nvsandbox-utils")},
    ),
}  # fmt: skip
NAMES = [(name, *rest) for names, rest in OPTIONS.items() for name in names.split()]


def test_without_options_the_defaults_are_the_vendors(ask: Ask) -> None:
    assert ask().options == GenerateOptions()
    assert GenerateOptions().name_strategies == ("index", "uuid")


@pytest.mark.parametrize(("option", "variable", "value", "expected"), NAMES, ids=[name for name, *_ in NAMES])
def test_an_option_by_any_name_and_its_variable_say_the_same(
    ask: Ask, option: str, variable: str, value: str, expected: dict[str, object]
) -> None:
    wanted = GenerateOptions()._replace(**expected)
    assert ask(option, value).options == wanted
    assert ask(f"{option}={value}").options == wanted
    assert ask(**{variable: value}).options == wanted
    assert ask(option, value, **{variable: "overridden"}).options == wanted
    repeated = [word for part in value.split(",") for word in (option, part)]
    assert ask(*repeated).options == wanted


@pytest.mark.parametrize("value", ["true", "1"])
def test_the_device_all_can_be_left_out_by_a_switch_or_a_variable(ask: Ask, value: str) -> None:
    wanted = GenerateOptions(all_device=False)
    assert ask("--no-all-device").options == ask(**{f"{GENERATE}NO_ALL_DEVICE": value}).options == wanted


@pytest.mark.parametrize(
    ("option", "variable", "key"),
    [
        ("--driver-root", "NVIDIA_CTK_DRIVER_ROOT", "driver_root"),
        ("--dev-root", "NVIDIA_CTK_DEV_ROOT", "driver_dev_root"),
    ],
)
def test_roots_are_options_variables_and_may_be_relative(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, variable: str, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    wanted = Settings()._replace(**{key: str(tmp_path / "root")})
    assert ask(option, str(tmp_path / "root")).settings == wanted
    assert ask(option, "root").settings == wanted
    assert ask(**{variable: str(tmp_path / "root")}).settings == wanted


def test_the_hosts_ldconfig_is_an_option_and_a_variable(ask: Ask) -> None:
    wanted = Settings(ldconfig="/opt/ldconfig")
    assert ask("--ldconfig-path", "/opt/ldconfig").settings == wanted
    assert ask(**{f"{GENERATE}LDCONFIG_PATH": "/opt/ldconfig"}).settings == wanted
