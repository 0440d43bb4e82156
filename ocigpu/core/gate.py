"""What a container may request, by the source of the request and the settings: the only place that decides it.  Pure.

A variable counts as the image's, because a config.json does not show who set it.  So does an annotation: engines pass
on annotations of images (Podman before 4.5.1) and of pods (CRI-O); docs/SECURITY.md lists which ones.  :data:`RULES` is
printed there, too (``python -m ocigpu.core.gate``).
"""

from ocigpu.core.errors import RequestError, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import CAPABILITIES, MODES_WITH_CDI, Settings
from ocigpu.core.vendors import GPU_VENDORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SOURCES = {
    "variable": "variable of the container",
    "annotation": "annotation",
    "mount": "volume mount",
    "option": "option of `ocigpu-container-cli`",
    "label": "label",
}
"""Ways to request."""
KINDS = {
    "gpu": "GPUs and MIG devices: index, UUID, PCI address, `all`, `none`, `runtime.nvidia.com/gpu=...`",
    "cdi-gpu": "GPUs by CDI name: class `gpu`, and the kind `cdi.default-kind`",
    "cdi-part": "`gds`, `mofed`, `gdrcopy`, `nvswitch` of NVIDIA by CDI name",
    "cdi-imex": "IMEX channels by CDI name",
    "cdi-other": "any other CDI name: `nvidia.com/pgpu=...`, other vendors' devices",
    "cdi-files": "driver files of any capability, provided by a specification",
    "capability": "driver capabilities",
    "requirement": "conditions on the driver (`NVIDIA_REQUIRE_*`)",
    "imex": "IMEX channels by number",
    "part": "`NVIDIA_GDS`, `_MOFED`, `_GDRCOPY`, `_NVSWITCH`",
    "mig": "`NVIDIA_MIG_CONFIG_DEVICES`, `_MONITOR_DEVICES`",
}
"""Kinds of requests."""

PARTS = {
    "gds": "NVIDIA_GDS",
    "mofed": "NVIDIA_MOFED",
    "gdrcopy": "NVIDIA_GDRCOPY",
    "nvswitch": "NVIDIA_NVSWITCH",
}
"""Opt-in parts, and the variable that requests each."""
CAPABILITIES_ANNOTATION = "ocigpu/driver-capabilities"
"""Annotation of a specification: the driver capabilities whose files it provides, if the settings do not permit all."""
IMEX_CLASS = "imex-channel"
GPU_CLASS = "gpu"
_CRI_TASKS = "io.containerd.runtime.v2.task"
_CRI_NAMESPACE = "k8s.io"
_CRI_ANNOTATION = "io.kubernetes.cri.container-type"


class Asker(NamedTuple):
    """On whose behalf something is requested.

    ``privileged``: the container has CAP_SYS_ADMIN.  ``filtered``: no image and no author of a pod can write the
    annotations that name devices (:func:`is_filtered`).
    """

    settings: Settings
    privileged: bool = False
    filtered: bool = False


class Condition(NamedTuple):
    """What must hold for a request; ``holds``: of asker, source and requested name.

    ``code``: of the error that stops the container; "": the request is ignored.  ``reason``: why, for messages; "":
    ignored without a note.
    """

    holds: "Callable[[Asker, str, str], bool]"
    text: str
    reason: str = ""
    code: str = ""
    hint: str = ""


def _is_trusted(asker: Asker, source: str) -> bool:
    return asker.privileged or (source == "annotation" and asker.filtered)


def _is_obeyed(asker: Asker, source: str, _: str) -> bool:
    return _is_trusted(asker, source) or asker.settings.accept_nvidia_visible_devices_envvar_when_unprivileged


def _is_listed(asker: Asker, source: str, name: str) -> bool:
    return _is_trusted(asker, source) or is_listed(name, asker.settings)


def _is_within(asker: Asker, source: str, _: str) -> bool:
    return _is_trusted(asker, source) or not set(CAPABILITIES) - permitted_capabilities(asker.settings)


