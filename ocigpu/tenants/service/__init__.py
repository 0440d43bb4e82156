"""``ocigpu caas serve``: containers with GPUs over HTTP, for tenants who know nothing of the cluster behind it.

:mod:`~.web` answers: it checks credential, parameters and body (:mod:`~.auth`, :mod:`~.parameters`, :mod:`~.intake`),
then calls the handler that the table (:mod:`~.endpoints`) names for a method and path.  Handlers are functions of a
request (:mod:`~.request`), a module for each kind of resource: :mod:`~.containers`, :mod:`~.events`, :mod:`~.logs`,
:mod:`~.keys`, :mod:`~.tenancies`, :mod:`~.about`.

Pure: what comes in and goes out (:mod:`~.models`) and refusals (:mod:`~.problems`), images (:mod:`~.image`), the
objects of a container (:mod:`~.pods`) and what they say of it (:mod:`~.lifecycle`), places in lists
(:mod:`~.cursors`).  :mod:`~.store` remembers, with :mod:`~.event_log` and :mod:`~.api_keys` in the same
:mod:`~.database`; :mod:`~.reconciler` keeps :mod:`~.cluster` and store the same; :mod:`~.event_recorder` writes Events;
:mod:`~.health` answers probes beside it; :mod:`~.server` joins them.
"""
