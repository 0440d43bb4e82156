"""The record of a source of devices; request, facts and plan for a container, whatever its devices' vendor.

It imports little, because every start of a container loads it.
"""

from ocigpu.core.config_json import read_env
from ocigpu.core.record import NamedTuple
from ocigpu.core.vendors import FIRST, VENDORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any, Protocol

    from ocigpu.core.actions import Plan
    from ocigpu.core.facts import HostFacts, ImageFacts
    from ocigpu.core.settings import Settings
    from ocigpu.gpus.offer import DeviceOffer, GenerateOptions
    from ocigpu.gpus.on_node import NodeGpus
    from ocigpu.gpus.parts import GpuPart
    from ocigpu.gpus.request import Request, Selection
    from ocigpu.gpus.usage import Usage

    Fingerprint = tuple[tuple[str, str], ...]

    class Board(Protocol):
        """What a simulated host is told of the model of its GPUs (:class:`ocigpu.sim.models.Model`)."""

        @property
        def name(self) -> str: ...
        @property
        def architecture(self) -> str: ...
        @property
        def driver_version(self) -> str: ...
        @property
        def device_id(self) -> int: ...
        @property
        def memory_mib(self) -> int: ...
        @property
        def multiprocessors(self) -> int: ...
        @property
        def power_watts(self) -> int: ...


def late(name: str) -> "Callable[..., Any]":
    """Return a function that loads the one of this name, MODULE:FUNCTION below ocigpu.gpus, and calls it."""

    def call(*arguments: "Any", **named: "Any") -> "Any":
        module, _, function = name.partition(":")
        return getattr(__import__(f"ocigpu.gpus.{module}", None, None, (function,)), function)(*arguments, **named)

    return call


def _missing(*_: "Any") -> "Any":
    raise NotImplementedError


def _never(_: "Settings") -> bool:
    return False


def _nothing(*_: "Any") -> "tuple[Any, ...]":
    return ()


def _no_words(*_: "Any") -> str:
    return ""


class Simulated(NamedTuple):
    """What a driver shows of simulated GPUs, by path below the host; nodes are (path, major, minor, mode).

    ``groups``: of nodes that are not of root's group.  ``programs``: by name the modules whose main(root, arguments)
    prints what the vendor's program of this name prints.
    """

    files: "dict[str, str]"
    links: "dict[str, str]"
    nodes: "tuple[tuple[str, int, int, int], ...]"
    gpus: "tuple[dict[str, Any], ...]"
    groups: "dict[str, int]"
    programs: "dict[str, str]"


class Trouble(NamedTuple):
    """What keeps containers from a vendor's GPUs: "error" or "warning", in words; what was seen where, and the fix."""

    severity: str
    text: str
    place: str
    seen: str
    wanted: str
    fix: str


class GpuLink(NamedTuple):
    """The direct links between two GPUs, by their UUIDs; ``kind``: what the vendor calls them."""

    one: str
    two: str
    kind: str
    links: int


