"""GPUs on the nodes of a cluster, from the same facts and the same plan as the shim (extra ``ocigpu[kubernetes]``).

From below: :mod:`~.api` (the kubelet's interfaces) and :mod:`~.node` (a node's GPUs as the kubelet counts them);
:mod:`~.cluster` (the API server), :mod:`~.fabric`, :mod:`~.mps`; :mod:`~.labels`, :mod:`~.leases`, :mod:`~.mig`,
:mod:`~.installer`; :mod:`~.dra` and :mod:`~.plugin`, which give GPUs to pods.  A folder imports from folders before it.
"""
