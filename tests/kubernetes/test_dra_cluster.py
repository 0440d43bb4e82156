"""The DRA driver and an API server: what it publishes, with and without the features that it would like."""

import copy
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, NODE
from kubernetes_lab import host
from support.cluster import Cluster
from test_dra_slices import nine_gpus

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.client import HTTP_ERROR, is_gone, refused
from ocigpu.kubernetes.dra.cluster import ApiCluster, open_cluster
from ocigpu.kubernetes.dra.devices import DraDevice, DraNode, Taint, make_devices
from ocigpu.kubernetes.dra.publisher import Publisher
from ocigpu.kubernetes.dra.slices import ApiFeatures
from ocigpu.tenants.service.cluster import httpx

DEVICES = make_devices(DraNode(host("a100-8")))


class Gated(Cluster):
    """An API server that leaves these fields out of what it keeps."""

    without: tuple[str, ...] = ()

    def _prepare(self, kind: Any, document: dict[str, Any]) -> None:
        if kind.kind == "ResourceSlice":
            strip(document["spec"], self.without)
        super()._prepare(kind, document)


def strip(value: Any, names: tuple[str, ...]) -> None:
    if isinstance(value, dict):
        for name in names:
            value.pop(name, None)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        strip(item, names)


@pytest.fixture
def cluster() -> Iterator[Gated]:
    with Gated() as running:
        yield running


class Publishing:
    def __init__(self, cluster: Cluster, node: str = NODE) -> None:
        self.lines: list[str] = []
        self.cluster = ApiCluster(cluster.client())
        self.publisher = Publisher(self.cluster, DRIVER, node, lambda _level, text, **_: self.lines.append(text))


def pools(cluster: Cluster) -> list[tuple[int, int, int]]:
    """Return (generation, number of slices that should be there, devices) of each slice, by name."""
    found = sorted(cluster.objects("ResourceSlice"), key=lambda each: str(each["metadata"]["name"]))
    return [
        (
            each["spec"]["pool"]["generation"],
            each["spec"]["pool"]["resourceSliceCount"],
            len(each["spec"].get("devices") or []),
        )
        for each in found
    ]


