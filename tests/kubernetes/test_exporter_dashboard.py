"""The Grafana dashboard and the alerts: complete, and only of metrics and labels that the exporter has."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import requirements
from support.product import REPOSITORY

from ocigpu.exporter.exposition import HEALTH, Picture, render
from ocigpu.exporter.metrics import METRICS
from ocigpu.exporter.options import ExporterOptions
from ocigpu.exporter.owners import WHOLE
from ocigpu.exporter.sample import GpuSample, Instance, Sample

DASHBOARD = REPOSITORY / "packaging/grafana/ocigpu-gpus.json"
ALERTS = REPOSITORY / "packaging/prometheus/ocigpu-alerts.yaml"
DOCUMENT: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS = DOCUMENT["panels"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

DEFAULTS = {metric.name for metric in METRICS if metric.default and metric.kind != "label"}
OWN = {
    HEALTH,
    *re.findall(
        r"ocigpu_exporter_[a-z_]+",
        "".join(path.read_text() for path in (REPOSITORY / "ocigpu/exporter").glob("*.py")),
    ),
}
LABELS = {"hostname", "gpu", "UUID", "modelName", "GPU_I_PROFILE", "pod", "namespace", "container", "instance"}
LABELS |= {"GPU_I_ID", "err_code", "err_msg", "reason"}
FUNCTIONS = {"sum", "avg", "max", "min", "count", "by", "on", "rate", "unless", "offset", "label_values"}


def expressions() -> list[str]:
    found = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
    variables = [item["definition"] for item in DOCUMENT["templating"]["list"] if item["type"] == "query"]
    rules = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return [*found, *variables, *rules]


@pytest.mark.parametrize("text", expressions())
def test_an_expression_has_only_metrics_and_labels_that_are_there(text: str) -> None:
    check_brackets(text)
    words = re.sub(r'"[^"]*"', '""', text)
    words = re.sub(r"\[(\$__rate_interval|[0-9]+m)\]", "", words)
    assert not re.search(r"[^\w\s{}()=~!,<>*/+\-.\"$]", words), words
    names = set(re.findall(r"\b[A-Za-z_]\w*", words))
    assert names & (DEFAULTS | OWN), "no metric"
    assert names <= DEFAULTS | OWN | LABELS | FUNCTIONS
    for selector in re.findall(r"\{([^}]*)\}", text):
        for part in selector.split(","):
            assert re.fullmatch(r'\s*\w+(=|!=|=~|!~)"[^"]*"\s*', part), part


def check_brackets(text: str) -> None:
    pairs, open_ = {")": "(", "]": "[", "}": "{"}, []
    for letter in re.sub(r'"[^"]*"', "", text):
        if letter in pairs.values():
            open_.append(letter)
        elif letter in pairs:
            assert open_, text
            assert open_.pop() == pairs[letter], text
    assert not open_, text


def test_the_dashboard_has_what_grafana_needs() -> None:
    assert re.fullmatch(r"[a-z0-9-]{1,40}", DOCUMENT["uid"])
    assert DOCUMENT["title"]
    assert DOCUMENT["schemaVersion"] >= 36
    assert "id" not in DOCUMENT, "Grafana numbers dashboards itself"
    variables = {item["name"]: item for item in DOCUMENT["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    used = set(re.findall(r"\$\{?(\w+)", " ".join(expressions()))) - {"__rate_interval", "labels", "value"}
    assert used <= set(variables)
    for item in DOCUMENT["templating"]["list"]:
        assert item["type"] == "datasource" or item["datasource"] == SOURCE


def test_every_panel_can_be_drawn() -> None:
    numbers = [panel["id"] for panel in PANELS]
    assert len(set(numbers)) == len(numbers)
    for panel in PANELS:
        assert panel["title"]
        assert panel["type"] in ("row", "stat", "timeseries", "table")
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == SOURCE
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
        assert all(target["datasource"] == SOURCE for target in panel["targets"])
        assert set(panel["fieldConfig"]) == {"defaults", "overrides"}


def test_no_panel_covers_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_every_alert_says_what_is_the_matter() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert used <= LABELS
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)


def test_an_unhealthy_gpu_fires_one_alert_and_a_lost_one_another(tmp_path: Path) -> None:
    """Prometheus judges the exporter's own series.  Source: its manual, "Unit Testing for Rules"."""
    requirements.require(requirements.programs("promtool"))
    sick = Instance(7, ("MIG-7",), "1g.10gb", {})
    gpus = (GpuSample(0, "GPU-0"), GpuSample(1, "GPU-1", instances=(sick,)), GpuSample(2, "GPU-2", error="GPU is lost"))
    health = {("GPU-0", WHOLE): "XID 79", ("GPU-1", WHOLE): "", ("GPU-1", 7): "XID 94", ("GPU-2", WHOLE): "GPU is lost"}
    page = render((), Picture(Sample(gpus), health=health), ExporterOptions(), "n1").decode()
    series = [line.replace("{", '{instance="n1:9400",').rsplit(" ", 1) for line in page.splitlines() if line[0] != "#"]
    expected = {
        "GpuUnhealthy": {"XID 79": "GPU 0 of n1 is unhealthy: XID 79",
                         "XID 94": "GPU 1, instance 7, of n1 is unhealthy: XID 94"},
        "GpuLost": {"": "GPU 2 of n1 does not answer"},
    }  # fmt: skip
    rules = {
        "rule_files": [str(ALERTS)],
        "tests": [{
            "interval": "1m",
            "input_series": [{"series": name, "values": f"{number}x5"} for name, number in series],
            "alert_rule_test": [
                {"eval_time": when, "alertname": alert, "exp_alerts": [
                    {"exp_labels": {**labels_of(series, why, alert), "severity": "critical"},
                     "exp_annotations": {"summary": text}}
                    for why, text in (found.items() if when == "2m" else ())]}
                for alert, found in expected.items() for when in ("30s", "2m")
            ],
        }],
    }  # fmt: skip
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(rules))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def labels_of(series: list[list[str]], reason: str, alert: str) -> dict[str, str]:
    """Return the labels of the one series that fires an alert."""
    metric = {"GpuUnhealthy": f"{HEALTH}{{", "GpuLost": "ocigpu_exporter_gpu_up{"}[alert]
    (found,) = (name for name, number in series if name.startswith(metric) and number == "0" and
                (not reason or f'reason="{reason}"' in name))  # fmt: skip
    return dict(re.findall(r'(\w+)="([^"]+)"', found))
