"""The container's state, as an OCI runtime gives it to hooks (runtime-spec, runtime.md, "State")."""

from ocigpu.core.config_json import is_path, parse_json
from ocigpu.core.errors import SpecError
from ocigpu.core.record import NamedTuple

MAX_STATE_BYTES = 4 << 20
STANDARD_INPUT = "-"


class State(NamedTuple):
    """The parts of a state that hooks use.

    ``pid``: 0 if not required.  ``root``: the container's root directory, absolute or relative to the bundle, "" when
    the state does not say it (crun does, and runc of version 0.1 of the specification did).
    """

    pid: int
    bundle: str
    root: str = ""


def read_state(path: str = STANDARD_INPUT) -> bytes:
    """Return the text of a state from a file or standard input, at most a byte more than a state may have.

    Raises SpecError OCIGPU-SPEC-5 when it is closed or unreadable.
    """
    what = "on standard input" if path == STANDARD_INPUT else path
    try:
        # sys.stdin is None when it was closed
        with open(0, "rb", closefd=False) if path == STANDARD_INPUT else open(path, "rb") as file:
            return file.read(MAX_STATE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SpecError("OCIGPU-SPEC-5", f"read state {what}: {getattr(error, 'strerror', error)}") from error


def parse_state(text: bytes, wants_pid: bool = True) -> State:
    """Return a parsed state of any version of the specification (``bundlePath`` before 1.0).

    ``wants_pid``: a state without a process is an error.  Raises SpecError OCIGPU-SPEC-5.
    """
    if len(text) > MAX_STATE_BYTES:
        raise _bad(f"larger than {MAX_STATE_BYTES >> 20} MiB")
    state = parse_json(text, "container's state", "OCIGPU-SPEC-5")
    pid = state.get("pid") if wants_pid else 0
    if type(pid) is not int or not 0 <= pid < 1 << 31 or (wants_pid and not pid):
        raise _bad("pid is missing or not a process id")
    bundle = state.get("bundle") or state.get("bundlePath")
    if not isinstance(bundle, str) or not is_path(bundle) or not bundle.startswith("/"):
        raise _bad("bundle is missing or not an absolute path")
    root = state.get("root")
    if root is not None and (not isinstance(root, str) or not is_path(root)):
        raise _bad("root is not a path")
    return State(pid, bundle, root or "")


def _bad(cause: str) -> SpecError:
    return SpecError("OCIGPU-SPEC-5", f"container's state: {cause}")
