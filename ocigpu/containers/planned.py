"""The shim's work for an existing bundle, without writing: its plan, and an edited copy of its config.json.

The work of the hook and of mode spec in a root directory is not done; the directory is only inspected if a decision
depends on it.
"""

import copy
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ocigpu.bundle.declared import Declared, edit_declared
from ocigpu.bundle.document import check_can_have_gpus
from ocigpu.bundle.edit import edit_config, rule_entries, take_back
from ocigpu.bundle.from_plan import declare
from ocigpu.bundle.hookless import VIEW_PREFIX, why_not_declared
from ocigpu.bundle.inject import edit_of_devices, put_devices
from ocigpu.bundle.policy import find_hook, hook_path, owns_device_policy
from ocigpu.bundle.rootfs import find_obstacle
from ocigpu.cdi.conditions import check_conditions
from ocigpu.cdi.registry import Resolved, read_registry
from ocigpu.containers.child import ask_child, look_below
from ocigpu.core.actions import Plan
from ocigpu.core.config_json import has_user_namespace, mount_points, rootfs_path
from ocigpu.core.errors import SpecError
from ocigpu.core.facts import HostFacts, ImageFacts
from ocigpu.core.settings import MODES, Settings
from ocigpu.entry.own_hooks import look, split_hooks, with_hooks
from ocigpu.entry.prepared import PREFIX as EARLY_PREFIX
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import make_plan, parse_request
from ocigpu.provision.image import read_image_facts
from ocigpu.system.store import SYSTEM_DIRECTORY

NAMED_AT_START = "NAMED-AT-START"
"""Instead of what is different for every start."""


def image_facts(bundle: str, container: dict[str, Any], host: HostFacts, root: str = "") -> ImageFacts:
    """Return the facts of the bundle's rootfs, or the defaults if it is missing (a bundle may be mounted later).

    ``root``: its path, if it differs from config.json: engines may mount it in a mount namespace of their own.  Raises
    SpecError OCIGPU-SPEC-3 for one that cannot be inspected, or does not answer.
    """
    path = rootfs_path(container, bundle)
    mounts, version = mount_points(container), host.driver_version
    try:
        return ImageFacts(*look_below(root or path, lambda root_fd: read_image_facts(root_fd, version, mounts)))
    except (FileNotFoundError, NotADirectoryError):
        return ImageFacts()
    except TimeoutError as error:
        hint = "See what is mounted there: a file system in user space or over a network may not answer."
        raise SpecError("OCIGPU-SPEC-3", f"open rootfs {path}: {error.strerror or error}", hint) from error
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-3", f"open rootfs {path}: {error.strerror or error}") from error


def why_not_spec(
    plan: Plan, host: HostFacts, container: dict[str, Any], bundle: str, settings: Settings, root: str = ""
) -> str:
    """Return why mode spec would leave a bundle's container to the hook, "" if it would not.

    For a runtime that root starts.  If the root directory does not exist yet, only the configuration is examined.
    ``root``: as for :func:`image_facts`.
    """
    config = copy.deepcopy(container)
    take_back(config)
    declared = declare(plan, host)

    def look(root_fd: int) -> str:
        reason = why_not_declared(root_fd, declared, config, not settings.no_cgroups, True)
        return reason or find_obstacle(root_fd, declared.links, declared.libraries)

    try:
        return str(look_below(root or rootfs_path(config, bundle), look))
    except OSError:
        return why_not_declared(-1, declared, config, not settings.no_cgroups, True)


class Planned(NamedTuple):
    """What a container would get: its request, the plan (None for nothing, and for CDI devices), and how.

    ``mode``: "hook", "spec", "cdi", or "" for nothing.  ``why_hook``: why mode spec leaves it to the hook.
    ``cdi``: what its CDI devices stand for.  ``host``: what the plan was made of.
    """

    request: Request
    mode: str = ""
    plan: Plan | None = None
    why_hook: str = ""
    cdi: Resolved | None = None
    host: HostFacts = HostFacts()


