"""The device plugin's configuration: the vendor's schema, every key obeyed or refused, and who comes before whom."""

import contextlib
import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.core.errors import SettingsError
from ocigpu.kubernetes.node.config import (
    MAX_BYTES,
    OPTIONS,
    Configuration,
    PluginOptions,
    configure,
    matches,
    parse_config_file,
)
from ocigpu.kubernetes.node.sharing import Shared, Sharing
from ocigpu.system.options import parse_duration

UUID = "01234567-89ab-cdef-0123-456789abcdef"


def read(text: str, flags: dict[str, str] | None = None, environment: dict[str, str] | None = None) -> Configuration:
    file, _ = parse_config_file(text, "dp.yaml")
    return configure(flags or {}, environment or {}, file, "dp.yaml")


def refusal(text: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        read(text, environment=environment)
    assert caught.value.code == "OCIGPU-KUBE-1"
    assert "\n" not in caught.value.message
    return caught.value.message


def sharing(entry: Any, **block: Any) -> str:
    return json.dumps({"sharing": {"timeSlicing": {**block, "resources": [entry]}}})


FULL = f"""
version: v1
flags:
  migStrategy: mixed
  failOnInitError: false
  mpsRoot: /run/nvidia/mps
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /host
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: true
  useNodeFeatureAPI: false
  deviceDiscoveryStrategy: nvml
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [envvar, cdi-cri]
    deviceIDStrategy: index
    cdiAnnotationPrefix: cdi.example.com/
    nvidiaCTKPath: /usr/local/bin/nvidia-ctk
    containerDriverRoot: /driver
    sharedDevicesAllocationPolicy: packed
  gfd:
    oneshot: true
    noTimestamp: true
    sleepInterval: 1m30s
    outputFile: /out
    machineTypeFile: /machine
resources:
  gpus: [{{pattern: "*H100*", name: h100}}]
  mig: [{{pattern: 1g.*, name: nvidia.com/small}}]
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - name: nvidia.com/gpu
      replicas: 4
    - {{name: mig-1g.5gb, rename: slices, replicas: 2, devices: [0:1, "2:10", MIG-{UUID}]}}
imex: {{channelIDs: [0, 7], required: true}}
"""


def test_every_key_of_the_schema_is_obeyed() -> None:
    found = read(FULL)
    assert found.warnings == ()
    assert found.options == PluginOptions(
        mig_strategy="mixed", fail_on_init_error=False, mps_root="/run/nvidia/mps", driver_root="/run/nvidia/driver",
        dev_root="/host", gdrcopy_enabled=True, gds_enabled=True, mofed_enabled=True, use_node_feature_api=False,
        device_discovery_strategy="nvml", pass_device_specs=True, device_list_strategy=("envvar", "cdi-cri"),
        device_id_strategy="index", cdi_annotation_prefix="cdi.example.com/",
        cdi_hook_path="/usr/local/bin/nvidia-ctk", container_driver_root="/driver",
        shared_devices_allocation_policy="packed", oneshot=True, no_timestamp=True, sleep_interval=90.0,
        output_file="/out", machine_type_file="/machine", imex_channel_ids=(0, 7), imex_required=True,
    )  # fmt: skip
    assert (found.gpu_names, found.mig_names) == ((("*H100*", "nvidia.com/h100"),), (("1g.*", "nvidia.com/small"),))
    assert found.sharing == Sharing(
        "time-slicing",
        (
            Shared("nvidia.com/gpu", "nvidia.com/gpu.shared", 4),
            Shared("nvidia.com/mig-1g.5gb", "nvidia.com/slices", 2, ("0:1", "2:10", f"MIG-{UUID}")),
        ),
        one_each=True,
    )


def test_the_same_file_in_json_is_the_same() -> None:
    text = json.dumps(yaml.safe_load(FULL.replace("0:1", '"0:1"')), indent="\t")
    assert read(text) == read(FULL)


def test_an_empty_file_gives_the_defaults() -> None:
    assert read("") == read("{}") == read("# nothing\n") == Configuration(PluginOptions())


def test_the_table_names_every_option_and_every_flag_of_the_file() -> None:
    assert tuple(option.name for option in OPTIONS) == PluginOptions._fields
    assert [option.name for option in OPTIONS] == list(PluginOptions._fields)
    leaves: set[str] = set()

    def walk(document: Any, path: str) -> None:
        for name, value in document.items():
            if isinstance(value, dict):
                walk(value, f"{path}{name}.")
            else:
                leaves.add(path + name)

    written = yaml.safe_load(FULL)
    walk({part: written[part] for part in ("flags", "imex")}, "")
    assert {option.key for option in OPTIONS} - {""} == leaves


def test_a_flag_comes_before_a_variable_before_the_file_before_the_default() -> None:
    text, environment, flags = "flags: {migStrategy: single}", {"MIG_STRATEGY": "mixed"}, {"mig_strategy": "none"}
    assert read("").options.mig_strategy == "none"
    assert read(text).options.mig_strategy == "single"
    assert read(text, environment=environment).options.mig_strategy == "mixed"
    assert read(text, flags, environment).options.mig_strategy == "none"
    assert read(text, environment={"MIG_STRATEGY": ""}).options.mig_strategy == "single"
    assert read("imex: {channelIDs: [0]}", environment={"IMEX_CHANNEL_IDS": "1, 2"}).options.imex_channel_ids == (1, 2)


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("PASS_DEVICE_SPECS", "t", "pass_device_specs", True),
        ("FAIL_ON_INIT_ERROR", "False", "fail_on_init_error", False),
        ("DEVICE_LIST_STRATEGY", "envvar, cdi-cri", "device_list_strategy", ("envvar", "cdi-cri")),
        ("NVIDIA_CTK_PATH", "/ctk", "cdi_hook_path", "/ctk"),
        ("CONTAINER_DRIVER_ROOT", "/d", "container_driver_root", "/d"),
        ("GFD_SLEEP_INTERVAL", "5s", "sleep_interval", 5.0),
        ("P_GPU_ALIAS", "pgpu", "vfio_resource", "pgpu"),
        ("DP_DISABLE_HEALTHCHECKS", "all", "disabled_health_checks", "all"),
        ("CDI_DISABLE_HOOKS", "all", "cdi_disable_hooks", ("all",)),
    ],
)  # fmt: skip
def test_a_variable_sets_its_option(variable: str, value: str, field: str, expected: Any) -> None:
    assert getattr(read("", environment={variable: value}).options, field) == expected


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MIG_STRATEGY", "both", 'MIG_STRATEGY: "both" is not one of none, single, mixed'),
        ("PASS_DEVICE_SPECS", "yes", 'PASS_DEVICE_SPECS: "yes" is neither true nor false'),
        ("DEVICE_LIST_STRATEGY", "envvar,cdi", 'DEVICE_LIST_STRATEGY: "cdi" is not one of envvar, volume-mounts,'),
        ("DEVICE_LIST_STRATEGY", ",", "DEVICE_LIST_STRATEGY: is empty"),
        ("IMEX_CHANNEL_IDS", "0,-1", 'IMEX_CHANNEL_IDS: "-1" is not a channel number'),
        ("NVIDIA_DRIVER_ROOT", "run", 'NVIDIA_DRIVER_ROOT: "run" is not an absolute path'),
        ("GFD_SLEEP_INTERVAL", "60", 'GFD_SLEEP_INTERVAL: "60" is not a duration'),
        ("DEVICE_DISCOVERY_STRATEGY", "tegra", "deviceDiscoveryStrategy: tegra is refused: "),
        ("P_GPU_ALIAS", "A/b", 'P_GPU_ALIAS: "A/b" is not a resource name'),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variable: str, value: str, message: str) -> None:
    assert refusal("", {variable: value}).startswith(message)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("all", "all"), (None, "all"), (2, 2), ([0], ("0",)), (["0"], ("0",)), (["0:0"], ("0:0",)),
        ([f"GPU-{UUID}"], (f"GPU-{UUID}",)), ([f"MIG-{UUID}"], (f"MIG-{UUID}",)),
        ([f"MIG-GPU-{UUID}/3/0"], (f"MIG-GPU-{UUID}/3/0",)), ([1, "1", 0], ("1", "0")),
    ],
)  # fmt: skip
def test_devices_that_are_shared_may_be_written_so(devices: Any, expected: Any) -> None:
    entry = {"name": "gpu", "replicas": 2, "devices": devices}
    assert read(sharing(entry)).sharing.resources[0].devices == expected


