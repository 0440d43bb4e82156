"""Mode ``spec``: config.json and root directory declare everything, so that no process of ours runs for the container.

If the image or the engine's configuration forbids that, the caller uses the hook instead.  The declaration for a
request is stored (:mod:`ocigpu.gpus.cached`).
"""

import errno
import os
import stat
from binascii import crc32

from ocigpu.bundle.declared import Declared, edit_declared, why_hook
from ocigpu.bundle.document import write_config
from ocigpu.bundle.edit import remove_gpu_hooks, take_back_rules
from ocigpu.bundle.rootfs import NeedsHookError, RootDirectory, find_covers, resolve_in_root
from ocigpu.core import rawjson
from ocigpu.core.config_json import Document, get_list, get_object, has_user_namespace, map_inside, rootfs_path
from ocigpu.gpus.cached import find_answer
from ocigpu.gpus.vendors import make_plan, read_facts
from ocigpu.provision.image import has_compat, read_image_facts, read_layout
from ocigpu.provision.inside import exists_inside, status_inside
from ocigpu.system.files import draft_name, is_draft_left, is_open_to_all
from ocigpu.system.log import get_trace, mark, step
from ocigpu.system.paths import use_walk
from ocigpu.system.signals import ended_by_signals
from ocigpu.system.store import open_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ocigpu.core.settings import Settings
    from ocigpu.gpus.request import Request

VIEW_PREFIX = "view-"
MAX_VIEWS = 1024
"""Maximum of directories for graphics until the next boot: containers may request any subset of the GPUs."""
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def declare_in_bundle(
    document: Document, request: "Request", settings: "Settings", bundle: str, owns_policy: bool
) -> Declared:
    """Edit a bundle's configuration, on disk too, and its root directory for a request; returns what was declared.

    ``owns_policy``: whether this process may set device rules and make nodes (root of the initial user namespace).
    Raises NeedsHookError where a hook must do it, OcigpuError for a request that cannot be granted; then only the
    object in memory is changed: it may lack other GPU hooks.
    """
    config = document.config
    root = BundleRoot(rootfs_path(config, bundle), owns_policy)
    declare_rules = owns_policy and not settings.no_cgroups
    try:
        with step("find-declared", root.path, "kept from an earlier start, or of a plan made now"):
            declared = find_declared(root.fd, request, settings)
        if remove_gpu_hooks(config):
            take_back_rules(config, declared.rules)
        root.check(declared, config, declare_rules)
        present = [mount for mount in declared.mounts if not _is_missing(mount["source"], declared.optional)]
        declared = declared._replace(mounts=present)
        notes: list[str] = []

        def edit(views: list[str]) -> None:
            bind_nodes = not owns_policy or has_user_namespace(config)
            notes.extend(edit_declared(config, declared, root.path, views, declare_rules, bind_nodes))
            if get_trace():
                _mark_declared(declared)

        root.write(document, declared, settings, edit)
        return declared._replace(notes=(*declared.notes, *notes))
    finally:
        root.close()


class BundleRoot:
    """The root directory of a bundle, open, while something is declared for its container.

    Raises NeedsHookError if it cannot be opened (the hook reports why), or is the host's.
    """

    def __init__(self, path: str, owns_policy: bool) -> None:
        self.path = path
        self.owns_policy = owns_policy
        try:
            self.fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise NeedsHookError(f"open rootfs {path}: {error.strerror}") from error
        use_walk(True)
        if os.path.samestat(os.fstat(self.fd), os.stat("/")):
            self.close()
            raise NeedsHookError("its root directory is the host's")

    def close(self) -> None:
        """Close the directory."""
        os.close(self.fd)
        use_walk(False)

    def check(self, declared: Declared, config: "dict[str, Any]", declare_rules: bool) -> None:
        """Raise NeedsHookError unless config.json and root directory can declare all of it."""
        if reason := why_not_declared(self.fd, declared, config, declare_rules, self.owns_policy):
            raise NeedsHookError(reason)

    def write(
        self, document: Document, declared: Declared, settings: "Settings", edit: "Callable[[list[str]], None]"
    ) -> None:
        """Make views, links and the loader's cache, and write the configuration after ``edit``, called with the views.

        All of it is undone if anything fails.  Raises NeedsHookError, and what ``edit`` and write_config raise.
        """
        with ended_by_signals():
            self._write(document, declared, settings, edit)

    def _write(
        self, document: Document, declared: Declared, settings: "Settings", edit: "Callable[[list[str]], None]"
    ) -> None:
        directory = RootDirectory(self.fd, settings.simulation_root)
        try:
            try:
                with step("views"):
                    views = make_views(declared, settings)
                with step("links", self.path):
                    directory.make_links(declared.links)
                    directory.write_files(declared.files)
                if declared.libraries:
                    with step("loader-cache", self.path):
                        directory.extend_ld_cache(declared.libraries)
            except OSError as error:
                where = f"{error.filename}: " if isinstance(error.filename, str) else ""
                raise NeedsHookError(f"{self.path}: {where}{error.strerror}") from error
            edit(views)
            with step("write-config", document.path):
                write_config(document)
        except BaseException:
            with step("undo-links", self.path):
                directory.undo()
            raise
        finally:
            directory.close()


