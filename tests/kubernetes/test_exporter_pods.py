"""UIDs and labels of pods in the exporter's series: from the API server, and what tenants choose is bounded."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exporter_lab import kubelet, read_page
from hypothesis import given
from hypothesis import strategies as st
from support.api_server import FakeApiServer, make_account

from ocigpu.core.errors import SettingsError
from ocigpu.core.settings import Settings
from ocigpu.exporter.exposition import OWN_LABELS
from ocigpu.exporter.options import ExporterOptions
from ocigpu.exporter.pods import MAX_LABELS, TARGET_LABELS, PodFacts, PodLookup, compile_allowlist, make_labels
from ocigpu.exporter.sample import GpuSample, Sample
from ocigpu.exporter.service import ExporterService
from ocigpu.kubernetes.cluster.api_server import METADATA
from ocigpu.system.service import ServiceLog

PATH = "/api/v1/namespaces/team/pods/training"
UID = "11111111-2222-3333-4444-555555555555"
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"


def pod(uid: str = UID, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "training", "uid": uid, "labels": labels}}


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("account")
    make_account(directory)
    return directory


@pytest.fixture
def server(account: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    found = FakeApiServer(account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", found.place.host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(found.place.port))
    monkeypatch.setattr("ocigpu.kubernetes.cluster.api_server.PAUSES", ())
    yield found
    found.close()


# --- which labels, and under which names


def test_names_of_labels_are_those_of_dcgm_exporter() -> None:
    labels = {"app": "llm", "app.kubernetes.io/name": "a", "some-thing": "b", "9lives": "c"}
    assert make_labels(labels, compile_allowlist(())) == (
        ("_9lives", "c"), ("app", "llm"), ("app_kubernetes_io_name", "a"), ("some_thing", "b"),
    )  # fmt: skip


def test_only_allowed_keys_become_labels() -> None:
    allowed = compile_allowlist(("^app$", r"^team\.io/"))
    labels = {"app": "1", "apple": "2", "team.io/cost": "3", "x/team.io": "4"}
    assert make_labels(labels, allowed) == (("app", "1"), ("team_io_cost", "3"))


@pytest.mark.parametrize("pattern", ["(a", "(?=a)", r"(a)\1", "a{2000}"])
def test_an_expression_that_is_none_is_named(pattern: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="--kubernetes-pod-label-allowlist-regex") as raised:
        compile_allowlist((pattern,))
    assert raised.value.code == "OCIGPU-KUBE-4"
    assert capfd.readouterr().err == "", "the library says nothing of its own"


def test_an_expression_takes_no_more_time_than_a_key_is_long() -> None:
    begin = time.process_time()
    allowed = compile_allowlist(("(a+)+$", "(a|a)*b"))
    assert not allowed("a" * 300 + "c")
    assert time.process_time() - begin < 5


def test_a_pod_cannot_replace_labels_of_series_or_of_prometheus() -> None:
    taken = [*OWN_LABELS, *TARGET_LABELS, "__name__", "__address__", ""]
    labels = dict.fromkeys(taken, "evil") | {"pod.uid": "evil", "GPU-I-ID": "evil"}
    assert make_labels(labels, compile_allowlist(()), OWN_LABELS) == ()


def test_there_are_no_more_labels_than_are_good() -> None:
    labels = {f"k{number:04}": "v" for number in range(1000)} | {"a" * 318: "v", "long": "v" * 64}
    found = make_labels(labels, compile_allowlist(()))
    assert [name for name, _ in found] == [f"k{number:04}" for number in range(MAX_LABELS)]


@given(st.dictionaries(st.text(max_size=20), st.one_of(st.text(max_size=80), st.integers(), st.none())))
def test_any_labels_make_names_that_prometheus_accepts(labels: dict[str, Any]) -> None:
    found = make_labels(labels, compile_allowlist(()), OWN_LABELS)
    assert len({name for name, _ in found}) == len(found)
    for name, value in found:
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
        assert not name.startswith("__")
        assert "\n" not in value
    for other in (None, [], "x", 1):
        assert make_labels(other, compile_allowlist(())) == ()


# --- what is asked


def test_pods_are_read_one_by_one_and_only_their_metadata(server: FakeApiServer, account: Path) -> None:
    server.objects[PATH] = pod(app="llm")
    seen: list[dict[str, str]] = []
    serve = server.serve

    def watch(method: str, target: str, headers: dict[str, str], body: bytes) -> Any:
        seen.append({"method": method, "target": target, **headers})
        return serve(method, target, headers, body)

    server.serve = watch
    pods = PodLookup(compile_allowlist(()), (), str(account))
    pods.follow([("team", "training"), ("team", "../../secrets"), ("te/am", "x")])
    pods.look()
    assert pods.facts == {("team", "training"): PodFacts(UID, (("app", "llm"),))}
    assert [(each["method"], each["target"]) for each in seen] == [("GET", f"{PATH}?resourceVersion=0")]
    assert seen[0]["Accept"] == METADATA
    pods.look(everything=False)
    assert len(seen) == 1, "a known pod is not asked for at once"


def test_a_pod_keeps_its_facts_until_the_server_says_that_it_is_gone(server: FakeApiServer, account: Path) -> None:
    server.objects[PATH] = pod(app="llm")
    pods = PodLookup(None, (), str(account))
    pods.follow([("team", "training")])
    pods.look()
    assert pods.facts == {("team", "training"): PodFacts(UID)}, "labels are not wanted"
    server.answers = [403]
    pods.look()
    assert "403" in pods.problem
    assert pods.facts == {("team", "training"): PodFacts(UID)}
    server.objects[PATH] = pod("another")
    pods.look()
    assert (pods.problem, pods.facts[("team", "training")].uid) == ("", "another")
    del server.objects[PATH]
    pods.look()
    assert pods.facts == {}
    pods.follow([])
    pods.look()
    assert (pods.problem, pods.facts) == ("", {})


def test_outside_of_a_pod_it_says_why_there_are_none(tmp_path: Path) -> None:
    pods = PodLookup(None, (), str(tmp_path))
    pods.follow([("team", "training")])
    pods.look()
    assert pods.problem == "no API server: the pod has no service account's token"


def test_series_have_the_labels_and_no_page_waits_for_them(
    server: FakeApiServer, account: Path, tmp_path: Path
) -> None:
    """The kubelet names the pod, the API server its UID and labels; the second page has them."""
    server.objects[PATH] = pod(app='"}\n\\', pod="evil", hostname="evil")
    with kubelet(tmp_path, [("team", "training", "main", "nvidia.com/gpu", ["GPU-a"])]) as (socket, _):
        options = ExporterOptions(
            address="127.0.0.1:0", kubernetes=True, pod_resources_kubelet_socket=socket,
            kubernetes_enable_pod_labels=True, kubernetes_enable_pod_uid=True,
        )  # fmt: skip
        service = ExporterService(options, Settings(driver_root="/nonexistent"), ServiceLog(False))
        try:
            assert service.pods
            service.pods._account = str(account)
            gpu = GpuSample(0, "GPU-a", "00000000:01:00.0", "A", values={TEMPERATURE: 40})
            source = service.sources["nvidia"]
            service._take(source, Sample((gpu,)))
            ((labels, _),) = read_page(service.page.text.decode())[TEMPERATURE]
            assert (labels["pod"], labels["pod_uid"], "app" in labels) == ("training", "", False)
            service.pods.look(everything=False)
            service._take(source, Sample((gpu,)))
            ((labels, _),) = read_page(service.page.text.decode())[TEMPERATURE]
            assert (labels["pod"], labels["pod_uid"], labels["namespace"]) == ("training", UID, "team")
            assert labels["hostname"] == service.hostname
            assert labels["app"].startswith('"}')
            own = read_page(service.own_metrics().decode())
            assert own["ocigpu_exporter_pod_lookup_up"] == [({}, 1.0)]
        finally:
            service.web.close()
