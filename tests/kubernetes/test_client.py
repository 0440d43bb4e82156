"""The API server's client: opened in one way, its errors in one line."""

import json
from pathlib import Path

import pytest
from lightkube import Client
from support.cluster import Cluster

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.client import ask, open_client
from ocigpu.kubernetes.cluster.documents import Documents


def test_no_proxy_of_the_environment_comes_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with Cluster() as cluster:
        documents = Documents(open_client(Client, str(cluster.write_kubeconfig(tmp_path / "config"))))
        assert documents.get("Namespace", "none") is None
        documents.close()


def test_an_answer_that_means_nothing_is_an_error_of_one_line() -> None:
    with pytest.raises(HostError, match="get x: Expecting") as raised:
        ask("get x", lambda: json.loads("<html>"), None)
    assert raised.value.code == "OCIGPU-KUBE-5"
