"""What the commands share: the options that name settings and hosts, and what they mean."""

import os
import sys

from ocigpu.core.errors import UNUSABLE, HostError, OsErrorAs, UsageError, quoted
from ocigpu.core.facts import HostFacts, facts_from_json
from ocigpu.core.settings import Settings
from ocigpu.system.files import read_bounded
from ocigpu.system.settings_file import read_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

CONFIG_VARIABLE = "OCIGPU_CONFIG"
MAX_FACTS = 64 << 20


def settings_path(config: str) -> str:
    """Return the settings file that was named on the command line or by OCIGPU_CONFIG, "" for the default."""
    return config or os.environ.get(CONFIG_VARIABLE, "")


def own_program(name: str) -> str:
    """Return the path of a program of ours beside this one, else on the PATH or that of services; "" for none."""
    from shutil import which

    from ocigpu.engines.places import find_program, is_program

    path = beside(name)
    return path if is_program("/", path) else which(name) or find_program("/", name)


def beside(name: str) -> str:
    """Return the path that a program beside this one has."""
    return os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), name)


def check_one_of(option: str, value: str, known: "Collection[str]") -> None:
    """Raise UsageError for a value that an option does not have."""
    if value not in known:
        raise UsageError(f"{option}: {quoted(value)} is not one of {', '.join(known)}")


def named_address(text: str) -> str:
    """Return the PCI address that an argument names, as sysfs writes it; the domain may be left out.

    What is no address is returned as it is.
    """
    from ocigpu.gpus.tree import normal_bus_id, sysfs_address

    return sysfs_address(normal_bus_id(text if text.count(":") > 1 else f"0:{text}")) or text


def read_named(path: str, limit: int) -> bytes:
    """Return the content of a file that is named on the command line, "-" for standard input; raises OSError."""
    with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
        return read_bounded(file, limit)


def load_settings(config: str, driver_root: str = "") -> Settings:
    """Return the settings in force, with ``driver_root`` as that of a real host if given; raises SettingsError."""
    settings = read_settings(settings_path(config), keep=True)
    return settings._replace(driver_root=os.path.abspath(driver_root), simulation_root="") if driver_root else settings


def load_facts(settings: Settings, recorded: str = "", vendors: tuple[str, ...] = ()) -> HostFacts:
    """Return the facts of the host, or those of the file ``recorded``; raises HostError.

    ``vendors``: whose devices they are about, () for all whose driver is here.
    """
    if recorded:
        return _read_recorded_facts(recorded)
    from ocigpu.gpus.vendors import find_vendors, read_facts

    return read_facts(settings, vendors or find_vendors(settings), kept=False)


def _read_recorded_facts(path: str) -> HostFacts:
    import json

    with OsErrorAs(HostError, "OCIGPU-HOST-3", f"facts {path}", ""), open(path, "rb") as file:
        data = read_bounded(file, MAX_FACTS)
    try:
        return facts_from_json(json.loads(data.decode()))
    except UNUSABLE as error:
        raise HostError(
            "OCIGPU-HOST-3", f"facts {path}: not recorded facts", "write it: ocigpu facts --json"
        ) from error
