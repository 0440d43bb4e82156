"""``ocigpu node-labels``: labels about the GPUs of a Kubernetes node."""

import os
from typing import Annotated

import typer

from ocigpu.cli.common import ConfigOption, load_settings
from ocigpu.core.errors import UsageError


def node_labels_command(
    context: typer.Context,
    to: str = "",
    show: bool = False,
    remove: bool = False,
    remove_on_exit: bool = False,
    kube_api_qps: Annotated[float, typer.Option("--kube-api-qps", hidden=True)] = 5,  # noqa: ARG001
    kube_api_burst: Annotated[int, typer.Option("--kube-api-burst", hidden=True)] = 10,  # noqa: ARG001
    kubeconfig: Annotated[str, typer.Option("--kubeconfig", hidden=True)] = "",
    node_name: Annotated[str, typer.Option("--node-name", hidden=True)] = "",
    namespace: Annotated[str, typer.Option("--namespace", hidden=True)] = "",
    pod_name: Annotated[str, typer.Option("--pod-name", hidden=True)] = "",
    config: ConfigOption = "",
    json: bool = False,
) -> None:
    import time

    from ocigpu.cli.common import print_json
    from ocigpu.kubernetes.labelling import Labeller, read_labels
    from ocigpu.kubernetes.labels import render_features
    from ocigpu.kubernetes.loading import parse_flags, read_configuration
    from ocigpu.kubernetes.publish import TARGETS, find_place, withdraw
    from ocigpu.system.service import ServiceLog

    if kubeconfig:
        raise UsageError("--kubeconfig is refused: only the service account of a pod is used", "Or use --to file.")
    if to and to not in TARGETS:
        raise UsageError(f"--to {to!r} is not one of {', '.join(TARGETS)}")
    given = {"NODE_NAME": node_name, "POD_NAMESPACE": namespace, "POD_NAME": pod_name}
    environment = {**os.environ, **{name: text for name, text in given.items() if text}}
    told = parse_flags(context.args, environment, "node-labels")
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
