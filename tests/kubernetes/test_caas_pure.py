"""The service for containers: what needs neither server nor cluster."""

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from caas_lab import READY, SCHEDULED, SEED, ended, main_status, running
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ocigpu.tenants.service.auth import Principal
from ocigpu.tenants.service.cluster import ClusterClient, ClusterError, ShortLines, httpx
from ocigpu.tenants.service.containers import check_request, secret_values
from ocigpu.tenants.service.cursors import make_cursor, read_cursor
from ocigpu.tenants.service.endpoints import ENDPOINTS, problems_of
from ocigpu.tenants.service.image import REGISTRIES, check_registry, parse_image
from ocigpu.tenants.service.intake import read_model
from ocigpu.tenants.service.lifecycle import (
    MAX_JUDGED,
    REASONS,
    ContainerStanding,
    judge_output,
    read_standing,
)
from ocigpu.tenants.service.models import FINAL, LIFECYCLES, SCOPES, ContainerRequest, KeyRequest, Phases
from ocigpu.tenants.service.pods import (
    ContainerPlan,
    PodOptions,
    make_docker_config,
    plan_pod,
    plan_secrets,
    plan_volumes,
)
from ocigpu.tenants.service.problems import PROBLEMS, Refusal
from ocigpu.tenants.service.reconciler import plan_of, wait_at_most
from ocigpu.tenants.service.request import MAX_STREAMS, ApiRequest, ServiceState, TenantRules
from ocigpu.tenants.service.server import audit_text
from ocigpu.tenants.service.store import StoredContainer
from ocigpu.tenants.service.web import PathPattern

D = "sha256:" + "a" * 64
ACCEPTED = 1795428000.0
"""2026-11-23T10:00:00Z"""


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest"),
        ("nvidia/cuda:12.5.0", "docker.io/nvidia/cuda:12.5.0"),
        ("a/b/c", "docker.io/a/b/c:latest"),
        ("localhost/x", "localhost/x:latest"),
        ("index.docker.io/ubuntu", "docker.io/library/ubuntu:latest"),
        ("a_b/x", "docker.io/a_b/x:latest"),
        ("a__b/c---d:1", "docker.io/a__b/c---d:1"),
        ("[fd00::1]:5000/x", "[fd00::1]:5000/x:latest"),
        ("0" * 64 + "/x", "docker.io/" + "0" * 64 + "/x:latest"),
        ("nvcr.io/x@sha384:" + "a" * 96, "nvcr.io/x@sha384:" + "a" * 96),
        ("localhost:5000/x:1", "localhost:5000/x:1"),
        ("Registry/x", "Registry/x:latest"),
        (f"ghcr.io/a/b:t@{D}", f"ghcr.io/a/b:t@{D}"),
        (f"ghcr.io/a/b@{D}", f"ghcr.io/a/b@{D}"),
        (SEED["container-url"], SEED["container-url"]),
    ],
)
def test_references_are_read_as_engines_do(text: str, full: str) -> None:
    assert str(parse_image(text)) == full


@pytest.mark.parametrize(
    "text",
    ["a_b.c/x", "a__b:80/x", "x-/y.z", "-a.b/x", "a.b-/x", "[::1]x/y", "[::g]/x", "a.b:/x", "a.b:x/y", "a" * 64,
     "0" * 64, "nvcr.io/x@sha384:" + "a" * 64, "nvcr.io/x@sha256:" + "A" * 64, "a._b", "a.b/c__.d",
     "x/" + "y" * 250, "é.b/x", "a.b/x:é",
     "", " ", "UPPER", "a//b", "/a", "a/", "a:", "a@sha256:0", "a b", "https://nvcr.io/x", "a\n", "-a", "a:-t", "a@x",
     "nvcr.io/", "x" * 300, "a/../b", "é", "nvcr.io/x;rm"],
)  # fmt: skip
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse_image(text)
    assert caught.value.code == "image_invalid"


@given(st.text(alphabet="ab_.-:/@[]0A", max_size=40))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    with contextlib.suppress(Refusal):
        found = parse_image(text)
        assert parse_image(str(found)) == found
        assert re.fullmatch(r"[A-Za-z0-9.:\[\]-]+", found.registry)