_OBEYED = "the container has no CAP_SYS_ADMIN and accept-nvidia-visible-devices-envvar-when-unprivileged is false"
CONDITIONS = {
    "U": Condition(
        _is_obeyed,
        "`accept-nvidia-visible-devices-envvar-when-unprivileged` is true, or the container has CAP_SYS_ADMIN; for"
        " annotations, also if annotations are filtered",
        _OBEYED,
    ),
    "V": Condition(
        lambda asker, *_: asker.settings.accept_nvidia_visible_devices_as_volume_mounts,
        "`accept-nvidia-visible-devices-as-volume-mounts` is true",
    ),
    "M": Condition(
        lambda asker, *_: asker.settings.mode in MODES_WITH_CDI,
        "`mode` is not `hook`; in that mode a variable or mount with a CDI name is refused",
    ),
    "L": Condition(
        _is_listed,
        f"`cdi.environment-vendors` lists its vendor or its kind ({' and '.join(GPU_VENDORS)} stand for GPUs; their"
        " other kinds must be listed themselves), or it is of `cdi.default-kind`, or the container has CAP_SYS_ADMIN,"
        " or annotations are filtered; otherwise it is refused",
        "the image may have written this, and cdi.environment-vendors does not permit its kind",
        "OCIGPU-REQ-1",
        "Add its kind, vendor/class, to cdi.environment-vendors, or give CAP_SYS_ADMIN; for annotations see"
        " cdi.engine-filters-annotations.",
    ),
    "I": Condition(
        lambda asker, *_: not asker.settings.features_ignore_imex_channel_requests,
        "`features.ignore-imex-channel-requests` is false",
        "features.ignore-imex-channel-requests is true",
    ),
    "F": Condition(
        _is_within,
        "`supported-driver-capabilities` lists all, or the specification states that it provides only those listed"
        " (`ocigpu cdi generate` writes that), or the container has CAP_SYS_ADMIN, or annotations are filtered;"
        " otherwise it is refused",
    ),
    "C": Condition(
        lambda asker, _, name: name in permitted_capabilities(asker.settings),
        "`supported-driver-capabilities` lists it; otherwise it is refused",
        "not permitted on this host",
        "OCIGPU-REQ-2",
    ),
    "R": Condition(lambda asker, *_: not asker.settings.disable_require, "`disable-require` is false"),
    "S": Condition(
        lambda asker, *_: asker.privileged,
        "the container has CAP_SYS_ADMIN; otherwise it is refused",
        "the container has no CAP_SYS_ADMIN",
        "OCIGPU-REQ-5",
    ),
}
"""By the letter that :data:`RULES` and the table in docs/SECURITY.md have."""
RULES = {
    "gpu": {"variable": "U", "annotation": "MU", "mount": "V", "option": ""},
    "cdi-gpu": {"variable": "MUL", "annotation": "MUL", "mount": "MV"},
    "cdi-part": {"variable": "MUL", "annotation": "MU", "mount": "MV"},
    "cdi-imex": {"variable": "MIUL", "annotation": "MIU", "mount": "MIV"},
    "cdi-other": {"variable": "MUL", "annotation": "MUL", "mount": "MV"},
    "cdi-files": {"variable": "F", "annotation": "F", "mount": ""},
    "capability": {"variable": "C", "option": "C"},
    "requirement": {"variable": "R", "option": "R"},
    "imex": {"variable": "IU", "mount": "IV", "option": "I"},
    "part": {"variable": "U"},
    "mig": {"variable": "S", "option": ""},
}
"""For each kind and source the conditions, of which all must hold; no entry: it cannot be requested in this way."""
_NO_WAY = Condition(lambda *_: False, "it cannot be requested in this way")


def why_not(kind: str, source: str, asker: Asker, name: str = "") -> Condition | None:
    """Return the first condition that a request does not meet, None when it may be granted.

    ``name``: the CDI name or the driver capability.
    """
    letters = RULES[kind].get(source)
    if letters is None:
        return _NO_WAY
    for letter in letters:
        condition = CONDITIONS[letter]
        if not condition.holds(asker, source, name):
            return condition
    return None


def permits(kind: str, source: str, asker: Asker, where: str, notes: list[str], name: str = "") -> bool:
    """Return whether a request may be granted; the reason for ignoring one is appended to ``notes``.

    ``where``: the request for messages.  Raises RequestError for one that stops the container.
    """
    condition = why_not(kind, source, asker, name)
    if condition is None:
        return True
    if condition.code:
        shown = quoted(name) if "=" in name else name
        message = ": ".join(filter(None, (where, shown, condition.reason)))
        raise RequestError(condition.code, message, condition.hint or None)
    note = f"{where} ignored: {condition.reason}"
    if condition.reason and note not in notes:
        notes.append(note)
    return False


def find_kind(name: str, settings: Settings) -> str:
    """Return the kind of request that a fully qualified CDI name is."""
    kind = name.partition("=")[0]
    device_class = kind.partition("/")[2]
    if is_of_nvidia(name):
        if device_class == IMEX_CLASS:
            return "cdi-imex"
        if device_class in PARTS:
            return "cdi-part"
    return "cdi-gpu" if _is_gpu(device_class) or kind == settings.cdi_default_kind else "cdi-other"


