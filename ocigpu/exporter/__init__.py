"""The Prometheus exporter ``ocigpu exporter``: dcgm-exporter's metrics from plain NVML, and whose pods use the GPUs.

Other vendors' GPUs have the metrics that their folders sample (``sample`` of the Vendor record), with their own labels.

Pure: the table of metrics (:mod:`~.metrics`), the file that chooses among them (:mod:`~.collectors`), options
(:mod:`~.options`), whose GPUs they are (:mod:`~.owners`), and the text that Prometheus reads (:mod:`~.exposition`).
NVML is asked in a process of its own (:mod:`~.sampler_child`, watched by :mod:`~.sampler`), the kubelet by
:mod:`~ocigpu.kubernetes.cluster.pods`; :mod:`~.service` joins them, and :mod:`~ocigpu.system.pages` hands out what was
collected last.
"""
