"""``ocigpu compute-domain``: the programs of ComputeDomains."""

import os
from typing import Annotated

from ocigpu.cli.front.arguments import Range
from ocigpu.cli.front.optional import needing
from ocigpu.core.errors import UsageError

NEEDED = "ComputeDomains need lightkube"


def controller_command(
    image: str = "",
    image_pull_secret: list[str] | None = None,
    service_account: str = "",
    max_nodes: Annotated[int, Range(1, 1000)] = 18,
    namespace: str = "",
    json: bool = False,
) -> None:
    with needing(NEEDED, "OCIGPU-DRA-6"):
        from ocigpu.kubernetes.domains.controller import DomainService
        from ocigpu.kubernetes.domains.objects import DaemonOptions
    from ocigpu.system.service import ServiceLog

    namespace = namespace or os.environ.get("POD_NAMESPACE", "")
    if not namespace:
        raise UsageError("--namespace is not set", "In a pod: POD_NAMESPACE from the field metadata.namespace.")
    if not image:
        raise UsageError("--image is not set: the daemons' containers need ocigpu's image")
    options = DaemonOptions(namespace, image, service_account, tuple(image_pull_secret or ()), max_nodes)
    DomainService(options, ServiceLog(json)).run()


def daemon_command(
    max_nodes: Annotated[int, Range(1, 1000)] = 18,
    directory: str = "/imexd",
    hosts: str = "/etc/hosts",
    kubeconfig: str = "",
    json: bool = False,
) -> None:
    with needing(NEEDED, "OCIGPU-DRA-6"):
        from lightkube import Client

        from ocigpu.kubernetes.cluster.client import open_client
        from ocigpu.kubernetes.cluster.documents import Documents
        from ocigpu.kubernetes.domains.daemon import ImexDaemon
    from ocigpu.kubernetes.domains.imex import read_imex_options
    from ocigpu.system.service import ServiceLog

    options = read_imex_options(os.environ)._replace(most=max_nodes, directory=directory, hosts=hosts)
    documents, watched = (Documents(open_client(Client, kubeconfig)) for _ in range(2))
    ImexDaemon(documents, watched, options, ServiceLog(json)).run()


def check_command(directory: str = "/imexd") -> None:
    from ocigpu.kubernetes.domains.imex import check_ready, read_imex_options

    check_ready(read_imex_options(os.environ)._replace(directory=directory))
