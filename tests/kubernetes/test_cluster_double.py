"""The API server double behaves as the API server that it stands for; each case is what the documents name."""

import threading

import lightkube
import pytest
from lightkube.codecs import from_dict
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_global_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Namespace, Pod
from lightkube.types import PatchType
from support.cluster import Cluster
from support.cluster_rules import Problem

CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "boxes.test.io"},
    "spec": {
        "group": "test.io",
        "scope": "Cluster",
        "names": {"kind": "Box", "plural": "boxes", "singular": "box", "listKind": "BoxList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["size"],
                                "x-kubernetes-validations": [
                                    {"rule": "self.size >= oldSelf.size", "message": "boxes do not shrink"},
                                    {"rule": "self.size < 100 || self.color == 'red'", "message": "large ones are red"},
                                ],
                                "properties": {
                                    "size": {"type": "integer", "minimum": 1},
                                    "color": {"type": "string", "enum": ["red", "blue"], "default": "blue"},
                                },
                            },
                            "status": {
                                "type": "object",
                                "properties": {
                                    "conditions": {
                                        "type": "array",
                                        "x-kubernetes-list-type": "map",
                                        "x-kubernetes-list-map-keys": ["type"],
                                        "items": {
                                            "type": "object",
                                            "required": ["type", "status"],
                                            "properties": {"type": {"type": "string"}, "status": {"type": "string"}},
                                        },
                                    }
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}
Box = create_global_resource("test.io", "v1", "Box", "boxes")


@pytest.fixture
def cluster():
    with Cluster() as cluster:
        yield cluster


def box(name="one", **spec):
    return {"apiVersion": "test.io/v1", "kind": "Box", "metadata": {"name": name}, "spec": {"size": 1, **spec}}


def config(name, namespace="default", **data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}, "data": data}


def refused(code, reason, call, *arguments, **options):
    with pytest.raises((ApiError, Problem)) as caught:
        call(*arguments, **options)
    found = caught.value if isinstance(caught.value, Problem) else caught.value.status
    assert (found.code, found.reason) == (code, reason), found.message
    return found.message


def test_objects_are_made_read_changed_and_deleted_by_a_client(cluster):
    client = cluster.client()
    made = client.create(ConfigMap(metadata=ObjectMeta(generateName="a-", namespace="default"), data={"x": "1"}))
    assert made.metadata.name.startswith("a-")
    assert made.metadata.uid
    assert made.metadata.resourceVersion
    assert refused(
        409,
        "AlreadyExists",
        client.create,
        ConfigMap(metadata=made.metadata.__class__(name=made.metadata.name), data={}),
    )
    stale = client.get(ConfigMap, made.metadata.name)
    client.patch(ConfigMap, made.metadata.name, {"data": {"y": "2", "x": None}}, patch_type=PatchType.MERGE)
    assert "has been modified" in refused(409, "Conflict", client.replace, stale)
    assert client.get(ConfigMap, made.metadata.name).data == {"y": "2"}
    client.delete(ConfigMap, made.metadata.name)
    assert "not found" in refused(404, "NotFound", client.get, ConfigMap, made.metadata.name)
    assert ("DELETE", f"/api/v1/namespaces/default/configmaps/{made.metadata.name}") in cluster.requests
    refused(404, "NotFound", cluster.create, config("x", namespace="nowhere"))


def test_lists_are_selected_and_cut_into_pages(cluster):
    for number in range(5):
        labels = {"even": str(number % 2 == 0)} | ({"first": ""} if not number else {})
        cluster.create({**config(f"c{number}"), "metadata": {"name": f"c{number}", "labels": labels}})
    client = cluster.client()

    def names(**options):
        return [one.metadata.name for one in client.list(ConfigMap, **options)]

    assert names(chunk_size=2) == ["c0", "c1", "c2", "c3", "c4"]
    assert names(labels={"even": "True"}) == ["c0", "c2", "c4"]
    assert names(labels={"even": ("True", "x"), "first": None}) == ["c0"]
    assert names(fields={"metadata.name": "c3"}) == ["c3"]
    assert "not supported" in refused(400, "BadRequest", names, fields={"data.x": "1"})


def test_a_watch_gives_events_from_a_version_and_bookmarks(cluster):
    client = cluster.client()
    version = cluster.create(config("before"))["metadata"]["resourceVersion"]
    cluster.create(config("c"))
    cluster.patch("ConfigMap", "c", {"metadata": {"labels": {"x": "y"}}}, "default")
    cluster.delete("ConfigMap", "c", "default")

    def events(count, **options):
        found = []
        for event, thing in client.watch(ConfigMap, namespace="default", server_timeout=60, **options):
            found.append((event, thing.metadata.name))
            if len(found) == count:
                return found
        return None

    assert events(3, resource_version=version) == [("ADDED", "c"), ("MODIFIED", "c"), ("DELETED", "c")]
    # a label that comes and goes is an object that comes and goes for those who select by it
    assert events(2, resource_version=version, labels={"x": "y"}) == [("ADDED", "c"), ("DELETED", "c")]
    assert events(1) == [("ADDED", "before")]
    with client._client._client.stream(
        "GET", "/api/v1/configmaps?watch=1&allowWatchBookmarks=true&resourceVersion=101"
    ) as answer:
        assert any('"BOOKMARK"' in line for line in answer.iter_lines())


def test_watches_break_and_history_is_forgotten(cluster):
    client, started, broken = cluster.client(), threading.Event(), []

    def watch():
        try:
            for _ in client.watch(ConfigMap, namespace="default"):
                started.set()
        except Exception as error:  # noqa: BLE001 - which one is the client's affair
            broken.append(error)

    version = cluster.create(config("a"))["metadata"]["resourceVersion"]
    thread = threading.Thread(target=watch)
    thread.start()
    assert started.wait(30)
    cluster.drop_watches()
    thread.join(30)
    assert broken
    cluster.create(config("b"))
    cluster.expire()
    with pytest.raises(ApiError) as caught:
        next(client.watch(ConfigMap, namespace="default", resource_version=version))
    assert caught.value.status.code == 410


def test_injected_failures_are_as_many_as_were_asked_for(cluster):
    client = cluster.client()
    cluster.fail(2, 503, method="GET", path="namespaces/default$")
    assert client.get(Namespace, "kube-system").status.phase == "Active"
    for _ in range(2):
        refused(503, "Injected", client.get, Namespace, "default")
    assert client.get(Namespace, "default")
    cluster.fail(1, 0)
    with pytest.raises(lightkube.core.client.httpx2.HTTPError):
        client.get(Namespace, "default")


def test_custom_resources_are_held_to_schema_and_rules(cluster):
    refused(404, "NotFound", cluster.create, box())
    cluster.create(CRD)
    client = cluster.client()
    made = client.create(Box(box(extra="gone")))
    assert made.spec == {"size": 1, "color": "blue"}
    assert made.metadata.generation == 1
    assert "minimum" in refused(422, "Invalid", cluster.create, box("two", size=0))
    assert "large ones are red" in refused(422, "Invalid", cluster.create, box("two", size=100))
    refused(422, "Invalid", cluster.create, box("two", color="green"))
    assert client.patch(Box, "one", {"spec": {"size": 7}}, patch_type=PatchType.MERGE).metadata.generation == 2
    assert "do not shrink" in refused(
        422, "Invalid", client.patch, Box, "one", {"spec": {"size": 3}}, patch_type=PatchType.MERGE
    )
    double = [{"type": "Ready", "status": "True"}] * 2
    assert "Duplicate" in refused(
        422, "Invalid", cluster.patch, "Box", "one", {"status": {"conditions": double}}, sub="status"
    )


def test_the_status_is_written_through_its_sub_resource_only(cluster):
    cluster.create(CRD)
    client = cluster.client()
    cluster.create(box())
    box_status = create_global_resource("test.io", "v1", "Box", "boxes").Status
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    patched = client.patch(box_status, "one", {"status": status, "spec": {"size": 50}}, patch_type=PatchType.MERGE)
    assert patched["status"] == status
    assert patched["spec"]["size"] == 1
    assert patched["metadata"]["generation"] == 1


def test_server_side_apply_knows_who_manages_what(cluster):
    client = cluster.client()
    version = cluster.apply(config("c", a="1", b="1"), manager="one")["metadata"]["resourceVersion"]
    assert cluster.apply(config("c", a="1", b="1"), manager="one")["metadata"]["resourceVersion"] == version
    theirs = from_dict(config("c", a="2", c="3"))
    assert 'conflict with "one": .data.a' in refused(409, "Conflict", client.apply, theirs, field_manager="two")
    client.apply(theirs, field_manager="two", force=True)
    assert cluster.get("ConfigMap", "c", "default")["data"] == {"a": "2", "b": "1", "c": "3"}
    # what a manager leaves out goes, unless another manages it
    assert cluster.apply(config("c", b="1"), manager="one")["data"] == {"a": "2", "b": "1", "c": "3"}
    assert cluster.apply(config("c"), manager="two")["data"] == {"b": "1"}
    managed = cluster.get("ConfigMap", "c", "default")["metadata"]["managedFields"]
    assert [(one["manager"], one["fieldsV1"]) for one in managed if one["manager"] == "one"] == [
        ("one", {"f:data": {"f:b": {}}})
    ]


def test_lists_that_are_maps_are_applied_by_their_keys(cluster):
    cluster.create(CRD)
    cluster.create(box())

    def apply(manager, *types):
        conditions = [{"type": one, "status": "True"} for one in types]
        body = {"apiVersion": "test.io/v1", "kind": "Box", "status": {"conditions": conditions}}
        head = {"force": "true", "fieldManager": manager}
        document = {**body, "metadata": {"name": "one"}}
        content = "application/apply-patch+yaml"
        return cluster.do("PATCH", document, sub="status", named=True, query=head, content=content)["status"]

    apply("a", "Ready", "Sane")
    assert [one["type"] for one in apply("b", "Other")["conditions"]] == ["Ready", "Sane", "Other"]
    assert [one["type"] for one in apply("a", "Sane")["conditions"]] == ["Sane", "Other"]


def test_finalizers_and_terminating_namespaces_hold(cluster):
    client = cluster.client()
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "t"}})
    assert cluster.get("ServiceAccount", "default", "t")
    cluster.create({**config("c"), "metadata": {"name": "c", "namespace": "t", "finalizers": ["test.io/hold"]}})
    cluster.create(config("d", namespace="t"))
    client.delete(Namespace, "t")
    assert client.get(Namespace, "t").status.phase == "Terminating"
    assert [one["metadata"]["name"] for one in cluster.objects("ConfigMap")] == ["c"]
    assert "being terminated" in refused(403, "Forbidden", cluster.create, config("e", namespace="t"))
    cluster.patch("ConfigMap", "c", {"metadata": {"finalizers": None}}, "t")
    assert not cluster.exists("ConfigMap", "c", "t")
    assert not cluster.exists("Namespace", "t")


