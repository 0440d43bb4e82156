"""The alerts about leases, the service and the tenancy controller: Prometheus judges what the lease agent serves."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from lease_lab import GPUS
from support import requirements
from support.product import REPOSITORY

from ocigpu.kubernetes.leases.lease import Lease, Phase
from ocigpu.kubernetes.leases.metrics import METRICS, LeaseMetrics

ALERTS = REPOSITORY / "packaging/prometheus/ocigpu-tenants-alerts.yaml"
RULES = {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
FOREIGN = {
    "up", "probe_success", "kube_daemonset_status_number_unavailable", "kube_deployment_status_replicas_available",
    "kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes",
}  # fmt: skip
"""Of Prometheus, its blackbox exporter, kube-state-metrics (docs/metrics/workload) and the kubelet (volume_stats)."""
DEPLOYMENTS = REPOSITORY / "packaging/kubernetes"
CAAS = '{namespace="ocigpu",deployment="ocigpu-caas"}'
CONTROLLER = '{namespace="ocigpu",deployment="ocigpu-tenancy-controller"}'
CLAIM = '{namespace="ocigpu",persistentvolumeclaim="ocigpu-caas"}'


def test_an_alert_is_of_metrics_that_are_there_and_says_what_is_the_matter() -> None:
    assert len(RULES) == ALERTS.read_text().count("- alert:")
    for rule in RULES.values():
        names = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b|\bup\b", re.sub(r"\{.*?\}", "", rule["expr"])))
        assert names
        assert names <= FOREIGN | METRICS.keys(), rule
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_the_objects_that_alerts_name_are_those_of_the_manifests() -> None:
    text = "\n---\n".join((DEPLOYMENTS / f"{name}.yaml").read_text() for name in ("tenants", "leases", "caas"))
    there = {(one["kind"], one["metadata"]["name"]) for one in yaml.safe_load_all(text) if one}
    kinds = {"deployment": "Deployment", "daemonset": "DaemonSet", "persistentvolumeclaim": "PersistentVolumeClaim"}
    kinds |= {"job": "Service"}  # a ServiceMonitor's job is its Service's name
    found = [each for rule in RULES.values() for each in re.findall(r'(\w+)=~"([^"]+)"', rule["expr"])]
    for label, pattern in found:
        if label in kinds:
            assert [name for kind, name in there if kind == kinds[label] and re.fullmatch(pattern, name)], pattern
    assert {label for label, _ in found} == {*kinds, "phase"}


def series_of(phase: Phase, seconds: float) -> dict[str, str]:
    """Return what an agent serves of one GPU that has been in its phase so long, by minute for an hour."""
    metrics = LeaseMetrics(lambda: [(GPUS[0],)])
    metrics.take({GPUS[0]: Lease(GPUS[0], phase, since=100.0)}, 100.0 + seconds)
    lines = [line for line in metrics.render().decode().splitlines() if line[0] != "#"]
    found = dict(line.replace("{", '{instance="n1",').rsplit(" ", 1) for line in lines if "{" in line)
    return {name: f"{value}{'+60' if 'phase_seconds' in name else '+0'}x60" for name, value in found.items()}


CASES: dict[str, tuple[dict[str, str], dict[str, list[str]]]] = {
    "free": (series_of(Phase.FREE, 5), {}),
    "leased for long": (series_of(Phase.LEASED, 1e6), {}),
    "quarantined": (
        series_of(Phase.QUARANTINED, 5),
        {"GpuQuarantined": [f"GPU {GPUS[0]} of n1 is quarantined; ocigpu lease show says why"]},
    ),
    "not returned": (
        series_of(Phase.RECLAIMING, 0),
        {"GpuNotReturned": [
            f"GPU {GPUS[0]} of n1 is in Reclaiming for 30m 0s; ocigpu lease show says what it waits for"
        ]},
    ),
    "fails": (
        {'ocigpu_lease_failures_total{instance="n1",step="check",reason="OCIGPU-FW-1"}': "0+1x60"},
        {"LeaseStepsFail": ["On n1 check fails again and again (OCIGPU-FW-1)"]},
    ),
    "silent": (
        {'up{instance="n1",job="ocigpu-lease-agent"}': "0x60", 'up{instance="n1",job="node"}': "0x60"},
        {"LeaseAgentSilent": ["The lease agent n1 does not answer; without it no GPU of its node becomes free"]},
    ),
    "stuck": (
        {name: re.sub(r"\+60", "+0", values) for name, values in series_of(Phase.FREE, 5).items()},
        {"LeaseAgentStuck": ["The lease agent n1 answers but does no work; its log says why"]},
    ),
    "missing": (
        {'kube_daemonset_status_number_unavailable{namespace="ocigpu",daemonset="ocigpu-lease-agent"}': "2x60"},
        {"LeaseAgentMissing": ["2 nodes lack a running lease agent (ocigpu/ocigpu-lease-agent)"]},
    ),
    "service": (
        {f"kube_deployment_status_replicas_available{CAAS}": "0x60"},
        {"TenantServiceDown": ["No replica of ocigpu/ocigpu-caas is ready; containers run on"]},
    ),
    "service that is updated": (
        {f"kube_deployment_status_replicas_available{CAAS}": "1x26 0x2 1x30"},
        {},
    ),
    "unreachable": (
        {'probe_success{instance="https://caas.example/readyz",job="ocigpu-caas"}': "0x60"},
        {"TenantServiceUnreachable": ["https://caas.example/readyz does not answer tenants, or not with 200"]},
    ),
    "store": (
        {f"kubelet_volume_stats_{word}_bytes{CLAIM}": f"{number}x60"
         for word, number in {"available": "1e9", "capacity": "8e9"}.items()},
        {"TenantStoreNearlyFull": [
            "The service's store ocigpu/ocigpu-caas has 12.5% left; when it is full, new containers are refused"
        ]},
    ),
    "controller": (
        {f"kube_deployment_status_replicas_available{CONTROLLER}": "0x60"},
        {"TenancyControllerDown": [
            "No replica of ocigpu/ocigpu-tenancy-controller runs; tenancies are not created, suspended or repaired"
        ]},
    ),
}  # fmt: skip
"""Series of an hour, and the alerts that fire after half of it, with their text."""


def test_every_alert_has_a_case() -> None:
    assert {name for _, fired in CASES.values() for name in fired} == RULES.keys()


@pytest.mark.parametrize("name", CASES)
def test_prometheus_fires_these_alerts_and_no_others(name: str, tmp_path: Path) -> None:
    """Source: Prometheus' manual, "Unit Testing for Rules"."""
    requirements.require(requirements.programs("promtool"))
    series, fired = CASES[name]
    rules = {
        "rule_files": [str(ALERTS)],
        "tests": [{
            "interval": "1m",
            "input_series": [{"series": each, "values": values} for each, values in series.items()],
            "alert_rule_test": [
                {"eval_time": "30m", "alertname": alert, "exp_alerts": [
                    {"exp_labels": {**labels_of(alert, series), **rule["labels"]}, "exp_annotations": {"summary": text}}
                    for text in fired.get(alert, ())]}
                for alert, rule in RULES.items()
            ],
        }],
    }  # fmt: skip
    judge(tmp_path, "test", "rules", rules)