def test_a_node_publishes_once(cluster: Gated) -> None:
    node = cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
    ours = Publishing(cluster)
    assert ours.publisher.publish(DEVICES) == (1, 0, ApiFeatures(), 1)
    assert pools(cluster) == [(1, 1, 8)]
    (found,) = cluster.objects("ResourceSlice")
    assert found["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]
    before = len([method for method, _ in cluster.requests if method != "GET"])
    assert ours.publisher.publish(DEVICES) == (0, 0, ApiFeatures(), 1)
    assert Publishing(cluster).publisher.publish(DEVICES) == (0, 0, ApiFeatures(), 1), (
        "a new driver knows what is there"
    )
    assert len([method for method, _ in cluster.requests if method != "GET"]) == before
    assert ours.publisher.publish(DEVICES[1:]) == (1, 1, ApiFeatures(), 1)
    assert pools(cluster) == [(2, 1, 7)]


def test_what_others_have_changed_is_put_right(cluster: Gated) -> None:
    ours = Publishing(cluster)
    ours.publisher.publish(DEVICES)
    (found,) = cluster.objects("ResourceSlice")
    changed = copy.deepcopy(found)
    changed["spec"]["devices"] = changed["spec"]["devices"][:1]
    cluster.update(changed)
    assert ours.publisher.publish(DEVICES).made == 1
    assert pools(cluster) == [(2, 1, 8)]
    cluster.delete("ResourceSlice", cluster.objects("ResourceSlice")[0]["metadata"]["name"])
    ours.publisher.publish(DEVICES)
    assert [count for _, _, count in pools(cluster)] == [8]


def test_counters_that_are_dropped_are_noticed_before_a_device_needs_them(cluster: Gated) -> None:
    cluster.without = ("sharedCounters", "consumesCounters")
    ours = Publishing(cluster)
    done = ours.publisher.publish((*DEVICES, *nine_gpus()))
    assert done.features == ApiFeatures(counters=False)
    assert pools(cluster) == [(1, 1, 8)], "MIG devices that could be given twice are not offered"
    assert any("leaves out sharedCounters" in line for line in ours.lines)
    assert ours.publisher.publish((*DEVICES, *nine_gpus())).made == 0
    cluster.without = ()
    again = Publishing(cluster)
    assert again.publisher.publish(nine_gpus()).features == ApiFeatures()
    assert {generation for generation, _, _ in pools(cluster)} == {2}


def test_taints_that_are_dropped_take_the_device_away(cluster: Gated) -> None:
    cluster.without = ("taints",)
    sick = DEVICES[0]._replace(taints=(Taint(f"{DRIVER}/xid", "79"),))
    ours = Publishing(cluster)
    assert ours.publisher.publish((sick, *DEVICES[1:])).features == ApiFeatures(taints=False)
    assert pools(cluster) == [(1, 1, 7)]


def test_a_server_without_the_effect_none_gets_no_such_taints(cluster: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes before 1.35 refuses the slice; its words are those of field.NotSupported."""
    noted = DEVICES[0]._replace(taints=(Taint(f"{DRIVER}/xid", "31", "None"),))
    sick = DEVICES[1]._replace(taints=(Taint(f"{DRIVER}/xid", "79"),))
    everything = (noted, sick, *DEVICES[2:])
    ours = Publishing(cluster)
    create = ours.cluster.create_slice

    def refuse(document: dict[str, Any]) -> Any:
        taints = [taint for each in document["spec"]["devices"] for taint in each.get("taints", ())]
        if any(taint["effect"] == "None" for taint in taints):
            text = 'spec.devices[0].taints[0].effect: Unsupported value: "None": supported values: "NoExecute"'
            raise HostError("OCIGPU-KUBE-5", f"API server: POST resourceslices: 422: {text}")
        return create(document)

    monkeypatch.setattr(ours.cluster, "create_slice", refuse)
    done = ours.publisher.publish(everything)
    assert (done.features, done.features.missing, done.slices) == (ApiFeatures(notes=False), (), 1)
    (published,) = cluster.objects("ResourceSlice")
    effects = [[taint["effect"] for taint in each.get("taints", ())] for each in published["spec"]["devices"]]
    assert effects == [[], ["NoSchedule"], *[[]] * (len(everything) - 2)]
    assert ours.publisher.publish(everything).made == 0


def test_taints_that_are_dropped_keep_devices_that_are_only_noted(cluster: Gated) -> None:
    cluster.without = ("taints",)
    noted = DEVICES[0]._replace(taints=(Taint(f"{DRIVER}/unmonitored", "", "None"),))
    Publishing(cluster).publisher.publish((noted, *DEVICES[1:]))
    assert pools(cluster) == [(1, 1, 8)]


def test_a_server_that_drops_what_cannot_be_done_without_is_an_error(cluster: Gated) -> None:
    cluster.without = ("attributes",)
    ours = Publishing(cluster)
    with pytest.raises(HostError, match=r"leaves out of a ResourceSlice: devices\[0\].attributes"):
        ours.publisher.publish(DEVICES)
    assert pools(cluster) == [], "nothing is left of the attempt"


def test_devices_that_the_api_would_refuse_take_nothing_from_the_others(cluster: Gated) -> None:
    wrong = DraDevice("gpu-9", "gpu", "9", "GPU-9", {"productName": {"string": "x" * 65}}, {})
    ours = Publishing(cluster)
    ours.publisher.publish((*DEVICES, wrong))
    assert pools(cluster) == [(1, 1, 8)]
    assert ours.lines == [
        'not published: device gpu-9: attribute "productName": string of 65 characters, 64 are allowed'
    ]


@pytest.mark.parametrize("failing", ["POST", "DELETE"])
def test_an_interrupted_change_is_finished_later(cluster: Gated, failing: str) -> None:
    ours = Publishing(cluster)
    ours.publisher.publish(DEVICES)
    cluster.fail(1, 500, failing, "/resourceslices")
    with pytest.raises(HostError, match="API server: "):
        ours.publisher.publish(DEVICES[1:])
    complete = [each for each in pools(cluster) if each[1] == 1]
    assert complete, "a whole pool is there at every moment"
    ours.publisher.publish(DEVICES[1:])
    assert pools(cluster) == [(2, 1, 7)]


@pytest.mark.rest
def test_100_nodes_of_8_gpus_in_one_cluster(cluster: Gated) -> None:
    """What one node writes is its own; nobody touches another's slices."""
    server = Publishing(cluster).cluster
    for number in range(100):
        Publisher(server, DRIVER, f"node-{number}", print).publish(DEVICES)
    found = cluster.objects("ResourceSlice")
    assert len(found) == 100
    assert {each["spec"]["nodeName"] for each in found} == {f"node-{number}" for number in range(100)}
    assert sum(len(each["spec"]["devices"]) for each in found) == 800
    lasting = {each["metadata"]["uid"] for each in found}
    Publishing(cluster, "node-7").publisher.publish(DEVICES[:4])
    assert len(lasting & {each["metadata"]["uid"] for each in cluster.objects("ResourceSlice")}) == 99


def test_claims_are_read_by_name(cluster: Gated) -> None:
    ours = ApiCluster(cluster.client())
    assert ours.get_claim("team", "gone") is None
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
    made = cluster.create(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "gpus", "namespace": "team"},
            "spec": {"devices": {"requests": []}},
        }
    )
    found = ours.get_claim("team", "gpus")
    assert found is not None
    assert found["metadata"]["uid"] == made["metadata"]["uid"]


