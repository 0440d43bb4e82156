"""The driver of dynamic resource allocation, ``ocigpu dra-driver`` (extra ``ocigpu[kubernetes]``).

Pure: what a node offers (:mod:`~.devices`), as ResourceSlices (:mod:`~.slices`), configurations in claims
(:mod:`~.configs`), the answer to a claim (:mod:`~.claims`).  Preparing claims: :mod:`~.prepare` with its memory
(:mod:`~.state`).  The kubelet's side is :mod:`~.sockets`, the API server's :mod:`~.cluster` and :mod:`~.publisher`;
:mod:`~.driver` is the program.  Source of what Kubernetes requires of a driver: k8s.io/api resource/v1, k8s.io/kubelet,
k8s.io/dynamic-resource-allocation.
"""
