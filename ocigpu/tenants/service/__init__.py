"""``ocigpu caas serve``: containers with GPUs over HTTP, for tenants without access to the cluster behind it.

:mod:`~.web` answers: it checks credential, parameters and body (:mod:`~.auth`, :mod:`~.parameters`, :mod:`~.intake`),
then calls the handler that the table (:mod:`~.endpoints`) names for a method and path.  Handlers are functions of a
request (:mod:`~.request`), a module for each kind of resource: :mod:`~.containers`, :mod:`~.events`, :mod:`~.logs`,
:mod:`~.keys`, :mod:`~.tenancies`, :mod:`~.about`.

Pure modules: requests and answers (:mod:`~.models`), refusals (:mod:`~.problems`), images (:mod:`~.image`), the objects
of a container (:mod:`~.pods`) and the state they show (:mod:`~.lifecycle`), places in lists (:mod:`~.cursors`).
:mod:`~.store` is the memory, with :mod:`~.event_log` and :mod:`~.api_keys` in the same :mod:`~.database`;
:mod:`~.reconciler` keeps :mod:`~.cluster` and store in agreement; :mod:`~.event_recorder` writes Events;
:mod:`~.health` answers probes beside it; :mod:`~.server` joins them.
"""
