"""``ocigpu node-labels``: labels about the GPUs of a Kubernetes node."""

import os
from typing import Annotated

import typer

from ocigpu.cli.common import ConfigOption, load_settings
from ocigpu.core.errors import UsageError

NODE_LABELS_EPILOG = """\
\b
Names and values are those of NVIDIA's GPU feature discovery. Where they go (--to):
  node-feature  the NodeFeature resource nvidia-features-for-NODE, for node feature
                discovery 0.14 and later; the default in a pod. NODE_NAME must be set;
                with POD_NAME it belongs to the pod's DaemonSet and goes with it.
  node          the node's own labels; needs no node feature discovery, but the right
                to change any node
  file          --output-file, for node feature discovery on the host
Labels stay when the program ends, and while the driver gives no answer.

\b
Options and variables of GPU feature discovery:
  --oneshot                  GFD_ONESHOT: once, then end
  --sleep-interval TIME      GFD_SLEEP_INTERVAL, 60s; infinite: only at SIGHUP
  --no-timestamp             GFD_NO_TIMESTAMP
  -o, --output-file FILE     GFD_OUTPUT_FILE
  --machine-type-file FILE   GFD_MACHINE_TYPE_FILE
  --use-node-feature-api     GFD_USE_NODE_FEATURE_API, USE_NODE_FEATURE_API, true;
                             =false: a file
  --node-name, --namespace, --pod-name NAME  NODE_NAME, NAMESPACE, POD_NAME
  --mig-strategy NAME        GFD_MIG_STRATEGY, MIG_STRATEGY
  --device-discovery-strategy NAME  GFD_DEVICE_DISCOVERY_STRATEGY
  --fail-on-init-error       GFD_FAIL_ON_INIT_ERROR: end when the first labelling fails,
                             as with --oneshot; default here: try again
  --driver-root DIR, --dev-root DIR, --driver-root-ctr-path DIR  as for the device plugin
  --config-file FILE         GFD_CONFIG_FILE, CONFIG_FILE: the device plugin's; read again
                             for each labelling
  --kube-api-qps, --kube-api-burst  accepted: there is one request for each labelling
  --kubeconfig               refused: only a service account is used

\b
Exit status: 0 done, or told to end; 1 it failed (--oneshot), or the configuration is
wrong; 2 wrong command line.

\b
Examples:
  ocigpu node-labels --show
  ocigpu node-labels --to file --output-file /tmp/gfd --oneshot
  ocigpu node-labels --sleep-interval 5m --mig-strategy mixed
"""
OPTION_NAMES = (
    "oneshot",
    "sleep_interval",
    "no_timestamp",
    "output_file",
    "machine_type_file",
    "use_node_feature_api",
    "mig_strategy",
    "device_discovery_strategy",
    "fail_on_init_error",
    "driver_root",
    "dev_root",
    "container_driver_root",
)


def node_labels_command(
    context: typer.Context,
    to: Annotated[
        str, typer.Option("--to", metavar="PLACE", help="node-feature, node or file.  [default: see below]")
    ] = "",
    show: Annotated[bool, typer.Option("--show", help="Only print the labels of this node.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Only remove the labels that were put there.")] = False,
    remove_on_exit: Annotated[
        bool, typer.Option("--remove-on-exit", help="Remove the labels when told to end.")
    ] = False,
    kube_api_qps: Annotated[float, typer.Option("--kube-api-qps", hidden=True)] = 5,  # noqa: ARG001
    kube_api_burst: Annotated[int, typer.Option("--kube-api-burst", hidden=True)] = 10,  # noqa: ARG001
    kubeconfig: Annotated[str, typer.Option("--kubeconfig", hidden=True)] = "",
    node_name: Annotated[str, typer.Option("--node-name", hidden=True)] = "",
    namespace: Annotated[str, typer.Option("--namespace", hidden=True)] = "",
    pod_name: Annotated[str, typer.Option("--pod-name", hidden=True)] = "",
    config: ConfigOption = "",
    json: Annotated[
        bool, typer.Option("--json", help="Print each line of the log, or with --show the labels, as JSON.")
    ] = False,
) -> None:
    """Label this Kubernetes node with what its GPUs are."""
    import time

    from ocigpu.cli.common import print_json
    from ocigpu.kubernetes.config import OPTIONS
    from ocigpu.kubernetes.labelling import Labeller, read_labels
    from ocigpu.kubernetes.labels import render_features
    from ocigpu.kubernetes.loading import CONFIG_VARIABLE, parse_flags, read_configuration
    from ocigpu.kubernetes.publish import TARGETS, find_place, withdraw
    from ocigpu.system.service_log import ServiceLog

    if kubeconfig:
        raise UsageError("--kubeconfig is refused: only the service account of a pod is used", "Or use --to file.")
    if to and to not in TARGETS:
        raise UsageError(f"--to {to!r} is not one of {', '.join(TARGETS)}")
    options = [option for option in OPTIONS if option.name in OPTION_NAMES]
    given = {"NODE_NAME": node_name, "POD_NAMESPACE": namespace, "POD_NAME": pod_name}
    environment = {**os.environ, **{name: text for name, text in given.items() if text}}
    told = parse_flags(context.args, environment, options, "node-labels", ("GFD_CONFIG_FILE", CONFIG_VARIABLE))
    settings = load_settings(config)
    if show:
        found = read_labels(settings, read_configuration(told, environment), time.time())
        if json:
            print_json({"labels": found.labels, "notes": found.notes, "problem": found.silent})
        else:
            print(render_features(found.labels), end="")
    elif remove:
        withdraw(find_place(read_configuration(told, environment).options, to, environment))
    else:
        Labeller(settings, told, environment, ServiceLog(json), to).run(remove_on_exit)
