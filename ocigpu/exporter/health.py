"""Whether NVIDIA GPUs are healthy, judged by samples with the XIDs and rules of the device plugin."""

from collections.abc import Iterable, Mapping

from ocigpu.exporter.owners import WHOLE, Key
from ocigpu.exporter.sample import GpuSample
from ocigpu.kubernetes.node.health import RULES, HealthPolicy, HealthState, Rules


class HealthWatch:
    """The states of GPUs and GPU instances.  ``reasons``: why each is unhealthy, "" for one that is well."""

    def __init__(self, policy: HealthPolicy, rules: Rules = RULES) -> None:
        self.reasons: Mapping[Key, str] = {}
        self._policy, self._rules = policy, rules
        self._states: dict[Key, HealthState] = {}
        self._counted: dict[Key, dict[int, int]] = {}

    def take(self, gpus: Iterable[GpuSample], now: float) -> None:
        """Take in a sample; ``now``: of a clock that only goes forward.  Other vendors' GPUs have metrics of their own.

        What is not in it any more is forgotten.
        """
        found: dict[Key, HealthState] = {}
        for gpu in gpus:
            if gpu.names or not gpu.uuid:
                continue
            parts = [(WHOLE, gpu.xid_totals), *((part.number, part.xid_totals) for part in gpu.instances)]
            for number, totals in parts:
                key = (gpu.uuid, number)
                state = self._states.get(key, HealthState())
                reason = gpu.error or self._find_xid(key, totals)
                found[key] = state.failed(now, reason, self._rules) if reason else state.answered(now, self._rules)
        self._states = found
        self.reasons = {key: "" if state.healthy else state.reason for key, state in found.items()}
        self._counted = {key: counts for key, counts in self._counted.items() if key in found}

    def _find_xid(self, key: Key, totals: Mapping[int, int]) -> str:
        """Return the XID that counts and has come since the last sample, "" for none."""
        before, self._counted[key] = self._counted.get(key, {}), dict(totals)
        if any(totals.get(xid, 0) < count for xid, count in before.items()):
            before = {}  # what counts them was started again
        new = [xid for xid, count in totals.items() if count > before.get(xid, 0) and self._policy.counts(xid)]
        return f"XID {new[-1]}" if new else ""