class Vendor(NamedTuple):
    """A source of devices; the functions after ``is_here`` only if containers can request them by a variable.

    ``name``: in fingerprints and drafts.  ``kinds``: vendors of CDI kinds that are its own.  ``subsystems``: of the
    kernel, whose events are about its devices.  ``modes``: of ``ocigpu cdi generate``.  ``offer``: what specifications
    get.  ``is_here``: whether the host is of this platform and no other.  ``has_driver``: whether the vendor's driver
    is loaded.  ``read_facts``: perhaps from an earlier start; ``read_now``: from the host now.  ``request_devices``:
    the request of a container with other devices.  ``simulate``: for sim; ``check``: for the doctor; ``read_usage``:
    what the GPUs do now, as far as files of the kernel show it (a :class:`~ocigpu.gpus.usage.Usage` each);
    ``read_links``: how they are connected besides PCIe, as far as such files show it.

    For the programs of a cluster's nodes: ``read_parts``: the devices for resource claims, without which the DRA driver
    reads the vendor's GPUs as NVIDIA's; ``offer_claimed``: the devices of a claim's specification under their ids,
    given with their names in the slice, from facts that were read before (raises HostError OCIGPU-DRA-3 where the host
    has changed); ``sharing``: the strategies by which containers of a claim may share a GPU.  ``read_node``: GPUs for
    the device plugin, and how they are connected, None for a vendor whose GPUs it does not offer; ``find_silence``: why
    the driver did not answer about existing GPUs, "" if it did; ``watch_faults``: what prints their faults in a process
    of its own, a module and the arguments of its main, () where nothing does
    (:class:`~ocigpu.kubernetes.node.program.EventWatcher` reads it); ``sample``: the same for what prints samples for
    the exporter, None for a vendor whose GPUs have no metrics (:func:`~ocigpu.exporter.sample.parse_sample` reads
    them); ``read_labels``: labels of the node, with their domains.
    """

    name: str
    modes: tuple[str, ...]
    read_fingerprint: "Callable[[Settings], Fingerprint]"
    offer: "Callable[[GenerateOptions, Settings], DeviceOffer]"
    kinds: tuple[str, ...] = ()
    subsystems: tuple[str, ...] = ()
    is_here: "Callable[[Settings], bool]" = _never
    has_driver: "Callable[[Settings], bool]" = _never
    parse_request: "Callable[[dict[str, Any], Settings, str], Request]" = _missing
    request_devices: "Callable[[dict[str, Any], Sequence[str], Settings], Request]" = _missing
    select_devices: "Callable[[Request, HostFacts], Selection]" = _missing
    read_facts: "Callable[[Settings], HostFacts]" = _missing
    read_now: "Callable[[Settings], HostFacts]" = _missing
    make_plan: "Callable[[HostFacts, Request, Settings, ImageFacts | None, str], Plan]" = _missing
    simulate: "Callable[[int, Board, int, int], Simulated]" = _missing
    check: "Callable[[Settings], tuple[Trouble, ...]]" = _missing
    read_usage: "Callable[[Settings, HostFacts], tuple[Usage, ...]]" = _nothing
    read_links: "Callable[[Settings, HostFacts], tuple[GpuLink, ...]]" = _nothing
    read_parts: "Callable[[Settings], tuple[GpuPart, ...]] | None" = None
    offer_claimed: "Callable[[Mapping[str, str], GenerateOptions, Settings, HostFacts], DeviceOffer]" = _missing
    sharing: tuple[str, ...] = ()
    read_node: "Callable[[Settings], NodeGpus] | None" = None
    find_silence: "Callable[[HostFacts], str]" = _no_words
    watch_faults: "Callable[[HostFacts], Sequence[str]]" = _nothing
    sample: "Callable[[Settings], Sequence[str]] | None" = None
    read_labels: "Callable[[Settings], Iterable[tuple[str, str]]]" = _nothing


def load_vendor(name: str) -> "Vendor":
    """Return a source of devices by its name; raises KeyError for one that there is not."""
    vendor: Vendor = __import__(f"ocigpu.gpus.{VENDORS[name][0]}", None, None, ("VENDOR",)).VENDOR
    return vendor


def parse_request(
    config: "dict[str, Any]", settings: "Settings", bundle: str = "", here: "Callable[[str], bool] | None" = None
) -> "Request":
    """Return the request of the container of this config.json (a raw document), to all vendors.

    If one vendor's devices are requested by CDI names, the others' must be too: specifications provide all or none.  Of
    several vendors, those whose driver is not loaded become a note: images for both set both variables.  ``here``:
    tells whether a vendor's driver counts as loaded; None: as on the host.  Raises RequestError for a request that
    cannot be understood or is refused; see the parse_request of each vendor's folder.
    """
    requests = [load_vendor(FIRST).parse_request(config, settings, bundle)]
    texts = read_env(config)
    for name, (_, variable, _) in VENDORS.items():
        if variable and name != FIRST and any(text.startswith(f"{variable}=") for text in texts):
            before = next((one.selection for one in requests if one.selection != "nothing"), "")
            way = settings._replace(mode="cdi" if before == "cdi" else "hook") if before else settings
            requests.append(load_vendor(name).parse_request(config, way, bundle))
    if len(requests) == 1:
        return requests[0]
    from ocigpu.gpus.request import join_requests

    asking = [one.vendor for one in requests if _own_gpus(one)]
    if len(asking) > 1:
        loaded = [name for name in asking if (here(name) if here else load_vendor(name).has_driver(settings))]
        if any(one.vendor in loaded and one.selection != "none" for one in requests):
            requests = [_without_gpus(one) if one.vendor not in loaded else one for one in requests]
    return join_requests(requests)


