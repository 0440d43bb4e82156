"""WSL 2: ``ocigpu cdi generate --mode wsl``, kind nvidia.com/gpu.

One device, "all": every GPU is behind /dev/dxg.  Which driver store is in use only a question to the display driver
(D3DKMT) answers; here it is the one that has a CUDA library, and where several have one, the one whose nvidia-smi is
that of /usr/lib/wsl/lib, which Windows fills from the driver in use.  Written from NVIDIA's generator and Microsoft's
documents, tried on copies of such files and not on WSL.
"""

from typing import TYPE_CHECKING

from ocigpu.core.actions import Link, RefreshLdCache, node_actions
from ocigpu.core.errors import CdiError
from ocigpu.core.settings import Settings
from ocigpu.gpus.offer import VOID, DeviceOffer, GenerateOptions, OfferedDevice, bind_file, library_folders
from ocigpu.gpus.wsl import DXCORE, LIBRARIES, STORES
from ocigpu.gpus.wsl.facts import CUDA, NAMED, SMI, Store, read_wsl_facts

if TYPE_CHECKING:
    from ocigpu.core.actions import Action


def offer(options: GenerateOptions, settings: Settings) -> DeviceOffer:
    """Return the device of a WSL system; raises CdiError (OCIGPU-CDI-7) when parts of it are not there.

    A driver store can be chosen by --library-search-path.
    """
    facts = read_wsl_facts(settings, options.library_search_paths)
    if facts.node is None:
        raise CdiError("OCIGPU-CDI-7", "no GPU on this WSL system: it has no /dev/dxg", "Update WSL: wsl --update")
    if facts.dxcore is None:
        message = f"no GPU on this WSL system: it has no {LIBRARIES}/{DXCORE}"
        raise CdiError("OCIGPU-CDI-7", message, "Update WSL: wsl --update")
    store, notes = _choose(facts.stores)
    named = [file for file in store.files if file.container_path.rpartition("/")[2] in NAMED]
    actions: list[Action] = [bind_file(file) for file in (facts.dxcore, *store.files)]
    if any(file.container_path == f"{store.path}/{SMI}" for file in named):
        actions.append(Link(f"/usr/bin/{SMI}", f"{store.path}/{SMI}", ""))
    actions.append(RefreshLdCache(settings.ldconfig, library_folders((facts.dxcore, *named)), ""))
    return DeviceOffer(
        source="wsl",
        vendor=options.vendor or "nvidia.com",
        device_class=options.device_class or "gpu",
        devices=(OfferedDevice("all", node_actions(facts.node)),),
        base=tuple(actions),
        env=(VOID,),
        hooked=tuple(actions),
        all_device=False,
        notes=notes,
    )


def _choose(stores: tuple[Store, ...]) -> tuple[Store, tuple[str, ...]]:
    """Return the driver store in use, and a note when there was a choice."""
    if not stores:
        message = f"no NVIDIA GPU on this WSL system: no directory of {STORES} has {CUDA}"
        raise CdiError("OCIGPU-CDI-7", message, "Install NVIDIA's driver for Windows, then: wsl --shutdown")
    if len(stores) == 1:
        return stores[0], ()
    current = [store for store in stores if store.current]
    names = ", ".join(store.path for store in stores)
    if len(current) != 1:
        raise CdiError(
            "OCIGPU-CDI-7",
            f"several NVIDIA drivers on this WSL system, and no telling which is in use: {names}",
            "Name one of them: --library-search-path DIRECTORY",
        )
    return current[0], (f"several NVIDIA drivers ({names}): {current[0].path} has the {SMI} of {LIBRARIES}",)