def why_not_declared(
    root_fd: int, declared: Declared, config: "dict[str, Any]", declare_rules: bool, owns_policy: bool
) -> str:
    """Return why config.json and root directory cannot declare all of it, "" if they can.

    ``root_fd``: -1 where the directory does not exist yet.  ``owns_policy``: as for :func:`declare_in_bundle`.
    """
    of_users = has_user_namespace(config)

    own = {mount["destination"] for mount in declared.mounts}
    mounts = [mount for mount in get_list(config, "mounts") if isinstance(mount, dict)]
    mounts = [one for one in mounts if isinstance(one.get("destination"), str) and one["destination"] not in own]
    covers, unsure = find_covers(root_fd, mounts) if root_fd >= 0 else ({}, "")
    if unsure:
        return f"the mount on {unsure} may lead anywhere"

    def resolve(path: str) -> str:
        return resolve_in_root(root_fd, path, covers) if root_fd >= 0 else path

    reason = why_hook(declared, config, resolve, declare_rules, not owns_policy or of_users)
    reason = reason or _why_exchangeable(declared) or _why_linked(root_fd, config, declared)
    if declared.simulated_proc and not owns_policy and of_users:
        reason = reason or "the simulated host's own step cannot enter its user namespace"
    return reason or (_why_closed(root_fd, config, declared) if of_users and root_fd >= 0 else "")


def _why_exchangeable(declared: Declared) -> str:
    """Return which file of a daemon any user can replace with a link, "" for none.

    The runtime mounts by name, later; the hook mounts the file that it has checked.
    """
    found = (path for path in declared.optional if is_open_to_all(os.path.dirname(path)))
    return next((f"every user can replace {path} with a link" for path in found), "")


def _why_linked(root_fd: int, config: "dict[str, Any]", declared: Declared) -> str:
    """Return which of our paths is a link in the image that could lead into a volume, "" for none.

    The runtime follows it, and creates what is missing at its target; the hook replaces the link.
    """
    sources = (mount.get("source") for mount in get_list(config, "mounts") if isinstance(mount, dict))
    if root_fd < 0 or not any(
        isinstance(path, str) and path.startswith("/") and os.path.isdir(path) for path in sources
    ):
        return ""
    paths = [mount["destination"] for mount in declared.mounts] + [path for path, _, _ in declared.views]
    places: dict[str, str] = {}
    for path in (*paths, *(node[0] for node in declared.nodes)):
        parent, _, name = path.rpartition("/")
        if parent not in places:  # an image can make this chain long
            places[parent] = resolve_in_root(root_fd, parent)
        found = status_inside(root_fd, f"{places[parent]}/{name}", os.O_NOFOLLOW)
        if found is not None and stat.S_ISLNK(found.st_mode):
            return f"{path} is a link in the image, and the container has volumes"
    return ""


def _why_closed(root_fd: int, config: "dict[str, Any]", declared: Declared) -> str:
    """Return why the runtime, root of a user namespace there, could not make a mount point in the image; "" if it can.

    It may write to directories of mapped owners (capabilities(7), CAP_DAC_OVERRIDE; user_namespaces(7)), and to
    world-writable ones.  Paths below a mount of the engine do not belong to the image.
    """
    covers = [mount.get("destination") for mount in get_list(config, "mounts") if isinstance(mount, dict)]
    tops = tuple(f"{cover.rstrip('/')}/" for cover in covers if isinstance(cover, str) and cover.startswith("/"))
    linux = get_object(config, "linux")
    uids, gids = (get_list(linux, name) for name in ("uidMappings", "gidMappings"))
    paths = [mount["destination"] for mount in declared.mounts] + [path for path, _, _ in declared.views]
    for path in paths:
        if path.startswith(tops) or exists_inside(root_fd, path):
            continue
        parent, found = path, None
        while found is None and parent:
            parent = parent.rpartition("/")[0]
            found = status_inside(root_fd, parent or "/")
        owned = found is not None and map_inside(uids, found.st_uid) >= 0 <= map_inside(gids, found.st_gid)
        if found is None or not (owned or found.st_mode & 0o002):
            return f"root of its user namespace may not make {path} in the image's {parent or '/'}"
    return ""


