"""``ocigpu node-installer``: ocigpu on a Kubernetes node, put there by a pod of a DaemonSet."""

from typing import Annotated

import typer

from ocigpu.core.errors import UsageError

NODE_INSTALLER_EPILOG = """\
\b
What it does, each step only if needed:
  1. places the image's files in PREFIX/versions/ID of the host; PREFIX/current leads to the version in use
  2. configures containerd or CRI-O (also those of k3s and RKE2), by "ocigpu engine configure" on the host
  3. restarts the engine and waits until it listens again, else takes the configuration back and restarts it again
  4. labels the node: ocigpu/runtime=ready, or failed.CODE, and stays; looks again at each hour and at SIGHUP
With --remove all is taken back, the files when the last container that was started by them has ended.

\b
Needs a privileged pod with the host's root in --host-root, its process ids (hostPID), and NODE_NAME with a service
account that may patch nodes; without those two there are no labels.  The files bring their own Python.

\b
Examples:
  ocigpu node-installer
  ocigpu node-installer --default --cdi
  ocigpu node-installer --remove --once
"""


def node_installer_command(
    host_root: Annotated[
        str, typer.Option("--host-root", metavar="DIR", help="Where the pod has the host's root.")
    ] = "/host",
    payload: Annotated[
        str, typer.Option("--payload", metavar="DIR", help="Directory of the image with the files for hosts.")
    ] = "/opt/ocigpu-node",
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="DIR", help="Directory of the host that the files were made for.")
    ] = "/opt/ocigpu",
    engine: Annotated[
        str, typer.Option("--engine", metavar="ENGINE", help="containerd or crio.  [default: the one that runs]")
    ] = "",
    engine_config: Annotated[
        str, typer.Option("--engine-config", metavar="FILE", help="The engine's file, where several run.")
    ] = "",
    name: Annotated[str, typer.Option("--name", help="Name of the runtime in the engine.")] = "ocigpu",
    default: Annotated[bool, typer.Option("--default", help="Make it the runtime of every container.")] = False,
    cdi: Annotated[bool, typer.Option("--cdi", help="Switch on CDI devices in the engine.")] = False,
    restart: Annotated[
        str, typer.Option("--restart", metavar="HOW", help="auto, systemd, signal (SIGTERM) or none.")
    ] = "auto",
    restart_seconds: Annotated[
        float, typer.Option("--restart-seconds", min=1, help="How long the engine may take to be back.")
    ] = 120.0,
    remove: Annotated[bool, typer.Option("--remove", help="Take everything back, and stay.")] = False,
    remove_on_exit: Annotated[
        bool, typer.Option("--remove-on-exit", help="Take everything back when told to end, also for an update.")
    ] = False,
    ready_file: Annotated[
        str, typer.Option("--ready-file", metavar="FILE", help="There while all is as it was asked for, for a probe.")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="End after the first time, with its exit status.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print each line of the log as JSON.")] = False,
) -> None:
    """Install ocigpu on this Kubernetes node and tell its container engine of it."""
    import os

    from ocigpu.kubernetes.host_engine import ENGINES, RESTARTS
    from ocigpu.kubernetes.node_installer import InstallerOptions, NodeInstaller
    from ocigpu.system.service_log import ServiceLog

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