def test_only_registries_that_are_allowed() -> None:
    check_registry(parse_image("ubuntu"), REGISTRIES)
    check_registry(parse_image("nvcr.io/nvidia/cuda"), ["nvcr.io/nvidia/"])
    for image in ("nvcr.io/nvidiax/cuda", "evil.nvcr.io/nvidia/cuda", "10.0.0.1:5000/x", "localhost/x"):
        with pytest.raises(Refusal) as caught:
            check_registry(parse_image(image), ["nvcr.io/nvidia"])
        assert caught.value.code == "registry_not_allowed"


@given(st.binary(min_size=32, max_size=32), st.text("ctr_0123456789", min_size=1), st.text("ab", max_size=3))
def test_a_cursor_is_of_its_list_alone(secret: bytes, last: str, tenancy: str) -> None:
    cursor = make_cursor(secret, last, {"tenancy": tenancy})
    assert read_cursor(secret, cursor, {"tenancy": tenancy}) == last
    for wrong, filters in ((cursor, {"tenancy": tenancy + "x"}), (f"A{cursor}", {"tenancy": tenancy}), ("é", {})):
        with pytest.raises(Refusal):
            read_cursor(secret, wrong, filters)


def request(**wanted: Any) -> ContainerRequest:
    return ContainerRequest.model_validate({**SEED, **wanted})


MOUNT = {"server": "nfs.example", "path": "/exports/landon/data", "target": "/data"}


def container(**wanted: Any) -> StoredContainer:
    rules = TenantRules(exports=("nfs.example:/exports/{tenancy}",))
    asked = request(**wanted)
    made = check_request(asked, "landon", rules)
    return StoredContainer(
        "ctr_01",
        "landon",
        ACCEPTED,
        json.dumps(made),
        asked.secrets,
        False,
        False,
        False,
        ContainerStanding("accepted"),
        1,
    )


