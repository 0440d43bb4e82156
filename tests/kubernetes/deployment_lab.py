"""The chart rendered for the tests, and what is looked for in its objects."""

import functools
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

DEPLOYMENT = Path(__file__).parents[2] / "packaging/kubernetes"
CHART = DEPLOYMENT / "chart"

Object = dict[str, Any]

SHARED = """\
version: v1
flags:
  migStrategy: none
sharing:
  mps:
    resources:
      - name: nvidia.com/gpu
        replicas: 10
"""
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "everything": {
        "mps": {"enabled": True, "shmSize": "8g", "args": ["--mig-strategy=single"]},
        "mig": True,
        "jsonLogs": True,
        "nodeLabels": {"target": "node", "vgpu": True, "args": ["--sleep-interval=5m"]},
        "exporter": {
            "serviceMonitor": True, "collectors": "A, gauge, b\n\nB, gauge, c\n", "args": ["--no-hostname"],
            "enablePodLabels": True, "enablePodUID": True, "podLabelAllowlistRegex": ["^app$", r"^a\.b/"],
        },
        "devicePlugin": {"deviceListStrategy": "cdi-cri", "args": ["--pass-device-specs", "--mig-strategy", "single"]},
    },
    "several configurations": {
        "config": {"files": {"shared": SHARED, "mixed": "version: v1\nflags:\n  migStrategy: mixed\n"}},
        "mps": {"enabled": True},
        "image": {"repository": "registry.example/gpu/ocigpu", "tag": "x", "pullSecrets": ["one"]},
        "seLinuxType": "container_device_plugin_t",
        "podAnnotations": {"a": "1"},
    },
    "a simulated host": {"host": {"simulation": "/opt/gpus"}, "exporter": {"pods": False}, "mps": {"enabled": True}},
    "no variables": {
        "devicePlugin": {"deviceListStrategy": "envvar,volume-mounts"}, "exporter": {"pods": False},
    },
    "another vendor too": {
        "amd": True,
        "config": {"files": {"shared": SHARED}},
        "nodeInstaller": {"enabled": True},
        "migManager": {"enabled": True},
    },
    "few rights": {"exporter": {"pods": False}, "runtimeClass": {"name": ""}, "priorityClassName": ""},
    "other places": {
        "host": {"driverRoot": "/run/nvidia/driver", "kubelet": "/var/lib/k0s/kubelet", "cdi": "/etc/cdi", "mps": "/m"},
        "config": {"existing": "mine"},
        "nodeLabels": {"args": ["--remove-on-exit"]},
        "devicePlugin": {"resources": {"limits": {"memory": "200Mi"}}},
    },
    "in another chart": {
        "nameOverride": "gpus",
        "image": {"digest": f"sha256:{'0' * 64}"},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
        "exporter": {"serviceMonitor": True, "serviceMonitorLabels": {"release": "prometheus"}},
        "global": {"imageRegistry": "x"},
    },
    "not enabled": {"enabled": False},
    "nodes that nobody logs into": {
        "nodeInstaller": {"enabled": True, "default": True, "cdi": True, "args": ["--restart=systemd"]},
        "seLinuxType": "container_device_plugin_t", "jsonLogs": True,
    },
    "nodes that are set back": {
        "nodeInstaller": {"enabled": True, "remove": True, "resources": {"limits": {"memory": "200Mi"}}},
        "devicePlugin": {"enabled": False}, "exporter": {"enabled": False}, "nodeLabels": {"enabled": False},
        "host": {"hook": "/opt/hook"}, "runtimeClass": {"handler": "gpus"},
    },
    "GPUs cut by labels": {
        "migManager": {"enabled": True, "layouts": "version: v1\nmig-configs: {}\n", "pods": "drain", "default": "a"},
        "mps": {"enabled": True}, "mig": True, "jsonLogs": True,
    },
    "GPUs cut by labels, from a map": {
        "migManager": {
            "enabled": True, "existing": "mine", "args": ["--interval=60"], "resources": {"limits": {"cpu": "1"}},
        },
        "host": {"simulation": "/opt/gpus"}, "podAnnotations": {"a": "1"},
    },
    "pods of their own": {
        "podLabels": {"team": "gpu"}, "podAnnotations": {"a": "1"}, "nodeSelector": {"pool": "gpu"},
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}, {"name": "TZ", "value": "UTC"}],
        "mps": {"enabled": True}, "nodeInstaller": {"enabled": True}, "migManager": {"enabled": True},
        "exporter": {
            "podLabels": {"team": "metrics"}, "podAnnotations": {"b": "2"}, "nodeSelector": {"disk": "ssd"},
            "extraEnv": [{"name": "TZ", "value": "CET"}], "priorityClassName": "low", "tolerations": [],
            "updateStrategy": {"type": "OnDelete"},
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "preference": {"matchExpressions": [{"key": "x", "operator": "Exists"}]}}]}},
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "nvidia.com/gpu.present", "operator": "In", "values": ["true"]}]}],
            "serviceMonitor": True, "serviceMonitorInterval": "30s", "serviceMonitorTimeout": "10s",
            "serviceMonitorHonorLabels": False,
            "serviceMonitorRelabelings": [{"action": "labeldrop", "regex": "instance"}],
            "serviceMonitorMetricRelabelings": [{"action": "drop", "regex": "x"}],
        },
    },
    "nothing": {
        "devicePlugin": {"enabled": False}, "exporter": {"enabled": False}, "nodeLabels": {"enabled": False},
    },
}  # fmt: skip


def load_renderer() -> ModuleType:
    """Return packaging/kubernetes/render.py as a module."""
    spec = importlib.util.spec_from_file_location("render_chart", DEPLOYMENT / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["render_chart"] = module
    spec.loader.exec_module(module)
    try:
        module.find_helm()
    except module.ChartError as error:  # get_helm.py has one for x86-64 alone
        module.find_helm = functools.partial(pytest.skip, str(error), allow_module_level=True)
    return module


RENDERER = load_renderer()
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""In C where PyYAML has it."""


def objects(values: Mapping[str, Any], namespace: str = "gpu") -> list[Object]:
    return json.loads(_objects(json.dumps(values), namespace))


@functools.cache
def _objects(values: str, namespace: str) -> str:
    """Return objects as JSON: each test may change its own."""
    text = RENDERER.render(json.loads(values), namespace=namespace)
    return json.dumps([each for each in yaml.load_all(text, Loader=LOADER) if each])


def of_kind(found: list[Object], kind: str) -> dict[str, Object]:
    """Return objects of a kind by name; two of one name are an error."""
    chosen = [each for each in found if each["kind"] == kind]
    named = {each["metadata"]["name"]: each for each in chosen}
    assert len(named) == len(chosen)
    return named


def containers(found: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Yield (pod specification, container) of every DaemonSet."""
    for daemon_set in of_kind(found, "DaemonSet").values():
        pod = daemon_set["spec"]["template"]["spec"]
        for container in pod["containers"]:
            yield pod, container


def admits(pod: Object, labels: Mapping[str, str]) -> bool:
    """Return whether the pod's node affinity admits a node with these labels."""
    wanted = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return any(all(_holds(each, labels) for each in term["matchExpressions"]) for term in wanted)


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    assert expression["values"], "the API server refuses In and NotIn without values"
    inside = labels.get(expression["key"]) in expression["values"]
    return inside if expression["operator"] == "In" else not inside
