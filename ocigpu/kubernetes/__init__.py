"""The Kubernetes device plugin, from the same facts and the same plan as the shim (extra ``ocigpu[kubernetes]``).

Pure: options of these programs (:mod:`~.options` and its tables), configuration (:mod:`~.config`, :mod:`~.sharing`),
resources and their devices (:mod:`~.devices`, :mod:`~.vfio`), which devices go well together (:mod:`~.preferred`),
what a container of a pod is given (:mod:`~.allocate`, :mod:`~.mps`), health (:mod:`~.health`) and labels
(:mod:`~.labels`).
Reading the host: :mod:`~.node` with :mod:`~.hardware` and :mod:`~.topology`.
:mod:`~.api` holds the kubelet's interfaces.
"""
