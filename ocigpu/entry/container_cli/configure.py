"""``ocigpu-container-cli configure``: gives a container its GPUs, called as nvidia-container-cli is.

By the vendor's prestart hook (with --pid), or by enroot and LXC in a mount namespace of their own (without).  The
options request what variables request elsewhere; plan and provisioning are those of ocigpu-hook.
"""

import argparse
import os
from typing import Any

from ocigpu.core.actions import Node, Plan
from ocigpu.core.config_json import clean_path
from ocigpu.core.errors import OcigpuError, RequestError, SpecError, UsageError, printable, quoted
from ocigpu.core.facts import HostFacts
from ocigpu.core.gate import Asker, why_not
from ocigpu.core.settings import CAPABILITIES, Settings
from ocigpu.core.tokens import HEX, WORDS, pci_address
from ocigpu.entry.container_cli.list import check_mig_capability
from ocigpu.entry.container_cli.options import COMPAT_MODES
from ocigpu.gpus.nvidia.request import MAX_REQUIREMENTS, check_permitted, check_tokens
from ocigpu.gpus.request import Request
from ocigpu.system.files import why_untrusted
from ocigpu.system.log import step

MAX_CONDITIONS = 32
"""Options --require, as nvidia-container-cli has it."""
_CLASSES = {
    "ARG": "input error",
    "HOST": "initialization error",
    "SPEC": "container error",
    "NS-1": "container error",
    "NS-2": "permission error",
    "LIB": "detection error",
    "DEV": "device error",
    "REQ-1": "device error",
    "REQ-2": "input error",
    "REQ-3": "requirement error",
    "REQ-4": "requirement error",
    "DEV-3": "mount error",
    "MNT": "mount error",
    "CG": "mount error: failed to add device rules",
    "LD": "ldcache error",
}
"""The vendor's class of an error by our code, or the part of it that names its area."""
_HINTS = {
    "OCIGPU-NS-1": "Give --pid of a container that is being created, or call it in a mount namespace of its own where"
    " ROOTFS is mounted (mount --bind ROOTFS ROOTFS).",
    "OCIGPU-CG-1": "Use --no-cgroups only if something else controls device access.",
}


def configure(options: argparse.Namespace, channels: list[int], settings: Settings) -> list[str]:
    """Give the container of the options its GPUs; return what was done, a line each, for a log.

    ``channels``: its IMEX channels.  Raises OcigpuError, its message beginning with the vendor's class of error, after
    everything begun was undone.  Needs CAP_SYS_ADMIN over the container's mount namespace.  Single-threaded callers
    only.
    """
    try:
        return _configure(options, channels, settings)
    except OcigpuError as error:
        area = error.code.removeprefix("OCIGPU-")
        kind = _CLASSES.get(area) or _CLASSES.get(area.partition("-")[0], "")
        message = error.message if not kind or error.message.startswith(("mig-", kind)) else f"{kind}: {error.message}"
        raise OcigpuError(error.code, message, _HINTS.get(error.code, error.hint)) from error


def _configure(options: argparse.Namespace, channels: list[int], settings: Settings) -> list[str]:
    rootfs, pid = _parse_rootfs(options.rootfs), _parse_pid(options.pid)
    settings = adjust_settings(options, settings)
    request = make_request(options, channels, settings)
    from ocigpu.gpus.cached import read_facts
    from ocigpu.gpus.nvidia.plan import make_plan
    from ocigpu.provision.apply import provision, provision_own
    from ocigpu.provision.image import read_rootfs_facts

    with step("facts", settings.driver_root):
        facts = without_left_out(options, read_facts(settings))
    with step("image", rootfs):
        image = read_rootfs_facts(rootfs, facts.driver_version)
    plan = make_plan(facts, request, settings, image)
    if options.no_devbind:
        plan = without_nodes(plan)
    if pid:
        config = None if settings.no_cgroups else find_config(rootfs)
        notes = provision(plan, pid, rootfs, config, settings)
    else:
        notes = provision_own(plan, rootfs, settings)
    done = f"{rootfs}: driver {plan.driver_version}, GPUs: {', '.join(plan.gpus + plan.mig_devices) or 'none'}"
    return [done, *(action.describe() for action in plan.actions), *(f"note: {note}" for note in plan.notes + notes)]


def _parse_rootfs(text: str) -> str:
    rootfs = clean_path(text)
    if not text.startswith("/") or rootfs == "/":
        raise UsageError(f"invalid rootfs directory: {quoted(text)}", "Give the absolute path of a directory but /.")
    return rootfs


def _parse_pid(text: str) -> int:
    """Return the process, 0 for none: the caller's own mount namespace is the container's."""
    digits = text.removeprefix("-")
    if text and not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
        raise UsageError(f"parse pid failed: {quoted(text)}: not a process id")
    return max(int(text or 0), 0)