@pytest.mark.parametrize(
    "devices",
    [2.0, -2, 0, True, "not-all", "2", [], [-1], ["-1"], ["GPU-UUID"], [f"MIG-GPU-{UUID}"], [[0]], [None], {}, "ALL"],
    ids=str,
)
def test_other_devices_are_refused(devices: Any) -> None:
    entry = {"name": "gpu", "replicas": 2, "devices": devices}
    assert refusal(sharing(entry)).startswith("dp.yaml: sharing.timeSlicing.resources[0].devices: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: v2", 'version: unknown version "v2"'),
        ("sharing: {timeSlicing: {}}", "sharing.timeSlicing: no resources specified"),
        ("sharing: {timeSlicing: {resources: []}}", "sharing.timeSlicing: no resources specified"),
        ("sharing: {timeSlicing: {resources: null}}", "sharing.timeSlicing: no resources specified"),
        (
            "sharing: {timeSlicing: {replicas: 4}}",
            'sharing.timeSlicing: unknown key "replicas": it belongs into an entry of sharing.timeSlicing.resources',
        ),
        (sharing({"replicas": 2}), "sharing.timeSlicing.resources[0]: no resource name specified"),
        (sharing({"name": "gpu"}), "sharing.timeSlicing.resources[0]: no replicas specified"),
        (sharing({"name": "gpu", "replicas": 1}), "resources[0].replicas: 1: number of replicas must be >= 2"),
        (sharing({"name": "gpu", "replicas": 0}), "resources[0].replicas: 0: number of replicas must be >= 2"),
        (sharing({"name": "gpu", "replicas": -1}), "resources[0].replicas: -1: number of replicas must be >= 2"),
        (sharing({"name": "gpu", "replicas": 49_001}), "resources[0].replicas: 49001: number of replicas must be"),
        (sharing({"name": "gpu", "replicas": "2"}), 'resources[0].replicas: "2" is not a number'),
        (sharing({"name": "gpu", "replica": 2}), 'resources[0]: unknown key "replica": did you mean replicas?'),
        (sharing({"name": "x" * 53, "replicas": 2}), "resources[0].name: "),
        (sharing({"name": "gpu", "replicas": 2, "rename": "GPU"}), 'resources[0].rename: "GPU" is not a resource name'),
        (sharing({"name": "example.com/gpu", "replicas": 2}), 'resources[0].name: "example.com/gpu" is not a resource'),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}", "sharing.mps: MPS needs flags.mpsRoot"),
        (
            "{flags: {migStrategy: mixed, mpsRoot: /m}, sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}}",
            "sharing.mps: MPS cannot be used with MIG strategy mixed",
        ),
        ("imex: {channelIDs: [1048576]}", "imex.channelIDs: "),
        ("imex: {channelIDs: 0}", 'imex.channelIDs: "0" is not a list'),
        ("flags: {gfd: {sleepInterval: 5}}", 'flags.gfd.sleepInterval: "5" is not a duration'),
        ("flags: {migStrategy: [none]}", "flags.migStrategy: "),
        ("flags: {migStategy: none}", 'flags: unknown key "migStategy": did you mean migStrategy?'),
        (
            "flags: {deviceListStrategy: envvar}",
            'flags: unknown key "deviceListStrategy": it belongs into flags.plugin',
        ),
        ("flags: {plugin: {migStrategy: none}}", 'flags.plugin: unknown key "migStrategy": it belongs into flags'),
        ("flags: {sleepInterval: 60s}", 'flags: unknown key "sleepInterval": it belongs into flags.gfd'),
        ("flags: {imex: {}}", 'flags: unknown key "imex": it belongs to the top'),
        ("flags: {name: x}", 'flags: unknown key "name"'),
        (
            "flags: {renameByDefault: true}",
            'flags: unknown key "renameByDefault": it belongs into sharing.timeSlicing or sharing.mps',
        ),
        (
            "sharing: {failRequestsGreaterThanOne: false}",
            'sharing: unknown key "failRequestsGreaterThanOne": it belongs into sharing.timeSlicing or sharing.mps',
        ),
        (
            "{apiVersion: v1, kind: ConfigMap, metadata: {}, data: {any: 'version: v1'}}",
            "it is a Kubernetes object (ConfigMap), not a configuration",
        ),
        ('{"GPUPartitionSize": "1g.5gb"}', 'none of its keys is known ("GPUPartitionSize")'),
        ("flags: {plugin: {deviceListStrategy: 3}}", "flags.plugin.deviceListStrategy: "),
        ("flags: {plugin: {deviceListStrategy: [3]}}", "flags.plugin.deviceListStrategy: "),
        ("resources: [{name: gpu}]", "resources: "),
        ("resources: {gpus: [{pattern: a}]}", "resources.gpus[0].name: is missing"),
        ("resources: {mig: [{pattern: a, name: A}]}", 'resources.mig[0].name: "A" is not a resource name'),
        ("[]", "the document is not a mapping of keys"),
        ("flags: {a: [1", "not YAML: line "),
        ("a: 1\na: 2", 'not YAML: line 2 column 1: duplicate key "a"'),
        ('{"version": "v1", "version": "v1"}', 'duplicate key "version"'),
        ("flags: {<<: {migStategy: none}}", 'flags: unknown key "migStategy"'),
        ("{[1]: 2}", "not YAML: line 1 column 2: a key that is not text"),
        ("version: !!python/object:os.system {}", "not YAML: "),
        ("#" * (MAX_BYTES + 1), f"more than {MAX_BYTES} characters"),
        ("[" * 5000, "not YAML: "),
        ("a: \x01", "not YAML: "),
    ],
    ids=lambda text: text[:60],
)
def test_a_wrong_file_is_refused_with_the_path_of_the_key(text: str, message: str) -> None:
    found = refusal(text)
    assert found.startswith("dp.yaml: ")
    assert message in found


