"""Small file systems that show a container its own GPUs only: /proc/driver/nvidia, and EGL's application profile.

Pure; the plan of hook mode and the plan of CDI hooks are made of the same parts.
"""

from ocigpu.core.actions import Bind, Mask, ReadOnly, Tmpfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ocigpu.core.actions import Action
    from ocigpu.core.facts import ProcFile

PROC_OPTIONS = ("ro", "nosuid", "nodev", "noexec")
"""Mount options of what goes below /proc/driver/nvidia."""
PROC_DRIVER = "/proc/driver/nvidia"
PROFILE_DIRECTORY = "/etc/nvidia/nvidia-application-profiles-rc.d"


def proc_view(
    proc_driver: str,
    proc_files: "Iterable[ProcFile]",
    simulated: bool,
    directories: "Iterable[tuple[str, str]]",
    files: "Iterable[tuple[str, str]]",
) -> "list[Bind | Tmpfs]":
    """Return what makes a private /proc/driver/nvidia with rewritten params and a part of the host's.

    ``proc_driver``: the host's, whose ``proc_files`` are shown to everybody.  ``directories`` and ``files``: the rest
    of it that the container may see, pairs of (path below it, reason).
    """
    actions: list[Bind | Tmpfs] = [simulated_proc(proc_driver)] if simulated else []
    texts = [
        (item.name, item.mode, _rewritten_params(item.content) if item.name == "params" else item.content)
        for item in proc_files
    ]
    binds: list[Bind | Tmpfs] = []
    shown = []
    for name, reason in directories:
        shown.append(name)
        binds.append(_proc_bind(proc_driver, name, reason, "directory"))
    for name, reason in files:
        if all(name != existing for existing, _, _ in texts):
            texts.append((name, 0o444, ""))
            binds.append(_proc_bind(proc_driver, name, reason, "file"))
    reason = "the container sees only its own GPUs, and the driver's libraries must not create device nodes"
    return [*actions, Tmpfs(PROC_DRIVER, 0o555, tuple(texts), _with_ancestors(shown, texts), reason), *binds]


def proc_view_by_masks(proc_driver: str, simulated: bool, hidden: "Iterable[tuple[str, str]]") -> "list[Action]":
    """Return the actions that leave a container its procfs's /proc/driver/nvidia, read-only, without ``hidden`` parts.

    ``hidden``: pairs of (path below it, reason).  The runtimes refuse mounts below /proc in a config.json, but hide and
    protect paths there.  Read-only, because root can control the driver there (suspend).
    """
    actions: list[Action] = [simulated_proc(proc_driver)] if simulated else []
    actions.append(ReadOnly(PROC_DRIVER, "what the driver lets root write there is not for containers"))
    return actions + [Mask(f"{PROC_DRIVER}/{name}", reason) for name, reason in hidden]


def simulated_proc(proc_driver: str) -> Bind:
    """Return what stands in for the procfs tree on a simulated host."""
    reason = "simulated host: stands in for the procfs tree that the kernel module makes"
    return Bind(proc_driver.rpartition("/")[0], "/proc/driver", PROC_OPTIONS, reason, "directory")


def _proc_bind(proc_driver: str, name: str, reason: str, kind: str) -> Bind:
    return Bind(f"{proc_driver}/{name}", f"{PROC_DRIVER}/{name}", PROC_OPTIONS, reason, kind)


def _with_ancestors(directories: list[str], files: list[tuple[str, int, str]]) -> tuple[str, ...]:
    """Return the directories and every parent of a directory or file, parents first."""
    found = set(directories)
    for path in [*directories, *(name for name, _, _ in files)]:
        parent = path.rpartition("/")[0]
        while parent:
            found.add(parent)
            parent = parent.rpartition("/")[0]
    return tuple(sorted(found))


def _rewritten_params(content: str) -> str:
    """Return the driver's params with ModifyDeviceFiles off: node creation inside a container is not its business."""
    lines = ("ModifyDeviceFiles: 0" if line == "ModifyDeviceFiles: 1" else line for line in content.split("\n"))
    return "\n".join(lines)


def application_profile(minors: "Iterable[int]") -> Tmpfs:
    """Return the application profile that names the GPUs with these minors to EGL, by a bit mask of minors."""
    mask = 0
    for minor in minors:
        mask |= 1 << minor
    content = (
        '{"profiles": [{"name": "_container_", "settings": ["EGLVisibleDGPUDevices", '
        f"{mask:#x}]}}],"
        ' "rules": [{"pattern": [], "profile": "_container_"}]}\n'
    )
    reason = "EGL lists only the container's own GPUs"
    return Tmpfs(PROFILE_DIRECTORY, 0o555, (("10-container.conf", 0o444, content),), (), reason, optional=True)
