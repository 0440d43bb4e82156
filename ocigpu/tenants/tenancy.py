"""The objects of a tenancy, the next steps for one, and its status: all pure.

Identity is the namespace's UID in the status, not labels: a user who can write labels of a namespace would own it
(CVE-2022-46167, CVE-2025-55205 of a similar project).  Existing objects are never adopted.  Sources: Kubernetes' "API
Conventions" (conditions), "Resource Quotas" (extended resources only as requests), "Network Policies", "Pod Security
Standards"; Cilium's "Layer 3 Policies".
"""

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import printable
from ocigpu.kubernetes.cluster.announce import Verdict, make_conditions
from ocigpu.kubernetes.cluster.names import TENANCY_LABEL, UID_LABEL, namespace_name
from ocigpu.kubernetes.cluster.quantity import parse_quantity

FINALIZER = "ocigpu.io/tenancy"
REGISTRIES = "ocigpu.io/registries"
"""Annotation of a tenancy's namespace: whose images its pods may run, with commas; the admission policy reads it."""
POLICIES = ("ocigpu-tenant-pods", "ocigpu-tenant-resources", "ocigpu-tenant-objects", "ocigpu-tenant-finalizers")
"""Names of the admission policies, and of their bindings."""
OBJECT_NAME = "ocigpu-tenancy"
SETTLED_LEASES = ("Free", "Quarantined")
"""Phases of a lease whose GPU the tenancy has no more."""
PRIVATE = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
"""Not the Internet: IANA's registry of special-purpose addresses (RFC 6890), multicast, reserved."""
PUBLIC_6 = "2000::/3"
"""All that is assigned of IPv6's Internet (IANA's registry of global unicast addresses).  So neither what stands for
IPv4 addresses, 64:ff9b::/96 and 64:ff9b:1::/48 (RFC 6052, 8215), nor what is local."""
PRIVATE_6 = ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
"""Of these, tunnels that have IPv4 addresses in them (Teredo, 6to4: RFC 4380, 3056), and examples."""
COUNTED = ("secrets", "configmaps", "services", "persistentvolumeclaims", *(
    f"count/{kind}" for kind in (
        "pods", "replicationcontrollers", "deployments.apps", "replicasets.apps", "statefulsets.apps",
        "daemonsets.apps", "jobs.batch", "cronjobs.batch", "events", "podtemplates",
        "leases.coordination.k8s.io", "poddisruptionbudgets.policy",
        "horizontalpodautoscalers.autoscaling", "ingresses.networking.k8s.io", "resourceclaims.resource.k8s.io",
        "resourceclaimtemplates.resource.k8s.io",
    )
))  # fmt: skip
MAX_OBJECTS = 1000
"""Of each kind, pods that have ended too, so that no tenancy fills the database of all."""
DEFAULTS: Mapping[str, Any] = {
    "suspended": False,
    "internet": False,
    "podSecurity": "baseline",
    "registries": [],
    "quota": {"gpus": 8, "pods": 32, "cpu": "128", "memory": "2Ti", "storage": "1Ti"},
    "container": {"cpu": "8", "memory": "64Gi"},
}
"""Those of the schema."""

Document = dict[str, Any]


class TenancyOptions(NamedTuple):
    """The options that all tenancies share.

    ``denied``: addresses that pods must not reach even with the Internet; ``dns``: those of node-local DNS caches;
    ``cilium``: whether the cluster has Cilium's policies.
    """

    resource: str = "nvidia.com/gpu"
    denied: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    cilium: bool = False


class TenancySeen(NamedTuple):
    """The cluster's state of a tenancy.  ``objects``: by (kind, name), those of its namespace.

    ``others``: names of network policies that are not ours; ``pods``: of its namespace, read only if it must have none;
    ``leases``: names of those it still holds; ``unenforced``: which admission policies are not in force.
    """

    namespace: Document | None
    objects: Mapping[tuple[str, str], Document] = {}
    others: Sequence[str] = ()
    pods: Sequence[Document] = ()
    leases: Sequence[str] = ()
    unenforced: Sequence[str] = ()


class TenancyStep(NamedTuple):
    """A request that brings the cluster nearer: ``verb`` is create, update (of the object as it was read) or delete."""

    verb: str
    document: Document


