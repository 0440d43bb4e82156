"""The changes of "ocigpu engine configure": reads files and computes their new texts, but writes nothing."""

import fnmatch
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ocigpu.core.config_json import OUR_HOOK
from ocigpu.core.errors import OcigpuError
from ocigpu.engines import places
from ocigpu.engines.checker import Meant, program_version
from ocigpu.engines.document import Applied, ValueChange, apply_changes, is_template, look_up, revert_changes, table_at
from ocigpu.engines.files import EngineFile, Root
from ocigpu.engines.record import EngineRecord, backup_path, digest, parse_record, record_path
from ocigpu.engines.status import (
    CRI_PLUGINS,
    HOOK,
    NO_DEFAULT,
    cri_plugin,
    find_missing_default,
    import_paths,
    is_cri_off,
    is_our_hook,
    read_merged,
)
from ocigpu.engines.template import BASE, NAMES, has_base, has_table, is_generated, tables_version
from ocigpu.engines.wanted import (
    KATA_HANDLER,
    Wanted,
    containerd_changes,
    crio_changes,
    default_sandbox,
    docker_changes,
    podman_changes,
    version_of,
)

DROP_IN_HEADER = '# Written by "ocigpu engine configure {engine}"; "ocigpu engine remove {engine}" takes it away.\n'
_HAS_CDI = {"docker": (25, 0), "containerd": (1, 7)}


class ConfigureOptions(NamedTuple):
    """The options of the command line; "" for one not given.  Paths are below ``root``.

    ``gpus_hook``: whether Docker's --gpus gets its hook; None: if possible.  ``leave_sandbox``: ocigpu may become the
    default even if it replaces a sandbox.
    """

    engine: str
    wanted: Wanted
    gpus_hook: bool | None = False
    hook_directory: str = ""
    config: str = ""
    drop_in: str = ""
    root: str = "/"
    leave_sandbox: bool = False


class Edit(NamedTuple):
    """One file: its state, its new text (None: it is removed), its record and its original text.

    ``after`` equal to ``file.text`` means that no change is needed.  ``directories``: those that are made or removed
    with it.  ``forgets``: a record must be removed, in any state of the file.
    """

    file: EngineFile
    after: str | None
    record: EngineRecord | None
    backup: str | None
    directories: tuple[str, ...] = ()
    forgets: bool = False

    @property
    def changed(self) -> bool:
        """Whether the file is written or removed."""
        return self.after != self.file.text


class EngineLink(NamedTuple):
    """A link to make, or with an empty target to remove."""

    path: str
    target: str


class EnginePlan(NamedTuple):
    """All that one run does; ``main``: the engine's own file, and ``meant``: what it may differ in, for its checker."""

    engine: str
    main: str
    edits: tuple[Edit, ...]
    links: tuple[EngineLink, ...] = ()
    notes: tuple[str, ...] = ()
    meant: Meant = Meant(frozenset())

    @property
    def changed(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.links) or any(edit.changed or edit.forgets for edit in self.edits)


def plan_configuration(root: Root, options: ConfigureOptions) -> EnginePlan:
    """Return what makes an engine know ocigpu.

    Raises OcigpuError of area ENG: a file cannot be understood or forbids the change, the engine is too old.
    """
    needed = _HAS_CDI.get(options.engine)
    version = program_version(options.root, options.engine)
    if options.wanted.cdi and needed and version and version < needed:
        raise OcigpuError(
            "OCIGPU-ENG-5",
            f"--cdi: {options.engine} {version[0]}.{version[1]} has no CDI; {needed[0]}.{needed[1]} is the first",
        )
    if options.engine == "docker":
        plan = _plan_docker(root, options)
    elif options.engine == "containerd":
        plan = _plan_containerd(root, options, version)
        plan = plan._replace(notes=(*_others_notes(options, plan.main), *plan.notes))
    else:
        plan = _plan_drop_in(root, options)
    plan = plan._replace(notes=(*_sandbox_notes(options, plan.main), *plan.notes))
    if not any(places.find_program(options.root, name) for name in ("runc", "crun")):
        note = "no runc or crun on the PATH of services: name the engine's own in runtime.runtimes of ocigpu's settings"
        plan = plan._replace(notes=(*plan.notes, note))
    program = places.find_program(options.root, places.PROGRAMS[options.engine])
    if not program and all(edit.file.text is None for edit in plan.edits):
        plan = plan._replace(notes=(f"{options.engine} does not seem to be installed here", *plan.notes))
    plan = plan._replace(notes=(*plan.notes, *_default_notes(options, plan)))
    name, path, default, _, kata, _ = options.wanted
    names = frozenset({name, KATA_HANDLER} if kata else {name})
    return plan._replace(meant=Meant(names, name, path, default))


