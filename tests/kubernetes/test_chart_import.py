"""``ocigpu chart import``: values of NVIDIA's charts become values that ours accepts, and each key is accounted for."""

import copy
import io
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from deployment_lab import CHART, Object, containers, objects, of_kind
from hypothesis import given
from hypothesis import strategies as st
from support.product import REPOSITORY
from support.products import one_in

from ocigpu.cli.front.main import main
from ocigpu.cli.settings import charts
from ocigpu.cli.settings.charts import (
    CHARTS,
    EMPTY,
    NONE,
    REFUSED,
    TAKEN,
    UNKNOWN,
    UNNEEDED,
    ValuesImport,
    import_values,
)
from ocigpu.core.errors import SettingsError
from ocigpu.core.settings import Settings, find_problems
from ocigpu.gpus.nvidia.request import parse_request

Run = tuple[int, str, str]
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def read_defaults() -> dict[str, dict[str, Any]]:
    """Return the default values of each chart."""
    found: dict[str, dict[str, Any]] = {chart: {} for chart in CHARTS}
    for line in Path(__file__).with_name("chart-defaults.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        chart, key, value = line.split(" ", 2)
        *above, last = key.split(".")
        place = found[chart]
        for name in above:
            place = place.setdefault(name, {})
        place[last] = json.loads(value)
    return found


DEFAULTS = read_defaults()


def take(values: Any, chart: str = "") -> ValuesImport:
    return import_values([("values.yaml", json.dumps(values).encode())], chart)


def became(result: ValuesImport) -> dict[str, str]:
    return {entry.key: entry.became for entry in result.entries}


def rendered(result: ValuesImport) -> list[Object]:
    """Return the objects of our chart with imported values, as Helm reads them from the file."""
    text = charts.render_values(result)
    assert yaml.safe_load(text) == result.values
    VALIDATOR.validate(result.values)
    return objects(yaml.safe_load(text))


# --- the charts' own values


@pytest.mark.parametrize("chart", CHARTS)
def test_every_default_of_a_chart_is_accounted_for(chart: str) -> None:
    result = take(DEFAULTS[chart])
    assert result.charts == (("values.yaml", chart),), "it is detected"
    assert [entry.key for entry in result.entries if entry.became == UNKNOWN] == []
    keys = [key for key, _, _ in charts.walk(charts.ValuesFile(DEFAULTS[chart]), chart)]
    assert len(keys) == len(set(keys))
    assert set(keys) <= {entry.key for entry in result.entries}
    assert all(entry.remark for entry in result.entries if entry.became in (NONE, UNNEEDED))
    assert all(entry.to for entry in result.entries if entry.became == TAKEN)
    VALIDATOR.validate(result.values)


@pytest.mark.parametrize("chart", one_in(2, CHARTS))
def test_a_charts_defaults_are_rendered(chart: str) -> None:
    found = rendered(take(DEFAULTS[chart]))
    for each in found:
        if each["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes_validate.validate(each, "1.37", strict=True)
    programs = {container["name"] for _, container in containers(found)}
    assert (
        programs
        == {
            "gpu-operator": {"device-plugin", "exporter", "node-labels", "node-installer", "mig-manager"},
            "device-plugin": {"device-plugin"},
            "gfd": {"node-labels"},
            "dcgm-exporter": {"exporter"},
            "dra-driver": {"dra-driver", "compute-domain-driver"},
        }[chart]
    )


def test_no_key_of_the_table_is_missing_in_the_charts() -> None:
    """Keys that charts have without a default in their files are named here."""
    commented = {
        "gpu-operator": "hostPaths.kubeletRootDir daemonsets.nodeSelector cdi.default devicePlugin.env. toolkit.env."
        " dcgmExporter.env. dcgmExporter.args dcgmExporter.hpcJobMapping dcgmExporter.podLabelAllowlistRegex"
        " dcgmExporter.config. dcgmExporter.serviceMonitor. dcgmExporter.imagePullSecrets draDriver. global",
        "device-plugin": "devicePlugin.enableHostNetwork gfd.enableHostNetwork mps.enableHostNetwork podLabels"
        " updateStrategy.rollingUpdate global",
        "gfd": "namespaceOverride podLabels updateStrategy.rollingUpdate global",
        "dcgm-exporter": "customMetrics updateStrategy. selectorLabelsOverride allowDefaultNamespace extraEnv. global",
        "dra-driver": "runtimeClassName kubeletPlugin.podLabels kubeletPlugin.securityContext kubeletPlugin.resources"
        " featureGates. global",
    }
    for chart, rows in CHARTS.items():
        known = charts.ValuesFile(DEFAULTS[chart])
        missing = [key for key in rows if known.get(key, known) is known and not _is_null(DEFAULTS[chart], key)]
        left = [key for key in missing if not key.startswith(tuple(commented[chart].split()))]
        assert left == [], chart


def _is_null(data: Any, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(data, dict) or name not in data:
            return False
        data = data[name]
    return data is None


# --- what users set


def test_an_operators_values_of_a_fleet() -> None:
    """As "helm get values" prints them: driver on the nodes, k3s, two configurations, and a mistyped key."""
    files = {
        "shared": "version: v1\nsharing:\n  mps:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 4}\n",
        "whole": "version: v1\nflags:\n  migStrategy: none\n",
    }
    config = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
    result = take({
        "driver": {"enabled": False},
        "mig": {"strategy": "mixed"},
        "daemonsets": {
            "tolerations": [{"operator": "Exists"}], "labels": {"team": "gpu"}, "lables": {},
            "annotations": {"linkerd.io/inject": "1"}, "rollingUpdate": {"maxUnavailable": "2"},
        },
        "toolkit": {"env": [
            {"name": "CONTAINERD_CONFIG", "value": config},
            {"name": "CONTAINERD_SET_AS_DEFAULT", "value": "true"},
            {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
        ]},
        "devicePlugin": {
            "config": {"create": True, "name": "plugin", "default": "whole", "data": files},
            "env": [{"name": "PASS_DEVICE_SPECS", "value": "true"}, {"name": "NODE_NAME", "value": "n"},
                    {"name": "DEVICE_ID_STRATEGY", "value": "name"}],
            "imagePullSecrets": ["harbor"],
            "hostNetwork": True,
        },
        "dcgmExporter": {
            "args": ["-n", "-r", "host:5555", "--kubernetes-enable-pod-uid"], "annotations": {"a": "b"},
            "enablePodUID": True, "podLabelAllowlistRegex": ["^app$"],
            "env": [{"name": "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS", "value": "true"}],
            "serviceMonitor": {"enabled": True, "interval": "30s", "additionalLabels": {"release": "prometheus"},
                               "relabelings": [{"action": "labeldrop", "regex": "instance"}]},
            "config": {"name": "metrics", "create": True, "data": "DCGM_FI_DEV_GPU_TEMP, gauge, temperature\n"},
        },
        "migManager": {"config": {"name": "layouts"}, "env": [{"name": "WITH_REBOOT", "value": "true"}]},
        "gfd": {"resources": {"limits": {"memory": "64Mi"}}},
    })  # fmt: skip
    words = became(result)
    assert words["daemonsets.lables"] == UNKNOWN
    assert words["devicePlugin.env.NODE_NAME"] == UNNEEDED
    assert words["devicePlugin.env.DEVICE_ID_STRATEGY"] == REFUSED
    assert words["toolkit.env.HTTPS_PROXY"] == UNNEEDED, "no program here connects through a proxy"
    (left,) = [entry.remark for entry in result.entries if entry.key == "dcgmExporter.args"]
    assert left.startswith("without -r host:5555: ")
    assert "--kubernetes-enable-pod-uid: here exporter.enablePodUID" in left
    values = result.values
    assert values["host"] == {"driverRoot": "/"}
    assert values["config"]["files"] == files | {"default": files["whole"]}
    assert values["mps"]["enabled"] is True
    assert values["image"] == {"pullSecrets": ["harbor"]}
    assert values["migManager"] == {
        "existing": "layouts", "enabled": True, "default": "all-disabled",
        "extraEnv": [{"name": "WITH_REBOOT", "value": "true"}],
    }  # fmt: skip
    assert values["exporter"]["serviceMonitorHonorLabels"] is False
    found = rendered(result)
    pods = of_kind(found, "DaemonSet")
    for each in pods.values():
        template = each["spec"]["template"]
        assert template["metadata"]["labels"]["team"] == "gpu"
        assert template["metadata"]["annotations"]["linkerd.io/inject"] == "1"
        assert template["spec"]["tolerations"] == [{"operator": "Exists"}]
        assert template["spec"]["imagePullSecrets"] == [{"name": "harbor"}]
        assert each["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 2}
        assert template["spec"].get("hostNetwork") == (True if "device-plugin" in each["metadata"]["name"] else None)
    installer = pods["ocigpu-node-installer"]["spec"]["template"]["spec"]["containers"][0]
    assert {f"--engine-config={config}", "--default"} <= set(installer["args"])
    assert [each["name"] for each in installer["env"]] == ["NODE_NAME"]
    exporter = pods["ocigpu-exporter"]["spec"]["template"]
    assert exporter["metadata"]["annotations"] == {"a": "b", "linkerd.io/inject": "1"}
    assert exporter["spec"]["containers"][0]["args"][-5:] == [
        "--kubernetes-enable-pod-labels=true", "--kubernetes-enable-pod-uid=true",
        "--kubernetes-pod-label-allowlist-regex=^app$", "--collectors=/collectors/collectors.csv", "-n",
    ]  # fmt: skip
    assert exporter["spec"]["automountServiceAccountToken"] is True
    (monitor,) = of_kind(found, "ServiceMonitor").values()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {
        "port": "metrics", "honorLabels": False, "interval": "30s",
        "relabelings": [{"action": "labeldrop", "regex": "instance"}],
    }  # fmt: skip
    labels = pods["ocigpu-node-labels"]["spec"]["template"]["spec"]["containers"][0]
    assert labels["resources"] == {"limits": {"memory": "64Mi"}}


def test_the_device_plugins_and_the_exporters_values_together() -> None:
    term = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["a100"]}]}
    plugin = {
        "config": {"map": {"only": "version: v1\nflags:\n  migStrategy: none\n"}},
        "fullnameOverride": "gpus", "compatWithCPUManager": True, "deviceListStrategy": ["envvar", "cdi-cri"],
        "nodeSelector": {"pool": "gpu"}, "runtimeClassName": "nvidia", "migStrategy": "mixed",
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}},
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
        },
        "gfd": {"enabled": True, "sleepInterval": "5m", "noTimestamp": True},
        "imagePullSecrets": [{"name": "harbor"}], "securityContext": {"privileged": True},
    }  # fmt: skip
    exporter = {
        "arguments": ["-f", "/etc/dcgm-exporter/dcp-metrics-included.csv", "--collect-interval", "5000"],
        "tolerations": [{"key": "x", "operator": "Exists"}], "hostNetwork": True, "priorityClassName": "low",
        "podLabels": {"a": "b"},
        "extraEnv": [{"name": "DCGM_EXPORTER_DEBUG", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "service": {"port": 9500, "type": "NodePort"}, "nodeSelector": {"disk": "ssd"},
        "serviceMonitor": {"interval": "1m", "metricRelabelings": [{"action": "drop", "regex": "x"}]},
        "imagePullSecrets": [{"name": "quay"}], "tlsServerConfig": {"enabled": True},
    }  # fmt: skip
    result = import_values([(name, json.dumps(each).encode()) for name, each in (("a", plugin), ("b", exporter))])
    assert [chart for _, chart in result.charts] == ["device-plugin", "dcgm-exporter"]
    words = became(result)
    assert [words[key] for key in ("tlsServerConfig.enabled", "service.type", "serviceMonitor.enabled")] == [
        NONE, NONE, TAKEN,
    ]  # fmt: skip
    found = rendered(result)
    pods = of_kind(found, "DaemonSet")
    assert set(pods) == {
        *("gpus-device-plugin", "gpus-device-plugin-only"),
        *("gpus-node-labels", "gpus-node-labels-only", "gpus-exporter"),
    }
    assert "RuntimeClass" not in {each["kind"] for each in found}, "it belongs to somebody else"
    for name, each in pods.items():
        pod = each["spec"]["template"]["spec"]
        terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert [term["matchExpressions"][0] for term in terms] == term["matchExpressions"]
        assert pod["runtimeClassName"] == "nvidia"
        assert [each["name"] for each in pod["imagePullSecrets"]] == ["harbor", "quay"]
        assert pod["nodeSelector"] == {"pool": "gpu"} | ({"disk": "ssd"} if name == "gpus-exporter" else {})
    words_of = pods["gpus-device-plugin"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words_of[-2:] == ["--pass-device-specs=true", "--mig-strategy=mixed"]
    assert "--device-list-strategy=envvar,cdi-cri" in words_of
    labels = pods["gpus-node-labels"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--no-timestamp=true", "--sleep-interval=5m"} <= set(labels)
    pod = pods["gpus-exporter"]["spec"]["template"]["spec"]
    assert (pod["priorityClassName"], pod["hostNetwork"], pod["dnsPolicy"]) == ("low", True, "ClusterFirstWithHostNet")
    assert pod["tolerations"] == [{"key": "x", "operator": "Exists"}]
    assert pod["containers"][0]["env"][-1]["name"] == "DCGM_EXPORTER_DEBUG"
    assert pod["containers"][0]["ports"][0]["containerPort"] == 9500


def test_a_dra_drivers_values() -> None:
    result = take({
        "nvidiaDriverRoot": "/run/nvidia/driver",
        "resources": {"computeDomains": {"enabled": False}},
        "featureGates": {"MPSSupport": True, "DynamicMIG": True, "NVMLDeviceHealthCheck": True, "Unheard": True},
        "kubeletPlugin": {
            "kubeletPluginsDirectoryPath": "/var/lib/k0s/kubelet/plugins", "nodeSelector": {"a": "b"},
            "containers": {"gpus": {"resources": {"limits": {"memory": "1Gi"}}}},
        },
        "controller": {"replicas": 2},
    })  # fmt: skip
    words = became(result)
    assert words["featureGates.Unheard"] == UNKNOWN
    assert words["resources.computeDomains.enabled"] == UNNEEDED
    assert "enabled" not in result.values["computeDomains"]
    (pod, container), *others = containers(rendered(result))
    assert not others
    assert container["args"][-1] == "--dynamic-mig"
    assert container["securityContext"]["privileged"] is True
    assert container["resources"] == {"limits": {"memory": "1Gi"}}
    assert "--plugins-directory=/var/lib/k0s/kubelet/plugins" in container["args"]
    assert pod["nodeSelector"] == {"a": "b"}


SLICED = "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 4}\n"
RUNTIME = "the nodes need ocigpu as a runtime: "


def test_domains_are_imported_with_their_controllers_place_and_without_the_kinds_that_the_cluster_has() -> None:
    toleration = {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}
    term = {"matchExpressions": [{"key": "control", "operator": "Exists"}]}
    preferred = [{"weight": 100, "preference": term}]
    result = take({
        "resources": {"gpus": {"enabled": False}},
        "controller": {
            "replicas": 3, "nodeSelector": {"pool": "control"}, "tolerations": [toleration],
            "priorityClassName": "high", "metrics": {"enabled": True},
            "affinity": {"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]},
                "preferredDuringSchedulingIgnoredDuringExecution": preferred,
            }},
        },
        "kubeletPlugin": {
            "nodeSelector": {"rack": "nvl72"}, "updateStrategy": {"rollingUpdate": {"maxUnavailable": 1}},
        },
    })  # fmt: skip
    assert result.values["computeDomains"]["kinds"] is False
    assert became(result)["controller.metrics.enabled"] == NONE
    found = rendered(result)
    assert "CustomResourceDefinition" not in {each["kind"] for each in found}
    deployment = of_kind(found, "Deployment")["ocigpu-compute-domain-controller"]["spec"]
    assert deployment["replicas"] == 3
    pod = deployment["template"]["spec"]
    assert (pod["nodeSelector"], pod["tolerations"], pod["priorityClassName"]) == (
        {"pool": "control"}, [toleration], "high",
    )  # fmt: skip
    assert pod["affinity"]["nodeAffinity"] == {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]},
        "preferredDuringSchedulingIgnoredDuringExecution": preferred,
    }
    driver = of_kind(found, "DaemonSet")["ocigpu-compute-domain-driver"]["spec"]
    assert driver["template"]["spec"]["nodeSelector"] == {"rack": "nvl72"}, "one DaemonSet has both drivers there"
    assert driver["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1}
    (plain,) = of_kind(objects({"computeDomains": {"enabled": True}}), "Deployment").values()
    assert not {"nodeSelector", "tolerations", "affinity"} & set(plain["spec"]["template"]["spec"])


@pytest.mark.parametrize("sharing", [SLICED, SLICED.replace("timeSlicing", "mps")])
def test_sharing_through_a_device_plugin_that_claims_replace_is_said_to_end(sharing: str) -> None:
    operator = {
        "toolkit": {"enabled": True},
        "devicePlugin": {
            "config": {"create": True, "name": "x", "default": "a", "data": {"a": sharing}},
            "env": [{"name": "FAIL_ON_INIT_ERROR", "value": "true"}],
        },
    }
    dra = {"nvidiaDriverRoot": "/run/nvidia/driver", "logVerbosity": "4"}
    result = import_values([(name, json.dumps(each).encode()) for name, each in (("a", operator), ("b", dra))])
    remarks = {entry.key: entry.remark for entry in result.entries}
    assert "no device plugin shares GPUs by it" in remarks["devicePlugin.config.data"]
    assert "no device plugin runs" in remarks["devicePlugin.env.FAIL_ON_INIT_ERROR"]
    assert "no device plugin" not in remarks["toolkit.enabled"]
    assert [note for note in result.notes if note.startswith("the sharing in config.files ends: ")]
    assert [note for note in result.notes if "dra.deviceClasses" in note]
    assert not [note for note in result.notes if note.startswith(RUNTIME)], "node-installer brings it"
    programs = {container["name"] for _, container in containers(rendered(result))}
    assert not {"device-plugin", "mps-control-daemon"} & programs
    alone = import_values([("a", json.dumps(operator).encode())])
    assert not [note for note in alone.notes if "sharing" in note or "dra." in note]


def test_nodes_without_the_installer_are_said_to_need_a_runtime() -> None:
    for chart in CHARTS:
        notes = take({"toolkit": {"enabled": False}} if chart == "gpu-operator" else {}, chart).notes
        assert len([note for note in notes if note.startswith(RUNTIME)]) == 1, chart


@pytest.mark.parametrize(
    ("chart", "values", "key", "reason"),
    [
        ("device-plugin", {"config": {"map": {"A100": ""}}}, "config.map", "at most 30"),
        ("device-plugin", {"config": {"map": {"a": "nonsense: 1"}}}, "config.map", "none of its keys is known"),
        ("device-plugin", {"config": {"map": {"a": "", "b": ""}, "default": "c"}}, "config.default", 'has no "c"'),
        ("device-plugin", {"config": {"name": "x", "default": "c"}}, "config.default", "the key default"),
        (
            "device-plugin",
            {"config": {"map": {"a": "", "default": ""}, "default": "a"}},
            "config.map",
            "default is for all other nodes",
        ),
        ("device-plugin", {"deviceListStrategy": "shout"}, "deviceListStrategy", "shout"),
        ("device-plugin", {"fullnameOverride": "x" * 31}, "fullnameOverride", "not the form"),
        ("device-plugin", {"podLabels": {"ocigpu/config": "x"}}, "podLabels", "selects its pods by"),
        ("device-plugin", {"gfd": {"sleepInterval": "soon"}}, "gfd.sleepInterval", "sleep-interval"),
        ("device-plugin", {"affinity": {"x": {}}}, "affinity", "no affinity"),
        (
            "dcgm-exporter",
            {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": []}]}}}},
            "affinity",
            "other than labels",
        ),
        ("dcgm-exporter", {"customMetrics": "DCGM_FI_DEV_GPU_TMP, gauge, x"}, "customMetrics", "unknown metric"),
        ("dcgm-exporter", {"service": {"address": "1.2.3.4:1"}}, "service.address", "all addresses"),
        ("dcgm-exporter", {"service": {"port": 1, "address": ":2"}}, "service.address", "are one here"),
        ("dcgm-exporter", {"kubeletPath": "/x"}, "kubeletPath", "not pod-resources below"),
        ("dcgm-exporter", {"arguments": ["-m", "ns:map"]}, "arguments", "mount the ConfigMap"),
        ("dcgm-exporter", {"serviceMonitor": {"interval": "often"}}, "serviceMonitor.interval", "not the form"),
        ("dcgm-exporter", {"imagePullSecrets": [1]}, "imagePullSecrets", "not the name of a secret"),
        ("gpu-operator", {"migManager": {"config": {"data": {"config.yaml": "x"}}}}, "migManager.config.data", "mig"),
        (
            "gpu-operator",
            {"migManager": {"config": {"name": "mine", "data": {"config.yaml": "version: v1\nmig-configs: {}\n"}}}},
            "migManager.config.data",
            "migManager.config.name names the ConfigMap",
        ),
        ("gpu-operator", {"devicePlugin": {"config": {"data": {"a": ""}}}}, "devicePlugin.config.data", "ignores"),
        (
            "gpu-operator",
            {"devicePlugin": {"env": [{"name": "NVIDIA_IMEX_CHANNELS", "value": "0"}]}},
            "devicePlugin.env.NVIDIA_IMEX_CHANNELS",
            "more rights",
        ),
    ],
)  # fmt: skip
def test_what_our_programs_would_refuse_is_not_taken_over(
    chart: str, values: dict[str, Any], key: str, reason: str
) -> None:
    result = take(values, chart)
    (entry,) = [entry for entry in result.entries if entry.key == key]
    refusals = (
        "at most 30",
        "none of its keys is known",
        "shout",
        "sleep-interval",
        "unknown metric",
        "mig",
        "more rights",
    )
    assert entry.became == (REFUSED if reason in refusals else NONE)
    assert reason in entry.remark
    VALIDATOR.validate(result.values)


HARDENED = {
    "toolkit": {"env": [
        {"name": "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED", "value": "False"},
        {"name": "ACCEPT_NVIDIA_VISIBLE_DEVICES_AS_VOLUME_MOUNTS", "value": "true"},
        {"name": "NVIDIA_CONTAINER_RUNTIME_LOG_LEVEL", "value": "trace"},
        {"name": "NVIDIA_CONTAINER_RUNTIME_MODE", "value": "auto"},
        {"name": "CONTAINERD_SOKET", "value": "/run/k3s/containerd/containerd.sock"},
        {"name": "CONTAINERD_RUNTIME_CLASS", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]},
    "devicePlugin": {"env": [
        {"name": "DEVICE_LIST_STRATEGY", "value": "volume-mounts"},
        {"name": "FOO_BAR", "value": "1"},
        {"name": "PASS_DEVICE_SPEC", "value": "true"},
        {"name": "FAIL_ON_INIT_ERROR", "value": "true"},
        {"name": "FAIL_ON_INIT_ERROR", "value": "false"},
    ]},
    "dcgmExporter": {"env": [{"name": "DCGM_EXPORTER_LISTEN", "value": ":9500"}]},
    "migManager": {"env": [{"name": "WITH_REBOOT", "value": "true"}]},
}  # fmt: skip


def test_settings_of_the_runtime_are_for_each_node_and_variables_that_nobody_reads_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hardening that the operator's documentation describes."""
    result = take(HARDENED, "gpu-operator")
    found = {entry.key: (entry.became, entry.remark) for entry in result.entries if entry.remark}
    off = "accept-nvidia-visible-devices-envvar-when-unprivileged = false"
    node_lines = (
        off,
        "accept-nvidia-visible-devices-as-volume-mounts = true",
        "[runtime]",
        'log-level = "debug"',
    )
    assert result.node_lines == node_lines
    assert find_problems(tomllib.loads("\n".join(node_lines))) == []
    became_, remark = found["toolkit.env.ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED"]
    assert (became_, remark.startswith(f"{off} in each node's /etc/ocigpu/config.toml")) == (NONE, True)
    assert found["toolkit.env.NVIDIA_CONTAINER_RUNTIME_MODE"] == (UNNEEDED, "the same here")
    assert found["toolkit.env.CONTAINERD_RUNTIME_CLASS"] == (NONE, "its value is not in this file")
    for key, near in (
        ("toolkit.env.CONTAINERD_SOKET", ": CONTAINERD_SOCKET was meant?"),
        ("devicePlugin.env.FOO_BAR", "devicePlugin reads no such variable"),
        ("devicePlugin.env.PASS_DEVICE_SPEC", ": PASS_DEVICE_SPECS was meant?"),
    ):
        assert found[key][0] == UNKNOWN
        assert found[key][1].endswith(near)
    assert "docs/KUBERNETES.md" in found["devicePlugin.env.DEVICE_LIST_STRATEGY"][1]
    twice = [entry.became for entry in result.entries if entry.key == "devicePlugin.env.FAIL_ON_INIT_ERROR"]
    assert twice == [TAKEN, REFUSED]
    values = result.values
    assert "extraEnv" not in values["nodeInstaller"]
    assert values["devicePlugin"]["extraEnv"] == [{"name": "FAIL_ON_INIT_ERROR", "value": "true"}]
    assert values["migManager"]["extraEnv"] == [{"name": "WITH_REBOOT", "value": "true"}]
    assert values["exporter"]["port"] == 9500
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(HARDENED))
    assert main(["chart", "import", str(file), "--from", "gpu-operator"]) == 0
    out, err = capsys.readouterr()
    assert "".join(f"      {line}\n" for line in node_lines) in err
    assert "".join(f"#   {line}\n" for line in node_lines) in out


@pytest.mark.parametrize("strategy", [{"cdi": {"enabled": True}}, {"cdi": {"enabled": False}}, HARDENED])
def test_the_charts_own_pods_get_gpus_on_nodes_with_the_lines_that_are_printed(strategy: dict[str, Any]) -> None:
    """With mig.strategy none they have no CAP_SYS_ADMIN, so their variables count for nothing there."""
    off = {"name": "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED", "value": "false"}
    result = take({"mig": {"strategy": "none"}, "toolkit": {"env": [off]}, **strategy}, "gpu-operator")
    node = tomllib.loads("\n".join(result.node_lines))
    settings = Settings(
        accept_nvidia_visible_devices_envvar_when_unprivileged=node[charts.VARIABLES],
        accept_nvidia_visible_devices_as_volume_mounts=node[charts.MOUNTS],
    )
    assert [note for note in result.notes if "runtimeClass.volumeMounts" in note]
    programs = []
    for pod, container in containers(rendered(result)):
        if "runtimeClassName" not in pod:
            continue
        host = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
        capabilities = container["securityContext"].get("capabilities", {}).get("add", [])
        configuration = {
            "process": {
                "env": [f"{each['name']}={each['value']}" for each in container["env"] if "value" in each],
                "capabilities": {"bounding": [f"CAP_{each}" for each in capabilities]},
            },
            "mounts": [
                {"source": host.get(each["name"], "/x"), "destination": each["mountPath"]}
                for each in container["volumeMounts"]
            ],
        }
        assert parse_request(configuration, settings).selection == "all", container["name"]
        programs.append(container["name"])
    assert set(programs) == {"device-plugin", "exporter", "node-labels"}


TOOLKIT = [key for key, row in CHARTS["gpu-operator"].items() if row.how == "node-setting"]


@pytest.mark.parametrize("key", one_in(5, TOOLKIT))
def test_every_setting_of_the_toolkit_is_a_key_of_its_file(key: str) -> None:
    row = CHARTS["gpu-operator"][key]
    for value in ("true", "auto", "debug", "/a", "a/b", "", "\n]", "\ud800", "x" * (1 << 19)):
        with pytest.raises((charts.NoCounterpartError, charts.UnneededError)):
            charts.CONVERTERS[row.how](row, value, charts.ValuesFile({}))


def test_a_programs_own_terms_do_not_admit_nodes_without_the_label_of_the_tutorial() -> None:
    page = (REPOSITORY / "docs/tutorials/from-gpu-operator.md").read_text()
    canary = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    term = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["a100"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    exporter = {
        "affinity": affinity,
        "nodeSelector": {"disk": "ssd"},
        "customMetrics": "DCGM_FI_DEV_GPU_TEMP, gauge, x",
    }
    operator = {"toolkit": {"enabled": True}, "migManager": {"enabled": True}}
    given = [("a", json.dumps(operator).encode()), ("b", json.dumps(exporter).encode())]
    values = import_values(given).values
    assert values["exporter"]["nodeSelectorTerms"] == [term]
    more: dict[str, Any] = {"leases": {"enabled": True, "check": "true"}, "amd": True}
    values = values | more | canary
    pods = list(containers(objects(values)))
    assert {container["name"] for _, container in pods} >= {
        "exporter",
        "node-installer",
        "mig-manager",
        "device-plugin",
    }
    for pod, _ in pods:
        assert pod["nodeSelector"]["gpu-stack"] == "ocigpu"
    assert [pod["nodeSelector"] for pod, container in pods if container["name"] == "exporter"] == [
        {"gpu-stack": "ocigpu", "disk": "ssd"}
    ]


@pytest.mark.parametrize("text", [b"USER-SUPPLIED VALUES:\nnull\n", b"COMPUTED VALUES:\r\n{}\r\n", b"null\n", b""])
def test_an_operator_with_default_values_is_imported_if_its_chart_is_named(text: bytes) -> None:
    with pytest.raises(SettingsError, match="x: no values") as caught:
        import_values([("x", text)])
    assert "--from: gpu-operator" in str(caught.value.hint)
    assert import_values([("x", text)], "gpu-operator").values["nodeInstaller"] == {"enabled": True}


def test_the_heading_of_helm_is_no_key() -> None:
    result = import_values([("x", b"USER-SUPPLIED VALUES:\narguments: [-n]\n")])
    assert result.charts == (("x", "dcgm-exporter"),)
    with pytest.raises(SettingsError, match="line 4"):
        import_values([("x", b"USER-SUPPLIED VALUES:\na: 1\nb: [\n")])


def test_a_row_for_a_key_and_those_below_it_is_there_once() -> None:
    result = take({"sandboxWorkloads": {"enabled": True, "mode": "kubevirt"}, "driver": {"version": "1", "image": "x"}})
    rows = [entry.key for entry in charts.grouped(result.entries)]
    assert {"sandboxWorkloads.enabled", "sandboxWorkloads.mode", "driver.*"} <= set(rows)
    assert len(rows) == len(set(rows))


# --- hostile files


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (b"a: [", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"- 1\n", "not a mapping"),
        (b"a: 1\na: 2\n", "duplicate key"),
        (b"a: 1\n---\nb: 2\n", "second document"),
        (b"? [a]\n: 1\n", "not text"),
        (b"a: !!python/object/apply:os.system [id]\n", "tag"),
        (b"a: " + b"[" * 500, "not YAML"),
        (b"x: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(b"y%d: &b%d [*%s]\n" % (n, n, b",*".join(
            [b"a" if n == 0 else b"b%d" % (n - 1)] * 9)) for n in range(8)), "counting each alias"),
        (b"#" * (1 << 20) + b"\n", "larger than 1 MiB"),
        (b"hello: 1\n", "no known NVIDIA chart"),
        (b"tolerations: []\n", "has keys of device-plugin, gfd, dcgm-exporter"),
        (b"devicePlugin: {enabled: 'yes'}\nmig: {strategy: most}\n", 'expected true or false, found "yes"; '),
        (b"devicePlugin: 5\ntoolkit: {enabled: true}\n", "devicePlugin"),
        (b"toolkit: {env: [{name: 'A=B', value: x}]}\n", "a list of variables"),
        (b"daemonsets: {labels: {a: 'x', x: yes}}\n", "daemonsets.labels: expected a mapping of texts, and x is true"),
        (b"hostPaths: {kubeletRootDir: '/a: b'}\n", 'expected an absolute path, found "/a: b"'),
        (b"daemonsets: {priorityClassName: 'x # y'}\n", "expected the name of an object"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)  # fmt: skip
def test_a_file_that_is_broken_is_an_error_of_one_line(
    text: bytes, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "values.yaml"
    file.write_bytes(text)
    target = tmp_path / "out"
    if cause == "devicePlugin":  # a section that is no section is an unknown key, and none of its values is lost
        assert became(import_values([("x", text)]))["devicePlugin"] == UNKNOWN
        return
    assert main(["chart", "import", str(file), "-o", str(target)]) == 1
    out, err = capsys.readouterr()
    first, *hints = err.splitlines()
    assert re.match("ocigpu: OCIGPU-KUBE-9: ", first)
    assert cause in first
    assert all(line.startswith("hint: ") for line in hints)
    assert (out, target.exists()) == ("", False)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from(["/x", "1e3", "yes", "0x1f", "a\nb ", "mixed", "RollingUpdate", "15s", "a: b", "\u2028", "-f"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=9), st.sampled_from(["name", "value", "default", "type"])), inner,
                        max_size=3),
    ),
    max_leaves=6,
)  # fmt: skip
PLACES = [(chart, key) for chart, rows in CHARTS.items() for key in rows]