def read_spec(tenancy: Document) -> Document:
    """Return the spec with every field: objects may be older than a default."""
    spec = tenancy.get("spec") or {}
    return {
        name: {**value, **(spec.get(name) or {})} if isinstance(value, dict) else spec.get(name, value)
        for name, value in DEFAULTS.items()
    }


def is_closed(tenancy: Document) -> bool:
    """Whether a tenancy is to have no pods."""
    return bool(tenancy["metadata"].get("deletionTimestamp") or read_spec(tenancy)["suspended"])


def plan_objects(tenancy: Document, options: TenancyOptions) -> tuple[Document, ...]:
    """Return the objects of a tenancy in the order of creation: restrictions come before permissions."""
    name, uid = tenancy["metadata"]["name"], tenancy["metadata"].get("uid", "")
    spec, labels = read_spec(tenancy), {TENANCY_LABEL: name}
    level = spec["podSecurity"]
    security = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "audit", "warn")}
    security |= {f"pod-security.kubernetes.io/{mode}-version": "latest" for mode in ("enforce", "audit", "warn")}
    space = {"name": namespace_name(name), "labels": {**labels, UID_LABEL: uid, **security}}
    if spec["registries"]:
        space["annotations"] = {REGISTRIES: ",".join(spec["registries"])}

    def head(api: str, kind: str, called: str = OBJECT_NAME) -> Document:
        metadata = {"name": called, "namespace": namespace_name(name), "labels": labels}
        return {"apiVersion": api, "kind": kind, "metadata": metadata}

    quota, container = spec["quota"], spec["container"]
    closed = is_closed(tenancy)
    hard = {
        f"requests.{options.resource}": quota["gpus"],
        "pods": quota["pods"],
        **{f"{side}.{what}": quota[what] for what in ("cpu", "memory") for side in ("requests", "limits")},
        "requests.storage": quota["storage"],
        "services.loadbalancers": 0,
        "services.nodeports": 0,
    }
    hard = {key: "0" if closed and key != "requests.storage" else str(value) for key, value in hard.items()}
    hard |= dict.fromkeys(COUNTED, str(MAX_OBJECTS))
    ranges = {key: str(container[key]) for key in ("cpu", "memory")}
    policy = _cilium_policy if options.cilium else _network_policy
    api, kind = ("cilium.io/v2", "CiliumNetworkPolicy") if options.cilium else ("networking.k8s.io/v1", "NetworkPolicy")
    return (
        {"apiVersion": "v1", "kind": "Namespace", "metadata": space},
        {**head(api, kind), "spec": policy(namespace_name(name), spec["internet"], options)},
        {**head("v1", "ResourceQuota"), "spec": {"hard": hard}},
        {
            **head("v1", "LimitRange"),
            "spec": {"limits": [{"type": "Container", "default": ranges, "defaultRequest": dict(ranges)}]},
        },
        {**head("v1", "ServiceAccount", "default"), "automountServiceAccountToken": False},
    )


def _network_policy(_space: str, internet: bool, options: TenancyOptions) -> Document:
    """Return a policy with all defaults filled in, so that it can be compared with the API server's copy."""
    own: Document = {"podSelector": {}}
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    server: list[Document] = [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        }
    ]
    egress: list[Document] = [
        {"to": [own]},
        {"to": server + [{"ipBlock": {"cidr": each}} for each in options.dns], "ports": dns},
    ]
    if internet and (blocks := _internet(options)):
        egress.append({"to": [{"ipBlock": block} for block in blocks]})
    return {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [{"from": [own]}], "egress": egress}


def _cilium_policy(space: str, internet: bool, options: TenancyOptions) -> Document:
    """Sections for both directions put both into default-deny."""
    own = {"matchLabels": {"k8s:io.kubernetes.pod.namespace": space}}
    dns = {"matchLabels": {"k8s:io.kubernetes.pod.namespace": "kube-system", "k8s:k8s-app": "kube-dns"}}
    ports = [{"ports": [{"port": "53", "protocol": protocol} for protocol in ("UDP", "TCP")]}]
    egress: list[Document] = [{"toEndpoints": [own]}, {"toEndpoints": [dns], "toPorts": ports}]
    if options.dns:
        egress.append({"toCIDR": list(options.dns), "toPorts": ports})
    if internet and (blocks := _internet(options)):
        egress.append({"toCIDRSet": blocks})
    return {"endpointSelector": {}, "ingress": [{"fromEndpoints": [own]}], "egress": egress}


