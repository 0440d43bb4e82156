"""Looks at a container from inside, so that two of them can be compared."""

import re

from support.bundle import LIBRARIES as MULTIARCH
from support.machine import TRIPLET
from support.process import Completed, explain
from support.product import SimulatedHost
from support.runtimes import parts, script

Seen = dict[str, str]
"""What was found in a container: "KIND PATH" to what it is."""

OWN_RUN = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o mode=755 tmpfs /run && exec "$@"', "sh")
"""Put before a command: what it keeps below /run goes with it."""


def survey(host: SimulatedHost) -> list[str]:
    """Return the argv that describes a container; /tmp is the container's own."""
    nodes = sorted(path for path in (host.directory / "dev").rglob("*") if path.is_char_device())
    names = [str(path.relative_to(host.directory / "dev")).replace("/", "-") for path in nodes]
    numbers = [host.number(str(path.relative_to(host.directory / "dev"))) for path in nodes]
    made = "; ".join(f"mknod /tmp/{name} c {' '.join(n)}" for name, n in zip(names, numbers, strict=True))
    own = "$(find /dev/dri /dev/nvidia* 2>/dev/null)"
    sonames = sorted({path.name for path in (host.directory / MULTIARCH).glob("lib*.so.[0-9]") if path.is_symlink()})
    return script(
        ["sh", "-c", f"set -- {own}; [ $# = 0 ] || /probe stat $* -- open $*"],
        ["sh", "-c", f"{made}; /probe open {' '.join(f'/tmp/{name}' for name in names)}; rm -f /tmp/*"],
        ["cat", "/proc/self/mountinfo"],
        ["sh", "-c", "find /etc /usr /run /opt /dev/dri -xdev -type l | while read l; do echo $l $(readlink $l); done"],
        ["find", "/etc", "/usr", "/run", "/opt", "/tmp", "-xdev", "-type", "f"],
        ["ldconfig", "-p"],
        ["sh", "-c", "find /proc/driver/nvidia | while read f; do stat -c '%n %F %a %u:%g' $f; done"],
        ["sh", "-c", "find /proc/driver/nvidia -type f | while read f; do echo $f $(cat $f | tr '\\n' '|'); done"],
        ["sh", "-c", "cd /etc/nvidia/nvidia-application-profiles-rc.d && ls -ln | tail -n +2 | cut -c1-10 && cat *"],
        ["nvidia-smi", "-L"],
        ["/dlopen", *sonames],
    )  # fmt: skip


def read_survey(output: str) -> Seen:
    nodes, numbers, mounts, links, files, cache, entries, contents, profile, listing, opened = parts(output)
    seen: Seen = {}
    for kind, text in (("node", nodes), ("number", numbers), ("library", opened)):
        for line in text.splitlines():
            command, path, answer = [*line.split(" ", 2), "", ""][:3]
            seen[f"{kind} {command} {path}"] = answer
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        _, _, _, root, point, options, *propagation = fields.split()
        source = root if root != "/" else rest.split()[0]
        seen[f"mount {point}"] = f"{source} {options} {' '.join(propagation).strip('0123456789: ')}"
    for kind, text in (("link", links), ("file", files), ("proc", entries), ("content", contents)):
        for line in text.splitlines():
            path, _, answer = line.partition(" ")
            seen[f"{kind} {path}"] = answer
    for line in cache.splitlines()[1:]:
        name, _, path = line.strip().partition(" => ")
        seen[f"cache {name}"] = path
    seen["profile"] = profile
    seen["listing"] = listing
    return seen


def beyond(seen: Seen, bare: Seen) -> Seen:
    """Return what a container has more than one of the same engine without GPUs."""
    return {key: value for key, value in seen.items() if bare.get(key) != value and not is_of_the_engine(key, value)}


def is_of_the_engine(key: str, value: str) -> bool:
    """Tell whether a mount is the container's own: its root directory, Podman's files of its name and network, and the
    empty directory in the state of crun 1.28, which masks what lies below it."""
    return key == "mount /" or (key.startswith("mount") and ("/userdata/" in value or "/.empty-directory " in value))


DIRECTORIES = (
    (re.compile(rf"(?<![0-9a-z])(/usr)?/lib(/{TRIPLET}|64)/"), "/LIB64/"),
    (re.compile(r"(?<![0-9a-z])(/usr)?/lib(/i386-linux-gnu|32)/"), "/LIB32/"),
    (re.compile(r"(?<![0-9a-z])/usr/lib/(?=lib)"), "/LIB32/"),
)


def without_directories(seen: Seen) -> Seen:
    """Return the findings with one name for all directories of libraries."""
    return {plain_directories(key): plain_directories(value) for key, value in seen.items()}


def plain_directories(text: str) -> str:
    for pattern, name in DIRECTORIES:
        text = pattern.sub(name, text)
    return text


def differences(one: Seen, other: Seen) -> dict[str, tuple[str, str]]:
    """Return what is not alike, by key."""
    keys = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
    return {key: (one.get(key, "(none)"), other.get(key, "(none)")) for key in keys}


def finished(result: Completed) -> Seen:
    assert result.returncode == 0, explain(result)
    assert len(parts(result.stdout)) == 11, explain(result)
    return read_survey(result.stdout)


VIEWS = ("/etc/nvidia/nvidia-application-profiles-rc.d", "/dev/dri/by-path")
WITHOUT_A_PROCESS = {
    "mount /proc/driver/nvidia": "runtimes refuse mounts below /proc: what is not granted is masked instead",
    "proc /proc/driver/nvidia": "as above: the directories of other GPUs are there, and empty; modes are the driver's",
    "content /proc/driver/nvidia/params": "ModifyDeviceFiles stays: nodes that are not granted cannot be opened anyway",
    **{f"mount {path}": "a directory below /run/ocigpu is bound, where the hook makes a tmpfs" for path in VIEWS},
    f"file {VIEWS[0]}/": "as above: find -xdev does not look into the hook's tmpfs",
    "node stat /dev/dri/by-path": "as above",
    "node stat /dev/dri": "made by the runtime, with the mode that it gives directories",
    "cache ": "only the image's own: its cache is kept, where the hook's ldconfig prefers the directory it is given",
}
"""Keys in which a container may differ where no process of ours has run for it, also with more behind them, and why."""


def may_differ(key: str) -> bool:
    """Tell whether a key may differ between a container that the hook has provisioned and one that it has not."""
    starts = tuple(f"{start.rstrip('/')}/" for start in WITHOUT_A_PROCESS if "stat" not in start)
    return key in WITHOUT_A_PROCESS or key.startswith(("cache ", *starts))
