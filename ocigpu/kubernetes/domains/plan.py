"""What a cluster's ComputeDomains lack: which nodes belong to them, their daemons, cliques and status.  Pure.

Claims decide which nodes a domain has: a node is in it while a claim of the domain's namespace is allocated a channel
there, and needs nothing of the node to leave it again.  Who tells the daemons of each other is the controller alone, by
objects of kind ComputeDomainClique; daemons only read them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ocigpu.core.errors import RequestError
from ocigpu.kubernetes.cluster.owners import DOMAIN_DRIVER
from ocigpu.kubernetes.domains.objects import (
    DOMAIN_LABEL,
    FINALIZER,
    NOT_READY,
    READY,
    DaemonOptions,
    Document,
    clique_object,
    daemon_name,
    daemon_set,
    daemon_template,
    domain_of,
    network_policy,
    uid_of,
    workload_template,
)
from ocigpu.kubernetes.dra.claims import allocated_devices
from ocigpu.kubernetes.dra.configs import resolve_configs

CLIQUE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9]{1,10}")
MADE = ("DaemonSet", "ResourceClaimTemplate", "NetworkPolicy", "ComputeDomainClique")
"""Kinds of the objects that are made for a domain."""


class ClusterSeen(NamedTuple):
    """A reading of the cluster; ``made``: objects of the kinds of :data:`MADE` with the domains' label.

    ``claims``, ``pods`` (of the daemons' namespace) and ``nodes``: those with the domains' label; ``slices``: of the
    domains' driver.
    """

    domains: Sequence[Document]
    made: Sequence[Document] = ()
    claims: Sequence[Document] = ()
    pods: Sequence[Document] = ()
    nodes: Sequence[Document] = ()
    slices: Sequence[Document] = ()


class DomainStep(NamedTuple):
    """A change: "create", "update", "delete", or "label": set the domain's label of a node, None removes it."""

    verb: str
    document: Document
    label: str | None = None


class DomainMember(NamedTuple):
    """A node of a domain with its daemon; ``number`` is -1 where no multi-node NVLink is: no IMEX daemon runs there."""

    node: str
    address: str
    clique: str
    number: int
    ready: bool

    def entry(self, name: str) -> Document:
        """Return it as an entry of a list; ``name``: of the field with the node's name."""
        status = READY if self.ready else NOT_READY
        return {
            name: self.node,
            "ipAddress": self.address,
            "cliqueID": self.clique,
            "index": self.number,
            "status": status,
        }


class DomainPlan(NamedTuple):
    """``members``: of all domains by uid; ``surplus``: nodes for which a clique of a domain has no room, by uid."""

    steps: tuple[DomainStep, ...]
    members: "dict[str, tuple[DomainMember, ...]]"
    surplus: "dict[str, tuple[str, ...]]"


def is_ending(domain: Document) -> bool:
    return bool(domain["metadata"].get("deletionTimestamp"))


# nodes


def claimed_nodes(domains: Iterable[Document], claims: Iterable[Document]) -> "dict[str, set[str]]":
    """Return the nodes on which a claim has a channel of a domain, by the domain's uid.

    A claim of another namespace than the domain's counts for nothing, whatever its parameters say.
    """
    spaces = {uid_of(domain): domain["metadata"]["namespace"] for domain in domains}
    found: dict[str, set[str]] = {uid: set() for uid in spaces}
    for claim in claims:
        for node, uid in _channels(claim):
            if spaces.get(uid) == claim["metadata"].get("namespace"):
                found[uid].add(node)
    return found


def _channels(claim: Document) -> "list[tuple[str, str]]":
    """Return node and domain of each channel that a claim is allocated."""
    own = [each for each in allocated_devices(claim) if each.get("driver") == DOMAIN_DRIVER]
    kinds = [(str(each.get("request", "")), str(each.get("device", "")).partition("-")[0]) for each in own]
    try:
        configs = resolve_configs((claim.get("status") or {}).get("allocation") or {}, DOMAIN_DRIVER, kinds)
    except RequestError:  # the node's driver says so to the kubelet
        return []
    return [(str(own[at].get("pool", "")), each.domain) for at, each in configs.items() if kinds[at][1] == "channel"]


def node_cliques(slices: Iterable[Document]) -> "dict[str, str]":
    """Return the clique of each node, "" without multi-node NVLink, as its driver has published it.

    A node may write what it likes into its own slices; what is not a clique leaves it out.
    """
    found: dict[str, str] = {}
    specs = [each.get("spec") or {} for each in slices]
    for spec in sorted(specs, key=lambda spec: int((spec.get("pool") or {}).get("generation") or 0)):
        node = str(spec.get("nodeName", ""))
        found.pop(node, None)  # of an older generation
        for device in spec.get("devices") or ():
            if device.get("name", "").startswith("daemon-"):
                clique = str(((device.get("attributes") or {}).get("cliqueID") or {}).get("string") or "")
                if not clique or CLIQUE.fullmatch(clique):
                    found[node] = clique
    return found


# members


def find_members(
    uid: str, nodes: Iterable[str], seen: ClusterSeen, cliques: Mapping[str, str], most: int
) -> "tuple[tuple[DomainMember, ...], tuple[str, ...]]":
    """Return the members of a domain by node, and the nodes for which their clique has no index left.

    A node keeps its clique, and its index, by which its peers know it, for as long as it is claimed, also while its
    daemon is replaced or its driver offers nothing: NVML that hangs for a moment must not end a job.
    """
    entries = [
        one
        for each in seen.made
        if each["kind"] == "ComputeDomainClique" and domain_of(each) == uid
        for one in each.get("daemons") or ()
    ]
    known = {(str(one["nodeName"]), str(one["cliqueID"])): one for one in entries}
    cliques = {**dict(known.keys()), **cliques}
    pods: dict[str, Document] = {}
    for pod in seen.pods:
        if _is_daemon(pod, uid):
            node = str(pod["spec"].get("nodeName"))
            pods[node] = max(pods.get(node, pod), pod, key=_rank)
    members: list[DomainMember] = []
    surplus: list[str] = []
    taken: dict[str, set[int]] = {}
    here = sorted(node for node in nodes if node in cliques)  # of others nothing is known yet
    for node in here:
        if before := known.get((node, cliques[node])):
            taken.setdefault(cliques[node], set()).add(int(before.get("index", 0)))
    for node in here:
        own, clique, before = pods.get(node), cliques[node], known.get((node, cliques[node]))
        address = _address(own) or str((before or {}).get("ipAddress") or "")
        if not address:
            continue
        number = -1
        if clique and before:
            number = int(before.get("index", 0))
        elif clique:
            free = [each for each in range(most) if each not in taken.get(clique, ())]
            if not free:
                surplus.append(node)
                continue
            number = free[0]
            taken.setdefault(clique, set()).add(number)
        members.append(DomainMember(node, address, clique, number, _is_ready(own)))
    return tuple(members), tuple(surplus)


def _is_daemon(pod: Document, uid: str) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    mine = any((each.get("kind"), each.get("name")) == ("DaemonSet", daemon_name(uid)) for each in owners)
    over = (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
    return domain_of(pod) == uid and mine and not over and bool(pod["spec"].get("nodeName"))


def _rank(pod: Document) -> "tuple[bool, str]":
    """The pod of a node that counts: one that is not ending, else the newest."""
    return not is_ending(pod), str(pod["metadata"].get("creationTimestamp") or "")


def _address(pod: Document | None) -> str:
    return str(((pod or {}).get("status") or {}).get("podIP") or "")


def _is_ready(pod: Document | None) -> bool:
    conditions = ((pod or {}).get("status") or {}).get("conditions") or ()
    ready = any((each.get("type"), each.get("status")) == ("Ready", "True") for each in conditions)
    return ready and pod is not None and not is_ending(pod) and bool(_address(pod))


# the plan


def plan_domains(seen: ClusterSeen, options: DaemonOptions, expired: "Iterable[str]" = ()) -> DomainPlan:
    """Return the changes that the cluster needs; ``expired``: ending domains whose daemons wait for pods no longer."""
    over = {
        uid
        for domain in seen.domains
        if is_ending(domain)
        for uid in [uid_of(domain)]
        if uid in expired or not claimed_nodes([domain], seen.claims)[uid]
    }
    active = [domain for domain in seen.domains if uid_of(domain) not in over]
    claimed, cliques = claimed_nodes(active, seen.claims), node_cliques(seen.slices)
    members, surplus = {}, {}
    wanted: list[Document] = []
    for domain in active:
        uid = uid_of(domain)
        members[uid], surplus[uid] = find_members(uid, claimed[uid], seen, cliques, options.most)
        wanted += _wanted_objects(domain, members[uid], options)
    steps = [*_finalizers(seen, over), *_objects(seen, wanted), *_labels(seen, claimed)]
    return DomainPlan(tuple(steps), members, surplus)


def _wanted_objects(domain: Document, members: Sequence[DomainMember], options: DaemonOptions) -> list[Document]:
    made = [daemon_template(domain, options), network_policy(domain, options), daemon_set(domain, options)]
    if not is_ending(domain):
        made.append(workload_template(domain))
    uid = uid_of(domain)
    for clique in sorted({each.clique for each in members} - {""}):
        daemons = [each.entry("nodeName") for each in members if each.clique == clique]
        made.append({**clique_object(uid, clique, options.namespace), "daemons": daemons})
    return made


def _finalizers(seen: ClusterSeen, over: "set[str]") -> list[DomainStep]:
    steps = []
    left = {domain_of(each) for each in seen.made if each["kind"] != "ComputeDomainClique"}
    for domain in seen.domains:
        metadata, uid = domain["metadata"], uid_of(domain)
        found: list[str] = metadata.get("finalizers") or []
        if not is_ending(domain) and FINALIZER not in found:
            finalizers = [*found, FINALIZER]
        elif uid in over and FINALIZER in found and uid not in left:
            finalizers = [each for each in found if each != FINALIZER]
        else:
            continue
        steps.append(DomainStep("update", {**domain, "metadata": {**metadata, "finalizers": finalizers}}))
    return steps


def _key(document: Document) -> "tuple[str, str, str]":
    return document["kind"], document["metadata"].get("namespace", ""), document["metadata"]["name"]


def _objects(seen: ClusterSeen, wanted: Sequence[Document]) -> list[DomainStep]:
    """Return what makes the objects of domains: existing ones stay as they are, but for the members of cliques.

    A change to the DaemonSet would restart the daemons, and with them end the jobs that use them.
    """
    present = {_key(each): each for each in seen.made}
    steps = []
    for document in wanted:
        found = present.get(_key(document))
        if found is not None and domain_of(found) != domain_of(document):
            continue  # of a former domain of this name: it is deleted first
        present.pop(_key(document), None)
        if found is None:
            steps.append(DomainStep("create", document))
        elif document["kind"] == "ComputeDomainClique" and found.get("daemons") != document["daemons"]:
            steps.append(DomainStep("update", {**found, "daemons": document["daemons"]}))
    steps += [DomainStep("delete", each) for each in present.values() if not is_ending(each)]
    return steps


def _labels(seen: ClusterSeen, claimed: "Mapping[str, set[str]]") -> list[DomainStep]:
    """Return the labels of nodes that must change; a node has one domain, and keeps it while that has a claim there."""
    now = {each["metadata"]["name"]: domain_of(each) for each in seen.nodes}
    steps = []
    for node in sorted({*now, *(name for names in claimed.values() for name in names)}):
        domains = sorted(uid for uid, names in claimed.items() if node in names)
        label = now.get(node) if now.get(node) in domains else next(iter(domains), None)
        if label != now.get(node):
            head = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
            steps.append(DomainStep("label", head, label))
    return steps


def label_change(label: str | None) -> Document:
    """Return the merge patch that sets the label of a node."""
    return {"metadata": {"labels": {DOMAIN_LABEL: label}}}


# status


def make_domain_status(domain: Document, members: Sequence[DomainMember]) -> Document:
    """Return the status of a domain.

    It is ready when all of its nodes are, and as many as its manifest says, if it does.
    """
    expected = int((domain.get("spec") or {}).get("numNodes") or 0)
    ready = len(members) >= expected and all(each.ready for each in members)
    return {"status": READY if ready else NOT_READY, "nodes": [each.entry("name") for each in members]}


def show_domain(domain: Document) -> str:
    """Return namespace and name of a domain."""
    return f"{domain['metadata']['namespace']}/{domain['metadata']['name']}"


def describe_step(step: DomainStep) -> str:
    kind, namespace, name = _key(step.document)
    if step.verb == "label":
        return f"node {name}: {f'labelled with ComputeDomain {step.label}' if step.label else 'label removed'}"
    return f"{step.verb} {kind} {f'{namespace}/' if namespace else ''}{name}"