def _internet(options: TenancyOptions) -> list[Document]:
    """Return the public addresses without the denied ones; no rule if all are denied (an empty list allows all)."""
    found = []
    denied = {each: ipaddress.ip_network(each, strict=False) for each in options.denied}
    for every, private in (("0.0.0.0/0", PRIVATE), (PUBLIC_6, PRIVATE_6)):
        whole = ipaddress.ip_network(every)
        more = {text: net for text, net in denied.items() if net.version == whole.version and net.overlaps(whole)}
        if all(net.prefixlen > whole.prefixlen for net in more.values()):
            found.append({"cidr": every, "except": list(dict.fromkeys([*private, *more]))})
    return found


def is_as_planned(planned: Any, found: Any) -> bool:
    """Whether an object's contents are equal, quantities as numbers; labels and others' annotations may be more."""
    if isinstance(planned, dict) and "metadata" in planned:
        wanted, there = planned["metadata"], found["metadata"]
        return (
            (there.get("labels") or {}).items() >= (wanted.get("labels") or {}).items()
            and _registries(there) == _registries(wanted)
            and all(
                is_as_planned(value, found.get(name))
                for name, value in planned.items()
                if name not in ("apiVersion", "kind", "metadata")
            )
        )
    if isinstance(planned, dict) and isinstance(found, dict):
        return planned.keys() == found.keys() and all(
            is_as_planned(value, found[key]) for key, value in planned.items()
        )
    if isinstance(planned, list) and isinstance(found, list):
        return len(planned) == len(found) and all(map(is_as_planned, planned, found))
    if isinstance(planned, str) and isinstance(found, str | int) and planned != found:
        one, other = parse_quantity(planned), parse_quantity(str(found))
        return one is not None and one == other
    return bool(planned == found)


def _registries(metadata: Document) -> str:
    return str((metadata.get("annotations") or {}).get(REGISTRIES, ""))


def next_steps(tenancy: Document, seen: TenancySeen, options: TenancyOptions) -> tuple[TenancyStep, ...]:
    """Return the next steps for a tenancy as it was read; foreign objects are left alone."""
    metadata = tenancy["metadata"]
    finalizers = metadata.get("finalizers") or []
    going = bool(metadata.get("deletionTimestamp"))
    if going and FINALIZER not in finalizers:
        return ()
    if not going and FINALIZER not in finalizers:
        return (TenancyStep("update", _with(tenancy, finalizers=[*finalizers, FINALIZER])),)
    space = _observe_namespace(tenancy, seen.namespace)
    planned = plan_objects(tenancy, options)
    if going and (seen.namespace is None or space.reason in _FOREIGN):
        left = [each for each in finalizers if each != FINALIZER]
        return () if seen.leases else (TenancyStep("update", _with(tenancy, finalizers=left)),)
    if seen.namespace is None:
        # the status forgets the old namespace before there is a new one
        known = (tenancy.get("status") or {}).get("namespace")
        return () if known else (TenancyStep("create", planned[0]),)
    if not space.holds:
        return ()
    steps = []
    for each in planned:
        found = (
            seen.namespace
            if each["kind"] == "Namespace"
            else seen.objects.get((each["kind"], each["metadata"]["name"]))
        )
        if found is None:
            steps.append(TenancyStep("create", each))
        elif not is_as_planned(each, found):
            metadata = dict(found["metadata"])
            for field in ("labels", "annotations"):
                kept = {name: value for name, value in (metadata.get(field) or {}).items() if name != REGISTRIES}
                metadata[field] = {**kept, **each["metadata"].get(field, {})}
            steps.append(TenancyStep("update", {**found, **each, "metadata": metadata}))
    if is_closed(tenancy):
        steps += [TenancyStep("delete", each) for each in seen.pods if not each["metadata"].get("deletionTimestamp")]
    if going and not steps and not seen.pods and not seen.leases:
        steps.append(TenancyStep("delete", seen.namespace))
    return tuple(steps)


def _with(document: Document, **metadata: Any) -> Document:
    return {**document, "metadata": {**document["metadata"], **metadata}}


_FOREIGN = ("NamespaceNotOurs", "NamespaceReplaced")
"""Reasons why a namespace is left alone."""


