"""``ocigpu tenancy``: a cluster that KUBECONFIG names."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.cluster import Cluster
from tenancy_lab import install, make_controller, settle

from ocigpu.cli.main import main


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster() as cluster:
        install(cluster)
        document = {
            "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"token": "admin"}}],
            "current-context": "c",
        }
        (tmp_path / "config").write_text(yaml.safe_dump(document))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield cluster


def test_a_tenancy_is_made_seen_suspended_and_deleted(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> str:
        assert main(["tenancy", *words]) == 0
        return capsys.readouterr().out

    def run_json(*words: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(run(*words, "--json"))
        return found

    assert "made" in run("create", "landon", "--gpus", "4", "--internet")
    assert "Pending" in run("list")
    controller = make_controller(cluster)
    settle(controller)
    capsys.readouterr()
    assert run_json("list")["tenancies"] == [
        {"tenancy": "landon", "phase": "Ready", "gpus": 4, "used": "0", "namespace": "tenant-landon", "why": ""}
    ]
    shown = run("show", "landon")
    assert "NetworkIsolated" in shown
    assert "Observed" in shown
    assert run_json("show", "landon")["spec"]["internet"] is True  # type: ignore[index]
    run("suspend", "landon")
    settle(controller)
    capsys.readouterr()
    assert "Suspended" in run("list")
    run("suspend", "landon", "--resume")
    settle(controller)
    capsys.readouterr()
    assert run_json("delete", "landon")["phase"] == "Ready"
    settle(controller)
    assert not cluster.exists("Tenancy", "landon")


def test_what_is_wrong_is_said_in_a_line(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in [
        (["show", "nobody"], "OCIGPU-TEN-1"),
        (["delete", "nobody"], "OCIGPU-TEN-1"),
        (["create", "no.name"], "OCIGPU-KUBE-5"),
        (["create", "x", "--gpus", "-1"], "OCIGPU-KUBE-5"),
        (["controller", "--network", "calico"], "OCIGPU-ARG-1"),
        (["controller", "--deny", "10.0.0.1/8"], "OCIGPU-ARG-1"),
    ]:
        assert main(["tenancy", *words]) in (1, 2)
        error = capsys.readouterr().err
        assert code in error
        assert "Traceback" not in error


def test_without_a_cluster_it_says_where_one_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    assert main(["tenancy", "list"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().err