def find_declared(root_fd: int, request: "Request", settings: "Settings") -> Declared:
    """Return the declaration for a request and an image: made now, or by an earlier start for an equal request.

    Raises OcigpuError for what cannot be granted.
    """
    about = (request, *read_layout(root_fd))

    def make() -> Declared:
        return make_declared(root_fd, request, settings)

    # what compatibility libraries mean is read from them
    return make() if has_compat(root_fd) else find_kept("declared", about, settings, make)


def find_kept(
    kind: str, about: "tuple[Any, ...]", settings: "Settings", make: "Callable[[], Declared]", stamp: str = ""
) -> Declared:
    """Return the result of ``make``, now or from an earlier start: as :func:`ocigpu.gpus.cached.find_answer`."""
    try:
        return Declared(**find_answer(kind, about, settings, lambda: make()._asdict(), stamp))
    except TypeError:  # stored by different code of the same version
        return make()


def make_declared(root_fd: int, request: "Request", settings: "Settings") -> Declared:
    from ocigpu.bundle.from_plan import declare

    with step("facts", settings.driver_root):
        facts = read_facts(settings, request.vendors)
    with step("image"):
        image = read_image_facts(root_fd, facts.driver_version)
    with step("plan"):
        plan = make_plan(facts, request, settings, image, "spec")
    return declare(plan, facts)


def _mark_declared(declared: Declared) -> None:
    for path, *_ in declared.nodes:
        mark("declare-node", path)
    for mount in declared.mounts:
        mark("declare-mount", mount["destination"], f"of {mount['source']}")
    mark("declare-rules", ", ".join(f"{rule['major']}:{rule['minor']}" for rule in declared.rules))


def _is_missing(path: str, optional: "Sequence[str]") -> bool:
    """Tell whether an optional socket has disappeared since the facts were read."""
    return path in optional and not os.path.exists(path)


def make_views(declared: Declared, settings: "Settings") -> list[str]:
    """Make the declared small directories below /run/ocigpu, until the next boot; returns their host paths.

    Raises NeedsHookError where there is no such place, and OSError.
    """
    if not declared.views:
        return []
    cache_fd = open_cache(True, settings.simulation_root)
    if cache_fd < 0:
        raise NeedsHookError("no directory can keep files for graphics")
    try:
        top = os.readlink(f"/proc/self/fd/{cache_fd}")
        return [f"{top}/{_make_view(cache_fd, files, links)}" for _, files, links in declared.views]
    finally:
        os.close(cache_fd)


def _make_view(cache_fd: int, files: "Sequence[tuple[str, int, str]]", links: "Sequence[tuple[str, str]]") -> str:
    """Make a directory with these files and links unless it is there; returns its name, which its content decides.

    No other user can enter the parent directory, and it gets its name when it is complete: the name guarantees the
    content.
    """
    content = rawjson.dump([files, links]).encode()
    name = f"{VIEW_PREFIX}{len(content)}-{crc32(content):08x}-{crc32(content[::-1]):08x}"
    try:
        os.close(os.open(name, _DIRECTORY_FLAGS, dir_fd=cache_fd))
    except FileNotFoundError:
        draft = draft_name()
    else:
        return name
    names = os.listdir(cache_fd)
    for left in filter(is_draft_left, names):
        _remove_view(cache_fd, left)
    if sum(other.startswith(VIEW_PREFIX) for other in names) >= MAX_VIEWS:
        raise NeedsHookError(f"there are {MAX_VIEWS} directories with files for graphics already")
    try:
        _fill_view(cache_fd, draft, files, links)
        os.rename(draft, name, src_dir_fd=cache_fd, dst_dir_fd=cache_fd)
    except OSError as error:
        _remove_view(cache_fd, draft)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another start has made it
            raise
    return name


def _fill_view(
    cache_fd: int, name: str, files: "Sequence[tuple[str, int, str]]", links: "Sequence[tuple[str, str]]"
) -> None:
    os.mkdir(name, 0o755, dir_fd=cache_fd)
    fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=cache_fd)
    try:
        for path, mode, text in files:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=fd), "w") as file:
                file.write(text)
                os.fchmod(file.fileno(), mode)
        for path, target in links:
            os.symlink(target, path, dir_fd=fd)
        os.fchmod(fd, 0o555)
    finally:
        os.close(fd)


def _remove_view(cache_fd: int, name: str) -> None:
    try:
        fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=cache_fd)
    except (FileNotFoundError, NotADirectoryError):  # a file is the store's
        return
    try:
        for path in os.listdir(fd):
            os.unlink(path, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=cache_fd)