def _default_notes(options: ConfigureOptions, plan: EnginePlan) -> tuple[str, ...]:
    """Return what to say of a default runtime that no entry has: often what a removed toolkit left behind."""
    texts = {edit.file.path: edit.after for edit in plan.edits if edit.after is not None}
    if any(map(is_template, texts)):
        return ()
    main = (options.config or places.CRIO) if options.engine == "crio" else plan.main
    try:
        name = find_missing_default(options.engine, read_merged(options.root, options.engine, main, [], texts)[1])
    except ValueError:  # an invalid version: another error
        return ()
    again = f"ocigpu engine configure {options.engine}"
    text = f'no entry has the default runtime "{name}": {NO_DEFAULT[options.engine]}; {again} --name {name} makes one'
    return (f"{text}, {again} --default makes ocigpu the default",) if name else ()


def _sandbox_notes(options: ConfigureOptions, main: str) -> tuple[str, ...]:
    """Return what a new default does to containers that run in a sandbox now.

    Raises OcigpuError OCIGPU-ENG-2 unless that is meant.
    """
    if not options.wanted.default:
        return ()
    path = (options.config or places.CRIO) if options.engine == "crio" else main
    sandbox = default_sandbox(options.engine, _merged(options, path, {}))
    if not sandbox:
        return ()
    said = f'--default: containers that name no runtime leave the sandbox "{sandbox}" and run on the host\'s kernel'
    if not options.leave_sandbox:
        raise OcigpuError("OCIGPU-ENG-2", said, "leave out --default, and name the runtime; or, if it is meant: --yes")
    return (said,)


def _plan_drop_in(root: Root, options: ConfigureOptions) -> EnginePlan:
    """Plan the drop-in of CRI-O or Podman, which merge the tables of all their files."""
    notes = (f"--cdi: {options.engine} always has CDI enabled",) if options.wanted.cdi else ()
    header = DROP_IN_HEADER.format(engine=options.engine)
    if options.engine == "podman":
        path = options.drop_in or options.config or default_drop_in(options)
        texts = {path: base_text(root, root.read(path)) or ""}
        changes = podman_changes(options.wanted, _merged(options, path, texts))
    else:
        path = options.drop_in or default_drop_in(options, options.config)
        if not os.path.dirname(path).endswith(".d"):
            raise OcigpuError(
                "OCIGPU-ENG-2",
                f"--drop-in {path}: CRI-O reads every file of its directory, records too: it must be called *.d",
            )
        texts = {path: base_text(root, root.read(path)) or ""}
        changes = crio_changes(options.wanted, _merged(options, options.config or places.CRIO, texts))
    return EnginePlan(options.engine, path, (edit_file(root, path, changes, header),), notes=notes)


def default_drop_in(options: ConfigureOptions, main: str = "") -> str:
    """Return the path of the drop-in that is written unless another one is named; ``main``: the main file, if any."""
    if options.engine == "containerd":
        return f"{os.path.dirname(main)}/conf.d/99-ocigpu.toml"
    if options.engine == "crio":
        return f"{main or places.CRIO}.d/99-ocigpu.conf"
    directory = places.PODMAN_DIRECTORY
    if os.geteuid() and options.root == "/":
        directory = places.home_config("/", "containers/containers.conf.d")
    return f"{directory}/99-ocigpu.conf"


def main_config(options: ConfigureOptions) -> str:
    """Return the main file of Docker or containerd: the named one, the running daemon's, else the usual one.

    Raises OcigpuError OCIGPU-ENG-2 when several daemons run with different files.
    """
    if options.config:
        return options.config
    usual = places.CONTAINERD
    if options.engine == "docker":
        usual = places.DOCKER
        if os.geteuid() and options.root == "/":
            usual = places.home_config("/", "docker/daemon.json")
    running = {d.config or usual for d in places.running_daemons(options.root) if d.engine == options.engine}
    running = running - set(places.KUBERNETES.values()) or running  # those have names
    if len(running) > 1:
        raise OcigpuError(
            "OCIGPU-ENG-2",
            f"{options.engine} runs several times, with {', '.join(sorted(running))}",
            "specify one: --engine-config FILE",
        )
    return running.pop() if running else usual