def test_several_entries_of_one_resource_need_lists_of_devices() -> None:
    entries = [{"name": "gpu", "replicas": 2, "devices": [0]}, {"name": "gpu", "replicas": 4, "devices": [1]}]
    block = {"sharing": {"timeSlicing": {"resources": entries}}}
    assert [entry.replicas for entry in read(json.dumps(block)).sharing.resources] == [2, 4]
    del entries[1]["devices"]
    assert "several entries for nvidia.com/gpu" in refusal(json.dumps(block))


@pytest.mark.parametrize(
    ("block", "rename", "expected"),
    [
        ({}, None, "nvidia.com/gpu"),
        ({"renameByDefault": True}, None, "nvidia.com/gpu.shared"),
        ({"renameByDefault": True}, "foo", "nvidia.com/foo"),
        ({}, "nvidia.com/foo", "nvidia.com/foo"),
    ],
)
def test_a_shared_resource_is_named_as_asked_for(block: dict[str, Any], rename: str | None, expected: str) -> None:
    assert (
        read(sharing({"name": "gpu", "replicas": 2, "rename": rename}, **block)).sharing.resources[0].offered_as
        == expected
    )


@pytest.mark.parametrize(
    ("block", "value", "expected"),
    [("timeSlicing", None, False), ("timeSlicing", True, True), ("mps", None, True), ("mps", False, False)],
)
def test_more_than_one_replica_is_refused_by_default_with_mps_only(
    block: str, value: bool | None, expected: bool
) -> None:
    part = {"failRequestsGreaterThanOne": value, "resources": [{"name": "gpu", "replicas": 2}]}
    found = read(json.dumps({"flags": {"mpsRoot": "/m"}, "sharing": {block: part}})).sharing
    assert (found.strategy, found.one_each) == ({"mps": "mps", "timeSlicing": "time-slicing"}[block], expected)