def test_the_seeds_request_is_a_pod_in_a_virtual_machine() -> None:
    pod = plan_pod(plan_of(container()), PodOptions())
    assert pod["metadata"] == {
        "name": "ctr-01",
        "namespace": "tenant-landon",
        "labels": {
            "ocigpu.io/container": "ctr_01",
            "ocigpu.io/tenancy": "landon",
            "app.kubernetes.io/managed-by": "ocigpu-caas",
        },
    }
    spec = pod["spec"]
    (main,) = spec["containers"]
    assert spec["runtimeClassName"] == "kata-qemu-nvidia-gpu"
    assert main["image"] == SEED["container-url"]
    assert main["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert not {"hostNetwork", "hostPID", "nodeName", "tolerations"} & spec.keys()
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 86400
    assert main["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize(
    ("registry", "host"), [("docker.io", "https://index.docker.io/v1/"), ("10.0.0.1:5000", "10.0.0.1:5000")]
)
def test_credentials_are_for_one_registry_in_the_form_of_the_kubelet(registry: str, host: str) -> None:
    config = json.loads(make_docker_config(registry, "é", 'a:"b'))
    (one,) = config["auths"].items()
    assert (one[0], one[1]["username"], one[1]["password"]) == (host, "é", 'a:"b')
    assert base64.b64decode(one[1]["auth"]).decode() == 'é:a:"b'


def test_an_image_is_asked_for_at_its_registry_each_time() -> None:
    """Else a tenant runs, without credentials, what another one's have brought to the node."""
    for image in ("ubuntu:22.04", f"nvcr.io/x@{D}", "ghcr.io/me/private:1"):
        spec = plan_pod(plan_of(container(**{"container-url": image})), PodOptions())["spec"]
        assert spec["containers"][0]["imagePullPolicy"] == "Always"
        assert "imagePullSecrets" not in spec
    preloaded = plan_pod(plan_of(container()), PodOptions(pull_policy="IfNotPresent"))["spec"]
    assert preloaded["containers"][0]["imagePullPolicy"] == "IfNotPresent"


SPEC = {"container": {"cpu": "8", "memory": "64Gi"}, "quota": {"cpu": "128", "memory": "2Ti"}}


@pytest.mark.parametrize(
    ("wanted", "options", "spec", "cpu", "memory"),
    [
        ({"gpus": 1}, PodOptions(), SPEC, None, None),  # the LimitRange's
        ({"gpus": 4}, PodOptions(), SPEC, "32", "256Gi"),
        ({"gpus": 8}, PodOptions(), {**SPEC, "quota": {"cpu": 40, "memory": "300Gi"}}, "35", "268800Mi"),
        ({"gpus": 8}, PodOptions(), {**SPEC, "quota": {"cpu": 8, "memory": "64Gi"}}, "8", "64Gi"),
        ({"gpus": 2}, PodOptions(), {**SPEC, "container": {"cpu": "750m", "memory": "1.5Gi"}}, "1500m", "3Gi"),
        ({"gpus": 2}, PodOptions(), {**SPEC, "container": {"cpu": "x", "memory": "1k"}}, "x", "2000"),
        ({"gpus": 2}, PodOptions(cpus_per_gpu=3, memory_per_gpu="7Gi"), SPEC, "6", "14Gi"),
        ({"gpus": 2, "cpus": 5, "memory": "9Gi"}, PodOptions(cpus_per_gpu=3, memory_per_gpu="7Gi"), SPEC, "5", "9Gi"),
        ({"gpus": 8}, PodOptions(), {}, None, None),
    ],
)
def test_processors_and_memory_grow_with_the_gpus_unless_the_body_names_them(
    wanted: dict[str, Any], options: PodOptions, spec: dict[str, Any], cpu: str | None, memory: str | None
) -> None:
    limits = plan_pod(plan_of(container(**wanted)), options, spec)["spec"]["containers"][0]["resources"]["limits"]
    assert (limits.get("cpu"), limits.get("memory")) == (cpu, memory)
    assert limits["nvidia.com/gpu"] == str(wanted["gpus"])


def test_words_and_secrets_reach_the_container_as_they_are() -> None:
    found = container(command=["sh", "-c"], args=["echo $(HOME) $$ $X"], env={"A": "$(B)"}, secrets={"TOKEN": "s3cret"})
    pod = plan_pod(plan_of(found), PodOptions("kata", "nvidia.com/h100", 4, "64Gi"))
    main = pod["spec"]["containers"][0]
    # what Kubernetes makes of two is one; of $(NAME) it would make a variable's value
    assert [word.replace("$$", "$") for word in main["args"]] == ["echo $(HOME) $$ $X"]
    assert main["env"][0] == {"name": "A", "value": "$$(B)"}
    assert main["resources"]["limits"] == {"nvidia.com/h100": "1", "cpu": "4", "memory": "64Gi"}
    assert "s3cret" not in json.dumps(pod) + json.dumps(found.request)
    assert main["env"][1] == {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "ctr-01", "key": "TOKEN"}}}
    (secret,) = plan_secrets(plan_of(found), found.secrets or {})
    assert (secret["metadata"]["name"], secret["stringData"]) == ("ctr-01", {"TOKEN": "s3cret"})


