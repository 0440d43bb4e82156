"""The Kubernetes device plugin, from the same facts and the same plan as the shim (extra ``ocigpu[kubernetes]``).

Pure parts first: configuration (:mod:`~ocigpu.kubernetes.config`), resources and their devices
(:mod:`~ocigpu.kubernetes.devices`), which devices go well together (:mod:`~ocigpu.kubernetes.preferred`), what a
container of a pod is given (:mod:`~ocigpu.kubernetes.allocate`), health (:mod:`~ocigpu.kubernetes.health`) and node
labels (:mod:`~ocigpu.kubernetes.labels`).  :mod:`ocigpu.kubernetes.api` holds the kubelet's interfaces.
"""