def _own_gpus(request: "Request") -> "Sequence[str]":
    """Return what of a request is about the GPUs of its vendor: another kind of CDI device needs no driver of it."""
    if request.selection == "cdi":
        from ocigpu.core.gate import is_gpu_of  # loaded with the vendor's request

        return [name for name in request.cdi_devices if is_gpu_of(VENDORS[request.vendor][2], name)]
    return () if request.selection == "nothing" else (request.selection,)


def _without_gpus(request: "Request") -> "Request":
    """Return a request without the GPUs of its vendor, whose driver the host has not, and with a note if it had any."""
    own = _own_gpus(request)
    if not own:
        return request
    why = f"no driver of {VENDORS[request.vendor][2]} is loaded, another vendor's GPUs are used"
    left = tuple(name for name in request.cdi_devices if name not in own)
    return request._replace(
        selection="cdi" if left else "nothing",
        devices=(),
        cdi_devices=left,
        notes=(*request.notes, f"{request.source} ignored: {why}"),
    )


def read_facts(settings: "Settings", vendors: "Iterable[str]", kept: bool = True) -> "HostFacts":
    """Return the facts of the host about these vendors' devices; raises HostError.

    ``kept``: those of an earlier start will do, as long as they hold.
    """
    loaded = map(load_vendor, vendors)
    read = [vendor.read_facts(settings) if kept else vendor.read_now(settings) for vendor in loaded]
    if len(read) == 1:
        return read[0]
    from ocigpu.core.facts import join_facts

    return join_facts(read)


def find_vendors(settings: "Settings") -> tuple[str, ...]:
    """Return the names of the vendors whose driver is loaded and whose devices containers can request; else FIRST."""
    return tuple(_driven(settings)) or (FIRST,)


def _driven(settings: "Settings") -> "Iterator[str]":
    return (name for name, (_, variable, _) in VENDORS.items() if variable and load_vendor(name).has_driver(settings))


def read_host_facts(settings: "Settings", kept: bool = False) -> "HostFacts":
    """Return the facts of the host about all vendors of :func:`find_vendors`; raises HostError.  ``kept``: as above."""
    return read_facts(settings, find_vendors(settings), kept)


def make_plan(
    facts: "HostFacts",
    request: "Request",
    settings: "Settings",
    image: "ImageFacts | None" = None,
    mode: str = "hook",
) -> "Plan":
    """Return what must be done for a container that makes this request on this host.

    Raises RequestError and HostError; see the make_plan of each vendor's folder.
    """
    plans = [
        load_vendor(one.vendor).make_plan(facts.of(one.vendor), one, settings, image, mode) for one in request.each
    ]
    if len(plans) == 1:
        return plans[0]
    from ocigpu.core.actions import join_plans

    return join_plans(plans)


def find_mode(mode: str, kind_vendor: str, settings: "Settings") -> "tuple[str, Vendor]":
    """Return the mode of a specification, with its source: "auto" selects by this host's platform.

    ``kind_vendor``: vendor part of the requested kind; that of another vendor's devices decides.
    """
    vendors = [load_vendor(name) for name in VENDORS]
    for vendor in vendors:
        if kind_vendor.lower() in vendor.kinds:
            return vendor.modes[0], vendor
    if mode == "auto":
        platform = next((vendor for vendor in reversed(vendors) if vendor.is_here(settings)), None)
        mode = (platform or load_vendor(next(_driven(settings), FIRST))).modes[0]
    return mode, next(vendor for vendor in vendors if mode in vendor.modes)
