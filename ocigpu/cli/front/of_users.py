"""Containers of other users, for commands of root: looked at with their owner's rights, and never entered."""

import os
from typing import TYPE_CHECKING, Any

from ocigpu.core.errors import OcigpuError, printable, quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from ocigpu.containers.find import Places

SECONDS = 15.0
ROOTLESS = (
    "Rootless containers: ocigpu ps, explain and diff work, for their user and for root. Their GPUs are mounts made at"
    " the start, without a device cgroup: none can be lost or exchanged, so start it again for others; to try them:"
    " podman exec CONTAINER nvidia-smi"
)


def ask_owners(
    look: "Callable[[Places], tuple[str, dict[str, Any]]]", missing: OcigpuError
) -> tuple[str, str, dict[str, Any]]:
    """Return whose container it is, with the text and the data that ``look`` finds with that user's rights.

    ``missing``: the error that root has none, which is raised where no user has one either.  Raises OcigpuError.
    """
    from ocigpu.containers.users import ask_users

    def look_as_user(places: "Places") -> dict[str, Any] | None:
        try:
            text, data = look(places)
        except OcigpuError as error:
            return None if error.code == missing.code else {"error": [error.code, error.message, error.hint]}
        return {"text": text, "data": data}

    answers, notes = ask_users(look_as_user, SECONDS)
    if not answers:
        more = f"; {notes[0]}" if notes else ""
        raise OcigpuError(missing.code, f"{missing.message}{more}", missing.hint)
    if len(answers) > 1:
        raise OcigpuError("OCIGPU-CTR-2", f"it may be of user {' or '.join(sorted(answers))}: run it as one of them")
    ((user, found),) = answers.items()
    if "error" in found:
        code, message, hint = found["error"]
        raise OcigpuError(code, f"user {user}: {message}", hint)
    return user, found["text"], found["data"]


def print_of_user(user: str, text: str) -> None:
    """Print what a user's files say, which may be anything."""
    print(f"of user {printable(user)}, by their own files")
    print("\n".join(map(printable, text.splitlines())))


def refuse_rootless(what: str, name: str, missing: OcigpuError | None = None) -> None:
    """Raise OcigpuError OCIGPU-CTR-6 for a rootless container, which a command of root's own cannot work on.

    ``missing``: the error that root has none of this name; None where another user calls.
    """
    from ocigpu.containers.find import default_places, find_container

    if missing is None:
        try:
            find_container(default_places(), name)
        except OcigpuError:
            return
        user = str(os.geteuid())
    else:

        def look(places: "Places") -> tuple[str, dict[str, Any]]:
            find_container(places, name)
            return "", {}

        user = ask_owners(look, missing)[0]
    raise OcigpuError("OCIGPU-CTR-6", f"{what}: container {quoted(name)} is rootless, of user {user}", ROOTLESS)
