"""The step that an operator takes after a change: engines read their configuration when they start or reload."""

from ocigpu.engines import places
from ocigpu.engines.configure import ConfigureOptions, EnginePlan


def remaining_step(options: ConfigureOptions, plan: EnginePlan) -> str:
    """Return what makes the engine use the changed files, "" when nothing is left to do.

    dockerd takes runtimes and a default runtime by a reload, switches of features at its start (docs.docker.com,
    "dockerd": configuration reload behavior); it looks for the hook of --gpus only then, too (moby,
    daemon/nvidia_linux.go: init).  It never takes a default away by a reload, and Docker 20.10 crashes when the runtime
    of that name is gone: a removal needs a restart.
    """
    if options.engine == "podman":
        return ""
    if options.root != "/":
        return f"restart {options.engine} where the system in {options.root} runs, if it does"
    if options.engine == "docker":
        if plan.main == places.home_config("/", "docker/daemon.json"):
            return "systemctl --user restart docker"
        if plan.main.startswith("/var/snap/"):
            return "snap restart docker"
        reload = options.wanted.name and not options.wanted.cdi and not plan.links
        return "systemctl reload docker" if reload else "systemctl restart docker"
    for name, path in places.KUBERNETES.items():
        if plan.main.startswith(path.rpartition("/")[0]):
            return f"systemctl restart {name} (or {name}-agent)"
    return f"systemctl restart {options.engine}"
