"""The page of the service for containers, and what it shows: nodes, GPUs, leases, partitions, containers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from caas_lab import Lab, ended, make_lab, running
from support import requirements
from support.browser import Browser, missing
from support.process import wait_for

from ocigpu.tenants.service.fleet import view_nodes
from ocigpu.tenants.service.page import FILE, make_headers

TEXT = Path(FILE).read_text()
PHASES = ("Free", "Reserved", "Leased", "Reclaiming", "Checking", "Quarantined", "Maintenance", "Unknown")
CRD = Path(__file__).parents[2] / "packaging/kubernetes/chart/kinds/gpuleases.yaml"


def address(module: int) -> str:
    return f"0000:{module:02x}:00.0"


def add_lease(lab: Lab, module: int) -> None:
    head = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "GPULease", "metadata": {"name": f"n1-gpu-{module}"}}
    lab.cluster.create({**head, "spec": {"nodeName": "n1", "pciAddress": address(module)}})


def set_lease(lab: Lab, module: int, phase: str, **status: Any) -> None:
    status = {"phase": phase, "generation": 7, "physicalId": module, **status}
    lab.cluster.patch("GPULease", f"n1-gpu-{module}", {"status": status}, sub="status")


def add_node(lab: Lab) -> None:
    status = {"capacity": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]}
    lab.cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {}})
    lab.cluster.patch("Node", "n1", {"status": status}, sub="status")
    holder = {"tenancy": "landon", "namespace": "tenant-landon", "podName": "ctr-01"}
    for module, phase in enumerate(PHASES, 1):
        more: dict[str, Any] = {"holder": holder, "set": [address(3), address(4)]} if phase == "Leased" else {}
        more |= {"reason": "FirmwareMismatch"} if phase == "Quarantined" else {}
        add_lease(lab, module)
        set_lease(lab, module, phase, **more)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with make_lab(tmp_path_factory.mktemp("caas")) as made:
        made.cluster.apply_manifests(CRD)
        add_node(made)
        yield made


def test_nodes_and_leases_are_read_whatever_is_in_them() -> None:
    assert view_nodes([{"metadata": {"name": "plain"}}], [], "nvidia.com/gpu") == []
    (node,) = view_nodes([], [{"metadata": {"name": "x"}}], "nvidia.com/gpu")
    assert (node.name, node.ready, node.gpus[0].phase) == ("unknown", False, "Unknown")
    strange = {"metadata": {"name": "y"}, "status": {"physicalId": "x", "set": ["a"], "generation": "z"}}
    (node,) = view_nodes([], [strange], "nvidia.com/gpu")
    assert (node.gpus[0].module, node.gpus[0].partition, node.gpus[0].generation) == (None, [], None)


def test_the_overview_has_nodes_for_who_may_see_them(lab: Lab) -> None:
    lab.add_tenancy("other")
    foreign = lab.run(lab.key("other"), tenancy="other")
    mine = lab.run(lab.key())
    admin = lab.admin
    wait_for("the leases", lambda: len(lab.ask("GET", "/v1/overview", admin).body["nodes"][0]["gpus"]) == 8)
    found = lab.ask("GET", "/v1/overview", admin).body
    (node,) = found["nodes"]
    assert (node["name"], node["ready"], node["capacity"]) == ("n1", True, 8)
    assert [gpu["phase"] for gpu in node["gpus"]] == [*PHASES]
    third = node["gpus"][2]
    assert (third["tenancy"], third["container"], third["partition"]) == ("landon", "ctr_01", [3, 4])
    assert {mine, foreign} <= {one["id"] for one in found["containers"]}
    own = lab.ask("GET", "/v1/overview", lab.key()).body
    assert own["nodes"] is None
    assert foreign not in json.dumps(own)
    assert lab.ask("GET", "/v1/overview", lab.key("landon", "containers:read", "fleet:read")).body["nodes"]


def test_the_overview_comes_again_when_something_changes(lab: Lab) -> None:
    with lab.open("GET", "/v1/overview", lab.admin, Accept="text/event-stream") as answer:

        def overview() -> Any:
            while True:
                line = answer.readline().decode()
                if line.startswith("data: "):
                    return json.loads(line[6:])

        assert overview()["nodes"]
        set_lease(lab, 1, "Reserved")
        while overview()["nodes"][0]["gpus"][0]["phase"] != "Reserved":
            pass
        set_lease(lab, 1, "Free")


def test_the_page_loads_nothing_and_permits_nothing_else(lab: Lab) -> None:
    answer = lab.ask("GET", "/")
    policy = answer.headers["content-security-policy"]
    assert answer.body.decode() == TEXT
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy == make_headers(TEXT)["Content-Security-Policy"]
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|@import|url\(|\bon[a-z]+=|innerHTML|eval\(", TEXT)
    assert not re.findall(r"https?://|<script [^>]*src| style=", TEXT)
    assert TEXT.count("<script>") == TEXT.count("<style>") == 1
    for phase in PHASES:  # a word and a sign: colour is not all
        assert re.search(rf'{phase}: \["', TEXT), phase


def test_the_page_in_a_browser(lab: Lab, tmp_path: Path) -> None:
    requirements.require(missing())
    key = lab.admin
    made = lab.run(lab.key(), gpus=2)
    lab.pod(made)
    with Browser(tmp_path) as browser:
        base = f"http://127.0.0.1:{lab.server.port}"
        browser.dark(False)
        browser.go(f"{base}/")
        wait_for("the form", lambda: browser.ask("document.querySelector('#login')?.hidden") is False)
        submit = "document.getElementById('login').requestSubmit()"
        browser.ask(f"document.getElementById('key').value = 'ocigpu_x_y'; {submit}")
        wait_for(
            "the refusal", lambda: "credential_invalid" in browser.ask("document.getElementById('problem').innerText")
        )
        browser.complaints.clear()  # the browser logs each answer of 401
        browser.ask(f"document.getElementById('key').value = '{key}'; {submit}")
        phases = "[...document.querySelectorAll('.gpu')].map((one) => one.dataset.phase).join()"
        wait_for("the nodes", lambda: browser.ask(phases) == ",".join(PHASES))
        shown = str(browser.ask("document.body.innerText"))
        for text in (
            "n1",
            "8 GPUs",
            "\u2715 Quarantined",
            "FirmwareMismatch",
            "{3,4}",
            "\u25cb Free",
            "landon",
            "live",
        ):
            assert text in shown, text
        # live: a lease, a container
        set_lease(lab, 1, "Leased")
        wait_for("the lease", lambda: str(browser.ask(phases)).startswith("Leased,"))
        row = f"document.querySelector('[data-container={made}]')?.innerText || ''"
        lab.set_status(made, **running())
        wait_for("the container", lambda: "running" in browser.ask(row) and "vm boot 90.0 s" in browser.ask(row))
        # the service goes and comes back
        lab.stop()
        wait_for("the news", lambda: "again" in browser.ask("document.getElementById('state').innerText"))
        lab.start()
        lab.set_status(made, **ended())
        wait_for("the end", lambda: "finished" in browser.ask(row), on_failure=lambda: str(browser.complaints))
        # both colours; the colours of the text are readable in both
        back = "getComputedStyle(document.body).backgroundColor"
        light = browser.ask(back)
        browser.dark(True)
        assert browser.ask(back) != light
        assert browser.ask("matchMedia('(prefers-color-scheme: dark)').matches")
        assert {url for url in browser.urls if not url.startswith(base)} <= {"about:blank"}
        assert [one for one in browser.complaints if "ERR_" not in one] == []  # connections that the restart broke
        # nothing that is put into the page runs
        evil = "one.textContent = 'window.evil = 1'; document.body.append(one)"
        browser.ask(f"{{const one = document.createElement('script'); {evil}}}")
        assert browser.ask("window.evil === undefined")
        # a key in the address is taken out of it
        browser.go(f"{base}/#key={lab.key()}")
        browser.call("Page.reload")
        wait_for("the address", lambda: browser.ask("location.hash") == "")


def test_a_tenants_page_has_no_nodes(lab: Lab, tmp_path: Path) -> None:
    requirements.require(missing())
    made = lab.run(lab.key())
    with Browser(tmp_path) as browser:
        browser.go(f"http://127.0.0.1:{lab.server.port}/#key={lab.key()}")
        wait_for("the container", lambda: made in str(browser.ask("document.body?.innerText")))
        assert browser.ask("document.getElementById('fleet').hidden")
        assert "n1" not in browser.ask("document.getElementById('nodes').innerText")
        assert browser.ask("location.hash") == ""
