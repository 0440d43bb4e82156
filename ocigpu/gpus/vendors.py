"""Every source of devices with its fingerprint: what its specifications and cached facts depend on."""

from ocigpu.core.errors import quoted
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import _SENTENCES, ANNOTATION, explain_changes, parse_fingerprint
from ocigpu.gpus.nvidia.fingerprint import read_nvidia
from ocigpu.gpus.tree import settings_digest

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Fingerprint = tuple[tuple[str, str], ...]


def read_fingerprint(source: str, settings: Settings) -> "Fingerprint":
    """Return (key, value) pairs that change when what this source of devices tells may have changed.

    The first pair is ("source", source), the last one stands for the settings.  Values are "" where there is nothing
    (an absent driver is no error) and never hold white space.  A source without a reader has these two pairs only.
    Raises HostError (OCIGPU-HOST-3) when a file of the driver is there and cannot be read.
    """
    reader = READERS.get(source)
    pairs = reader(settings) if reader else ()
    return (("source", source), *pairs, ("settings", settings_digest(settings)))


def _read_amd(settings: Settings) -> "Fingerprint":
    from ocigpu.gpus.amd.facts import read_amd_fingerprint  # here: a host has GPUs of one vendor, as a rule

    return read_amd_fingerprint(settings)


def _read_vfio(settings: Settings) -> "Fingerprint":
    from ocigpu.gpus.vfio.facts import read_vfio_fingerprint

    return read_vfio_fingerprint(settings)


def _read_csv(settings: Settings) -> "Fingerprint":
    from ocigpu.gpus.tegra.facts import read_csv_fingerprint

    return read_csv_fingerprint(settings)


def _read_wsl(settings: Settings) -> "Fingerprint":
    from ocigpu.gpus.wsl.facts import read_wsl_fingerprint

    return read_wsl_fingerprint(settings)


READERS: "dict[str, Callable[[Settings], Fingerprint]]" = {
    "nvidia": read_nvidia,
    "amd": _read_amd,
    "vfio": _read_vfio,
    "csv": _read_csv,
    "wsl": _read_wsl,
}
"""For each source of devices what reads its pairs."""


def stale_reasons(annotations: "Mapping[str, Any]", settings: Settings) -> tuple[str, ...]:
    """Return why a specification with these annotations no longer fits the host; () when it does.

    One without our annotation is not ours: ().  One that was made with other settings is only said to be that: what
    else differs was read from somewhere else.  Raises HostError as :func:`read_fingerprint` does.
    """
    text = annotations.get(ANNOTATION)
    if text is None:
        return ()
    old = parse_fingerprint(text) if isinstance(text, str) else ()
    if not old:
        return (f"its annotation {ANNOTATION} cannot be understood: {quoted(str(text))}",)
    source = old[0][1]
    if source not in READERS:
        return (f"its devices are of a source that this version does not know: {quoted(source)}",)
    changes = explain_changes(old, read_fingerprint(source, settings))
    return (_SENTENCES["settings"],) if _SENTENCES["settings"] in changes else changes