def plan_bundle(
    original: dict[str, Any], bundle: str, settings: Settings, read_host: Callable[[], HostFacts], root: str = ""
) -> Planned:
    """Return what the shim would give the container of a config.json that it has not edited yet.

    ``read_host``: called only where facts are needed.  ``root``: as for :func:`image_facts`.
    Raises OcigpuError for a request that cannot be granted.
    """
    request = parse_request(original, settings, bundle)
    if request.selection == "nothing":
        return Planned(request)
    check_can_have_gpus(original, os.path.join(bundle, "config.json"))
    if request.selection == "cdi":
        resolved = read_registry(settings).resolve(request.cdi_devices)
        notes = check_conditions(request, resolved.specs, read_host)
        return Planned(request._replace(notes=request.notes + notes), "cdi", cdi=resolved)
    host = read_host().of(*request.vendors)
    image = image_facts(bundle, original, host, root)
    why_hook = ""
    if MODES[settings.mode] == "spec":
        plan = make_plan(host, request, settings, image, "spec")
        why_hook = why_not_spec(plan, host, original, bundle, settings, root)
        if not why_hook:
            return Planned(request, "spec", plan, host=host)
    return Planned(request, "hook", make_plan(host, request, settings, image), why_hook, host=host)


def edit_copy(original: dict[str, Any], bundle: str, settings: Settings, planned: Planned) -> dict[str, Any]:
    """Return the config.json that the shim would write for the calling user; makes nothing else.

    Names that each start chooses again, such as the place where the shim waits for a hook, have a placeholder.  Raises
    OcigpuError as the shim would.
    """
    config = copy.deepcopy(original)
    root = owns_device_policy()
    declare_rules = root and not settings.no_cgroups
    program = find_hook(settings, shutil.which("ocigpu-runtime") or sys.argv[0])
    if planned.cdi is not None:
        _edit_for_devices(config, bundle, planned, settings, program)
    elif planned.plan is not None and planned.mode == "spec":
        declared = declare(planned.plan, planned.host)
        gone = [path for path in declared.optional if not os.path.exists(path)]
        present = [mount for mount in declared.mounts if mount["source"] not in gone]
        bind_nodes = not root or has_user_namespace(config)
        place, views = rootfs_path(config, bundle), _view_paths(declared)
        edit_declared(config, declared._replace(mounts=present), place, views, declare_rules, bind_nodes)
    elif planned.plan is not None:
        options = ["--config", os.path.abspath(settings.path)] if settings.path else []
        options += ["--bundle", os.path.abspath(bundle)]
        options = ["--early", f"{SYSTEM_DIRECTORY}/{EARLY_PREFIX}{NAMED_AT_START}", *options] if root else options
        program = hook_path(settings, shutil.which("ocigpu-runtime") or sys.argv[0])
        edit_config(config, rule_entries(planned.plan), program, options, declare_rules, planned.plan.groups())
    return config


def _edit_for_devices(config: dict[str, Any], bundle: str, planned: Planned, settings: Settings, program: str) -> None:
    """Edit for CDI devices; our own hooks are carried out where nothing that can be seen speaks against it."""
    root = owns_device_policy()
    cdi = planned.cdi
    assert cdi is not None
    options = (root and not settings.no_cgroups, os.lstat, cdi.files, not root)
    others, own = split_hooks(cdi.edits, program)
    edit, _ = edit_of_devices(config, others, *options)
    place, fields = rootfs_path(config, bundle), None
    if own:
        wanted = own
        try:
            fields = ask_child(lambda: look(config, edit, wanted, cdi, settings, place, root))
        except OSError:  # the directory does not exist yet
            fields = None
        if fields is None:
            edit, _ = edit_of_devices(config, cdi.edits, *options)
        else:
            declared = Declared(**fields)
            edit = with_hooks(
                edit._replace(devices=planned.request.cdi_devices), declared, place, _view_paths(declared)
            )
    put_devices(config, edit)


def _view_paths(declared: Declared) -> list[str]:
    return [f"{SYSTEM_DIRECTORY}/{VIEW_PREFIX}{NAMED_AT_START}" for _ in declared.views]
