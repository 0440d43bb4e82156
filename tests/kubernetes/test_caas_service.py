"""The service for containers over HTTP, in front of the tests' API server."""

import asyncio
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import jwt
import pytest
from caas_lab import READY, SCHEDULED, SEED, TENANCY_TYPE, Lab, ended, main_status, make_lab, running
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jsonschema import Draft202012Validator
from support.cluster import Cluster
from support.lines import Lines
from support.process import run, wait_for

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.tenants.service.auth import OidcOptions, TokenReader
from ocigpu.tenants.service.cluster import ClusterClient, ClusterError
from ocigpu.tenants.service.endpoints import ENDPOINTS, problems_of
from ocigpu.tenants.service.intake import MAX_BODY
from ocigpu.tenants.service.models import LINKED, UNLINKED
from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.reconciler import Reconciler, ReconcilerPace
from ocigpu.tenants.service.request import TenantRules
from ocigpu.tenants.service.server import CaasServer, ServiceOptions
from ocigpu.tenants.service.store import CaasStore

PATH = "/v1/containers"
MOUNT = {"server": "nfs.example", "path": "/exports/landon/a", "target": "/data"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with make_lab(
        tmp_path_factory.mktemp("caas"), rules=TenantRules(exports=("nfs.example:/exports/{tenancy}",))
    ) as made:
        made.add_tenancy("other")
        yield made


@pytest.fixture(scope="module")
def key(lab: Lab) -> str:
    return lab.key()


def test_the_seeds_request_becomes_a_pod_and_its_end_is_told(lab: Lab, key: str) -> None:
    answer = lab.ask("POST", PATH, key, SEED)
    assert answer.status == 202
    made = answer.body
    assert answer.headers["location"] == f"/v1/containers/{made['id']}"
    assert (made["lifecycle"], made["tenancy"], made["gpus"], made["image"]) == (
        "accepted",
        "landon",
        1,
        SEED["container-url"],
    )
    pod = lab.pod(made["id"])
    assert pod["spec"]["runtimeClassName"] == "kata-qemu-nvidia-gpu"
    lab.set_status(made["id"], phase="Pending", conditions=READY, containerStatuses=main_status(waiting={}))
    assert lab.wait(key, made["id"], "pulling")["phases"]["vm_boot"] == 90
    lab.set_status(made["id"], **running())
    assert lab.wait(key, made["id"], "running")["started"] == "2026-11-23T10:02:00.000Z"
    lab.set_status(made["id"], **ended())
    found = lab.wait(key, made["id"], "finished")
    assert (found["reason"], found["exit_code"], found["finished"]) == ("completed", 0, "2026-11-23T10:05:00.000Z")
    tag = lab.ask("GET", f"{PATH}/{made['id']}", key).headers["etag"]
    assert lab.ask("GET", f"{PATH}/{made['id']}", key, if_none_match=tag).status == 304
    assert lab.ask("DELETE", f"{PATH}/{made['id']}", key).status == 202
    wait_for("its end", lambda: lab.ask("GET", f"{PATH}/{made['id']}", key).status == 404)
    assert not lab.cluster.exists("Pod", made["id"].replace("_", "-"), "tenant-landon")
    assert lab.ask("DELETE", f"{PATH}/{made['id']}", key).status == 404


def test_secrets_and_mounts_are_made_and_go_with_it(lab: Lab, key: str) -> None:
    made = lab.run(key, secrets={"TOKEN": "hidden-value"}, mounts=[MOUNT], command=["sh"], gpus=2)
    name = made.replace("_", "-")
    lab.pod(made)
    assert lab.cluster.get("Secret", name, "tenant-landon")["stringData"] == {"TOKEN": "hidden-value"}
    assert lab.cluster.exists("PersistentVolume", f"{name}-0")
    assert lab.cluster.exists("PersistentVolumeClaim", f"{name}-0", "tenant-landon")
    shown = json.dumps([lab.show(key, made), *lab.lines, lab.audits()])
    assert "hidden-value" not in shown
    assert lab.show(key, made)["secrets"] == ["TOKEN"]
    lab.bind(made)
    lab.set_status(made, **running())
    assert lab.ask("DELETE", f"{PATH}/{made}", key).body["lifecycle"] == "stopping"
    # the kubelet ends the container and says so
    wait_for("its deletion", lambda: "deletionTimestamp" in lab.pod(made)["metadata"])
    assert lab.cluster.exists("Secret", name, "tenant-landon")
    lab.cluster.delete("Pod", name, "tenant-landon", gracePeriodSeconds=0)
    wait_for("its end", lambda: lab.ask("GET", f"{PATH}/{made}", key).status == 404)
    left = [
        one for kind in ("Secret", "PersistentVolume", "PersistentVolumeClaim") for one in lab.cluster.objects(kind)
    ]
    assert [one for one in left if one["metadata"]["name"].startswith(name)] == []


def kubectl_delete(lab: Lab, command: str) -> None:
    """Do what `kubectl delete KINDS -n NAMESPACE -l LABEL=VALUE` does."""
    verb = r"kubectl delete (?P<kinds>\S+) -n (?P<space>\S+) -l (?P<label>\S+)=(?P<value>\S+)"
    found = re.fullmatch(verb, command)
    assert found, command
    names = {
        "pod": "Pod", "secret": "Secret", "pvc": "PersistentVolumeClaim", "pv": "PersistentVolume",
    }  # fmt: skip
    for kind in found["kinds"].split(","):
        for one in lab.cluster.objects(names[kind]):
            metadata = one["metadata"]
            place = metadata.get("namespace")
            if metadata.get("labels", {}).get(found["label"]) == found["value"] and place in (None, found["space"]):
                lab.cluster.delete(names[kind], metadata["name"], place)


def test_a_pod_that_an_older_store_does_not_know_is_told_once_with_what_ends_it(tmp_path: Path) -> None:
    rules = TenantRules(exports=("nfs.example:/exports/{tenancy}",))
    with make_lab(tmp_path, rules=rules) as lab:
        before = lab.run(lab.key())
        lab.pod(before)
        lab.stop()
        shutil.copytree(tmp_path / "state", tmp_path / "backup")
        lab.start()
        made = lab.run(lab.key(), gpus=2, secrets={"TOKEN": "x"}, mounts=[MOUNT])
        lab.pod(made)
        lab.stop()
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "backup").rename(tmp_path / "state")
        lab.lines.clear()
        lab.start()

        def told() -> list[str]:
            return [text for level, text in lab.lines if "the store does not know it" in text and level == "warning"]

        wait_for("a warning", told)
        admin = lab.admin

        def overview(key: str) -> str:
            return str(lab.ask("GET", "/v1/overview", key).body["problem"])

        wait_for("the overview", lambda: "unknown to the store: 1, with 2 GPUs" in overview(admin))
        assert "unknown" not in overview(lab.key())
        assert lab.ask("GET", "/readyz").status == 200
        (line,) = told()
        name = made.replace("_", "-")
        assert line.startswith(f"container {made} of tenancy landon, pod tenant-landon/{name}, GPUs: 2: ")
        kubectl_delete(lab, line.partition("hint: ")[2])
        kinds = ("Pod", "Secret", "PersistentVolume", "PersistentVolumeClaim")
        left = [one["metadata"]["name"] for kind in kinds for one in lab.cluster.objects(kind)]
        assert left == [before.replace("_", "-")]
        wait_for("the end of it", lambda: "unknown" not in overview(admin))
        assert len(told()) == 1