def edit_file(
    root: Root,
    path: str,
    changes: Sequence[ValueChange],
    created: str,
    others: tuple[str, ...] = (),
    links: tuple[str, ...] = (),
) -> Edit:
    """Return the edit that adds these changes to those of earlier runs; ``created``: the first text of a new file."""
    file = root.read(path)
    record = read_record(root, file)
    base, kept = _before(root, file, record)
    if is_template(file.path):  # whose tables were of another version then, perhaps
        kept = [change for change in kept if change.keys[:2] == changes[0].keys[:2]]
    merged = {(change.keys, str(change.value) if change.append else ""): change for change in [*kept, *changes]}
    if base is None and record and record.created is not None:
        created = record.created
    after, applied = apply_changes(file.path, created if base is None else base, list(merged.values()))
    if not applied and not links and record is None:
        return Edit(file, file.text, None, None)
    if record:
        others, links = record.others + others, record.links + links
    directories = record.directories if record else tuple(root.missing_directories(file.path))
    new = EngineRecord(
        created if base is None else None,
        digest(after),
        tuple(applied),
        directories,
        tuple(dict.fromkeys(others)),
        tuple(dict.fromkeys(links)),
    )
    return Edit(file, after, new, base, directories)


def read_record(root: Root, file: EngineFile) -> EngineRecord | None:
    """Return the record of a file, None where it has none."""
    path = record_path(file.path)
    text = root.read(path).text
    return None if text is None else parse_record(path, text)


def base_text(root: Root, file: EngineFile) -> str | None:
    """Return the text of a file without what earlier runs have put into it."""
    return _before(root, file, read_record(root, file))[0]


def _before(root: Root, file: EngineFile, record: EngineRecord | None) -> tuple[str | None, list[ValueChange]]:
    """Return the text of a file without our changes, None for no file, and our changes still in force."""
    if record is None or file.text is None:
        return file.text, []
    text, left = without_changes(root, file, record, record.applied)
    changes = [entry.change for entry in record.applied]
    if text is None or is_template(file.path):
        return text, changes
    data = places.parse_config(file.path, file.text)
    return text, [change for change in changes if look_up(data, change.keys) is not None and change not in left]


def without_changes(
    root: Root, file: EngineFile, record: EngineRecord | None, applied: Sequence[Applied]
) -> tuple[str | None, list[ValueChange]]:
    """Return a file's text without the applied changes, None for no file, and changes since modified by others.

    A file unchanged since its record returns to its former content, byte for byte.
    """
    if file.text is None:
        return None, []
    created = record is not None and record.created is not None
    if record and digest(file.text) == record.digest:
        backup = None if created else root.read(backup_path(file.path)).text
        if created or backup is not None:
            return backup, []
    text, left = revert_changes(file.path, file.text, applied)
    if record and record.created is not None and _is_blank(file.path, text, record.created):
        return None, left
    return text, left


def _is_blank(path: str, text: str, created: str) -> bool:
    """Whether a file that we created contains nothing from others."""
    if places.is_json(path, text):
        return places.parse_config(path, text) == {}
    return text.strip() in ("", created.strip())


def _plan_docker(root: Root, options: ConfigureOptions) -> EnginePlan:
    path = main_config(options)
    changes = docker_changes(options.wanted)
    _require_no_options(options, path, changes)
    links, notes = _plan_hook(root, options, path)
    edit = edit_file(root, path, changes, "{}\n", links=tuple(link.path for link in links))
    if not places.is_json(edit.file.path, edit.after or ""):
        raise OcigpuError("OCIGPU-ENG-2", f"{path}: is empty and not called *.json", "put {} into it")
    return EnginePlan("docker", path, (edit,), links, notes)


def _require_no_options(options: ConfigureOptions, path: str, changes: Sequence[ValueChange]) -> None:
    """Raise OcigpuError OCIGPU-ENG-2 for a key that an option of the running dockerd sets too.

    dockerd does not start with both (moby, daemon/config: findConfigurationConflicts).
    """
    keys = {change.keys[0] for change in changes}
    given = {option for daemon in _dockerds(options, path) for option in daemon.options}
    for option in places.DOCKER_OPTIONS:
        if option in given & keys:
            raise OcigpuError(
                "OCIGPU-ENG-2",
                f"dockerd is started with --{option}: with that key in {path}, too, it would not start again",
                "take the option out of its unit (systemctl cat docker), restart dockerd, and try again",
            )


