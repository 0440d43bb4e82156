"""The step that an operator takes after a change: engines read their configuration when they start or reload."""

from ocigpu.engines import places
from ocigpu.engines.configure import Options, Plan


def remaining_step(options: Options, plan: Plan) -> str:
    """Return what makes the engine use the changed files, "" when nothing is left to do.

    dockerd takes runtimes and the default runtime by a reload, switches of features at its start (docs.docker.com,
    "dockerd": configuration reload behavior).
    """
    if options.engine == "podman":
        return ""
    if options.root != "/":
        return f"restart {options.engine} where the system in {options.root} runs, if it does"
    if options.engine == "docker":
        if not any(edit.changed for edit in plan.edits):
            return ""
        if plan.main == places.home_config("/", "docker/daemon.json"):
            return "systemctl --user restart docker"
        if plan.main.startswith("/var/snap/"):
            return "snap restart docker"
        return "systemctl restart docker" if options.wanted.cdi else "systemctl reload docker"
    for name, path in places.KUBERNETES.items():
        if plan.main.startswith(path.rpartition("/")[0]):
            return f"systemctl restart {name} (or {name}-agent)"
    return f"systemctl restart {options.engine}"
