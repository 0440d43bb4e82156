"""The program that a generated specification's hooks start."""

import os
import sys

from ocigpu.cdi.edits import HookOptions, enabled_hooks
from ocigpu.core.config_json import OUR_HOOK
from ocigpu.core.settings import DEFAULT_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.cdi.draft import Draft, GenerateOptions
    from ocigpu.core.settings import Settings

USUAL_DIRECTORIES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def hook_options(options: "GenerateOptions", settings: "Settings") -> HookOptions:
    """Return how hooks are written.

    An absolute path of the options is taken as it is; a name is searched in PATH and the usual directories.  Without
    one it is hook.path of the settings, else ocigpu-hook beside the running program, else in those directories.
    """
    path = options.hook_path or settings.hook_path or _beside() or OUR_HOOK
    if not path.startswith("/"):
        path = _search(path) or f"/usr/bin/{os.path.basename(path)}"
    merged = path.rpartition("/")[2] == OUR_HOOK
    named = settings.path and settings.path != DEFAULT_PATH and merged
    config = os.path.abspath(settings.path) if named else ""
    return HookOptions(path, config, enabled_hooks(options), ldconfig=settings.ldconfig)


def note_program(draft: "Draft", hook: HookOptions) -> "Draft":
    """Return the draft, with a note if its hooks start a program that is not there."""
    if not draft.common.get("hooks") or os.access(hook.path, os.X_OK):
        return draft
    note = f"hook {hook.path}: missing or not executable here: containers will not start without it"
    return draft._replace(notes=(*draft.notes, note))


def _beside() -> str:
    for program in (sys.argv[0], sys.executable):
        path = os.path.join(os.path.dirname(program), OUR_HOOK)
        if program.startswith("/") and os.access(path, os.X_OK):  # never what lies in the working directory
            return path
    return ""


def _search(name: str) -> str:
    directories = [*os.environ.get("PATH", "").split(":"), *USUAL_DIRECTORIES]
    paths = (f"{directory}/{name}" for directory in directories if directory.startswith("/"))
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")
