"""``--load-kmods`` of ``ocigpu-container-cli``: kernel modules loaded and device nodes made before a command."""

from ocigpu.core.errors import HostError
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.kmods import load_modules
from ocigpu.gpus.nvidia.nodes import apply_changes, find_changes, find_link_changes, plan_nodes, read_driver
from ocigpu.gpus.tree import find_roots
from ocigpu.system.namespaces import in_initial_user_namespace


def load_driver(settings: Settings, channels: list[int]) -> list[str]:
    """Load the driver's kernel modules and make its nodes, ``channels`` of IMEX too; return what was done, for a log.

    As with nvidia-container-cli, what fails is noted and no more: what matters of it, the command itself will miss.
    Nothing is done in a user namespace; for a simulated host nothing is loaded, and nodes are made in its directory.
    Needs root.
    """
    if not in_initial_user_namespace():
        return ["--load-kmods: skipped in a user namespace"]
    roots = find_roots(settings)
    done = []
    try:
        loaded, notes = load_modules(roots)
        done += [*(f"--load-kmods: loaded {name}" for name in loaded), *(f"--load-kmods: {note}" for note in notes)]
    except HostError as error:  # some may be there all the same
        done.append(f"--load-kmods: {error.line}")
    try:
        driver = read_driver(roots)
        nodes, missing = plan_nodes(driver, channels)
        done += [f"--load-kmods: {note}" for note in missing]
        for changes in (find_changes(nodes, roots), find_link_changes(nodes, driver, roots)):
            apply_changes(changes)
            done += [f"--load-kmods: {change.what} {change.path}" for change in changes if change.what != "keep"]
    except HostError as error:
        done.append(f"--load-kmods: {error.line}")
    return done
