"""The programs for Kubernetes: device plugin, DRA driver, exporter, MPS, node labels, node installer."""

import os
from typing import Annotated

from ocigpu.cli.arguments import Range
from ocigpu.cli.common import load_settings
from ocigpu.cli.show import data as print_json
from ocigpu.core.errors import HostError, UsageError

INSTALL = (
    "Install it into a virtual environment: pip install 'ocigpu[kubernetes]'; the deb and rpm packages are without it,"
    " packaging/kubernetes/Containerfile makes an image that has it"
)


def device_plugin_command(words: list[str] | None = None, config: str = "", log_format: str = "text") -> None:
    if log_format not in ("text", "json"):
        raise UsageError(f'--log-format: "{log_format}" is not one of text, json', "see: ocigpu device-plugin --help")
    try:
        import grpc  # noqa: F401

        from ocigpu.kubernetes.config import parse_flags
        from ocigpu.kubernetes.plugin import DevicePlugin
    except ImportError as error:
        cause = f"the device plugin needs grpcio and protobuf: {error}"
        raise HostError("OCIGPU-KUBE-3", cause, INSTALL) from error
    told = parse_flags(words or [], os.environ)
    DevicePlugin(told, load_settings(config), log_format == "json").run()


def dra_driver_command(words: list[str] | None = None, config: str = "", log_format: str = "text") -> None:
    if log_format not in ("text", "json"):
        raise UsageError(f'--log-format: "{log_format}" is not one of text, json', "see: ocigpu dra-driver --help")
    try:
        from ocigpu.kubernetes.dra.driver import DraDriver
        from ocigpu.kubernetes.dra.options import parse_options
    except ImportError as error:
        cause = f"the DRA driver needs grpcio, protobuf and lightkube: {error}"
        raise HostError("OCIGPU-DRA-6", cause, INSTALL) from error
    DraDriver(parse_options(words or [], os.environ), load_settings(config), log_format == "json").run()


def exporter_command(
    words: list[str] | None = None, config: str = "", driver_root: str = "", print_collectors: bool = False
) -> None:
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
    from ocigpu.system.service import ServiceLog

    ExporterService(options, load_settings(config, driver_root), ServiceLog(options.log_format == "json")).run()


def mps_command(words: list[str] | None = None, shm_size: str = "50%", config: str = "", json: bool = False) -> None:
    from ocigpu.kubernetes.config import parse_flags
    from ocigpu.kubernetes.mps_control import check_size
    from ocigpu.kubernetes.mps_supervisor import Supervisor
    from ocigpu.system.service import ServiceLog

    check_size(shm_size)
    told = parse_flags(words or [], os.environ, "mps-control-daemon")
    Supervisor(load_settings(config), told, shm_size, ServiceLog(json)).run()


def node_labels_command(
    words: list[str] | None = None,
    publish: str = "",
    show: bool = False,
    remove: bool = False,
    remove_on_exit: bool = False,
    kube_api_qps: float = 5.0,  # noqa: ARG001
    kube_api_burst: int = 10,  # noqa: ARG001
    kubeconfig: str = "",
    node_name: str = "",
    namespace: str = "",
    pod_name: str = "",
    config: str = "",
    json: bool = False,
) -> None:
    import time

    from ocigpu.kubernetes.config import parse_flags, read_configuration
    from ocigpu.kubernetes.labelling import Labeller, read_labels
    from ocigpu.kubernetes.labels import render_features
    from ocigpu.kubernetes.publish import TARGETS, find_place, withdraw
    from ocigpu.system.service import ServiceLog

    if kubeconfig:
        raise UsageError("--kubeconfig is refused: only the service account of a pod is used", "Or use --publish file.")
    if publish and publish not in TARGETS:
        raise UsageError(f"--publish {publish!r} is not one of {', '.join(TARGETS)}")
    given = {"NODE_NAME": node_name, "POD_NAMESPACE": namespace, "POD_NAME": pod_name}
    environment = {**os.environ, **{name: text for name, text in given.items() if text}}
    told = parse_flags(words or [], environment, "node-labels")
    settings = load_settings(config)
    if show:
        found = read_labels(settings, read_configuration(told), time.time())
        if json:
            print_json({"labels": found.labels, "notes": found.notes, "problem": found.silent})
        else:
            print(render_features(found.labels), end="")
    elif remove:
        withdraw(find_place(read_configuration(told).options, publish, environment))
    else:
        Labeller(settings, told, ServiceLog(json), publish).run(remove_on_exit)


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
    from ocigpu.kubernetes.host_engine import ENGINES, RESTARTS
    from ocigpu.kubernetes.node_installer import InstallerOptions, NodeInstaller
    from ocigpu.system.service import ServiceLog

    if engine and engine not in ENGINES:
        raise UsageError(f"--engine {engine!r} is not one of {', '.join(ENGINES)}")
    if restart not in RESTARTS:
        raise UsageError(f"--restart {restart!r} is not one of {', '.join(RESTARTS)}")
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
    try:
        from ocigpu.kubernetes.mig_manager import POLICIES, ManagerOptions, MigManager
        from ocigpu.kubernetes.mig_node import HostTools, NodeApi, connect
    except ImportError as error:
        raise HostError("OCIGPU-KUBE-3", f"the MIG manager needs lightkube: {error}", INSTALL) from error
    from ocigpu.kubernetes.mig_config import parse_services
    from ocigpu.system.service import ServiceLog

    if pods not in POLICIES:
        raise UsageError(f"--pods {pods!r} is not one of {', '.join(POLICIES)}")
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
    variables = {name: os.environ[name] for name in ("OCIGPU_CONFIG",) if name in os.environ}
    manager = MigManager(
        options, NodeApi(connect(), node_name), HostTools(host_root, ocigpu, variables), ServiceLog(json)
    )
    if once:
        return 0 if manager.reconcile() else 1
    manager.run()
    return 0
