"""Device ids as the operator wrote them, and names as the operator wants them."""

from ocigpu.core.cdi_names import check_device
from ocigpu.core.errors import CdiError, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def select_ids(ids: "Sequence[str]", known: "Sequence[tuple[str, ...]]", what: str) -> tuple[int, ...]:
    """Return the positions in ``known`` that the ids name, in its order; ``known`` holds each device's own ids.

    "all" among the ids is everything.  Raises CdiError (OCIGPU-CDI-7) for an id that no device has.
    """
    if "all" in ids:
        return tuple(range(len(known)))
    chosen = set()
    for text in ids:
        found = [position for position, own in enumerate(known) if text in own]
        if not found:
            first = ", ".join(own[0] for own in known[:16]) + (", ..." if len(known) > 16 else "")
            message = f"device id {quoted(text)}: no such {what}; there are: {first or 'none'}"
            raise CdiError("OCIGPU-CDI-7", message, "Give one of them, or leave --device-id out.")
        chosen.update(found)
    return tuple(sorted(chosen))


def choose_names(strategies: "Sequence[str]", index: str, type_index: str, uuid: str) -> tuple[str, ...]:
    """Return a device's names by these strategies, each once; what no CDI device may be called ("") is left out."""
    names = {"index": index, "type-index": type_index, "uuid": uuid}
    return tuple(dict.fromkeys(names[strategy] for strategy in strategies if not check_device(names[strategy])))