def test_an_export_is_mounted_without_programs_of_other_users() -> None:
    found = plan_of(container(mounts=[MOUNT, {**MOUNT, "target": "/more", "read_only": True}]))
    options = PodOptions(exports=("nfs.example:/exports/{tenancy}/",))
    volume, claim, second, _ = plan_volumes(found, options)
    assert volume["spec"]["mountOptions"] == ["nosuid", "nodev"]
    assert second["spec"]["mountOptions"] == ["nosuid", "nodev", "ro"]
    assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"] == claim["spec"]["volumeName"] == "ctr-01-0"
    assert volume["spec"]["claimRef"]["namespace"] == claim["metadata"]["namespace"] == "tenant-landon"
    assert "namespace" not in volume["metadata"]
    # the node mounts what the operator named; below it a tenant's link might lead to another tenant's directory
    assert volume["spec"]["nfs"] == {"server": "nfs.example", "path": "/exports/landon", "readOnly": False}
    spec = plan_pod(found, options)["spec"]
    assert [one["subPath"] for one in spec["containers"][0]["volumeMounts"]] == ["data", "data"]
    assert [one["persistentVolumeClaim"]["claimName"] for one in spec["volumes"]] == ["ctr-01-0", "ctr-01-1"]
    assert [one["mountPath"] for one in spec["containers"][0]["volumeMounts"]] == ["/data", "/more"]


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        ({"gpus": 3}, "gpus_no_partition"),
        ({"gpus": 0}, "gpus_no_partition"),
        ({"gpus": 16}, "gpus_no_partition"),
        ({"container-url": "Not An Image"}, "image_invalid"),
        ({"container-url": "10.0.0.1/x"}, "registry_not_allowed"),
        ({"timeout_seconds": 10**9}, "timeout_too_long"),
        ({"mounts": [MOUNT]}, "mount_not_allowed"),
        ({"mounts": [{**MOUNT, "path": "/exports/landonx"}]}, "mount_not_allowed"),
        ({"args": ["$" * 131_000] * 5}, "request_invalid"),  # of 1.3 MB in the cluster, which would not take it
    ],
)
def test_what_has_a_shape_and_cannot_be(wanted: dict[str, Any], code: str) -> None:
    rules = TenantRules(exports=("nfs.example:/exports/{tenancy}",) if "landonx" in str(wanted) else ())
    with pytest.raises(Refusal) as caught:
        check_request(request(**wanted), "landon", rules)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        ({"gpus": "2"}, "gpus"),
        ({"gpus": True}, "gpus"),
        ({"cpus": 0}, "cpus"),
        ({"cpus": 1.5}, "cpus"),
        ({"memory": "64"}, "memory"),
        ({"pull_credentials": {"username": "a:b", "password": "c"}}, "username"),
        ({"pull_credentials": {"username": "a"}}, "password"),
        ({"pull_credentials": {"username": "a", "password": "b", "registry": "c"}}, "registry"),
        ({"memory": "9999999Gi"}, "memory"),
        ({"memory": "1e9999Gi"}, "memory"),
        ({"gpu": 1}, "gpu"),
        ({"image": "ubuntu"}, "image"),
        ({"tenancy": "Landon"}, "tenancy"),
        ({"tenancy": "../x"}, "tenancy"),
        ({"env": {"A B": "1"}}, "A B"),
        ({"env": {"A": 1}}, "A"),
        ({"env": {"A": "\0"}}, "A"),
        ({"env": {"A": "\ud800"}}, "surrogate"),
        ({"args": ["a\udfff"]}, "surrogate"),
        ({"env": {"A": "1"}, "secrets": {"A": "2"}}, "in secrets"),
        ({"command": "sh"}, "command"),
        ({"mounts": [{**MOUNT, "target": "/proc/x"}]}, "target"),
        ({"mounts": [{**MOUNT, "target": "/a/../b"}]}, "target"),
        ({"mounts": [{**MOUNT, "path": "relative"}]}, "path"),
        ({"mounts": [{**MOUNT, "server": "a b"}]}, "server"),
        ({"mounts": [MOUNT, MOUNT]}, "one target"),
        ({"restart": "always"}, "restart"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
    ],
)
def test_bodies_of_another_shape(wanted: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=place):
        request(**wanted)


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
    | st.sampled_from(["a_b.c/x", "ubuntu", "\ud800", "\0", "64Gi", "on-failure", "/data", "nfs.example", "1e999"])
)  # fmt: skip
NAMES = st.sampled_from([*ContainerRequest.model_fields, "container-url", "path", "target", "username", "A"])
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)


@given(st.dictionaries(NAMES, ANYTHING, max_size=6))
def test_any_body_is_a_container_or_refused(value: dict[str, Any]) -> None:
    for body in (value, {**SEED, **value}):
        with contextlib.suppress(Refusal):
            wanted: Any = read_model(ContainerRequest, json.dumps(body).encode())
            made = check_request(wanted, "landon", TenantRules(exports=("nfs.example:/",)))
            secrets = secret_values(wanted, made)
            plan = ContainerPlan("ctr_01", "landon", json.loads(json.dumps(made)))
            json.dumps([plan_pod(plan, PodOptions(), SPEC), plan_secrets(plan, secrets)]).encode()