def test_pods_of_a_node_end_when_the_kubelet_says_so(cluster):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": []}}
    cluster.create(pod)
    client = cluster.client()
    client.delete(Pod, "p")
    assert cluster.get("Pod", "p")["metadata"]["deletionTimestamp"]
    client.delete(Pod, "p", grace_period=0)
    assert not cluster.exists("Pod", "p")


def test_owned_objects_go_with_their_owner(cluster):
    owner = cluster.create(config("owner"))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    cluster.create({**config("c"), "metadata": {"name": "c", "ownerReferences": [reference]}})
    cluster.delete("ConfigMap", "owner")
    assert cluster.objects("ConfigMap") == []


def policy(*validations, **spec):
    rules = [
        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["configmaps"]}
    ]
    spec = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": rules}, "validations": validations, **spec}
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": "p"}}
    scope = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}}
    bound = {"policyName": "p", "validationActions": ["Deny"], "matchResources": scope}
    policy = {**head, "kind": "ValidatingAdmissionPolicy", "spec": spec}
    return policy, {**head, "kind": "ValidatingAdmissionPolicyBinding", "spec": bound}


def test_admission_policies_deny_what_their_expressions_do_not_allow(cluster):
    variables = [{"name": "size", "expression": "size(object.data)"}]
    conditions = [{"name": "others", "expression": "request.userInfo.username != 'system:trusted'"}]
    one = {"expression": "variables.size < 2", "messageExpression": "'it has ' + string(variables.size)"}
    for document in policy(one, variables=variables, matchConditions=conditions):
        cluster.create(document)
    cluster.create(config("a", x="1"))
    assert "denied request: it has 2" in refused(422, "Invalid", cluster.create, config("b", x="1", y="2"))
    refused(422, "Invalid", cluster.patch, "ConfigMap", "a", {"data": {"y": "2"}}, "default")
    cluster.create(config("b", namespace="kube-system", x="1", y="2"))
    cluster.create(config("c", x="1", y="2"), user="system:trusted")
    # a failure of an expression denies
    assert "error" in refused(
        422, "Invalid", cluster.create, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "d"}}
    )


def test_users_have_the_rights_that_roles_give(cluster):
    client = cluster.client("system:serviceaccount:default:reader")
    assert "cannot list" in refused(403, "Forbidden", lambda: list(client.list(ConfigMap)))
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}]
    head = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "r"}}
    cluster.create({**head, "kind": "Role", "rules": rules})
    subjects = [{"kind": "ServiceAccount", "name": "reader", "namespace": "default"}]
    cluster.create({**head, "kind": "RoleBinding", "subjects": subjects, "roleRef": {"kind": "Role", "name": "r"}})
    assert list(client.list(ConfigMap)) == []
    refused(403, "Forbidden", lambda: list(client.list(ConfigMap, namespace="*")))
    assert ("system:serviceaccount:default:reader", "list", "", "configmaps") in cluster.used


def test_logs_are_followed_until_the_pod_has_ended(cluster):
    cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": []}})
    cluster.log("default", "p", "first")
    found = []
    for line in cluster.client().log("p", follow=True):
        found.append(line.strip())
        if line.strip() == "first":
            cluster.log("default", "p", "second")
            cluster.patch("Pod", "p", {"status": {"phase": "Succeeded"}}, sub="status")
    assert found == ["first", "second"]
