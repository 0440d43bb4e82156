"""The reader of settings gives the answers of a pydantic model to every file, and names every problem."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.settings_model import SettingsFile, refused_keys

from ocigpu.core.errors import SettingsError
from ocigpu.core.settings import KEYS, Settings, find_problems, parse_settings

GOOD = {
    "nothing": "",
    "mode auto": 'mode = "auto"',
    "mode hook": 'mode = "hook"',
    "the vendor's name of a mode": 'mode = "legacy"',
    "booleans": "disable-require = true\nno-cgroups = true",
    "swarm resource": 'swarm-resource = "DOCKER_RESOURCE_GPU,OTHER"',
    "empty strings": 'swarm-resource = ""\nldconfig = ""',
    "unprivileged containers refused": "accept-nvidia-visible-devices-envvar-when-unprivileged = false",
    "volume mounts": "accept-nvidia-visible-devices-as-volume-mounts = true",
    "all capabilities": 'supported-driver-capabilities = "all"',
    "some capabilities": 'supported-driver-capabilities = "compute, utility"',
    "no capabilities": 'supported-driver-capabilities = ""',
    "commas only": 'supported-driver-capabilities = ",,"',
    "ldconfig of the host": 'ldconfig = "/sbin/ldconfig"',
    "ldconfig with the vendor's mark": 'ldconfig = "@/sbin/ldconfig.real"',
    "ldconfig is the mark alone": 'ldconfig = "@"',
    "mode of specifications": 'mode = "cdi"',
    "specifications": '[cdi]\nspec-dirs = ["/etc/cdi"]\ndefault-kind = "amd.com/gpu"\nannotation-prefixes = ["x/"]',
    "no directory of specifications": "[cdi]\nspec-dirs = []",
    "compatibility": 'cuda-compat-mode = "disabled"',
    "driver": '[driver]\nroot = "/run/nvidia/driver"\ndev-root = "/"\nldcache = "/etc/ld.so.cache"',
    "driver, dotted": 'driver.root = "/opt/driver"',
    "empty tables": "[driver]\n[runtime]\n[hook]\n[features]\n[simulation]",
    "runtimes": '[runtime]\nruntimes = ["crun", "/usr/bin/runc"]',
    "no runtimes": "[runtime]\nruntimes = []",
    "runtime log": '[runtime]\nlog = "/var/log/ocigpu.log"\nlog-level = "debug"',
    "hook": '[hook]\npath = "/usr/bin/ocigpu-hook"\nlog = "/var/log/hook.log"',
    "features": "[features]\nignore-imex-channel-requests = true",
    "simulation": '[simulation]\nroot = "/tmp/gpus"',
    "unicode": 'swarm-resource = "µ"',
}
BAD = {
    "unknown key": "disable-requires = true",
    "unknown key in a table": '[driver]\nroots = "/"',
    "unknown table": "[nvidia-container-cli]\nload-kmods = true",
    "snake case": "disable_require = true",
    "snake case in a table": '[driver]\ndev_root = "/"',
    "table of another name's key": '[hook]\nroot = "/"',
    "quoted dotted key": '"driver.root" = "/x"',
    "key that only the record has": 'path = "/etc/x"',
    "mode unknown": 'mode = "csv"',
    "mode empty": 'mode = ""',
    "mode in capitals": 'mode = "Hook"',
    "mode is a number": "mode = 1",
    "mode is a table": '[mode]\nname = "hook"',
    "boolean as number": "disable-require = 1",
    "boolean as string": 'disable-require = "true"',
    "string as boolean": "swarm-resource = false",
    "string as list": 'swarm-resource = ["A"]',
    "string with NUL": 'swarm-resource = "a\\u0000b"',
    "path with NUL": '[driver]\nroot = "/a\\u0000b"',
    "path with NUL after the mark": 'ldconfig = "@\\u0000"',
    "path is relative": '[driver]\nroot = "driver"',
    "path with dots first": '[hook]\npath = "./ocigpu-hook"',
    "path as number": "[driver]\nroot = 0",
    "path as date": "[driver]\nroot = 2026-01-01",
    "ldconfig relative after the mark": 'ldconfig = "@sbin/ldconfig"',
    "ldconfig with two marks": 'ldconfig = "@@/sbin/ldconfig"',
    "capability unknown": 'supported-driver-capabilities = "compute,magic"',
    "capability in capitals": 'supported-driver-capabilities = "COMPUTE"',
    "all among others": 'supported-driver-capabilities = "all,compute"',
    "capabilities as list": 'supported-driver-capabilities = ["compute"]',
    "compatibility unknown": 'cuda-compat-mode = "mount"',
    "specification directory relative": '[cdi]\nspec-dirs = ["etc/cdi"]',
    "specification directory with NUL": '[cdi]\nspec-dirs = ["/etc/\\u0000"]',
    "specification directory empty": '[cdi]\nspec-dirs = [""]',
    "kind without a class": '[cdi]\ndefault-kind = "nvidia.com"',
    "kind with a device": '[cdi]\ndefault-kind = "nvidia.com/gpu=0"',
    "kind empty": '[cdi]\ndefault-kind = ""',
    "runtimes as string": '[runtime]\nruntimes = "runc"',
    "runtimes with a number": '[runtime]\nruntimes = ["runc", 1]',
    "runtimes with an empty name": '[runtime]\nruntimes = [""]',
    "log level unknown": '[runtime]\nlog-level = "trace"',
    "table as value": "driver = 1",
    "table as list": "driver = []",
    "table as array of tables": '[[driver]]\nroot = "/"',
    "value as table": '[driver.root]\nx = "/"',
    "feature as string": '[features]\nignore-imex-channel-requests = "yes"',
    "one of two wrong": '[driver]\nroot = "/ok"\nldcache = "not ok"',
}


def to_settings(model: Any, path: str = "") -> Settings:
    values: dict[str, Any] = {}
    for key in KEYS:
        owner: Any = model
        *tables, name = key.name.split(".")
        for table in tables:
            owner = getattr(owner, table)
        value = getattr(owner, name.replace("-", "_"))
        values[key.field] = tuple(value) if isinstance(value, list) else value
    return Settings(**values, path=path)


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD.keys())
def test_a_good_file_has_the_values_of_the_model(text: str) -> None:
    document = tomllib.loads(text)
    assert find_problems(document) == []
    assert to_settings(SettingsFile.model_validate(document), "file") == parse_settings(document, "file")


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_reader_and_model_refuse_a_bad_file(text: str) -> None:
    document = tomllib.loads(text)
    assert len(find_problems(document)) == len(refused_keys(document)) == 1
    with pytest.raises(SettingsError) as caught:
        parse_settings(document, "file")
    assert caught.value.code == "OCIGPU-SET-2"
    assert find_problems(document)[0].startswith(caught.value.message.removeprefix("file: "))


NAMES = [key.name for key in KEYS]
TABLES = sorted({name.split(".")[0] for name in NAMES if "." in name})
SEGMENTS = [*sorted({segment for name in NAMES for segment in name.split(".")}), "driver.root", "unknown", ""]
CHOICES = sorted({choice for key in KEYS for choice in key.choices})
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-1, 2),
    st.floats(allow_nan=False),
    st.sampled_from(["", "/", "/x", "x", "@/x", "@", "all", "compute", "compute,,utility", "\0", *CHOICES]),
    st.text(max_size=4),
    st.lists(st.one_of(st.sampled_from(["", "runc", "/bin/crun"]), st.integers(0, 1)), max_size=2),
)
DOCUMENTS = st.dictionaries(
    st.sampled_from(SEGMENTS),
    st.one_of(SCALARS, st.dictionaries(st.sampled_from(SEGMENTS), SCALARS, max_size=2)),
    max_size=3,
)


@given(DOCUMENTS)
def test_reader_and_model_agree_on_any_document(document: dict[str, Any]) -> None:
    try:
        expected = parse_settings(document)
    except SettingsError:
        assert len(find_problems(document)) == len(refused_keys(document)) > 0
    else:
        assert find_problems(document) == []
        assert to_settings(SettingsFile.model_validate(document)) == expected


@given(st.sampled_from(KEYS), SCALARS)
def test_reader_and_model_agree_on_every_key(key: Any, value: Any) -> None:
    table, _, name = key.name.rpartition(".")
    document = {table: {name: value}} if table else {name: value}
    try:
        expected = parse_settings(document)
    except SettingsError:
        assert len(find_problems(document)) == len(refused_keys(document)) == 1
    else:
        assert to_settings(SettingsFile.model_validate(document)) == expected


def test_the_model_has_every_key_with_the_hot_path_default() -> None:
    assert to_settings(SettingsFile()) == Settings()
    dumped = SettingsFile().model_dump(by_alias=True)
    names = [name for name, value in dumped.items() if not isinstance(value, dict)]
    names += [f"{table}.{name}" for table in TABLES for name in dumped[table]]
    assert sorted(names) == sorted(NAMES)


def test_every_problem_of_a_file_is_named_at_once() -> None:
    problems = find_problems(tomllib.loads('mode = "csv"\ndisable-requires = true\n[driver]\nroot = "x"'))
    assert problems == [
        'mode: "csv" is not one of auto, hook, legacy, spec, jit-cdi, cdi',
        'unknown key "disable-requires": did you mean disable-require?',
        'driver.root: "x" is not an absolute path',
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[simulation]\ngpus = 8", "keys of [simulation]: root"),
        ("[simulation]\nmodel = 'h100'", "keys of [simulation]: root"),
        ("[simulation]\nrooot = '/opt/gpus'", "did you mean simulation.root?"),
        ("[simulaton]\nroot = '/opt/gpus'", "did you mean [simulation]?"),
        ("root = '/opt/gpus'", "did you mean driver.root or simulation.root?"),
        ("[runtime]\nspec-dirs = ['/etc/cdi']", "did you mean cdi.spec-dirs?"),
        ("log-level = 'debug'", "did you mean runtime.log-level?"),
        ("mdoe = 'spec'", "did you mean mode?"),
        ("[driver]\nversion = '550'", "keys of [driver]: root, dev-root, ldcache"),
        ("colour = true", "ocigpu config keys lists all keys"),
        ("[nvidia-container-cli]\nno-cgroups = true", "ocigpu config import FILE"),
    ],
)
def test_an_unknown_key_is_compared_with_those_of_its_table(text: str, hint: str) -> None:
    document = tomllib.loads(text)
    with pytest.raises(SettingsError) as caught:
        parse_settings(document, "/etc/ocigpu/config.toml")
    assert hint in caught.value.hint
    assert find_problems(document)[0].endswith(caught.value.hint)
