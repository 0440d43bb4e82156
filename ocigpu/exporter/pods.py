"""UIDs and labels of the pods that have GPUs, from the API server, in a thread of its own: no page waits for it.

Only the metadata of these pods is requested, one by one, so that the exporter needs no right to list the cluster's
pods.  Everybody who may create a pod chooses its labels.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, SettingsError, printable, quoted
from ocigpu.kubernetes.cluster.api_server import ACCOUNT, METADATA, ApiServer, find_api_server, request
from ocigpu.system.exposition import Pairs

MAX_PODS = 1024
"""Pods that are looked up, of those that have GPUs of this node."""
MAX_LABELS = 32
"""Labels of a pod that its series have."""
MAX_KEY, MAX_VALUE = 317, 63
"""Longest key and value of a label that Kubernetes accepts: 253 for the prefix, a slash, and 63 each."""
REFRESH = 60.0
"""Seconds after which a pod is looked up again: labels change, and a pod may have the name of an earlier one."""
TARGET_LABELS = frozenset((
    "cluster", "container", "endpoint", "hostname", "instance", "job", "le", "namespace", "node", "pod", "prometheus",
    "prometheus_replica", "quantile", "service",
))  # fmt: skip
"""Names that Prometheus and its operator give to what they read; with honorLabels a pod's would replace them."""
_INVALID = re.compile(r"[^a-zA-Z0-9_]")
_PLAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Names of pods and namespaces (RFC 1123): nothing else becomes part of a path."""

Pod = tuple[str, str]
"""Namespace and name."""
Allowed = Callable[[str], bool]


class PodFacts(NamedTuple):
    """``labels``: with the names that they have in series, without those that are not allowed."""

    uid: str = ""
    labels: Pairs = ()


def compile_allowlist(patterns: Sequence[str]) -> Allowed:
    """Return whether a label's key matches one of these regular expressions; all do without any.

    The syntax is RE2's, whose time grows only linearly with a key.  Raises SettingsError (OCIGPU-KUBE-4) for a pattern
    that it does not accept, or without google-re2, which the package ocigpu-kubernetes contains.
    """
    if not patterns:
        return lambda _key: True
    option = "--kubernetes-pod-label-allowlist-regex"
    try:
        import re2  # needed for this option alone
    except ImportError as error:
        raise SettingsError("OCIGPU-KUBE-4", f"{option}: it needs google-re2") from error
    options = re2.Options()
    options.log_errors = False
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re2.compile(pattern, options))
        except re2.error as error:
            words = error.args[0] if error.args else ""
            text = words.decode(errors="replace") if isinstance(words, bytes) else str(words)
            raise SettingsError("OCIGPU-KUBE-4", f"{option}: {quoted(pattern)}: {printable(text, 200)}") from error
    return lambda key: any(each.search(key) for each in compiled)


def make_labels(found: Any, allowed: Allowed, taken: Iterable[str] = ()) -> Pairs:
    """Return labels of a pod as those of series, at most MAX_LABELS, in the order of their keys.  Pure.

    Characters that Prometheus does not allow become "_", as in dcgm-exporter.  A label is left out that would have a
    name that is ``taken``, that Prometheus gives to its targets, or that it reserves ("__").
    """
    if not isinstance(found, dict):
        return ()
    names: dict[str, str] = {}
    reserved = {*TARGET_LABELS, *taken}
    for key, value in sorted((key, value) for key, value in found.items() if isinstance(value, str)):
        if len(key) > MAX_KEY or len(value) > MAX_VALUE or not allowed(key):
            continue
        name = _INVALID.sub("_", key)
        name = f"_{name}" if name[:1].isdigit() else name
        if name and name not in reserved and not name.startswith("__"):
            names.setdefault(name, printable(value, MAX_VALUE))
        if len(names) == MAX_LABELS:
            break
    return tuple(names.items())


class PodLookup:
    """The facts of the pods that :meth:`follow` was last told; :attr:`facts` may be read at any time.

    ``taken``: names that labels of pods may not have; ``problem``: why the latest look-up failed, "" if it did not.
    """

    def __init__(self, allowed: Allowed | None, taken: Iterable[str] = (), account: str = ACCOUNT) -> None:
        self.facts: Mapping[Pod, PodFacts] = {}
        self.problem = ""
        self._allowed = allowed
        self._taken = frozenset(taken)
        self._account = account
        self._wanted: frozenset[Pod] = frozenset()
        self._changed = threading.Event()

    def start(self) -> None:
        """Look up pods in a thread that ends with the program."""
        threading.Thread(target=self._run, daemon=True).start()

    def follow(self, pods: Iterable[Pod]) -> None:
        """Look up these pods from now on, new ones at once."""
        wanted = frozenset(pods)
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    def _run(self) -> None:
        while True:
            news = self._changed.wait(REFRESH)
            self._changed.clear()
            self.look(everything=not news)

    def look(self, everything: bool = True) -> None:
        """Look up the pods, those that are known only with ``everything``.

        A pod keeps its facts while the server does not answer; one that is gone has none.
        """
        wanted = sorted(self._wanted)[:MAX_PODS]
        found = {pod: self.facts[pod] for pod in wanted if pod in self.facts}
        problem = ""
        try:
            server = find_api_server(os.environ, self._account)
            if server is None:
                raise HostError("OCIGPU-KUBE-5", "no API server: the pod has no service account's token")
            for pod in wanted:
                if pod in found and not everything:
                    continue
                facts = self._read(server, pod)
                if facts is None:
                    found.pop(pod, None)
                else:
                    found[pod] = facts
                self.facts = dict(found)
        except HostError as error:
            problem = error.message
        self.facts, self.problem = found, problem

    def _read(self, server: ApiServer, pod: Pod) -> PodFacts | None:
        namespace, name = pod
        if not (_PLAIN.fullmatch(namespace) and _PLAIN.fullmatch(name)):
            return None
        # from the server's cache: thousands of nodes read their pods every minute
        path = f"/api/v1/namespaces/{namespace}/pods/{name}?resourceVersion=0"
        answer = request(server, "GET", path, accept=METADATA)
        metadata = answer.body.get("metadata")
        if answer.status == 404 or not isinstance(metadata, dict):
            return None
        labels = make_labels(metadata.get("labels"), self._allowed, self._taken) if self._allowed else ()
        return PodFacts(printable(str(metadata.get("uid", "")), MAX_VALUE), labels)