@given(st.dictionaries(st.sampled_from(["tenancy", "scopes", "expires_seconds", "label"]), ANYTHING))
def test_any_body_is_a_key_or_refused(value: dict[str, Any]) -> None:
    with contextlib.suppress(Refusal):
        wanted: Any = read_model(KeyRequest, json.dumps(value).encode())
        wanted.label.encode()


def event(reason: str, at: str = "2026-11-23T10:01:50Z", message: str = "") -> dict[str, Any]:
    return {"reason": reason, "lastTimestamp": at, "message": message}


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": status}


WAITING = {"phase": "Pending", "conditions": READY}
GONE = {
    "type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC",
    "message": "PodGC: node no longer exists", "lastTransitionTime": "2026-11-23T11:00:00Z",
}  # fmt: skip
"""As the pod garbage collector of Kubernetes marks pods of a node that was deleted, before it removes them."""
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/9 nodes"}


@pytest.mark.parametrize(
    ("status", "events", "lifecycle", "reason"),
    [
        ({}, [], "scheduling", ""),
        ({"phase": "Pending", "conditions": [UNSCHEDULABLE]}, [], "queued", "no_capacity"),
        ({"phase": "Pending", "conditions": SCHEDULED}, [], "booting", ""),
        ({"phase": "Pending", "conditions": SCHEDULED}, [event("FailedCreatePodSandBox", message="deadline exceeded")],
         "booting", "vm_boot_timeout"),
        ({"phase": "Pending", "conditions": SCHEDULED}, [event("FailedCreatePodSandBox", message="qemu: no memory")],
         "booting", "vm_boot_failed"),
        ({"phase": "Pending", "conditions": SCHEDULED}, [event("FailedMount", message="access denied")],
         "booting", "volume_mount_failed"),
        ({"phase": "Pending", "conditions": SCHEDULED}, [event("Pulling")], "pulling", ""),
        (WAITING, [], "pulling", ""),
        ({**WAITING, "containerStatuses": main_status(waiting={"reason": "ImagePullBackOff"})}, [], "pulling",
         "image_pull_failed"),
        ({**WAITING, "containerStatuses": main_status(waiting={"reason": "CreateContainerError"})}, [], "booting",
         "container_start_failed"),
        ({"phase": "Pending", "conditions": SCHEDULED, "containerStatuses": main_status(waiting={"reason": "New"})}, [],
         "booting", "unknown"),
        ({**running(), "containerStatuses": main_status(waiting={"reason": "CrashLoopBackOff"})}, [], "running",
         "restarting"),
        (running(), [], "running", ""),
        ({"phase": "Unknown"}, [], "running", "node_lost"),
        (ended(), [], "finished", "completed"),
        (ended(1), [], "failed", "exit_nonzero"),
        (ended(137, "OOMKilled"), [], "failed", "oom_killed"),
        (ended(127, "StartError"), [], "failed", "container_start_failed"),
        ({**running(), "phase": "Failed", "conditions": [*READY, GONE]}, [], "failed", "node_lost"),
        ({**running(), "phase": "Failed", "conditions": [*READY, {**GONE, "reason": "EvictionByEvictionAPI"}]}, [],
         "failed", "evicted"),
        ({**ended(3), "conditions": [*READY, GONE]}, [], "failed", "exit_nonzero"),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed: OCIGPU-FAB-3"}, [],
         "failed", "gpu_unavailable"),
        ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}, [], "failed", "gpu_unavailable"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, [], "failed", "timed_out"),
        ({"phase": "Failed", "reason": "Evicted"}, [], "failed", "evicted"),
        ({"phase": "Failed", "reason": "Tomorrow"}, [], "failed", "unknown"),
        ({"phase": "Failed"}, [], "failed", "unknown"),
    ],
)  # fmt: skip
def test_what_a_pod_says(status: dict[str, Any], events: list[Any], lifecycle: str, reason: str) -> None:
    found = read_standing(pod(status), ACCEPTED, events)
    assert found[:2] == (lifecycle, reason)
    assert reason in REASONS
    assert (found.finished is not None or "conditions" not in status) == (
        lifecycle in FINAL or "conditions" not in status
    )