def _dockerds(options: ConfigureOptions, path: str) -> list[places.Daemon]:
    """Return the running daemons that have read this file."""
    daemons = places.running_daemons(options.root)
    return [one for one in daemons if one.engine == "docker" and (one.config or places.DOCKER) == path]


def _plan_hook(root: Root, options: ConfigureOptions, path: str) -> tuple[tuple[EngineLink, ...], tuple[str, ...]]:
    """Return the link for Docker's --gpus, unless it exists or is not requested, and a note about it."""
    record = read_record(root, root.read(path))
    if options.gpus_hook is False or (
        options.gpus_hook is None and any(root.read_link(link) for link in (record.links if record else ()))
    ):
        return (), ()
    search: tuple[str, ...] = places.DAEMON_PATH
    for daemon in _dockerds(options, path) if options.root == "/" else ():
        search = tuple(filter(os.path.isabs, (places.path_variable(daemon.pid) or "").split(":"))) or search
    try:
        link = _plan_hook_link(root, options, search)
    except OcigpuError as error:
        if options.gpus_hook:
            raise
        return (), (f"docker run --gpus stays as it is: {error.message}: {error.hint}",)
    if link is None:
        return (), ()
    directory = os.path.dirname(link.path)
    if options.gpus_hook is None and options.root == "/" and not os.access(directory, os.W_OK):
        return (), (f"docker run --gpus stays as it is: its hook in {directory} takes root",)
    far = directory not in search
    stale = (EngineLink(link.path, ""),) if root.read_link(link.path) is not None else ()
    return (*stale, link), (f"dockerd must have {directory} on its PATH",) if far else ()


def _plan_hook_link(root: Root, options: ConfigureOptions, search: Sequence[str]) -> EngineLink | None:
    """Return the link by which Docker's --gpus finds our hook, None where dockerd finds it already.

    ``search``: dockerd's PATH.  It goes where the options say, else to the shim's directory if that is on it, else to
    /usr/local/bin.  Another toolkit's hook stays; if ours is required, the link goes to an earlier directory.  Raises
    OcigpuError OCIGPU-ENG-5 without our hook, OCIGPU-ENG-2 for another toolkit's hook.
    """
    home, directory = os.path.dirname(options.wanted.path), options.hook_directory
    hook = f"{home}/{OUR_HOOK}"
    if why := places.why_no_program(root.path, hook):
        raise OcigpuError("OCIGPU-ENG-5", f"{hook} {why}", *([f"chmod +x {hook}"] if "executable" in why else []))
    found = next((path for path in (f"{one}/{HOOK}" for one in search) if places.is_program(root.path, path)), "")
    foreign = found if found and not is_our_hook(root.path, found) else ""
    if foreign and not options.gpus_hook:
        raise _foreign_hook(foreign, "ocigpu engine configure docker --gpus-hook puts ocigpu's before it")
    if found and not foreign and not directory:
        return None
    if foreign:
        search = [one for one in search[: search.index(os.path.dirname(foreign))] if places.file_mode(root.path, one)]
        if not search or (directory and directory not in search):
            raise _foreign_hook(foreign, f"it is found before {directory or 'any other directory of dockerd'}")
    directory = directory or next(one for one in (home, places.DAEMON_PATH[1], *search) if one in search)
    path = f"{directory}/{HOOK}"
    target = OUR_HOOK if directory == home else hook
    present = root.read_link(path)
    if present == target:
        return None
    if present is not None and (not present or places.file_mode(root.path, path) is not None):
        raise _foreign_hook(path)
    return EngineLink(path, target)  # a dangling link of a removed toolkit is replaced


def _foreign_hook(path: str, hint: str = "remove the other toolkit first") -> OcigpuError:
    return OcigpuError("OCIGPU-ENG-2", f"{path} is not ocigpu's", hint)