def test_who_pulls_an_image_is_known_to_its_registry_alone(lab: Lab, key: str) -> None:
    who = {"username": "robot", "password": "hidden-password"}
    body = {**SEED, "container-url": "ghcr.io/me/private:1", "pull_credentials": who, "secrets": {"A": "b"}}
    answer = lab.ask("POST", PATH, key, body, Idempotency_Key='"private"')
    again = lab.ask("POST", PATH, key, body, Idempotency_Key='"private"')
    assert answer.body["id"] == again.body["id"]
    made, name = answer.body["id"], answer.body["id"].replace("_", "-")
    assert lab.pod(made)["spec"]["imagePullSecrets"] == [{"name": f"{name}-pull"}]
    secret = lab.cluster.get("Secret", f"{name}-pull", "tenant-landon")
    assert secret["type"] == "kubernetes.io/dockerconfigjson"
    assert list(json.loads(secret["stringData"][".dockerconfigjson"])["auths"]) == ["ghcr.io"]
    assert lab.cluster.get("Secret", name, "tenant-landon")["stringData"] == {"A": "b"}
    shown = lab.show(key, made)
    assert (shown["has_pull_credentials"], shown["secrets"]) == (True, ["A"])
    wait_for("it to be forgotten", lambda: lab.server.store.find(made).secrets is None)
    wait_for("what is left of it to be removed", lambda: not lab.server.store.database.unclean)
    kept = b"".join(one.read_bytes() for one in (lab.directory / "state").iterdir())
    told = json.dumps([answer.body, shown, *lab.lines, lab.audits()])
    for hidden in ("hidden-password", "cm9ib3Q6aGlkZGVuLXBhc3N3b3Jk"):
        assert hidden not in told
        assert hidden.encode() not in kept
    assert "hidden-password" not in json.dumps(lab.pod(made))
    refused = lab.ask("POST", PATH, key, {**body, "container-url": "evil.example/x"})
    assert refused.body["code"] == "registry_not_allowed"
    lab.ask("DELETE", f"{PATH}/{made}", key)
    wait_for("its end", lambda: lab.ask("GET", f"{PATH}/{made}", key).status == 404)
    assert not lab.cluster.exists("Secret", f"{name}-pull", "tenant-landon")
    assert not lab.cluster.exists("Secret", name, "tenant-landon")


