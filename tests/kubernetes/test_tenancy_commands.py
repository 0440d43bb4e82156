"""``ocigpu tenancy``: a cluster that KUBECONFIG names."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster
from tenancy_lab import install, make_controller, settle

from ocigpu.cli.front.main import main


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster() as cluster:
        install(cluster)
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path / "config")))
        yield cluster


def test_a_tenancy_is_made_seen_suspended_and_deleted(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> str:
        assert main(["tenancy", *words]) == 0
        return capsys.readouterr().out

    def run_json(*words: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(run(*words, "--json"))
        return found

    assert "made" in run("create", "landon", "--gpus", "4", "--internet", "--only-registry", "nvcr.io/nvidia")
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
    assert run_json("show", "landon")["spec"]["internet"] is True
    assert cluster.get("Tenancy", "landon")["spec"]["registries"] == ["nvcr.io/nvidia"]
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
    assert main(["tenancy", "create", "there"]) == 0
    for words, code, hint in [
        (["show", "nobody"], "OCIGPU-TEN-1", "ocigpu tenancy list"),
        (["delete", "nobody"], "OCIGPU-TEN-1", "ocigpu tenancy list"),
        (["create", "no.name"], "OCIGPU-KUBE-5", ""),
        (["create", "x", "--gpus", "-1"], "OCIGPU-KUBE-5", ""),
        (["create", "there"], "OCIGPU-KUBE-5", "Another client created"),
        (["controller", "--network", "calico"], "OCIGPU-ARG-1", "--help"),
        (["controller", "--deny", "10.0.0.1/8"], "OCIGPU-ARG-1", "--help"),
    ]:
        assert main(["tenancy", *words]) in (1, 2)
        error = capsys.readouterr().err
        assert code in error
        assert (hint in error) if hint else "hint" not in error
        assert "Traceback" not in error
    cluster.delete("CustomResourceDefinition", "tenancies.ocigpu.io")
    assert main(["tenancy", "create", "x"]) == 1
    assert "404 means a missing type of resource" in capsys.readouterr().err


def test_without_a_cluster_it_says_where_one_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    assert main(["tenancy", "list"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().err
    # a user is missing, which the library asserts; then nobody listens
    nobody = {"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}], "current-context": "c"}
    contexts = [{"name": "c", "context": {"cluster": "c"}}]
    (tmp_path / "nothing").write_text(json.dumps({**nobody, "contexts": contexts}))
    assert main(["tenancy", "list"]) == 1
    assert "OCIGPU-KUBE-5: API server: configuration: Missing user" in capsys.readouterr().err
    contexts[0]["context"] = {"cluster": "c", "user": "u"}
    users = [{"name": "u", "user": {"token": "t"}}]
    (tmp_path / "nothing").write_text(json.dumps({**nobody, "contexts": contexts, "users": users}))
    assert main(["tenancy", "list"]) == 1
    assert "list Tenancy: Connection refused\nhint: Is the API server reachable" in capsys.readouterr().err