@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=4))
def test_whatever_a_value_is_ours_are_accepted_by_the_chart_or_it_is_an_error(changes: Any) -> None:
    chart = changes[0][0][0]
    values = copy.deepcopy(DEFAULTS[chart])
    for (_, key), value in changes:
        *above, last = key.split(".")
        place = values
        for name in above:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
        place[last] = value
    text = json.dumps(values, ensure_ascii=True).encode()  # each JSON is YAML
    try:
        result = import_values([("values.yaml", text)], chart)
    except SettingsError as error:
        said = error
    else:
        VALIDATOR.validate(result.values)
        assert json.dumps(yaml.safe_load(charts.render_values(result))) == json.dumps(result.values)
        return
    assert said.code == "OCIGPU-KUBE-9"
    assert said.message.isprintable()


@pytest.mark.parametrize(
    ("chart", "values"),
    [
        ("gpu-operator", {"hostPaths": {"driverInstallDir": []}}),
        ("device-plugin", {"config": {"map": {"a": ""}, "default": []}}),
        ("device-plugin", {"config": {"map": {"a": ""}, "default": "b"}}),
        ("dcgm-exporter", {"extraEnv": [{"name": "A", "value": None}]}),
    ],
)
def test_a_key_that_another_looks_at_may_be_anything(chart: str, values: dict[str, Any]) -> None:
    VALIDATOR.validate(take(values, chart).values)


