"""The programs for Kubernetes: device plugin, DRA driver, exporter, MPS, node labels, node installer."""

import os
from typing import Annotated

from ocigpu.cli.front.arguments import Range
from ocigpu.cli.front.common import check_one_of, load_settings
from ocigpu.cli.front.optional import needing
from ocigpu.cli.front.show import data as print_json
from ocigpu.cli.host.vfio import open_bus
from ocigpu.core.errors import UsageError
from ocigpu.gpus.tree import find_roots

LOG_FORMATS = ("text", "json")


def device_plugin_command(words: list[str] | None = None, config: str = "", log_format: str = "text") -> None:
    check_one_of("--log-format", log_format, LOG_FORMATS)
    with needing("the device plugin needs grpcio and protobuf"):
        from ocigpu.kubernetes.node.config import parse_flags
        from ocigpu.kubernetes.plugin.plugin import DevicePlugin
    given = parse_flags(words or [], os.environ)
    DevicePlugin(given, load_settings(config), log_format == "json").run()


def dra_driver_command(words: list[str] | None = None, config: str = "", log_format: str = "text") -> None:
    check_one_of("--log-format", log_format, LOG_FORMATS)
    with needing("the DRA driver needs grpcio, protobuf and lightkube", "OCIGPU-DRA-6"):
        from ocigpu.kubernetes.domains.driver import DomainDriver
        from ocigpu.kubernetes.dra.driver import DraDriver
        from ocigpu.kubernetes.dra.options import parse_options
    settings, options = load_settings(config), parse_options(words or [], os.environ)
    if options.compute_domains:
        DomainDriver(options, settings, log_format == "json").run()
    else:
        DraDriver(options, settings, log_format == "json", bus=open_bus(find_roots(settings))).run()


def exporter_command(
    words: list[str] | None = None, config: str = "", driver_root: str = "", print_collectors: bool = False
) -> None:
    from ocigpu.exporter.collectors import DEFAULTS, write_collectors
    from ocigpu.exporter.options import parse_options

    if print_collectors:
        print(write_collectors(DEFAULTS), end="")
        return
    options = parse_options(words or [], os.environ)
    if options.kubernetes:
        with needing("--kubernetes needs grpcio and protobuf"):
            import ocigpu.kubernetes.cluster.pods  # noqa: F401 - whether it can be
    from ocigpu.exporter.service import ExporterService
    from ocigpu.system.service import ServiceLog

    ExporterService(options, load_settings(config, driver_root), ServiceLog(options.log_format == "json")).run()


def mps_command(words: list[str] | None = None, shm_size: str = "50%", config: str = "", json: bool = False) -> None:
    from ocigpu.kubernetes.mps.daemon import check_size
    from ocigpu.kubernetes.mps.supervisor import Supervisor
    from ocigpu.kubernetes.node.config import parse_flags
    from ocigpu.system.service import ServiceLog

    check_size(shm_size)
    given = parse_flags(words or [], os.environ, "mps-control-daemon")
    Supervisor(load_settings(config), given, shm_size, ServiceLog(json)).run()


def node_labels_command(
    words: list[str] | None = None,
    publish: str = "",
    show: bool = False,
    remove: bool = False,
    remove_on_exit: bool = False,
    kube_api_qps: float = 5.0,  # noqa: ARG001 - accepted as by NVIDIA's, without effect
    kube_api_burst: int = 10,  # noqa: ARG001 - accepted as by NVIDIA's, without effect
    kubeconfig: str = "",
    node_name: str = "",
    namespace: str = "",
    pod_name: str = "",
    config: str = "",
    json: bool = False,
) -> None:
    import time

    from ocigpu.kubernetes.labels.labels import render_features
    from ocigpu.kubernetes.labels.program import TARGETS, Labeller, find_place, read_labels, withdraw
    from ocigpu.kubernetes.node.config import parse_flags, read_configuration
    from ocigpu.system.service import ServiceLog

    if kubeconfig:
        raise UsageError("--kubeconfig is refused: only the service account of a pod is used", "Or use --publish file.")
    if publish:
        check_one_of("--publish", publish, TARGETS)
    downward = {"NODE_NAME": node_name, "POD_NAMESPACE": namespace, "POD_NAME": pod_name}
    environment = {**os.environ, **{name: text for name, text in downward.items() if text}}
    given = parse_flags(words or [], environment, "node-labels")
    settings = load_settings(config)
    if show:
        found = read_labels(settings, read_configuration(given), time.time())
        if json:
            print_json({"labels": found.labels, "notes": found.notes, "problem": found.silent})
        else:
            print(render_features(found.labels), end="")
    elif remove:
        withdraw(find_place(read_configuration(given).options, publish, environment))
    else:
        Labeller(settings, given, ServiceLog(json), publish).run(remove_on_exit)