def _observe_namespace(tenancy: Document, space: Document | None) -> Verdict:
    name, uid = namespace_name(tenancy["metadata"]["name"]), tenancy["metadata"].get("uid")
    known = ((tenancy.get("status") or {}).get("namespace") or {}).get("uid")
    if space is None:
        return Verdict("NamespaceReady", False, "NamespaceAbsent", f"there is no namespace {name}")
    labels = space["metadata"].get("labels") or {}
    if known is None and labels.get(UID_LABEL) != uid:
        words = f"namespace {name} was there before: remove it, or choose another name for the tenancy"
        return Verdict("NamespaceReady", False, "NamespaceNotOurs", words)
    if known is not None and known != space["metadata"]["uid"]:
        words = f"namespace {name} is another one than that of UID {known}: remove it"
        return Verdict("NamespaceReady", False, "NamespaceReplaced", words)
    if space["metadata"].get("deletionTimestamp") or (space.get("status") or {}).get("phase") != "Active":
        words = "; ".join([f"namespace {name} is going away", *_what_holds(space)])
        return Verdict("NamespaceReady", False, "NamespaceTerminating", words)
    return Verdict("NamespaceReady", True, "Observed")


_HOLDING = re.compile(r"NamespaceDeletion\w+|NamespaceContentRemaining|NamespaceFinalizersRemaining")
"""Conditions by which the namespace controller says what a namespace waits for (k8s.io/api core/v1 types.go)."""


def _what_holds(space: Document) -> Iterator[str]:
    """Yield why a namespace under deletion still exists: finalizers, and the cluster's messages."""
    if finalizers := space["metadata"].get("finalizers"):
        yield f"it has the finalizers {printable(', '.join(finalizers), 300)}"
    for each in (space.get("status") or {}).get("conditions") or []:
        if _HOLDING.fullmatch(str(each.get("type"))) and each.get("status") == "True":
            yield printable(str(each.get("message", "")), 500)


_CONDITIONS = {
    "NetworkPolicy": "NetworkIsolated",
    "CiliumNetworkPolicy": "NetworkIsolated",
    "ResourceQuota": "QuotaEnforced",
    "LimitRange": "LimitsSet",
    "ServiceAccount": "AccountLocked",
}


def observe_conditions(tenancy: Document, seen: TenancySeen, options: TenancyOptions) -> tuple[Verdict, ...]:
    """Return each observed condition except the summary."""
    space = _observe_namespace(tenancy, seen.namespace)
    planned = plan_objects(tenancy, options)
    if space.holds and not is_as_planned(planned[0], seen.namespace):
        words = f"namespace {namespace_name(tenancy['metadata']['name'])} is not as it should be"
        space = Verdict("NamespaceReady", False, "Differs", words)
    verdicts = [space]
    for each in planned[1:]:
        found = seen.objects.get((each["kind"], each["metadata"]["name"])) if space.reason not in _FOREIGN else None
        verdicts.append(_observe_object(_CONDITIONS[each["kind"]], each, found, seen))
    missing = ", ".join(seen.unenforced)
    words = f"not in force: {missing}; install packaging/kubernetes/tenants.yaml" if missing else ""
    verdicts.append(Verdict("AdmissionEnforced", not missing, "NotInForce" if missing else "Observed", words))
    if is_closed(tenancy):
        pods = [_with_finalizers(each["metadata"]) for each in seen.pods]
        verdicts.append(
            Verdict("WorkloadsStopped", not pods, "PodsLeft" if pods else "Observed", _names("pods remain", pods))
        )
    if tenancy["metadata"].get("deletionTimestamp"):
        words = _names("GPUs are not returned yet", seen.leases)
        verdicts.append(Verdict("LeasesReleased", not seen.leases, "LeasesHeld" if seen.leases else "Observed", words))
    return tuple(verdicts)


