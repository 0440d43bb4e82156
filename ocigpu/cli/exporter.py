"""``ocigpu exporter``."""

import os
from typing import Annotated

import typer

from ocigpu.cli.common import ConfigOption, load_settings
from ocigpu.cli.device_plugin import INSTALL
from ocigpu.core.errors import HostError

EXPORTER_EPILOG = """\
\b
Options of dcgm-exporter, with their meaning there; each has its variable, e.g. DCGM_EXPORTER_LISTEN:
  -f, --collectors FILE                    which metrics, a line each: name, type, help; read again when it changes
  -a, --address [HOST]:PORT                where to listen; default :9400, on all addresses
  -c, --collect-interval MS                time between two samples; default 30000
  -k, --kubernetes                         ask the kubelet whose pods have the GPUs; needs grpcio
  --pod-resources-kubelet-socket SOCKET    the kubelet's socket
  --nvidia-resource-names LIST             further resources that are GPUs
  --kubernetes-gpu-id-type uid|device-name both are always understood
  --kubernetes-enable-dra                  labels of the resource claims by which pods have GPUs
  --kubernetes-virtual-gpus                label vgpu: the number of the replica; GPU_UTIL and FB_USED by pod
  -d, --devices f|g|i                      f: GPUs, or their instances with MIG; g[:0,2-4]: GPUs; i: instances
  --hpc-job-mapping-dir DIR                files that list the jobs of a GPU
  --xid-count-window-size MS, --clock-events-count-window-size MS
  -n, --no-hostname                        no label with the host's name
  -o, --use-old-namespace                  labels uuid, pod_name, pod_namespace, container_name
  --replace-blanks-in-model-name           dashes instead
  --enable-gpu-bind-unbind-watch, --gpu-bind-unbind-poll-interval 1s
                                           look for GPUs that come and go between samples too
  --log-format text|json
  --debug                                  log a line for each sample
Others of its options are refused by name, with the reason.
\b
Options of our own:
  --resource-prefixes LIST                 what GPUs' resources begin with; default nvidia.com/
  --hostname-label hostname|Hostname       dcgm-exporter's label until May 2026 was Hostname

\b
Pages: /metrics, /health and /.  Values are those of the last sample; ocigpu_exporter_up and
ocigpu_exporter_sample_age_seconds tell when NVML does not answer.  docs/METRICS.md lists all.

\b
Exit status:
  0  ended by SIGTERM, SIGINT or SIGQUIT; SIGHUP reads the list of metrics again
  1  the command failed; the message has a code for "ocigpu explain"
  2  the command line could not be understood

\b
Examples:
  ocigpu exporter
  ocigpu exporter --kubernetes --collect-interval 10000 --log-format json
  ocigpu exporter --print-collectors > /etc/ocigpu/collectors.csv
"""


def exporter_command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[EXPORTER OPTION]...", help="Options of the exporter; see below.")
    ] = None,
    config: ConfigOption = "",
    driver_root: Annotated[
        str, typer.Option("--driver-root", metavar="DIR", help="Where the driver's files are, in this container.")
    ] = "",
    print_collectors: Annotated[
        bool, typer.Option("--print-collectors", help="Print the list of metrics as a file for --collectors, and end.")
    ] = False,
) -> None:
    """Export the GPUs' metrics for Prometheus, with the names of NVIDIA's dcgm-exporter."""
    from ocigpu.kubernetes.exporter.collectors import DEFAULTS, write_collectors
    from ocigpu.kubernetes.exporter.options import parse_options

    if print_collectors:
        print(write_collectors(DEFAULTS), end="")
        return
    options = parse_options(words or [], os.environ)
    if options.kubernetes:
        try:
            import ocigpu.kubernetes.exporter.pods  # noqa: F401 - whether it can be
        except ImportError as error:
            cause = f"--kubernetes needs grpcio and protobuf: {error}"
            raise HostError("OCIGPU-KUBE-3", cause, INSTALL) from error
    from ocigpu.kubernetes.exporter.service import ExporterService
    from ocigpu.system.service_log import ServiceLog

    ExporterService(options, load_settings(config, driver_root), ServiceLog(options.log_format == "json")).run()