def node_installer_command(
    host_root: str = "/host",
    payload: str = "/opt/ocigpu-node",
    prefix: str = "/opt/ocigpu",
    engine: str = "",
    engine_config: str = "",
    name: str = "ocigpu",
    default: bool = False,
    cdi: bool = False,
    restart: str = "auto",
    restart_seconds: Annotated[float, Range(1)] = 120.0,
    remove: bool = False,
    remove_on_exit: bool = False,
    ready_file: str = "",
    once: bool = False,
    json: bool = False,
) -> int:
    from ocigpu.kubernetes.installer.engine import ENGINES, RESTARTS
    from ocigpu.kubernetes.installer.program import InstallerOptions, NodeInstaller
    from ocigpu.system.service import ServiceLog

    if engine:
        check_one_of("--engine", engine, ENGINES)
    check_one_of("--restart", restart, RESTARTS)
    prefix = os.path.normpath(prefix)
    if not prefix.startswith("/") or prefix.count("/") < 2:
        raise UsageError(f"--prefix {prefix!r} is not the absolute path of a directory below another one")
    options = InstallerOptions(
        host_root, payload, prefix, engine, engine_config, name, default, cdi, restart, restart_seconds, ready_file
    )
    installer = NodeInstaller(options, os.environ, ServiceLog(json))
    if not once:
        installer.run(remove, remove_on_exit)
    elif not remove:
        installer.install()
    elif not installer.remove():
        return 1
    return 0


def mig_manager_command(
    layouts: str = "",
    default_layout: str = "",
    node_name: str = "",
    host_root: str = "/host",
    ocigpu: str = "",
    pods: str = "refuse",
    drain_seconds: Annotated[float, Range(1)] = 600.0,
    client_seconds: Annotated[float, Range(1)] = 300.0,
    gpu_clients_file: str = "",
    with_shutdown_host_gpu_clients: bool = False,
    with_reboot: bool = False,
    no_cdi: bool = False,
    no_boot: bool = False,
    interval: Annotated[float, Range(1)] = 300.0,
    once: bool = False,
    json: bool = False,
) -> int:
    with needing("the MIG manager needs lightkube"):
        from lightkube import Client

        from ocigpu.kubernetes.cluster.client import open_client
        from ocigpu.kubernetes.mig.manager import POLICIES, ManagerOptions, MigManager
        from ocigpu.kubernetes.mig.node import HostTools, NodeApi
    from ocigpu.kubernetes.mig.layouts import parse_services
    from ocigpu.system.service import ServiceLog

    check_one_of("--pods", pods, POLICIES)
    if not node_name:
        raise UsageError("--node-name is missing", "In a pod it is the variable NODE_NAME, from spec.nodeName.")
    stopped = gpu_clients_file if with_shutdown_host_gpu_clients else ""
    options = ManagerOptions(
        config_file=layouts,
        default=default_layout,
        pods=pods,
        client_seconds=client_seconds,
        drain_seconds=drain_seconds,
        services=parse_services(stopped) if stopped else (),
        with_reboot=with_reboot,
        cdi=not no_cdi,
        boot=not no_boot,
        interval=interval,
    )
    names = ("OCIGPU_CONFIG", "OCIGPU_KUBELET_DIRECTORY")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    manager = MigManager(
        options, NodeApi(open_client(Client), node_name), HostTools(host_root, ocigpu, variables), ServiceLog(json)
    )
    if once:
        return 0 if manager.reconcile() else 1
    manager.run()
    return 0