def _plan_containerd(root: Root, options: ConfigureOptions, program: tuple[int, int] | None) -> EnginePlan:
    path = main_config(options)
    text = root.read(path).text
    if is_template(path) or is_generated(path, text or ""):
        return _plan_templates(root, options, path, text)
    created = f"version = {3 if program and program >= (2, 0) else 2}\n"
    file = root.read(path)
    record = read_record(root, file)
    base = base_text(root, file)
    if base is None:
        base = created
    data = places.parse_config(path, base)
    first = []
    if base is not created and not data:
        data = places.parse_config(path, created)
        first = [ValueChange(("version",), data["version"])]
    version = version_of(path, data)
    notes = _disabled_notes(path, data)
    here = record is not None and any(entry.change.keys[-2:-1] == ("runtimes",) for entry in record.applied)
    merges = merges_plugins(program)
    if version == 1 and program and program >= (2, 0) and options.drop_in != path:
        # containerd 2 ignores the plugin's table in a file of version 1, but reads it in an import (seen: 2.1.9)
        version, here = 3, False
    if options.drop_in == path or (not options.drop_in and (here or not merges or version == 1)):
        holders = [] if merges else _table_holders(options, path, data)
        if holders and holders[-1] != path:
            raise OcigpuError(
                "OCIGPU-ENG-3",
                f"{path}: containerd before 2.1 would not see the runtime: {holders[-1]} of the imports replaces the "
                "table",
                f"--drop-in {holders[-1]}",
            )
        merged = _merged(options, path, {path: base})
        changes = first + containerd_changes(options.wanted, version, merged)
        return EnginePlan("containerd", path, (edit_file(root, path, changes, created),), notes=notes)
    if version == 1:
        raise OcigpuError(
            "OCIGPU-ENG-2", f"{path}: --drop-in: version 1 of the configuration has none", "leave out --drop-in"
        )
    drop_in = options.drop_in or default_drop_in(options, path)
    header = DROP_IN_HEADER.format(engine="containerd") + f"version = {version}\n"
    merged = _merged(options, path, {path: base, drop_in: base_text(root, root.read(drop_in)) or header})
    if not merges:
        _require_whole_table(options, path, data, drop_in)
    edits = (
        edit_file(root, drop_in, containerd_changes(options.wanted, version, merged), header),
        edit_file(root, path, [*first, *_import_of(options, path, data, drop_in)], created, others=(drop_in,)),
    )
    return EnginePlan("containerd", path, edits, notes=notes)


def merges_plugins(program: tuple[int, int] | None) -> bool:
    """Whether a drop-in for this containerd may surely hold a part of a plugin's table (its pull request 9982)."""
    return program is not None and program >= (2, 1)


def _others_notes(options: ConfigureOptions, main: str) -> tuple[str, ...]:
    """Return a note on k3s and RKE2 if they were not named: they never read containerd's own file.

    Raises OcigpuError OCIGPU-ENG-5 if theirs is the only containerd.
    """
    if options.config:
        return ()
    names = [name for name, path in places.KUBERNETES.items() if places.file_mode(options.root, path) is not None]
    others = [name for name in names if os.path.dirname(places.KUBERNETES[name]) != os.path.dirname(main)]
    own = places.find_program(options.root, places.PROGRAMS["containerd"]) or places.file_mode(options.root, main)
    if others and not own:
        raise OcigpuError(
            "OCIGPU-ENG-5",
            f"containerd is not installed here, but {others[0]}, which has one of its own and does not read {main}",
            f"ocigpu engine configure {others[0]}",
        )
    if names and not others:
        return (f"the containerd that runs here is that of {names[0]}: its template is changed",)
    return tuple(
        f"{name} has a containerd of its own, which does not read {main}: ocigpu engine configure {name}"
        for name in others
    )


def _import_of(options: ConfigureOptions, path: str, data: dict[str, Any], drop_in: str) -> list[ValueChange]:
    """Return the import of just this drop-in: a pattern would bring in whatever else lies there."""
    imports = data.get("imports")
    for pattern in imports if isinstance(imports, list) else ():
        if drop_in in import_paths(options.root, path, str(pattern)) or fnmatch.fnmatchcase(drop_in, str(pattern)):
            return []
    return [ValueChange(("imports",), drop_in, append=True)]


def _require_whole_table(options: ConfigureOptions, path: str, data: dict[str, Any], drop_in: str) -> None:
    """Raise OcigpuError where containerd before 2.1 would lose settings."""
    holders = _table_holders(options, path, data)
    if holders and holders[-1] != drop_in:
        raise OcigpuError(
            "OCIGPU-ENG-2",
            f"--drop-in {drop_in}: containerd before 2.1 would drop the settings of {holders[-1]} in "
            f'[plugins."{CRI_PLUGINS[min(version_of(path, data), 3)][0]}"]',
            "leave out --drop-in" if holders[-1] == path else f"--drop-in {holders[-1]}",
        )