BAD: list[tuple[str, dict[str, Any], str, int]] = [
    ("not JSON", {"body": b"{"}, "request_invalid", 400),
    ("a name twice", {"body": b'{"image": "a", "image": "b"}'}, "request_invalid", 400),
    ("no number of JSON", {"body": b'{"image": "a", "gpus": NaN}'}, "request_invalid", 400),
    ("UTF-16", {"body": '{"image": "ubuntu"}'.encode("utf-16")}, "request_invalid", 400),
    ("deep", {"body": b"[" * 100_000}, "request_invalid", 400),
    ("no object", {"body": b"[]"}, "request_invalid", 400),
    ("unknown key", {"body": {**SEED, "gpu": 1}}, "request_invalid", 400),
    ("no image", {"body": {"tenancy": "landon"}}, "request_invalid", 400),
    ("3 GPUs", {"body": {**SEED, "gpus": 3}}, "gpus_no_partition", 422),
    ("no image's name", {"body": {**SEED, "container-url": "No Image"}}, "image_invalid", 422),
    ("another registry", {"body": {**SEED, "container-url": "10.0.0.1:5000/x"}}, "registry_not_allowed", 422),
    ("too long", {"body": {**SEED, "timeout_seconds": 10**9}}, "timeout_too_long", 422),
    ("a foreign export", {"body": {**SEED, "mounts": [{**MOUNT, "path": "/exports/other"}]}}, "mount_not_allowed", 422),
    ("a foreign tenancy", {"body": {**SEED, "tenancy": "other"}}, "tenancy_mismatch", 403),
    ("too large", {"body": b" " * (MAX_BODY + 1)}, "body_too_large", 413),
    ("no JSON by name", {"body": SEED, "Content_Type": "text/plain"}, "media_type", 415),
    ("a strange key", {"body": SEED, "Idempotency_Key": '"a'}, "parameter_invalid", 400),
    ("an unknown parameter", {"body": SEED, "path": f"{PATH}?gpus=1"}, "parameter_invalid", 400),
    ("no method", {"body": SEED, "method": "PUT"}, "method_not_allowed", 405),
    ("no path", {"path": "/v1/nothing"}, "not_found", 404),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "code", "status"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_bad_input_is_one_problem_and_leaves_nothing(
    lab: Lab, key: str, wanted: dict[str, Any], code: str, status: int
) -> None:
    before = (len(lab.server.store.list_containers("")), len(lab.cluster.objects("Pod")))
    wanted = {"method": "POST", "path": PATH, **wanted}
    answer = lab.ask(wanted.pop("method"), wanted.pop("path"), key, **wanted)
    assert (answer.status, answer.body["code"], answer.body["status"]) == (status, code, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.body["instance"] == f"urn:uuid:{answer.headers['x-request-id']}"
    assert {"type", "title", "detail", "fix"} <= answer.body.keys()
    assert (len(lab.server.store.list_containers("")), len(lab.cluster.objects("Pod"))) == before


def test_a_body_without_a_length_has_a_limit_too(lab: Lab, key: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", lab.server.port, timeout=60)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    chunks = (b" " * 65536 for _ in range(17))
    connection.request("POST", PATH, chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_places_in_a_body_are_named_and_values_are_not(lab: Lab, key: str) -> None:
    answer = lab.ask("POST", PATH, key, {**SEED, "secrets": {"TOKEN": ["hidden-value"]}, "mounts": [{"a/b": 1}]})
    pointers = {one["pointer"] for one in answer.body["errors"]}
    assert {"#/secrets/TOKEN", "#/mounts/0/a~1b", "#/mounts/0/server"} <= pointers
    assert "hidden-value" not in json.dumps(answer.body)


def test_tenancies_that_are_not_there_or_not_active(lab: Lab) -> None:
    lab.add_tenancy("asleep", "Suspended")
    assert lab.ask("POST", PATH, lab.key("nobody"), {"image": "ubuntu"}).body["code"] == "tenancy_unknown"
    assert lab.ask("POST", PATH, lab.key("asleep"), {"image": "ubuntu"}).body["code"] == "tenancy_not_active"
    admin = lab.admin
    assert lab.ask("POST", PATH, admin, {"image": "ubuntu"}).body["code"] == "tenancy_missing"
    assert lab.ask("POST", PATH, admin, {"image": "ubuntu", "tenancy": "other"}).body["tenancy"] == "other"


def test_a_tenancy_that_was_never_seen_is_made_for_whom_the_operator_names(tmp_path: Path) -> None:
    provider = Provider()
    try:
        oidc = OidcOptions(provider.url, "ocigpu")
        rules = TenantRules(creators=("admin", provider.url))
        with make_lab(tmp_path, oidc=oidc, rules=rules) as lab:
            refused = lab.ask("POST", PATH, lab.key("mine"), {"image": "ubuntu"})
            assert refused.body["code"] == "tenancy_unknown"  # a tenant's key makes none
            assert lab.ask("GET", "/v1/quotas?tenancy=mine", lab.admin).body["code"] == "tenancy_unknown"
            for wrong in ({"image": "No Image"}, {"image": "ubuntu", "gpus": 3}):
                assert lab.ask("POST", PATH, provider.token(tenancy="mine"), wrong).status == 422
            assert not lab.cluster.exists("Tenancy", "mine")
            for key, name in ((provider.token(tenancy="mine"), "mine"), (lab.admin, "yours")):
                answer = lab.ask("POST", PATH, key, {"image": "ubuntu", "tenancy": name})
                assert (answer.status, answer.body["tenancy"]) == (202, name)
                assert lab.cluster.get("Tenancy", name)["spec"] == {}
            lab.cluster.fail(1, 500, "POST", "/tenancies")
            again = lab.ask("POST", PATH, lab.admin, {"image": "ubuntu", "tenancy": "third"})
            assert (again.status, again.body["code"]) == (503, "cluster_unavailable")
        closed = tmp_path / "closed"
        closed.mkdir()
        with make_lab(closed, oidc=oidc) as lab:
            for key in (lab.admin, provider.token(tenancy="mine")):
                answer = lab.ask("POST", PATH, key, {"image": "ubuntu", "tenancy": "mine"})
                assert (answer.status, answer.body["code"]) == (422, "tenancy_unknown")
    finally:
        provider.close()


@pytest.mark.parametrize("counts", [LINKED, UNLINKED])
def test_numbers_of_gpus_are_those_of_the_document(tmp_path: Path, counts: tuple[int, ...]) -> None:
    with make_lab(tmp_path, rules=TenantRules(gpus=counts)) as lab:
        key, document = lab.key(), lab.ask("GET", "/v1/openapi.json").body
        wanted = document["components"]["schemas"]["ContainerRequest"]
        validator = Draft202012Validator({**wanted, "components": document["components"]})
        for count in range(-1, 18):
            body = {"image": "ubuntu", "gpus": count}
            answer = lab.ask("POST", PATH, key, body)
            assert answer.status == (202 if count in counts else 422)
            assert validator.is_valid(body) == (count in counts)
            if count in counts:
                assert answer.body["nvlink_partition"] == (count in (1, 2, 4, 8))
                limits = lab.pod(answer.body["id"])["spec"]["containers"][0]["resources"]["limits"]
                assert limits["nvidia.com/gpu"] == str(count)
                assert limits.get("cpu", "8") == str(8 * count)  # one: the namespace's default
            else:
                assert answer.body["detail"].endswith(f"not one of {', '.join(map(str, counts))}")


def test_a_tenancy_in_the_making_starts_containers_when_it_is_ready(lab: Lab) -> None:
    lab.add_tenancy("new", "Provisioning")
    key = lab.key("new")
    made = lab.run(key, tenancy="new")
    wait_for("the reason", lambda: lab.show(key, made)["reason"] == "tenancy_not_ready")
    assert not lab.cluster.exists("Pod", made.replace("_", "-"), "tenant-new")
    lab.cluster.patch("Tenancy", "new", {"status": {"phase": "Ready"}}, sub="status")
    lab.pod(made, "new")


def test_what_the_kubelet_says_of_a_pod_is_told(lab: Lab, key: str) -> None:
    made = lab.run(key)
    pod = lab.pod(made)["metadata"]
    about = {"kind": "Pod", "name": pod["name"], "namespace": pod["namespace"]}
    head = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "mount", "namespace": pod["namespace"]}}
    lab.cluster.create({**head, "reason": "FailedMount", "message": "access denied", "involvedObject": about})
    lab.set_status(made, phase="Pending", conditions=SCHEDULED)
    wait_for("its reason", lambda: lab.show(key, made)["reason"] == "volume_mount_failed")


def test_a_key_of_a_former_tenancy_is_none_of_its_names_next(lab: Lab) -> None:
    """Even before anybody has looked at whose the name is now."""
    lab.add_tenancy("renamed")
    assert lab.ask("GET", "/v1/quotas", lab.key("renamed")).status == 200
    head = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "Tenancy", "metadata": {"name": "renamed"}}
    store = lab.server.store
    for method, path, body in (("POST", PATH, {"image": "ubuntu"}), ("GET", "/v1/quotas", None)):
        store.keys.clock = lambda: time.time() - 60
        old = lab.key("renamed")
        store.keys.clock = time.time
        lab.cluster.delete("Tenancy", "renamed")
        lab.cluster.create({**head, "spec": {}})
        answer = lab.ask(method, path, old, body)
        assert (answer.status, answer.body["code"]) == (401, "credential_invalid")
    assert store.list_containers("renamed") == []


def test_a_tenancys_own_registries_are_held_to(lab: Lab) -> None:
    lab.add_tenancy("picky")
    key = lab.key("picky")
    body = {**SEED, "tenancy": "picky"}
    lab.cluster.patch("Tenancy", "picky", {"spec": {"registries": ["nvcr.io/nvidia/k8s", "ghcr.io"]}})
    assert lab.ask("POST", PATH, key, body).status == 202
    refused = lab.ask("POST", PATH, key, {**body, "container-url": "nvcr.io/nvidia/k8s-not/x"})
    assert (refused.status, refused.body["code"]) == (422, "registry_not_allowed")
    assert "nvcr.io/nvidia/k8s, ghcr.io" in refused.body["detail"]


def test_a_quota_is_told_before_the_cluster_refuses(lab: Lab) -> None:
    lab.add_tenancy("small", gpus=2)
    key = lab.key("small")
    lab.run(key, tenancy="small", gpus=2)
    wait_for(
        "the pod", lambda: any(one["metadata"]["namespace"] == "tenant-small" for one in lab.cluster.objects("Pod"))
    )
    quota = {"status": {"hard": {"requests.nvidia.com/gpu": "2"}, "used": {"requests.nvidia.com/gpu": "2"}}}
    lab.cluster.patch("ResourceQuota", "tenancy", quota, "tenant-small", sub="status")
    answer = lab.ask("POST", PATH, key, {"image": "ubuntu", "gpus": 1})
    assert (answer.status, answer.body["code"], answer.headers["retry-after"]) == (429, "quota_exceeded", "30")
    (item,) = lab.ask("GET", "/v1/quotas", key).body["items"]
    assert item == {"resource": "requests.nvidia.com/gpu", "hard": "2", "used": "2"}


def test_more_processors_or_memory_than_the_tenancy_has_are_refused(lab: Lab) -> None:
    lab.add_tenancy("narrow")
    lab.cluster.patch("Tenancy", "narrow", {"spec": {"quota": {"cpu": "16", "memory": "100Gi"}}})
    key = lab.key("narrow")
    for wanted in ({"cpus": 17}, {"memory": "101Gi"}):
        answer = lab.ask("POST", PATH, key, {"image": "ubuntu", **wanted})
        assert (answer.status, answer.body["code"]) == (429, "quota_exceeded")
    answer = lab.ask("POST", PATH, key, {"image": "ubuntu", "gpus": 8, "memory": "90Gi"})
    assert (answer.body["cpus"], answer.body["memory"]) == (None, "90Gi")
    limits = lab.pod(answer.body["id"], "narrow")["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "8", "cpu": "14", "memory": "90Gi"}


def test_other_tenancies_things_are_not_there(lab: Lab, key: str) -> None:
    made = lab.run(lab.key("other"), tenancy="other")
    nothing = lab.ask("GET", f"{PATH}/{made[:-1]}0", key)
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("GET", "/logs")):
        answer = lab.ask(method, f"{PATH}/{made}{path}", key)
        assert (answer.status, answer.body["code"]) == (404, "not_found")
        assert answer.body.keys() == nothing.body.keys()
    assert made not in json.dumps(lab.ask("GET", f"{PATH}?limit=200", key).body)
    refused = lab.ask("GET", f"{PATH}?tenancy=other", key).body
    assert (refused["code"], refused["detail"][:24]) == ("tenancy_mismatch", 'the request names "other')
    assert made in json.dumps(lab.ask("GET", f"{PATH}?limit=200&tenancy=other", lab.admin).body)


def test_a_list_has_pages(lab: Lab) -> None:
    lab.add_tenancy("many")
    key = lab.key("many")
    made = [lab.run(key, tenancy="many") for _ in range(5)]
    found: list[str] = []
    path = f"{PATH}?limit=2"
    while path:
        page = lab.ask("GET", path, key).body
        found += [one["id"] for one in page["items"]]
        path = f"{PATH}?limit=2&cursor={page['next_cursor']}" if page["next_cursor"] else ""
    assert found == made[::-1]
    cursor = lab.ask("GET", f"{PATH}?limit=2", key).body["next_cursor"]
    for other, query in ((key, "&lifecycle=running"), (lab.key(), ""), (key, "x")):
        assert lab.ask("GET", f"{PATH}?limit=2&cursor={cursor}{query}", other).body["code"] == "cursor_invalid"
    assert lab.ask("GET", f"{PATH}?lifecycle=finished", key).body["items"] == []
    assert "known are accepted, " in lab.ask("GET", f"{PATH}?lifecycle=walking", key).body["detail"]


def test_scopes_and_credentials(lab: Lab) -> None:
    reader = lab.key("landon", "containers:read")
    assert lab.ask("POST", PATH, reader, SEED).body["code"] == "scope_missing"
    assert lab.ask("GET", "/v1/keys", lab.key()).body["code"] == "scope_missing"
    missing = lab.ask("GET", PATH)
    assert (missing.status, missing.body["code"]) == (401, "credential_missing")
    assert missing.headers["www-authenticate"] == 'Bearer realm="ocigpu"'
    for wrong in ("ocigpu_x_y", "nonsense", "eyJhbGciOiJub25lIn0.e30."):
        assert lab.ask("GET", PATH, wrong).body["code"] == "credential_invalid"
    assert lab.ask("GET", PATH, Authorization="Basic YTpi").body["code"] == "credential_invalid"


def test_keys_are_made_shown_once_and_ended(lab: Lab) -> None:
    admin = lab.admin
    made = lab.ask("POST", "/v1/keys", admin, {"tenancy": "landon", "expires_seconds": 3600, "label": "ci"})
    assert made.status == 201
    me = lab.ask("GET", "/v1/me", made.body["key"]).body
    assert (me["tenancy"], me["scopes"]) == ("landon", ["containers:read", "containers:write", "logs:read"])
    listed = lab.ask("GET", "/v1/keys?limit=200", admin).body["items"]
    assert made.body["id"] in [one["id"] for one in listed]
    assert made.body["key"] not in json.dumps(listed)
    pages = [lab.ask("GET", "/v1/keys?limit=1", admin).body]
    while pages[-1]["next_cursor"]:
        pages.append(lab.ask("GET", f"/v1/keys?limit=1&cursor={pages[-1]['next_cursor']}", admin).body)
    assert [one["id"] for page in pages for one in page["items"]] == [one["id"] for one in listed]
    assert lab.ask("GET", "/v1/keys?cursor=AAAA", admin).body["code"] == "cursor_invalid"
    assert lab.ask("DELETE", f"/v1/keys/{made.body['id']}", admin).status == 204
    assert lab.ask("GET", "/v1/me", made.body["key"]).body["code"] == "credential_invalid"
    assert lab.ask("DELETE", "/v1/keys/none", admin).body["code"] == "not_found"
    for wrong in ({"tenancy": "landon", "scopes": ["admin"]}, {"scopes": ["logs:read"]}, {"scopes": []}):
        assert lab.ask("POST", "/v1/keys", admin, wrong).body["code"] == "request_invalid"


def test_each_mutation_is_an_audit_line(lab: Lab, key: str) -> None:
    made = lab.ask("POST", PATH, key, {**SEED, "secrets": {"A": "hidden-value"}})
    denied = lab.ask("POST", PATH, key, {**SEED, "tenancy": "other"})
    lines = {one["request_id"]: one for one in lab.audits()}
    good, bad = lines[made.headers["x-request-id"]], lines[denied.headers["x-request-id"]]
    assert good["resource"] == made.headers["location"]
    assert (good["action"], good["tenancy"], good["source"], good["result"]) == (
        "create_container", "landon", "127.0.0.1", "202",
    )  # fmt: skip
    assert good["actor"].startswith("key:")
    assert bad["result"] == "tenancy_mismatch"
    assert "hidden-value" not in json.dumps(lab.audits())
    assert {one["action"] for one in lab.audits()} <= {one.name for one in ENDPOINTS if one.method != "GET"}


# the document


def test_the_openapi_document_is_what_is_served(lab: Lab, key: str) -> None:
    document = lab.ask("GET", "/v1/openapi.json").body
    assert document["openapi"] == "3.1.1"
    served = {(one.path, one.method.lower()) for one in ENDPOINTS}
    assert {(path, method) for path, methods in document["paths"].items() for method in methods} == served
    assert {route.path for route in lab_routes(lab)} == set(document["paths"])
    # what is sent and answered is what it says
    made = lab.run(key, secrets={"A": "b"})
    lab.set_status(made, **running())
    lab.wait(key, made, "running")
    admin = lab.admin
    new = {"tenancy": "landon"}
    for method, path, real, who, body in (
        ("post", PATH, PATH, key, SEED),
        ("get", PATH, PATH, key, None),
        ("get", f"{PATH}/{{id}}", f"{PATH}/{made}", key, None),
        ("delete", f"{PATH}/{{id}}", f"{PATH}/{made}", key, None),
        ("get", "/v1/events", "/v1/events", key, None),
        ("get", "/v1/quotas", "/v1/quotas", key, None),
        ("get", "/v1/me", "/v1/me", key, None),
        ("post", "/v1/keys", "/v1/keys", admin, new),
        ("get", "/v1/keys", "/v1/keys", admin, None),
        ("get", "/readyz", "/readyz", "", None),
    ):
        said = document["paths"][path][method]
        if body is not None:
            check(document, said["requestBody"]["content"]["application/json"]["schema"], body)
        answer = lab.ask(method.upper(), real, who, body)
        content = said["responses"][str(answer.status)]["content"]
        check(document, content[answer.headers["content-type"]]["schema"], answer.body)
    refused = lab.ask("GET", PATH, "nonsense")
    check(
        document,
        document["paths"][PATH]["get"]["responses"]["401"]["content"]["application/problem+json"]["schema"],
        refused.body,
    )
    wanted = document["components"]["schemas"]["ContainerRequest"]
    validator = Draft202012Validator({**wanted, "components": document["components"]})
    assert [validator.is_valid(one) for one in (SEED, {"image": "x"}, {}, {"image": "x", "container-url": "y"})] == [
        True, True, False, False,
    ]  # fmt: skip


def lab_routes(lab: Lab) -> Any:
    app = lab.server.uvicorn_server.config.loaded_app
    while not hasattr(app, "routes"):
        app = app.app
    return [route for route in app.routes if route.path.startswith(("/v1", "/healthz", "/readyz"))]


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def test_the_documents_references_lead_somewhere(lab: Lab) -> None:
    document = lab.ask("GET", "/v1/openapi.json").body

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                found: Any = document
                for part in value["$ref"].removeprefix("#/").split("/"):
                    found = found[part]
            for one in value.values():
                walk(one)
        elif isinstance(value, list):
            for one in value:
                walk(one)

    walk(document)
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = [method["operationId"] for methods in document["paths"].values() for method in methods.values()]
    assert len(names) == len(set(names)) == len(ENDPOINTS)
    assert all(problems_of(one) for one in ENDPOINTS)


# an identity provider


class Provider:
    """One of OpenID Connect, for what a service asks of it."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[Any, str]] = {"one": (rsa.generate_private_key(65537, 2048), "RS256")}
        self.asked: list[str] = []
        self.broken = False
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                body = json.dumps(provider.answer(self.path)).encode()
                self.send_response(500 if provider.broken else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/realm"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def answer(self, path: str) -> Any:
        if path == "/realm/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        keys = []
        for name, (secret, algorithm) in self.keys.items():
            maker = jwt.algorithms.get_default_algorithms()[algorithm]
            public: Any = maker.to_jwk(secret.public_key(), as_dict=True)
            keys.append({**public, "kid": name, "alg": algorithm, "use": "sig"})
        return {"keys": [*keys, {"kty": "future", "kid": "x"}]}

    def token(self, name: str = "one", algorithm: str = "", secret: Any = None, **claims: Any) -> str:
        known, usual = self.keys[name]
        wanted = {"iss": self.url, "aud": "ocigpu", "sub": "ada", "tenancy": "landon", "exp": 4_000_000_000, **claims}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        return jwt.encode(wanted, secret or known, algorithm or usual, headers={"kid": name})

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_tokens_of_an_identity_provider(tmp_path: Path) -> None:
    provider = Provider()
    try:
        oidc = OidcOptions(provider.url, "ocigpu", algorithms=("RS256", "ES256"))
        with make_lab(tmp_path, oidc=oidc) as lab:
            me = lab.ask("GET", "/v1/me", provider.token()).body
            assert (me["actor"], me["tenancy"]) == ("oidc:ada", "landon")
            assert me["scopes"] == ["containers:read", "containers:write", "logs:read"]
            assert lab.ask("POST", PATH, provider.token(), SEED).status == 202
            only = provider.token(scope="openid containers:read admin")
            assert lab.ask("GET", "/v1/me", only).body["scopes"] == ["containers:read"]
            only = provider.token(scope=["openid", "logs:read"], exp=1e300)
            assert lab.ask("GET", "/v1/me", only).body["scopes"] == ["logs:read"]
            secret = rsa.generate_private_key(65537, 2048)
            public = b"0" * 64
            bad = [
                provider.token(aud="another"), provider.token(iss="http://127.0.0.1:1/x"), provider.token(exp=1),
                provider.token(exp=None), provider.token(sub=None), provider.token(nbf=3_900_000_000),
                provider.token(tenancy=None), provider.token(tenancy="../x"), provider.token(tenancy=["landon"]),
                provider.token(exp=float("inf")), provider.token(scope=7),
                provider.token(secret=secret), provider.token(algorithm="RS512"),
                provider.token(algorithm="HS256", secret=public), provider.token() + "x",
                jwt.encode({"sub": "x"}, "", "none", headers={"kid": "one"}), "a.b.c", "x" * 20_000,
            ]  # fmt: skip
            for token in bad:
                answer = lab.ask("GET", "/v1/me", token)
                assert (answer.status, answer.body["code"]) == (401, "credential_invalid"), token
            asked = len(provider.asked)
            assert lab.ask("GET", "/v1/me", provider.token()).status == 200
            assert len(provider.asked) == asked == 2  # keys are kept
            # a key that is new is looked for, once in a while; the provider may be away meanwhile
            reader = lab.server.tokens[0]
            provider.keys["two"] = (ec.generate_private_key(ec.SECP256R1()), "ES256")
            assert lab.ask("GET", "/v1/me", provider.token("two")).status == 401
            reader.tried_at -= 60
            assert lab.ask("GET", "/v1/me", provider.token("two")).status == 200
            provider.broken = True
            reader.read_at -= 900
            assert lab.ask("GET", "/v1/me", provider.token("two")).status == 200
            reader.read_at -= 9000
            reader.tried_at -= 60
            answer = lab.ask("GET", "/v1/me", provider.token("two"))  # nobody can say whether it is good
            assert (answer.status, answer.body["code"]) == (503, "provider_unavailable")
            assert answer.headers["retry-after"]
    finally:
        provider.close()


def test_tokens_that_anybody_makes_do_not_make_us_ask_the_provider_for_each() -> None:
    asked: list[str] = []

    async def fetch(url: str) -> bytes:
        asked.append(url)
        await asyncio.sleep(0)
        raise OSError("away")

    async def send() -> None:
        now = 10_000.0
        reader = TokenReader(OidcOptions("https://login.example", "ocigpu"), fetch, lambda: now)
        secret = ec.generate_private_key(ec.SECP256R1())
        tokens = [jwt.encode({"sub": "x"}, secret, "ES256", headers={"kid": str(number)}) for number in range(20)]
        for _ in range(2):
            results = await asyncio.gather(*map(reader.read, tokens), return_exceptions=True)
            # also those that did not ask themselves: the tokens may be good
            assert {getattr(one, "code", repr(one)) for one in results} == {"provider_unavailable"}
        assert len(asked) == 1
        now += 60
        with pytest.raises(Refusal):
            await reader.read(tokens[0])
        assert len(asked) == 2

    asyncio.run(send())


@pytest.mark.parametrize(
    ("known", "keys"),
    [
        ({"issuer": "https://login.example", "jwks_uri": "http://elsewhere.example/"}, {}),
        ({"issuer": "https://login.example", "jwks_uri": "https://login.example/keys"}, {"keys": ["x"]}),
        ([], {}),
        ("[" * 100_000, {}),
        (http.client.IncompleteRead(b""), {}),
    ],
    ids=["elsewhere", "no keys", "a list", "deep", "cut off"],
)
def test_whatever_a_provider_answers_is_a_refusal(known: Any, keys: Any) -> None:
    async def fetch(url: str) -> bytes:
        if isinstance(known, Exception):
            raise known
        found = keys if url.endswith("/keys") else known
        return (found if isinstance(found, str) else json.dumps(found)).encode()

    token = jwt.encode({"sub": "x"}, ec.generate_private_key(ec.SECP256R1()), "ES256", headers={"kid": "one"})
    with pytest.raises(Refusal, match="cannot be read"):
        asyncio.run(TokenReader(OidcOptions("https://login.example", "ocigpu"), fetch).read(token))


# a cluster that fails


def test_a_cluster_that_does_not_answer_is_told_and_nothing_is_made(
    lab: Lab, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(lab.server.store.list_containers("landon", limit=1000))
    for status in (0, 500):
        lab.cluster.fail(1_000_000, status, "GET", "/tenancies/")  # the service looks at tenancies by itself, too
        try:
            answer = lab.ask("POST", PATH, key, SEED)
        finally:
            lab.cluster.recover()
        assert (answer.status, answer.body["code"]) == (503, "cluster_unavailable")
        assert "retry-after" in answer.headers
    away = AsyncMock(side_effect=ClusterError(0, "Connect call failed ('127.0.0.1', 6443)"))
    monkeypatch.setattr(lab.server.reconciler.cluster, "read_tenancy", away)
    lab.lines.clear()
    answer = lab.ask("POST", PATH, key, SEED)
    assert answer.body["code"] == "cluster_unavailable"
    assert answer.body["detail"] == answer.body["title"], "the address of the API server is not a tenant's affair"
    assert [text for _, text in lab.lines if text.startswith("create_container: Connect call failed")]
    monkeypatch.setattr(Reconciler, "problem", "Connect call failed ('127.0.0.1', 6443)")
    assert "6443" in lab.ask("GET", "/v1/overview", lab.admin).body["problem"]
    assert lab.ask("GET", "/v1/overview", key).body["problem"] == answer.body["title"]
    assert len(lab.server.store.list_containers("landon", limit=1000)) == before


def test_a_cluster_with_another_version_of_tenancies(tmp_path: Path) -> None:
    with make_lab(tmp_path) as lab:
        found = lab.cluster.get("CustomResourceDefinition", "tenancies.ocigpu.io")
        found["spec"]["versions"][0]["name"] = "v2"
        lab.cluster.update(found)
        answer = lab.ask("POST", PATH, lab.key(), SEED)
        assert (answer.status, answer.body["code"]) == (503, "crd_version")


def test_a_full_disk_refuses_new_containers_and_the_service_goes_on(tmp_path: Path) -> None:
    with make_lab(tmp_path, pace=ReconcilerPace(0.2, 0.02, 0.2, 0.05)) as lab:
        key = lab.key()
        made = lab.run(key)
        lab.pod(made)
        store = lab.server.store
        store.limits = store.limits._replace(reserve=1 << 60)
        answer = lab.ask("POST", PATH, key, SEED)
        assert (answer.status, answer.body["code"], answer.headers["retry-after"]) == (503, "store_full", "30")
        store.forget, told = (lambda: os.write(-1, b"")), store.forget
        wait_for("the complaint", lambda: any("Bad file descriptor" in text for _, text in lab.lines))
        store.forget = told
        lab.set_status(made, **ended())
        assert lab.wait(key, made, "finished")["exit_code"] == 0
        store.limits = store.limits._replace(reserve=0)
        assert lab.ask("POST", PATH, key, SEED).status == 202


def test_requests_at_the_same_time_with_one_key_make_one_container(lab: Lab) -> None:
    lab.add_tenancy("race")
    key = lab.key("race")

    def send(_: int) -> tuple[int, str]:
        answer = lab.ask("POST", PATH, key, {"image": "ubuntu"}, Idempotency_Key='"same"')
        return answer.status, answer.body.get("id") or answer.body["code"]

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(send, range(24)))
    made = {text for status, text in found if status == 202}
    assert len(made) == 1
    assert {text for status, text in found if status != 202} <= {"idempotency_in_flight"}
    assert len(lab.server.store.list_containers("race")) == 1


# the program


def test_the_program_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    with Cluster() as cluster:
        cluster.create(TENANCY_TYPE)
        config = cluster.write_kubeconfig(tmp_path / "kubeconfig")
        ocigpu = [sys.executable, "-m", "ocigpu.cli.front.main", "caas"]
        state = ["--store", str(tmp_path / "state")]
        words = ["serve", *state, "--listen", "127.0.0.1:0", "--kubeconfig", str(config), "--json"]
        with subprocess.Popen([*ocigpu, *words], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout
                port = json.loads(process.stdout.readline())["port"]
                key = run([*ocigpu, "admin-key", *state]).stdout.strip()
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("GET", "/v1/me", headers={"Authorization": f"Bearer {key}", "Connection": "close"})
                assert json.loads(connection.getresponse().read())["scopes"] == ["admin"]
                connection.close()
                again = run([*ocigpu, *words], check=False)
                assert (again.returncode, "OCIGPU-CAAS-1" in again.stderr) == (1, True)
            finally:
                process.terminate()
            assert process.wait(60) == 0


ISSUER = ["--oidc-issuer", "https://login.example"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--listen", "0.0.0.0:0"], 1, "keys would be sent unencrypted"),
        (["--listen", "nowhere"], 1, "not HOST:PORT"),
        (["--tls-key", "k"], 2, "together"),
        (["--tls-key", "/none", "--tls-certificate", "/none"], 1, "/none, key /none: No such file or directory"),
        (["--tls-key", "/etc/hostname", "--tls-certificate", "/etc/hostname"], 1, "not a certificate with its key"),
        (["--kubeconfig", "/nonexistent"], 1, "API server: /nonexistent: "),
        (["--memory-per-gpu", "much"], 2, "quantity"),
        (["--registry", "No Registry"], 1, "not a registry"),
        (["--image-pull-policy", "Never"], 2, "Always, IfNotPresent"),
        (["--nfs", "/path"], 1, "not SERVER:/PATH"),
        (["--create-tenancies", "everybody"], 1, "neither admin nor the issuer"),
        (["--create-tenancies", "https://login.example"], 1, "neither admin nor the issuer"),
        (["--oidc-issuer", "http://login.example"], 1, "not an https address"),
        (ISSUER, 1, "--oidc-audience"),
        (
            ["--oidc-issuer", "https://login.example", "--oidc-audience", "x", "--oidc-algorithm", "none"],
            1,
            "not a signature",
        ),
    ],
)
def test_options_that_are_wrong_or_dangerous(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, said: str
) -> None:
    assert main(["caas", "serve", "--store", str(tmp_path / "state"), *words]) == status
    error = capsys.readouterr().err
    assert said in error
    assert "OCIGPU-CAAS-1" in error or status == 2
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("kind", ["link", "second name", "somebody else's"])
def test_an_audit_that_somebody_else_may_have_put_there_is_not_written(tmp_path: Path, kind: str) -> None:
    audit, other, cluster = tmp_path / "audit", tmp_path / "other", ClusterClient(AsyncMock())
    other.write_text("")
    if kind == "link":
        audit.symlink_to(other)
    elif kind == "second name":
        audit.hardlink_to(other)
    else:
        audit.write_text("")
        os.chown(audit, 12345, -1)
    options = ServiceOptions("127.0.0.1:0", str(tmp_path / "state"), audit=str(audit))
    with pytest.raises(HostError, match=f"audit {audit}: "):
        CaasServer(options, Lines(), cluster)
    assert not (tmp_path / "state").exists()


def test_an_admin_key_is_of_a_store_that_a_service_has_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    words = ["caas", "admin-key", "--store", str(store)]
    assert main(words) == 1
    assert f"OCIGPU-CAAS-1: {store}/caas.sqlite: no service has its store here" in capsys.readouterr().err
    assert not store.exists()
    CaasStore(str(store)).close()
    assert main(words) == 0
    assert len(capsys.readouterr().out.split()) == 1