def _is_gpu(device_class: str) -> bool:
    return device_class == GPU_CLASS or device_class.startswith(f"{GPU_CLASS}.")  # gpu.coherent


def is_listed(name: str, settings: Settings) -> bool:
    """Return whether containers may name a CDI device in variables and annotations that their image can set.

    The vendors of GPUs stand for these only: a GPU for virtual machines (nvidia.com/pgpu) is the whole device, and
    parts of the driver have variables and settings of their own.
    """
    kind = name.partition("=")[0]
    vendor = kind.partition("/")[0]
    if kind == settings.cdi_default_kind or kind in settings.cdi_environment_vendors:
        return True
    if vendor not in settings.cdi_environment_vendors:
        return False
    what = find_kind(name, settings)
    return what == "cdi-gpu" or (what == "cdi-other" and vendor not in GPU_VENDORS)


def is_of_nvidia(name: str) -> bool:
    """Tell whether a qualified name is of NVIDIA or of one of its subdomains."""
    return _is_of("nvidia.com", name)


def is_gpu_of_nvidia(name: str) -> bool:
    """Tell whether a qualified name is of a GPU that NVIDIA's driver serves, see :func:`is_gpu_of`."""
    return is_gpu_of("nvidia.com", name)


def is_gpu_of(vendor: str, name: str) -> bool:
    """Tell whether a qualified name is of a GPU that a vendor's driver serves, not of one for a virtual machine."""
    return _is_of(vendor, name) and _is_gpu(name.partition("=")[0].partition("/")[2])


def _is_of(vendor: str, name: str) -> bool:
    return f".{name.partition('/')[0]}".endswith(f".{vendor}")


def permitted_capabilities(settings: Settings) -> set[str]:
    """Return the driver capabilities that containers may have by the settings."""
    permitted = set(filter(None, map(str.strip, settings.supported_driver_capabilities.split(","))))
    return set(CAPABILITIES) if "all" in permitted else permitted


def find_bound(source: str, asker: Asker) -> tuple[str, ...]:
    """Return the driver capabilities to which specifications are limited, () if they decide themselves."""
    if why_not("cdi-files", source, asker) is None:
        return ()
    return tuple(sorted(permitted_capabilities(asker.settings))) or ("none",)


def is_filtered(config: "dict[str, Any]", bundle: str, settings: Settings) -> bool:
    """Return whether the engine keeps annotations that name devices from images and from authors of pods.

    The settings say so, or the engine is containerd's CRI, which passes annotations of its own configuration's lists
    only, from the kubelet (containerd, docs/cri/config.md: container_annotations, pod_annotations).  It is recognized
    by the directory of the bundle, which containerd chooses: STATE/io.containerd.runtime.v2.task/NAMESPACE/ID, with the
    namespace of the CRI; ``ctr`` and Docker use others.  No part of that path comes from an image or pod.  Annotations
    of the CRI are required as well, because other clients of that namespace need not write them; they would not suffice
    alone, because an image could set them.
    """
    if settings.cdi_engine_filters_annotations:
        return True
    annotations = config.get("annotations")
    parts = bundle.rstrip("/").split("/")
    of_cri = len(parts) > 4 and not parts[0] and parts[-3:-1] == [_CRI_TASKS, _CRI_NAMESPACE]
    return of_cri and isinstance(annotations, dict) and _CRI_ANNOTATION in annotations


def is_plugin_key(name: str) -> bool:
    """Return whether what follows the prefix of an annotation's key is of the form that device plugins write.

    PLUGIN_DEVICE: at most 63 letters, digits and "_-.", the first and the last a letter or digit
    (container-device-interface, AnnotationKey).
    """
    plugin, underscore, device = name.partition("_")
    if not (plugin and underscore and device and len(name) <= 63 and name.isascii()):
        return False
    return name[0].isalnum() and name[-1].isalnum() and all(c.isalnum() or c in "_-." for c in name)


def render_table() -> str:
    """Return the rules as docs/SECURITY.md has them."""
    lines = [f"| requested | {' | '.join(SOURCES.values())} |", f"|---|{'---|' * len(SOURCES)}"]
    for kind, meaning in KINDS.items():
        cells = [RULES[kind].get(source) for source in SOURCES]
        shown = ["no" if cell is None else " ".join(cell) or "yes" for cell in cells]
        lines.append(f"| {meaning} | {' | '.join(shown)} |")
    lines += ["", *(f"- **{letter}**: {condition.text}." for letter, condition in CONDITIONS.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_table(), end="")