def test_a_pod_that_goes_is_stopping() -> None:
    assert read_standing(pod(running(), deletionTimestamp="2026-11-23T10:03:00Z"), ACCEPTED)[:2] == (
        "stopping",
        "deleted",
    )


def test_a_node_that_was_deleted_is_told_with_its_time() -> None:
    found = read_standing(pod({**running(), "phase": "Failed", "conditions": [*READY, GONE]}), ACCEPTED)
    assert (found.detail, found.finished) == ("PodGC: node no longer exists", ACCEPTED + 3600)
    leaving = {**running(), "conditions": [GONE, *READY]}
    assert read_standing(pod(leaving, deletionTimestamp="2026-11-23T10:03:00Z"), ACCEPTED)[:2] == (
        "stopping",
        "node_lost",
    )


@pytest.mark.parametrize("how", [{}, {"reason": "OOMKilled"}])
def test_what_a_container_printed_is_in_no_detail(how: dict[str, str]) -> None:
    """The kubelet's message of a container that ran is the container's own."""
    status = ended(1, message="token=s3cret", **how)
    assert "s3cret" not in str(read_standing(pod(status), ACCEPTED))
    last = status["containerStatuses"][0]["state"]
    waiting = [{**one, "lastState": last} for one in main_status(waiting={"reason": "CrashLoopBackOff"})]
    found = read_standing(pod({**running(), "containerStatuses": waiting}), ACCEPTED)
    assert (found.reason, "s3cret" in str(found)) == ("restarting", False)
    never = ended(127, "StartError", 'exec: "nothing": not found')
    assert "not found" in read_standing(pod(never), ACCEPTED).detail
    assert "terminationMessagePolicy" not in json.dumps(plan_pod(plan_of(container()), PodOptions()))


def test_an_error_of_cuda_is_seen_in_the_last_lines() -> None:
    failed = read_standing(pod(ended(1)), ACCEPTED)
    line = b"2026-11-23T10:02:00Z error code 802: system not yet initialized\n"
    assert judge_output(failed, line).reason == "cuda_fabric_not_ready"
    assert judge_output(failed, line + b"x" * MAX_JUDGED).reason == "exit_nonzero"
    assert judge_output(failed, b"\xff" * 10).reason == "exit_nonzero"
    assert judge_output(read_standing(pod(ended()), ACCEPTED), line).reason == "completed"


def test_the_time_of_each_phase_is_known() -> None:
    events = [
        event("Pulling", "2026-11-23T10:01:41Z"),
        event("Pulled", "2026-11-23T10:01:56Z"),
    ]
    found = read_standing(pod(running()), ACCEPTED, events)
    assert found.phases == {"queued": 10, "vm_boot": 90, "pull": 15, "start": 4}
    assert found.image_digest == "sha256:" + "0" * 64
    assert found.node == "n1"
    assert read_standing(pod(running()), ACCEPTED).phases == {"queued": 10, "vm_boot": 90}


@given(st.recursive(st.none() | st.text(max_size=5) | st.integers(0, 9), lambda inner: st.lists(inner, max_size=3)))
def test_no_pod_is_too_strange(value: Any) -> None:
    """The API server checks shapes; what is in a text is anybody's."""
    status = {
        "phase": "Failed",
        "message": str(value),
        "conditions": [{"type": str(value), "lastTransitionTime": str(value)}],
    }
    assert read_standing(pod(status), ACCEPTED).lifecycle == "failed"


def test_whoever_is_ended_as_it_is_woken_ends() -> None:
    async def wait() -> bool:
        event = asyncio.Event()

        async def work() -> None:
            while True:
                event.clear()
                await wait_at_most(event, 60)

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        event.set()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        return task.done()

    assert asyncio.run(asyncio.wait_for(wait(), 120))