def labels_of(alert: str, series: dict[str, str]) -> dict[str, str]:
    """Return the labels of the series that fires an alert."""
    if alert == "LeaseAgentStuck":
        return {"instance": "n1"}
    metric = re.findall(r"\b(?:up|[a-z]+(?:_[a-z]+)+)(?=\{|\[| )", RULES[alert]["expr"])[0]
    found = [dict(re.findall(r'(\w+)="([^"]+)"', name)) for name in series if name.startswith(f"{metric}{{")]
    return found[0] if found else {}


def test_prometheus_accepts_the_configuration_of_the_page(tmp_path: Path) -> None:
    requirements.require(requirements.programs("promtool"))
    page = (REPOSITORY / "docs/METRICS.md").read_text()
    (block,) = [one for one in re.findall(r"^```yaml\n(.*?)^```", page, re.S | re.M) if "lease-agent" in one]
    jobs = yaml.safe_load(block)["scrape_configs"]
    found = jobs[0].pop("kubernetes_sd_configs")  # Debian's Prometheus is built without it
    assert found == [{"role": "endpoints", "namespaces": {"names": ["ocigpu"]}}]
    judge(tmp_path, "check", "config", {"scrape_configs": jobs, "rule_files": [str(ALERTS)]})


def judge(directory: Path, verb: str, what: str, document: dict[str, Any]) -> None:
    file = directory / "file.json"
    file.write_text(json.dumps(document))
    done = subprocess.run(["promtool", verb, what, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