def adjust_settings(options: argparse.Namespace, settings: Settings) -> Settings:
    """Return the settings with what the options of configure say; raises UsageError for a mode that there is not.

    An ldconfig without "@" is one of the image for nvidia-container-cli.  Such a one is never executed: the host's is.
    Compatibility libraries that the settings forbid no option allows.
    """
    if options.ldconfig.startswith("@"):
        settings = settings._replace(ldconfig=os.path.abspath(options.ldconfig[1:]))
    modes = set(options.cuda_compat_mode)
    for mode in sorted(modes.difference(COMPAT_MODES)):
        raise UsageError(
            f"invalid option: cuda-compat-mode={printable(mode, 120)}", f"Modes: {', '.join(COMPAT_MODES)}"
        )
    if options.no_cntlibs or "disabled" in modes:
        settings = settings._replace(cuda_compat_mode="disabled")
    elif len(modes) > 1:
        raise UsageError("only one cuda-compat-mode can be specified at a time")
    return settings._replace(no_cgroups=settings.no_cgroups or options.no_cgroups)


def make_request(options: argparse.Namespace, channels: list[int], settings: Settings) -> Request:
    """Return what the options of configure ask for: pure.

    Raises RequestError as :func:`ocigpu.gpus.nvidia.request.parse_request` does, and UsageError for too many
    conditions.
    """
    tokens = tuple(dict.fromkeys(filter(None, map(str.strip, ",".join(options.device).split(",")))))
    selection = "list" if tokens else "none"
    if any(token.lower() == "all" for token in tokens):
        selection, tokens = "all", ()
    for token in tokens:
        if token.lower() in WORDS:
            raise RequestError("OCIGPU-DEV-1", f"device error: {token}: unknown device", "Leave --device out for none.")
    devices = tuple(map(full_address, tokens))
    check_tokens(devices, "--device")
    for name, value in (("config", options.mig_config), ("monitor", options.mig_monitor)):
        check_mig_capability(name, value)
    wanted = {name for name in CAPABILITIES if getattr(options, name)}
    asker = Asker(settings, privileged=True)  # whoever calls it has the rights for what it does
    check_permitted(wanted, "option", asker, "options")
    return Request(
        selection=selection,
        devices=devices,
        source=f"--device={printable(','.join(tokens) or 'all', 120)}" if selection != "none" else "no --device",
        capabilities=tuple(sorted(wanted)),
        requirements=() if why_not("requirement", "option", asker) else _parse_requirements(options.require),
        mig_config=options.mig_config,
        mig_monitor=options.mig_monitor,
        imex_channels=() if why_not("imex", "option", asker) else tuple(sorted(channels)),
    )


def full_address(token: str) -> str:
    """Return a PCI address as nvidia-container-cli reads it ("0:3:0", "00000000:03:00.7") in full, others as is.

    Of such an address the function does not matter.
    """
    parts = token.partition(".")[0].split(":")
    if len(parts) != 3 or not all(part and HEX.issuperset(part) for part in parts):
        return token
    address = ":".join(part.lstrip("0").rjust(digits, "0") for part, digits in zip(parts, (8, 2, 2), strict=True))
    return f"{address}.0" if pci_address(address) else token


def _parse_requirements(expressions: list[str]) -> tuple[tuple[str, str], ...]:
    from ocigpu.gpus.nvidia.require import parse_requirement  # CUDA images have one

    if len(expressions) > MAX_CONDITIONS:
        raise UsageError(f"too many requirements: more than {MAX_CONDITIONS}")
    if sum(map(len, expressions)) > MAX_REQUIREMENTS:
        raise RequestError("OCIGPU-REQ-4", f"--require: more than {MAX_REQUIREMENTS} characters together")
    for expression in expressions:
        parse_requirement(expression, "--require")
    return tuple(("--require", expression) for expression in sorted(filter(None, expressions)))


def without_left_out(options: argparse.Namespace, facts: HostFacts) -> HostFacts:
    """Return the host's facts without the sockets and firmware that the options leave out."""
    daemons = [name for name in ("persistenced", "fabricmanager") if getattr(options, f"no_{name}")]
    return facts._replace(
        sockets=tuple(item for item in facts.sockets if not any(name in item.container_path for name in daemons)),
        firmware=() if options.no_gsp_firmware else facts.firmware,
    )


def without_nodes(plan: Plan) -> Plan:
    """Return the plan for a container whose device nodes somebody else makes: rules stay."""
    return plan._replace(actions=tuple(action for action in plan.actions if not isinstance(action, Node)))


def find_config(rootfs: str) -> dict[str, Any] | None:
    """Return the OCI configuration of the container with this root directory, None if it is not found.

    It is looked for in the working directory, which for hooks is the bundle, and beside the root directory.  What is
    inside the image, or could have been written by others than root or us, is not taken for it.
    """
    from ocigpu.bundle.document import read_config
    from ocigpu.core.config_json import rootfs_path

    real = os.path.realpath(rootfs)
    try:
        bundles = [os.path.realpath(os.getcwd()), os.path.dirname(real)]
    except FileNotFoundError:  # the working directory was removed
        bundles = [os.path.dirname(real)]
    for bundle in dict.fromkeys(bundles):
        if os.path.commonpath((real, bundle)) == real:
            continue
        try:
            document = read_config(bundle)
            if os.path.realpath(rootfs_path(document.config, bundle)) != real:
                continue
        except SpecError:  # none, or the file of something else
            continue
        if not why_untrusted(document.uid, document.mode):
            return document.config
    return None
