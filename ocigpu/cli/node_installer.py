"""``ocigpu node-installer``: ocigpu on a Kubernetes node, put there by a pod of a DaemonSet."""

from typing import Annotated

import typer

from ocigpu.core.errors import UsageError


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
    restart_seconds: Annotated[float, typer.Option(min=1)] = 120.0,
    remove: bool = False,
    remove_on_exit: bool = False,
    ready_file: str = "",
    once: bool = False,
    json: bool = False,
) -> None:
    import os

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
        raise typer.Exit(1)