def test_a_line_that_does_not_end_is_ended() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for part in [b"2026 a\nx", *[b"y" * (1 << 18)] * 9, b"end\n"]:
            yield part

    async def read() -> list[str]:
        response = httpx.Response(200, stream=ShortLines(parts()))
        return [line async for line in response.aiter_lines()]

    lines = asyncio.run(read())
    assert lines[0] == "2026 a"
    assert max(map(len, lines)) < 2 << 20
    assert "".join(lines) == "2026 ax" + "y" * (9 << 18) + "end"


@pytest.mark.parametrize("answer", [{}, {"kind": "Tenancy", "metadata": {"name": "landon"}}])
def test_an_answer_that_is_no_tenancy_is_not_the_end_of_one(answer: Any) -> None:
    """Whose name it was would lose keys and containers."""

    async def get(*_arguments: Any, **_more: Any) -> Any:
        return answer

    client: Any = SimpleNamespace(get=get)
    with pytest.raises(ClusterError, match="not a tenancy") as caught:
        asyncio.run(ClusterClient(client).read_tenancy("landon"))
    assert caught.value.passing


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"image": "a", "gpus": NaN}', "the body is not JSON: NaN is not JSON"),
        (b'{"image": "a", "image": "b"}', 'the body is not JSON: duplicate key "image"'),
        (b"\xff\xfe{\x00}\x00", "the body is not JSON: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_body_that_readers_differ_about_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(Refusal, match=re.escape(said)):
        read_model(ContainerRequest, body)


def test_a_mark_at_the_begin_of_a_body_is_ignored() -> None:
    assert read_model(ContainerRequest, b'\xef\xbb\xbf{"image": "a"}').model_dump()["image"] == "a"


def test_a_stream_that_nobody_takes_keeps_no_place() -> None:
    nothing: Any = None
    service = ServiceState(nothing, nothing, TenantRules(), nothing, b"")

    async def parts() -> AsyncIterator[str]:
        yield "x"

    async def serve(request: Request) -> Response:
        asked = ApiRequest(request, Principal("key:x", "landon", ()), service, b"", {}, {})
        answer = asked.open_stream(parts(), "text/plain")
        assert len(service.streams) == 1
        if "never" in request.scope:
            raise OSError
        return answer

    async def gone(_message: Any) -> None:
        raise OSError("the client went away")

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send() -> None:
        for more in ({}, {"never": 1}) * MAX_STREAMS:
            scope = {"type": "http", "asgi": {"spec_version": "2.4"}, **more}
            with contextlib.suppress(OSError, ClientDisconnect):
                await PathPattern(serve)(scope, receive, gone)

    asyncio.run(send())
    assert not service.streams


def test_every_code_is_used_and_no_other(tmp_path: Path) -> None:
    assert {code for endpoint in ENDPOINTS for code in problems_of(endpoint)} == PROBLEMS.keys()


PAGE = (Path(__file__).parents[2] / "docs/tenants/CAAS.md").read_text()


def test_the_page_lists_what_there_is() -> None:
    rows = {line for line in PAGE.splitlines() if line.startswith("| `")}
    scope = {None: "none", "": "any credential"}
    wanted = {f"| `{one.method} {one.path}` | {scope.get(one.scope, one.scope)} | {one.summary} |" for one in ENDPOINTS}
    wanted |= {f"| `{code}` | {one.status} | {one.title} | {one.fix} |" for code, one in PROBLEMS.items()}
    wanted |= {f"| `{name}` | {text} |" for table in (REASONS, SCOPES) for name, text in table.items() if name}
    assert wanted - rows == set()
    assert set(re.findall(r"`(\w+)`", PAGE.split("`lifecycle`, in this order")[1].split("`reason` says")[0])) == {
        *LIFECYCLES
    }
    assert set(re.findall(r"\| `(\w+)` \|", PAGE.split("`phases` contains")[1].split("## Problems")[0])) == {
        *Phases.model_fields
    }


def test_a_log_of_plain_lines_has_the_whole_audit() -> None:
    line = {"tenancy": None, "actor": "key:ab", "resource": "/v1/x\ny", "result": "202"}
    assert audit_text(line) == r'audit actor="key:ab" resource="/v1/x\ny" result="202"'
