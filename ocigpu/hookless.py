"""Mode ``spec``: a container whose config.json and root directory say all, so that no process of ours runs for it.

Where that is not possible (the image or the engine's configuration forbid it) the caller uses the hook instead.  What
is declared for a request is kept in the cache directory (:mod:`ocigpu.cache`) as long as the facts hold that it was
made of: most starts need neither the facts nor the plan.
"""

import errno
import os
from binascii import crc32

from ocigpu import __version__, rawjson
from ocigpu.cache import open_cache, prune_cache, read_cached, seal, unseal, write_cached
from ocigpu.declared import Declared, edit_declared, has_user_namespace, why_hook
from ocigpu.host.cached import read_stamp
from ocigpu.linux.paths import use_walk
from ocigpu.provision.image import has_compat, read_layout
from ocigpu.rootfs import NeedsHookError, RootDirectory, resolve_in_root
from ocigpu.spec import Document, remove_gpu_hooks, rootfs_path, write_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ocigpu.request import Request
    from ocigpu.settings import Settings

KEPT_PREFIX = "declared-"
SPARE = 64
"""Files of other requests and images that may stay."""
MAX_KEY = 8192
"""Characters of a request, image and settings whose declaration is kept: usual ones have some 1,500."""
VIEW_PREFIX = "view-"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def declare_in_bundle(
    document: Document, request: "Request", settings: "Settings", bundle: str, owns_policy: bool
) -> Declared:
    """Edit a bundle's configuration, on disk too, and its root directory for a request; returns what was declared.

    ``owns_policy``: whether this process may set device rules and make nodes (root of the initial user namespace).
    Raises NeedsHookError where a hook must do it, OcigpuError for a request that cannot be granted; then nothing is
    changed but the object in memory, which may lack other GPU hooks.
    """
    use_walk(True)
    config = document.config
    root = rootfs_path(config, bundle)
    try:
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:  # the hook names it
        raise NeedsHookError(f"open rootfs {root}: {error.strerror}") from error
    directory = RootDirectory(root_fd)
    try:
        if os.path.samestat(os.fstat(root_fd), os.stat("/")):
            raise NeedsHookError("its root directory is the host's")
        declared = find_declared(root_fd, request, settings)
        remove_gpu_hooks(config)
        reason = why_hook(declared, config, lambda path: resolve_in_root(root_fd, path))
        if reason:
            raise NeedsHookError(reason)
        try:
            views = make_views(declared, settings)
            present = [mount for mount in declared.mounts if not _is_missing(mount["source"], declared.optional)]
            directory.make_links(declared.links)
            if declared.libraries:
                directory.extend_ld_cache(declared.libraries)
        except OSError as error:
            where = f"{error.filename}: " if isinstance(error.filename, str) else ""
            raise NeedsHookError(f"{root}: {where}{error.strerror}") from error
        bind_nodes = not owns_policy or has_user_namespace(config)
        declare_rules = owns_policy and not settings.no_cgroups
        edit_declared(config, declared._replace(mounts=present), root, views, declare_rules, bind_nodes)
        write_config(document)
    except BaseException:
        directory.undo()
        raise
    finally:
        directory.close()
        os.close(root_fd)
        use_walk(False)
    return declared


def find_declared(root_fd: int, request: "Request", settings: "Settings") -> Declared:
    """Return what is declared for a request and an image: made by an earlier start for an equal one, or now.

    Raises OcigpuError for what cannot be granted.
    """
    layout = read_layout(root_fd)
    if has_compat(root_fd):
        return _make_declared(root_fd, request, settings)
    key = repr((__version__, request, layout, settings))
    cache_fd = open_cache(True, settings.simulation_root) if len(key) <= MAX_KEY else -1
    if cache_fd < 0:
        return _make_declared(root_fd, request, settings)
    try:
        name = f"{KEPT_PREFIX}{crc32(key.encode()):08x}"
        stamp = read_stamp(settings)
        declared = _read_declared(cache_fd, name, key, stamp) if stamp else None
        if declared is None:
            declared = _make_declared(root_fd, request, settings)
            if stamp and read_stamp(settings) == stamp:  # then the plan was made of these facts
                lines = (key, stamp, rawjson.dump(declared._asdict()))
                write_cached(cache_fd, name, seal("\n".join(lines).encode()))
                prune_cache(cache_fd, KEPT_PREFIX, (name,), SPARE)
        return declared
    finally:
        os.close(cache_fd)


def _read_declared(cache_fd: int, name: str, key: str, stamp: str) -> Declared | None:
    lines = unseal(read_cached(cache_fd, name)).split(b"\n")
    if len(lines) != 3 or lines[:2] != [key.encode(), stamp.encode()]:
        return None
    try:
        return Declared(**rawjson.parse(lines[2].decode()))
    except (ValueError, TypeError, RecursionError):  # written by other code of this version
        return None


def _make_declared(root_fd: int, request: "Request", settings: "Settings") -> Declared:
    from ocigpu.declare import declare
    from ocigpu.host.cached import read_facts
    from ocigpu.plan import make_plan
    from ocigpu.provision.image import read_image_facts

    facts = read_facts(settings)
    image = read_image_facts(root_fd, facts.driver_version)
    return declare(make_plan(facts, request, settings, image, "spec"), facts)


def _is_missing(path: str, optional: "Sequence[str]") -> bool:
    """Tell whether a socket that need not be there has gone since the facts were read."""
    return path in optional and not os.path.exists(path)


def make_views(declared: Declared, settings: "Settings") -> list[str]:
    """Make the small directories that are declared, below /run/ocigpu until the next boot; returns their host paths.

    Raises NeedsHookError where there is no such place, and OSError.
    """
    if not declared.views:
        return []
    cache_fd = open_cache(True, settings.simulation_root)
    if cache_fd < 0:
        raise NeedsHookError("there is no directory to keep files for graphics in")
    try:
        top = os.readlink(f"/proc/self/fd/{cache_fd}")
        return [f"{top}/{_make_view(cache_fd, files, links)}" for _, files, links in declared.views]
    finally:
        os.close(cache_fd)


def _make_view(cache_fd: int, files: "Sequence[tuple[str, int, str]]", links: "Sequence[tuple[str, str]]") -> str:
    """Make a directory with these files and links unless it is there; returns its name, which its content decides.

    The directory it lies in is closed to everybody else, and it gets its name when it is complete: what has the name
    has the content.
    """
    content = rawjson.dump([files, links]).encode()
    name = f"{VIEW_PREFIX}{len(content)}-{crc32(content):08x}-{crc32(content[::-1]):08x}"
    temporary = f"{name}.{os.getpid()}.tmp"
    try:
        os.close(os.open(name, _DIRECTORY_FLAGS, dir_fd=cache_fd))
    except FileNotFoundError:
        os.mkdir(temporary, 0o755, dir_fd=cache_fd)
    else:
        return name
    fd = os.open(temporary, _DIRECTORY_FLAGS, dir_fd=cache_fd)
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
    try:
        os.rename(temporary, name, src_dir_fd=cache_fd, dst_dir_fd=cache_fd)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another start has made it
            raise
        _remove_view(cache_fd, temporary)
    return name


def _remove_view(cache_fd: int, name: str) -> None:
    fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=cache_fd)
    try:
        for path in os.listdir(fd):
            os.unlink(path, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=cache_fd)
