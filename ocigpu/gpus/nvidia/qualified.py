"""CDI devices as containers request them: names from lists and mounts.  Pure."""

from ocigpu.core.cdi_names import check_device, is_qualified
from ocigpu.core.errors import RequestError, quoted
from ocigpu.core.gate import Asker, find_kind, permits
from ocigpu.core.tokens import MAX_TOKENS, MOUNT_SOURCE, select_tokens

MAX_NAME = 600
"""More than a vendor of 253 characters, a class of 63 and any device name in use."""


def name_of_mount(request: str) -> str:
    """Return the name that a mount "cdi/VENDOR/CLASS/DEVICE" or "cdi/VENDOR/CLASS=DEVICE" requests.

    Raises RequestError OCIGPU-REQ-1.
    """
    kind, slash, device = request.removeprefix("cdi/").rpartition("/")
    name = f"{kind}={device}" if slash and "=" not in request else request.removeprefix("cdi/")
    if len(name) > MAX_NAME or not is_qualified(name):
        raise RequestError(
            "OCIGPU-REQ-1",
            f"{MOUNT_SOURCE}: {quoted(request)} does not name a CDI device",
            "A mount for a CDI device ends in cdi/VENDOR/CLASS/DEVICE.",
        )
    return name


def all_qualified(tokens: tuple[str, ...], where: str, annotated: bool) -> bool:
    """Return whether every device of a list is a qualified name; raises OCIGPU-REQ-1 when only some are.

    ``annotated``: the list is an annotation's, where nothing else makes sense.
    """
    plain = [token for token in tokens if not is_qualified(token)]
    if plain and (annotated or len(plain) < len(tokens)):
        raise RequestError(
            "OCIGPU-REQ-1",
            f"{where}: {quoted(plain[0])} is not a fully qualified CDI device name"
            + ("" if len(plain) == len(tokens) else ", but others of the list are"),
            'Name every device as vendor/class=device, or set mode = "cdi", which completes plain names.',
        )
    return not plain


def name_devices(tokens: tuple[str, ...], where: str, default_kind: str) -> list[str]:
    """Return the fully qualified names; plain ones are devices of the default kind, and "all" or "none" stands alone.

    Beside qualified names "all" and "none" are devices like others.  Raises RequestError OCIGPU-REQ-1.
    """
    if len(tokens) > MAX_TOKENS:
        raise RequestError("OCIGPU-REQ-1", f"{where}: more than {MAX_TOKENS} devices")
    if not any("=" in token for token in tokens):
        selection, devices = select_tokens(tokens)
        tokens = devices or (selection,)
    names = []
    for token in tokens:
        if len(token) > MAX_NAME:
            raise RequestError("OCIGPU-REQ-1", f"{where}: longer than {MAX_NAME} characters: {quoted(token, 40)}")
        if is_qualified(token):
            names.append(token)
        elif problem := check_device(token):
            raise RequestError(
                "OCIGPU-REQ-1",
                f"{where}: {quoted(token)} is not a CDI device: {problem}",
                "Name a device as vendor/class=device, or by its name of the default kind (cdi.default-kind).",
            )
        else:
            names.append(f"{default_kind}={token}")
    return names


def permitted_names(names: list[str], source: str, asker: Asker, where: str, notes: list[str]) -> list[str]:
    """Return the qualified names that may be requested; the reasons for ignoring others are appended to ``notes``.

    Raises RequestError OCIGPU-REQ-1 for a name that stops the container.
    """
    settings = asker.settings
    return [name for name in names if permits(find_kind(name, settings), source, asker, where, notes, name)]