def test_mps_comes_before_time_slicing_and_that_is_said() -> None:
    part = {"resources": [{"name": "gpu", "replicas": 2}]}
    found = read(json.dumps({"flags": {"mpsRoot": "/m"}, "sharing": {"timeSlicing": part, "mps": part}}))
    assert found.sharing.strategy == "mps"
    assert found.warnings == ("sharing.timeSlicing has no effect beside sharing.mps",)


def test_an_unknown_key_at_the_top_is_ignored_with_a_warning() -> None:
    _, warnings = parse_config_file("x-note: 1\nflag: {}\nmigStrategy: none\n", "dp.yaml")
    assert warnings == (
        'dp.yaml: unknown key "x-note" ignored',
        'dp.yaml: unknown key "flag" ignored: did you mean flags?',
        'dp.yaml: unknown key "migStrategy" ignored: it belongs into flags',
    )


def test_a_whole_configmap_says_where_the_configuration_is() -> None:
    with pytest.raises(SettingsError) as caught:
        read("apiVersion: v1\nkind: ConfigMap\ndata:\n  any: |-\n    version: v1\n  other: x\n")
    assert caught.value.hint == 'The configuration is the text below one key of a ConfigMap: "any", "other"'


def test_device_specs_with_cdi_only_are_warned_about() -> None:
    environment = {"PASS_DEVICE_SPECS": "true", "DEVICE_LIST_STRATEGY": "cdi-cri"}
    assert "passDeviceSpecs has no effect" in read("", environment=environment).warnings[0]
    environment["DEVICE_LIST_STRATEGY"] = "cdi-cri,envvar"
    assert read("", environment=environment).warnings == ()


