"""CDI devices as containers ask for them: names out of lists and mounts.  Pure; the rest is ocigpu.request's."""

from ocigpu.cdi.names import check_device, is_qualified
from ocigpu.errors import RequestError, quoted
from ocigpu.request import MAX_TOKENS, MOUNT_SOURCE, select_tokens

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.settings import Settings

MAX_NAME = 600
"""More than a vendor of 253 characters, a class of 63 and any device name in use."""


def name_of_mount(request: str) -> str:
    """Return the name that a mount "cdi/VENDOR/CLASS/DEVICE" or "cdi/VENDOR/CLASS=DEVICE" asks for.

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
            "Name every device as vendor/class=device, or set mode = cdi, which completes plain names.",
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


def check_vendors(names: list[str], where: str, settings: "Settings") -> None:
    """Refuse devices of vendors that variables may not name: they are the image's, and a specification may hold a disk.

    The default kind's vendor is always permitted.  Raises RequestError OCIGPU-REQ-1.
    """
    permitted = (*settings.cdi_environment_vendors, settings.cdi_default_kind.partition("/")[0])
    for name in names:
        vendor = name.partition("/")[0]
        if vendor not in permitted:
            raise RequestError(
                "OCIGPU-REQ-1",
                f"{where}: {quoted(name)}: devices of {vendor} may not be named in variables by this container",
                "Name it in an annotation, give CAP_SYS_ADMIN, or add the vendor to cdi.environment-vendors.",
            )


def is_of_nvidia(name: str) -> bool:
    """Tell whether a qualified name is of NVIDIA or of one of its subdomains."""
    return f".{name.partition('/')[0]}".endswith(".nvidia.com")