def test_helm_reads_texts_as_the_texts_that_they_were() -> None:
    """Go's YAML reads some words as numbers that PyYAML does not."""
    nasty = ["1e3", "yes", "0x1f", "0o17", "1_000", ".5", "~", "null", "a: b", "#x", " x ", "a\nb\n", "x\ty",
             "2001-01-01", "é", "NaN", "12:30:45", "{{ .Values }}", "-", "y"]  # fmt: skip
    result = take({"podAnnotations": {f"a{number}": text for number, text in enumerate(nasty)}}, "gfd")
    (each,) = of_kind(rendered(result), "DaemonSet").values()
    assert list(each["spec"]["template"]["metadata"]["annotations"].values()) == [
        nasty[int(name[1:])] for name in each["spec"]["template"]["metadata"]["annotations"]
    ]


# --- the table


def property_of(path: str) -> Any:
    """Return what the schema says of one of our values."""
    found = SCHEMA
    for name in path.split("."):
        while "$ref" in found:
            found = SCHEMA["definitions"][found["$ref"].rpartition("/")[2]]
        if name not in found.get("properties", {}):
            assert found.get("additionalProperties"), path
            return found["additionalProperties"]
        found = found["properties"][name]
    return found


def test_the_tables_values_are_values_of_our_chart() -> None:
    for rows in CHARTS.values():
        for row in rows.values():
            assert row.how in charts.CONVERTERS
            assert row.kind in charts.KINDS
            assert bool(row.to or row.set) != bool(row.none or row.unneeded), row.key
            for path in (*row.to, *row.set):
                property_of(path)
            for other in row.others.values():
                assert other in rows, row.key
    assert {"to": ()}.keys() <= set(charts.ChartKey._fields)


