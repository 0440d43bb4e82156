"""The Grafana dashboard and the alerts: complete, and only of metrics and labels that the exporter has."""

import json
import re
from typing import Any

import pytest
import yaml
from support.product import REPOSITORY

from ocigpu.exporter.metrics import METRICS

DASHBOARD = REPOSITORY / "packaging/grafana/ocigpu-gpus.json"
ALERTS = REPOSITORY / "packaging/prometheus/ocigpu-alerts.yaml"
DOCUMENT: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS = DOCUMENT["panels"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

DEFAULTS = {metric.name for metric in METRICS if metric.default and metric.kind != "label"}
OWN = set(
    re.findall(
        r"ocigpu_exporter_[a-z_]+",
        "".join(path.read_text() for path in (REPOSITORY / "ocigpu/exporter").glob("*.py")),
    )
)
LABELS = {"hostname", "gpu", "UUID", "modelName", "GPU_I_PROFILE", "pod", "namespace", "container", "instance"}
LABELS |= {"GPU_I_ID", "err_code", "err_msg"}
FUNCTIONS = {"sum", "avg", "max", "min", "count", "by", "rate", "unless", "offset", "label_values"}


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
