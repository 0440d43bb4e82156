"""The Prometheus exporter ``ocigpu exporter``: dcgm-exporter's metrics from plain NVML, and the pods that use the GPUs.

Other vendors' GPUs have the metrics that their folders sample (``sample`` of the Vendor record), with their own labels.

Pure: the table of metrics (:mod:`~.metrics`), the file that chooses among them (:mod:`~.collectors`), options
(:mod:`~.options`), the GPUs' owners (:mod:`~.owners`), and the text that Prometheus reads (:mod:`~.exposition`).  A
separate process queries NVML (:mod:`~.sampler_child`, watched by :mod:`~.sampler`), and
:mod:`~ocigpu.kubernetes.cluster.pods` the kubelet; :mod:`~.service` joins them, and :mod:`~ocigpu.system.pages` serves
the last collected page.
"""