def test_what_the_chart_keeps_for_itself_is_what_its_schema_refuses() -> None:
    definitions = SCHEMA["definitions"]
    assert (
        set(definitions["extraEnv"]["items"]["properties"]["name"]["not"]["enum"])
        == charts.OWN_VARIABLES | charts.RIGHTS
    )
    assert set(definitions["podLabels"]["propertyNames"]["not"]["enum"]) == charts.OWN_LABELS
    files = SCHEMA["properties"]["config"]["properties"]["files"]["propertyNames"]["pattern"]
    assert files == f"^{charts.FILE_NAME.pattern}$"
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(re.findall(r"- name: ([A-Z_]{4,})\n", text)) == charts.OWN_VARIABLES


# --- the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "values.yaml"
    path.write_text("arguments: [-n]\nserviceMonitor: {enabled: false}\nimage: {tag: x}\nservce: 1\n")
    return path


def test_the_values_are_printed_and_the_table_is_on_the_other_stream(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chart", "import", str(file)]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["exporter"]["args"] == ["-n"]
    assert re.search(r"^servce +unknown key .*service was meant", err, re.MULTILINE)
    assert re.search(r"^image.tag +not needed", err, re.MULTILINE)
    assert "# Unknown key:\n#   servce: " in out
    assert "3 taken over, 1 not needed, 1 unknown key" in err


def test_a_file_is_written_and_another_is_not_replaced(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "ours.yaml"
    for force, status, said in (
        ([], 0, "written"),
        ([], 0, "unchanged"),
        ([], 1, "OCIGPU-SET-4"),
        (["--force"], 0, ""),
    ):
        assert main(["chart", "import", str(file), "-o", str(target), *force]) == status
        out, err = capsys.readouterr()
        assert said in err
        assert out == ""
        if said == "unchanged":
            file.write_text("arguments: [-n]\n")
    assert "arguments" not in target.read_text()
    assert target.read_text().startswith("# Values for ocigpu's chart, imported from ")


def test_json_names_every_key_and_standard_input_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = yaml.safe_dump(DEFAULTS["gfd"]).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["chart", "import", "-", "--from", "gfd", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["charts"] == [{"file": "standard input", "chart": "gfd"}]
    assert {key["key"] for key in answer["keys"]} >= {"nfd.nameOverride", "podAnnotations", "sleepInterval"}
    assert {key["became"] for key in answer["keys"]} == {TAKEN, UNNEEDED, EMPTY}
    assert yaml.safe_load(answer["text"])["nodeLabels"]["args"][-1] == "--sleep-interval=60s"


def test_a_file_that_is_not_there_and_a_chart_that_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chart", "import", str(tmp_path / "none")]) == 1
    assert "OCIGPU-KUBE-9: read " in capsys.readouterr().err
    assert main(["chart", "import", "--from", "x", str(tmp_path)]) == 2