def _observe_object(type_: str, planned: Document, found: Document | None, seen: TenancySeen) -> Verdict:
    kind = planned["kind"]
    if found is None:
        return Verdict(type_, False, "Absent", f"there is no {kind} {planned['metadata']['name']}")
    if not is_as_planned(planned, found):
        return Verdict(type_, False, "Differs", f"{kind} {planned['metadata']['name']} is not as it should be")
    status = found.get("status") or {}
    if kind == "ResourceQuota" and not is_as_planned(planned["spec"]["hard"], status.get("hard")):
        return Verdict(type_, False, "NotSeenYet", "the quota controller has not seen it yet")
    if type_ == "NetworkIsolated" and seen.others:
        return Verdict(type_, False, "OtherPolicies", _names("policies that may open it", seen.others))
    valid = next((each for each in status.get("conditions") or [] if each.get("type") == "Valid"), None)
    if kind == "CiliumNetworkPolicy" and valid is not None and valid.get("status") != "True":
        return Verdict(type_, False, "Rejected", printable(str(valid.get("message", "")), 300))
    return Verdict(type_, True, "Observed")


def _with_finalizers(metadata: Document) -> str:
    finalizers = ", ".join(metadata.get("finalizers") or ())
    return f"{metadata['name']}{f' (finalizers {printable(finalizers, 100)})' if finalizers else ''}"


def _names(words: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{words}: {', '.join(sorted(names)[:5])}{more}" if names else ""


def make_status(tenancy: Document, seen: TenancySeen, options: TenancyOptions, now: str, problem: str = "") -> Document:
    """Return the status; ``now``: RFC 3339, for conditions that change; ``problem``: what the last request met."""
    verdicts = observe_conditions(tenancy, seen, options)
    space, closed = verdicts[0], is_closed(tenancy)
    wrong = [each for each in verdicts if not each.holds]
    going = bool(tenancy["metadata"].get("deletionTimestamp"))
    if going:
        phase, reason = "Terminating", "Terminating"
    elif space.reason in _FOREIGN:
        phase, reason = "Failed", space.reason
    elif closed:
        phase, reason = ("Suspending", wrong[0].reason) if wrong else ("Suspended", "Suspended")
    elif wrong or problem:
        phase, reason = "Provisioning", wrong[0].reason if wrong else "RequestFailed"
    else:
        phase, reason = "Ready", "Observed"
    message = "; ".join(filter(None, [printable(problem, 500), *(f"{each.type}: {each.message}" for each in wrong)]))
    verdicts += (Verdict("Ready", phase == "Ready", reason, message),)
    conditions = make_conditions(verdicts, tenancy, now)
    generation = tenancy["metadata"].get("generation", 0)
    result: Document = {"phase": phase, "observedGeneration": generation, "conditions": conditions}
    if seen.namespace is not None and space.reason not in _FOREIGN:
        result["namespace"] = {name: seen.namespace["metadata"][name] for name in ("name", "uid")}
    elif space.reason == "NamespaceReplaced":
        result["namespace"] = tenancy["status"]["namespace"]
    quota = seen.objects.get(("ResourceQuota", OBJECT_NAME)) or {}
    used = (quota.get("status") or {}).get("used", {}).get(f"requests.{options.resource}")
    if used is not None:
        result["gpusUsed"] = str(used)
    return result


def find_held_leases(leases: Iterable[Document], tenancy: str) -> tuple[str, ...]:
    """Return the names of leases that a tenancy, or a pod of its namespace, still has."""
    held = []
    for lease in leases:
        status = lease.get("status") or {}
        holder = status.get("holder") or {}
        ours = holder.get("tenancy") == tenancy or holder.get("namespace") == namespace_name(tenancy)
        if ours and status.get("phase") not in SETTLED_LEASES:
            held.append(lease["metadata"]["name"])
    return tuple(held)


def find_unenforced(policies: Collection[Document], bindings: Collection[Document]) -> tuple[str, ...]:
    """Return which of the admission policies are not in force for every namespace with the label of tenancies."""
    found = []
    for name in POLICIES:
        policy: Document = next((each["spec"] for each in policies if each["metadata"]["name"] == name), {})
        binding: Document = next((each["spec"] for each in bindings if each["metadata"]["name"] == name), {})
        scope = binding.get("matchResources") or {}
        selector = scope.get("namespaceSelector") or {}
        whole = selector in ({}, {"matchExpressions": [{"key": TENANCY_LABEL, "operator": "Exists"}]})
        narrowed = any(scope.get(key) for key in ("objectSelector", "excludeResourceRules", "resourceRules"))
        if not (
            policy.get("failurePolicy", "Fail") == "Fail"
            and policy.get("validations")
            and binding.get("policyName") == name
            and "Deny" in binding.get("validationActions", ())
            and whole
            and not narrowed
        ):
            found.append(name)
    return tuple(found)
