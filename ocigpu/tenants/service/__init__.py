"""``ocigpu caas serve``: containers with GPUs over HTTP, for tenants who know nothing of the cluster behind it.

Pure: what comes in and goes out (:mod:`~.models`), the table of what is served (:mod:`~.endpoints`) and of refusals
(:mod:`~.problems`), images (:mod:`~.image`), the objects of a container (:mod:`~.pods`) and what they say of it
(:mod:`~.lifecycle`), places in lists (:mod:`~.cursors`), how much one credential gets (:mod:`~.intake`).
:mod:`~.store` remembers, :mod:`~.auth` knows who asks, :mod:`~.keeper` keeps :mod:`~.cluster` and store the same,
:mod:`~.web` answers, :mod:`~.health` does beside it, :mod:`~.server` joins them.
"""