def _table_holders(options: ConfigureOptions, path: str, data: dict[str, Any]) -> list[str]:
    """Return the files that contain the plugin's table: containerd before 2.1 uses only the last one's, whole.

    (services/server/config of containerd 1.x: "Maps merged by keys, but values are replaced entirely".)
    """
    problems: list[str] = []
    files, _ = read_merged(options.root, "containerd", path, problems)
    if problems:
        raise OcigpuError("OCIGPU-ENG-1", problems[0])
    plugin = cri_plugin(data)
    return [
        file for file in files if look_up(places.parse_config(file, places.read_file(options.root, file) or ""), plugin)
    ]


def _disabled_notes(path: str, data: dict[str, Any]) -> tuple[str, ...]:
    if is_cri_off(data):
        return (f"{path}: disabled_plugins switches Kubernetes' interface off: remove it there for Kubernetes",)
    return ()


def _plan_templates(root: Root, options: ConfigureOptions, path: str, text: str | None) -> EnginePlan:
    """Plan the block of each existing template, or of a new one; ``path``: a template, or the file written from it.

    A new template would disable a user's beside it: if both exist, k3s and RKE2 with containerd 2 use only
    config-v3.toml.tmpl, those with containerd 1 only config.toml.tmpl.
    """
    if options.wanted.default or options.wanted.cdi or options.drop_in:
        raise OcigpuError(
            "OCIGPU-ENG-5",
            f"{path}: --default, --cdi and --drop-in cannot be set in a template of k3s or RKE2",
            "start k3s or RKE2 with --default-runtime NAME; containerd 2 has CDI switched on",
        )
    directory = os.path.dirname(path)
    if is_template(path):
        templates = [path]
    else:
        templates = [one for one in (f"{directory}/{name}" for name in NAMES) if root.read(one).text is not None]
        if text is None and not templates:
            raise OcigpuError(
                "OCIGPU-ENG-5", f"{path} does not exist yet", "k3s and RKE2 write it when they start first"
            )
        old = text is not None and version_of(path, places.parse_config(path, text)) < 3
        if not templates or (old and templates == [f"{directory}/{NAMES[1]}"]):
            templates.append(f"{directory}/{NAMES[0 if old else 1]}")
    edits = tuple(_edit_template(root, options, one, f"{directory}/config.toml") for one in templates)
    notes = ("k3s and RKE2 write config.toml from this template at their next start",)
    return EnginePlan("containerd", templates[0], edits, notes=notes)


def _edit_template(root: Root, options: ConfigureOptions, path: str, written: str) -> Edit:
    """Return the edit that adds the block to a template, with an entry like runc's in the file ``written`` from it."""
    text = base_text(root, root.read(path))
    text = BASE if text is None else text
    version = tables_version(path, text)
    generated = _merged(options, written, {})
    plugin = table_at(generated, cri_plugin({"version": version_of(path, generated)}))
    if has_base(text) or has_table(text, ("plugins", *CRI_PLUGINS[version], "containerd", "runtimes", "runc")):
        plugin = plugin if table_at(plugin, ("containerd", "runtimes", "runc")) else _USUAL
    elif not has_table(text, ("plugins", *CRI_PLUGINS[version], "containerd", "runtimes")):
        plugin = {}  # our table replaces the entry for runc that containerd itself has
    changes = containerd_changes(options.wanted, version, {"plugins": {CRI_PLUGINS[version][0]: plugin}})
    return edit_file(root, path, changes, BASE)


_USUAL = {"containerd": {"runtimes": {"runc": {"options": {"SystemdCgroup": True}}}}}
"""What k3s and RKE2 write for runc on a host with systemd, before they have started once."""


def _merged(options: ConfigureOptions, path: str, texts: dict[str, str]) -> dict[str, Any]:
    """Return the merged configuration with files as before our changes; raises OcigpuError for an unreadable one."""
    problems: list[str] = []
    _, merged = read_merged(options.root, options.engine, path, problems, texts)
    if problems:
        raise OcigpuError("OCIGPU-ENG-1", problems[0])
    return merged
