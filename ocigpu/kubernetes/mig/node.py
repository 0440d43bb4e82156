"""What the MIG manager reads and changes: its node and pods by the API server, the GPUs by ``ocigpu`` on the host."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from lightkube import Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import DaemonSet
from lightkube.resources.core_v1 import Node, Pod, PodEviction
from lightkube.types import PatchType

from ocigpu.cdi.write import write_file
from ocigpu.core.errors import HostError, OsErrorAs, printable
from ocigpu.gpus.tree import read_bytes
from ocigpu.kubernetes.cluster.client import FAILURES, ask, refused, status_of
from ocigpu.kubernetes.node.on_host import run_on_host
from ocigpu.system.proc import read_boot_id
from ocigpu.system.programs import Finished

PROGRAMS = ("/opt/ocigpu/current/bin/ocigpu", "/usr/local/bin/ocigpu", "/usr/bin/ocigpu")
"""Where the node installer, ``make install`` and the packages put it."""
SECONDS = 600.0
BOOT_FILE, BOOT_LAYOUTS = "/etc/ocigpu/mig.env", "/etc/ocigpu/mig.yaml"
"""What ocigpu-mig.service applies at boot."""
_RESOURCE = "nvidia.com/"


class PodOfNode(NamedTuple):
    """A pod that has not ended.  ``selects``: its node selector and affinity, as text; ``gpus``: it requests some.

    ``claims``: its ResourceClaims, by name.  ``daemon``: name and UID of the DaemonSet in its owner reference, which
    the pod's author may have forged.
    """

    namespace: str
    name: str
    uid: str
    daemon: tuple[str, str] | None
    gpus: bool
    selects: str
    claims: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Metadata(NamedTuple):
    """Labels and annotations of the node."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class NodeApi:
    """One node and its pods; every method raises HostError (OCIGPU-KUBE-5)."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name

    def read(self) -> Metadata:
        found: Any = ask(f"read node {self.name}", lambda: self._client.get(Node, self.name)).metadata
        return Metadata(found.labels or {}, found.annotations or {})

    def patch(self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]) -> None:
        """Set labels and annotations, in one write; None removes one."""
        body = {"metadata": {"labels": labels, "annotations": annotations}}
        ask(
            f"patch node {self.name}",
            lambda: self._client.patch(Node, self.name, body, patch_type=PatchType.MERGE),
        )

    def pods(self) -> list[PodOfNode]:
        found = ask(
            f"list pods of node {self.name}",
            lambda: list(self._client.list(Pod, namespace="*", fields={"spec.nodeName": self.name})),
        )
        return [_pod(one) for one in found if one.status is None or one.status.phase not in ("Succeeded", "Failed")]

    def daemon_selects(self, pod: PodOfNode) -> str | None:
        """Return how the pod's DaemonSet selects nodes now, as :attr:`PodOfNode.selects`; None without one.

        It may differ from the pod, which is of a former revision during a roll-out.  Only an existing DaemonSet deletes
        the pod when it no longer selects the node, and any author can write the name of one into a pod.
        """
        if pod.daemon is None:
            return None
        name, uid = pod.daemon
        what, nothing = f"read DaemonSet {pod.namespace}/{name}", None
        found: Any = ask(what, lambda: self._client.get(DaemonSet, name, namespace=pod.namespace), nothing)
        if found is None or not uid or found.metadata.uid != uid:
            return None
        template = found.spec.template if found.spec else None
        return _selects(template.spec.to_dict() if template and template.spec else {})

    def evict(self, pod: PodOfNode) -> bool:
        """Request a pod's eviction; False while a disruption budget forbids it.

        Admission comes before the pod is looked up, and the policy is evaluated with the namespace's pods: where the
        last one has gone, the answer is not 404.
        """
        body = PodEviction(metadata=ObjectMeta(name=pod.name, namespace=pod.namespace))
        try:
            self._client.create(body, pod.name, namespace=pod.namespace)
        except FAILURES as error:
            if status_of(error) == 429:
                return False
            if status_of(error) != 404 and any(one.uid == pod.uid for one in self.pods()):
                raise refused(f"evict pod {pod}", error) from error
        return True

    def follow(self, wake: Callable[[], None], pause: Callable[[float], bool], keys: Collection[str]) -> None:
        """Call ``wake`` whenever one of these labels is other than before, until ``pause`` returns True."""
        before: dict[str, str] | None = None
        while True:
            try:
                for _, node in self._client.watch(Node, fields={"metadata.name": self.name}, server_timeout=300):
                    labels = (node.metadata.labels if node.metadata else None) or {}
                    now = {key: labels[key] for key in keys if key in labels}
                    if before is not None and now != before:
                        wake()
                    before = now
            except FAILURES:
                pass  # the next interval catches what was missed
            if pause(5.0):
                return


def _pod(pod: Any) -> PodOfNode:
    spec, metadata = pod.spec.to_dict(), pod.metadata
    status = pod.status.to_dict() if pod.status else {}
    containers = [*spec.get("containers", []), *spec.get("initContainers", [])]
    resources = [container.get("resources") or {} for container in containers]
    asked = [name for each in resources for name in (*(each.get("limits") or {}), *(each.get("requests") or {}))]
    parts = [*(spec.get("resourceClaims") or ()), *(status.get("resourceClaimStatuses") or ())]
    parts.append(status.get("extendedResourceClaimStatus") or {})
    claims = tuple(each["resourceClaimName"] for each in parts if each.get("resourceClaimName"))
    owners = [one for one in metadata.ownerReferences or () if one.kind == "DaemonSet" and one.controller]
    daemon = (owners[0].name, owners[0].uid) if owners else None
    gpus = any(each.get("claims") for each in resources) or any(name.startswith(_RESOURCE) for name in asked)
    return PodOfNode(metadata.namespace, metadata.name, metadata.uid or "", daemon, gpus, _selects(spec), claims)


def _selects(spec: Mapping[str, Any]) -> str:
    return json.dumps([spec.get("nodeSelector") or {}, (spec.get("affinity") or {}).get("nodeAffinity") or {}])


class MigAnswer(NamedTuple):
    """What ``ocigpu mig`` answered: its exit status, its document, and its complaint, "CODE: message"."""

    status: int
    document: dict[str, Any]
    problem: str = ""


class HostTools:
    """The host's programs, by chroot(1) unless this process is on the host; raises HostError (OCIGPU-MIG-6)."""

    def __init__(self, root: str = "/", program: str = "", variables: Mapping[str, str] | None = None) -> None:
        self.root = root.rstrip("/") or "/"
        self._program = program
        self._variables = dict(variables or {})

    def _run(self, command: Sequence[str], words: str = "") -> Finished:
        try:
            return run_on_host(self.root, command, SECONDS, words, **self._variables)
        except OSError as error:
            raise HostError("OCIGPU-MIG-6", f"{command[0]}: {error}") from error

    def path(self, path: str) -> str:
        """Return where this process finds a file of the host."""
        return path if self.root == "/" else f"{self.root}{path}"

    def _ocigpu(self) -> str:
        program = self._program or next((path for path in PROGRAMS if os.path.exists(self.path(path))), "")
        if not program:
            raise HostError("OCIGPU-MIG-6", "the host has no ocigpu", "Install it, or name it: --ocigpu PATH")
        return program

    def mig(self, verb: str, *words: str, layouts: str = "") -> MigAnswer:
        """Run ``ocigpu mig`` with the text of a layout file; "" stands for the built-in layouts of the host's GPUs."""
        file = ["-f", "-"] if layouts else []
        json_word = [] if "--valid-config" in words else ["--json"]
        done = self._run([self._ocigpu(), "mig", verb, *json_word, *file, *words], layouts)
        lines = [line for line in done.complaint.splitlines() if line.startswith("ocigpu: ")]
        try:
            document = json.loads(done.output) if done.output.strip() else {}
        except ValueError:
            document = {}
        problem = printable(lines[0].removeprefix("ocigpu: "), 800) if lines else ""
        if done.status and not document and not problem:
            problem = printable(done.last_line, 300)
        return MigAnswer(done.status, document, problem)

    def refresh_cdi(self) -> str:
        """Write the host's CDI specification again; returns why that did not work, "" when it did."""
        done = self._run([self._ocigpu(), "cdi", "refresh"])
        return printable(done.last_line, 300) if done.status else ""

    def running(self, services: Sequence[str]) -> list[str]:
        """Return the systemd services that run."""
        return [name for name in services if not self._run(["systemctl", "is-active", "--quiet", name]).status]

    def switch(self, verb: str, services: Sequence[str]) -> None:
        """Stop or start systemd services."""
        if services and (done := self._run(["systemctl", verb, *services])).status:
            raise HostError("OCIGPU-MIG-6", f"systemctl {verb} {' '.join(services)}: {printable(done.last_line, 300)}")

    def reboot(self) -> None:
        """Reboot the host."""
        self._run(["systemctl", "reboot"])

    def boot_id(self) -> str:
        """Return an id that changes with each boot."""
        return read_boot_id()

    def keep_for_boot(self, name: str, layouts: str) -> None:
        """Write what ocigpu-mig.service is to apply at boot, where it is not there already."""
        lines = [f"MIG_PARTED_SELECTED_CONFIG={name}", *([f"MIG_PARTED_CONFIG_FILE={BOOT_LAYOUTS}"] if layouts else [])]
        for path, text in ((BOOT_LAYOUTS, layouts), (BOOT_FILE, "\n".join(lines) + "\n")):
            content, target = text.encode(), self.path(path)
            if not content or read_bytes(target, len(content) + 1) == content:
                continue
            with OsErrorAs(HostError, "OCIGPU-MIG-6", f"write {target}"):
                write_file(target, content)
