"""Writes Events about containers into their tenancies' namespaces, for the cluster's operators.

Scheduler and kubelet write their own Events.  Nothing waits for these.  If the cluster does not answer, they are
written later, in order.  After a restart only new ones are written: the service keeps all of them (GET /v1/events).
Of several replicas, the one that keeps containers writes; one that takes over may write the last ones again, under the
same names.
"""

import asyncio
from typing import Final

from ocigpu.kubernetes.cluster.announce import make_event
from ocigpu.kubernetes.cluster.names import namespace_name
from ocigpu.system.service import Backoff, ServiceLog
from ocigpu.tenants.service.cluster import ClusterClient, ClusterError
from ocigpu.tenants.service.event_log import StoredEvent
from ocigpu.tenants.service.lifecycle import REASONS
from ocigpu.tenants.service.pods import object_name
from ocigpu.tenants.service.reconciler import ChangeSignal, ReconcilerPace
from ocigpu.tenants.service.store import CaasStore

REFUSED: Final = ("admission_denied", "quota_exceeded")
ENDED: Final = {"running": "Ready", "finished": "Finished"}


class EventRecorder:
    """Writes Events while :meth:`run` runs, only for what happens from now on."""

    def __init__(
        self, store: CaasStore, cluster: ClusterClient, signal: ChangeSignal, log: ServiceLog, pace: ReconcilerPace
    ) -> None:
        self._store, self._cluster, self._signal, self._log = store, cluster, signal, log
        self._pause = Backoff(pace.first, pace.longest)

    async def run(self, last: int) -> None:
        """Write until cancelled, what comes after the event ``last``."""
        with self._signal.subscribe() as heard:
            while True:
                heard.clear()
                found = self._store.events.after(last)
                for event in found:
                    last = event.id
                    await self._write_event(event)
                if not found:
                    await heard.wait()

    async def _write_event(self, event: StoredEvent) -> None:
        word = news_of(event)
        if not word:
            return
        pod = {"apiVersion": "v1", "kind": "Pod", "name": object_name(event.container)}
        about = {**pod, "namespace": namespace_name(event.tenancy)}
        note = ": ".join(filter(None, (REASONS[event.reason] if event.reason else "", event.detail)))
        warning = bool(event.reason) and word not in ("Created", "Deleted", "Finished")
        made = make_event(about, "caas", word, note or word, warning, event.at)
        while True:
            try:
                await self._cluster.announce(made)
            except ClusterError as error:
                if error.status in (404, 409):  # the namespace does not exist yet, or the Event was written before
                    return
                self._log.once("announce", "warning", f"events cannot be written: {error.message}")
                if not error.passing:
                    return
                await asyncio.sleep(self._pause.failed(0.0))
            else:
                self._log.forget("announce")
                self._pause.reset()
                return


def news_of(event: StoredEvent) -> str:
    """Return the reason of the cluster's Event, "" for no Event."""
    if event.kind != "changed":
        return event.kind.capitalize()
    if event.reason in REFUSED or event.lifecycle == "failed":
        return event.reason.title().replace("_", "")
    return ENDED.get(event.lifecycle, "") if event.reason in ("", "completed") else ""