def test_a_404_that_does_not_name_the_claim_is_no_claims_end(cluster: Gated) -> None:
    """A version that is served no more and a proxy answer so: the claim may be there, the version is asked again."""
    ours = ApiCluster(cluster.client())
    assert ours.get_claim("team", "gone") is None
    before = len(cluster.requests)
    cluster.fail(1, 404, "GET", "/resourceclaims")
    with pytest.raises(HostError, match="GET resourceclaims team/gone: 404"):
        ours.get_claim("team", "gone")
    assert ours.get_claim("team", "gone") is None
    assert [path.rpartition("/")[2] for _, path in cluster.requests[before:]] == ["gone", "resourceslices", "gone"]
    plain = httpx.Response(404, text="404 page not found", request=httpx.Request("GET", "http://127.0.0.1"))
    with pytest.raises(HTTP_ERROR) as raised:
        plain.raise_for_status()
    assert not is_gone(raised.value, "gone")
    assert "404 page not found" in refused("GET", raised.value).message


def test_a_version_that_another_thread_has_asked_again_is_not_lost(cluster: Gated) -> None:
    """It is forgotten with a 404 for a claim, while slices are written."""

    class Forgetful(ApiCluster):
        _version = property(lambda _: next(known), lambda *_: None)

    known = iter(["v1", ""])
    assert Forgetful(cluster.client()).version == "v1"


def test_errors_of_the_server_are_one_line(cluster: Gated, tmp_path: Path) -> None:
    cluster.fail(1, 403, "GET", "/resourceslices")
    with pytest.raises(HostError, match="LIST resourceslices: 403") as caught:
        ApiCluster(cluster.client()).list_slices(DRIVER, NODE)
    assert caught.value.code == "OCIGPU-KUBE-5"
    path = cluster.write_kubeconfig(tmp_path / "config")
    with closing(open_cluster(str(path))) as server:
        assert server.version == "v1"
    path.write_text(re.sub(r"http://[^\"]*", "http://127.0.0.1:1", path.read_text()))
    with closing(open_cluster(str(path))) as server, pytest.raises(HostError, match="LIST resourceslices"):
        server.list_slices(DRIVER, NODE)
    for text in ("", "{}", "clusters: 7"):
        path.write_text(text)
        with pytest.raises(HostError) as wrong:
            open_cluster(str(path))
        assert wrong.value.code == "OCIGPU-KUBE-5"
    with pytest.raises(HostError):
        open_cluster(str(tmp_path / "none"))


def test_a_server_without_the_group_says_so(cluster: Gated) -> None:
    cluster.fail(3, 404, "GET", "/resourceslices")
    with pytest.raises(HostError, match="serves none of resource"):
        assert ApiCluster(cluster.client()).version