@pytest.mark.parametrize("text", ["imex: {channelIDs: null}", "imex: {channelIDs: []}", "imex: null", "flags: null"])
def test_null_and_empty_are_as_if_not_written(text: str) -> None:
    assert read(text) == Configuration()


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60.0), ("1m30s", 90.0), ("1.5h", 5400.0), ("2000ms", 2.0)])
def test_durations_are_those_of_go(text: str, seconds: float) -> None:
    assert parse_duration(text, "x") == pytest.approx(seconds)


@pytest.mark.parametrize(
    "raw", ["5", 5, 5.0, "", "s", "5 s", "-5s", "5x", "1m30", "0s", "999999999h", None, []], ids=str
)
def test_other_durations_are_refused(raw: Any) -> None:
    with pytest.raises(SettingsError, match="is not a duration"):
        parse_duration(raw, "x")


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("1g.24gb", "1g.24gb", True), ("1g.24gb", "1g.24gb-me", False), ("1g.24gb", "1g.24gb+me.all", False),
        ("1g.24gb", "1g.24gb+gfx", False), ("1g.24gb", "x1g.24gb", False), ("*gb", "1g.24gb", True),
        ("*gb", "1g.24gb-me", False), ("*h100*", "NVIDIA H100 80GB HBM3", True), ("1g.24gb", "1gx24gb", False),
        ("[ab]?", "[ab]?", True), ("[ab]?", "ax", False), ("*a" * 40, "a" * 39 + "b", False), ("*", "", True),
    ],
)  # fmt: skip
def test_a_pattern_is_the_whole_text(pattern: str, text: str, expected: bool) -> None:
    assert matches(pattern, text) is expected


# --- whatever is written


OTHER_KEYS = ("version", "sharing", "timeSlicing", "mps", "resources", "gpus", "name", "replicas", "devices", "<<")
KEYS = st.sampled_from([*sorted({part for option in OPTIONS for part in option.key.split(".")}), *OTHER_KEYS])
VALUES = st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.sampled_from(["v1", "gpu", "0", "all", "5s"])
DOCUMENTS = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5))
TEXTS = st.text(st.sampled_from("version: flags{}[]&a*a!<>-\n\t\"'#?|0:1.e~"), max_size=60)


@given(TEXTS | DOCUMENTS.map(json.dumps) | DOCUMENTS.map(yaml.safe_dump))
def test_any_file_is_read_or_refused_in_one_line(text: str) -> None:
    with contextlib.suppress(SettingsError):
        assert isinstance(read(text), Configuration)
        return
    refusal(text)


def test_aliases_do_not_make_a_document_endless() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    text = "\n".join([*lines, "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: *a29}]}}"])
    assert refusal(text).endswith("more than 2000000 values, counting each alias in full")
    assert 'alias "f" of nothing before it' in refusal("flags: &f {plugin: *f}")


def test_aliases_are_understood() -> None:
    text = "flags: {plugin: &p {passDeviceSpecs: true}}\nsharing: {mps: null}\nx: *p\n"
    assert read(text).options.pass_device_specs is True
