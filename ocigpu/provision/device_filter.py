"""The device policy of a container as data, and as the BPF program that a cgroup v2 enforces.

Pure: nothing here touches the kernel.  A policy is a list of :class:`FilterRule`, applied in order to a container that
may do nothing; a later rule overrides an earlier one **for the access letters and devices it names** and leaves the
rest as it was.  That is what cgroup v1 does with the same list (Documentation/admin-guide/cgroup-v1/devices.rst)
and what the OCI runtime specification means by it.  A request (say, open for reading and writing) is allowed if each
of its letters is.

The program's context is ``struct bpf_cgroup_dev_ctx`` (linux/bpf.h): u32 access_type (access << 16 | type), u32 major,
u32 minor; access mknod=1 read=2 write=4, type block=1 char=2.  It returns 1 to allow, 0 to refuse (EPERM).
"""

import struct

from ocigpu.core.errors import SpecError, quoted
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ACCESS_BITS = {"m": 1, "r": 2, "w": 4}
ALL_ACCESS = 7
TYPE_NUMBERS = {"b": 1, "c": 2}
MAX_RULES = 10_000
MAX_STEPS = 1_000_000
MAX_MAJOR = (1 << 12) - 1  # MINORBITS is 20 in linux/kdev_t.h: no device has greater numbers
MAX_MINOR = (1 << 20) - 1


class FilterRule(NamedTuple):
    """Allow or deny ``access`` (letters r, w, m) to devices; ``type`` c, b or a (both); None as number: any."""

    allow: bool
    type: str
    major: int | None
    minor: int | None
    access: str


RUNTIME_DEFAULTS = (
    (None, FilterRule(True, "c", None, None, "m")),
    (None, FilterRule(True, "b", None, None, "m")),
    ("/dev/null", FilterRule(True, "c", 1, 3, "rwm")),
    ("/dev/zero", FilterRule(True, "c", 1, 5, "rwm")),
    ("/dev/full", FilterRule(True, "c", 1, 7, "rwm")),
    ("/dev/random", FilterRule(True, "c", 1, 8, "rwm")),
    ("/dev/urandom", FilterRule(True, "c", 1, 9, "rwm")),
    ("/dev/tty", FilterRule(True, "c", 5, 0, "rwm")),
    (None, FilterRule(True, "c", 5, 2, "rwm")),  # ptmx
    (None, FilterRule(True, "c", 136, None, "rwm")),  # pts
)
"""What runtimes allow by themselves, after (and so over) the rules of config.json, with the path they go by.

The rules that runc 1.1 to 1.5 (libcontainer/specconv, AllowedDevices) and crun 1.8 to 1.2x (libcrun,
default_devices) have in common.  Left out, because not all of them have it: 5:1 (crun) and 10:200 (crun, older runc);
engines list both in config.json where a container is to have them.  runc drops a default whose path is in
linux.devices, and neither runtime allows what is in linux.devices without a rule: both are followed here.
"""


def effective_rules(config: "dict[str, Any]") -> list[FilterRule]:
    """Return the rules that a runtime enforces for this config.json, in order.

    Raises SpecError (OCIGPU-SPEC-3) for a device rule that has a wrong type of value or an unknown type, and for more
    than :data:`MAX_RULES` of them.
    """
    linux = _table(config, "linux")
    declared = _table(linux, "resources").get("devices")
    declared = [] if declared is None else declared
    if not isinstance(declared, list) or len(declared) > MAX_RULES:
        raise SpecError("OCIGPU-SPEC-3", f"linux.resources.devices: not a list of at most {MAX_RULES} rules")
    rules: list[FilterRule] = []
    for position, entry in enumerate(declared):
        rules.extend(_parse_rule(entry, f"linux.resources.devices[{position}]"))
    own_paths = _device_paths(linux)
    rules.extend(rule for path, rule in RUNTIME_DEFAULTS if path is None or path not in own_paths)
    return rules


def _table(container: "dict[str, Any]", name: str) -> "dict[str, Any]":
    table = container.get(name)
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise SpecError("OCIGPU-SPEC-3", f"{name}: not an object")
    return table


def _device_paths(linux: "dict[str, Any]") -> "set[str]":
    devices = linux.get("devices")
    devices = [] if devices is None else devices
    if not isinstance(devices, list):
        raise SpecError("OCIGPU-SPEC-3", "linux.devices: not a list")
    paths = (device.get("path") for device in devices if isinstance(device, dict))
    return {path for path in paths if isinstance(path, str)}


def _parse_rule(entry: object, where: str) -> list[FilterRule]:
    """Return the rule of one entry of linux.resources.devices: none if it can have no effect."""
    if not isinstance(entry, dict):
        raise SpecError("OCIGPU-SPEC-3", f"{where}: not an object")
    allow = entry.get("allow", False)
    kind = entry.get("type") or "a"
    access = entry.get("access") or ""
    if not isinstance(allow, bool):
        raise SpecError("OCIGPU-SPEC-3", f"{where}.allow: not true or false")
    if kind not in ("a", "b", "c"):
        raise SpecError("OCIGPU-SPEC-3", f"{where}.type: {quoted(repr(kind))} is not a, b or c")
    if not isinstance(access, str):
        raise SpecError("OCIGPU-SPEC-3", f"{where}.access: {quoted(repr(access))} is not a text")
    # other letters mean nothing to runc (devices.Permissions.toSet) and crun (bpf_program_append_dev)
    letters = "".join(letter for letter in access if letter in ACCESS_BITS)
    major, minor = _number(entry, "major", where), _number(entry, "minor", where)
    if not allow:
        if kind == "a":  # runc takes any denial of type "a" for "deny everything"
            return [FilterRule(False, "a", None, None, "rwm")]
        if access and not letters:
            return []
        letters = letters or "rwm"
        # A negative number means any; when denying, that is the narrow reading.
        major = None if major is not None and major < 0 else major
        minor = None if minor is not None and minor < 0 else minor
    else:
        major, minor = (None if number == -1 else number for number in (major, minor))
        if not letters:
            return []
    if not (major is None or 0 <= major <= MAX_MAJOR) or not (minor is None or 0 <= minor <= MAX_MINOR):
        return []  # no device has such a number
    return [FilterRule(allow, kind, major, minor, letters)]


def _number(entry: "dict[str, Any]", name: str, where: str) -> int | None:
    value = entry.get(name)
    if value is not None and type(value) is not int:
        raise SpecError("OCIGPU-SPEC-3", f"{where}.{name}: {quoted(repr(value))} is not a whole number")
    return value


def access_mask(letters: str) -> int:
    """Return the access bits of letters, e.g. 6 for "rw"."""
    mask = 0
    for letter in letters:
        mask |= ACCESS_BITS[letter]
    return mask


class _Group:
    """Access bits of the devices of one type and major: ``default``, and ``minors`` where it differs."""

    __slots__ = ("default", "minors")

    def __init__(self, default: int, minors: "dict[int, int]") -> None:
        self.default = default
        self.minors = minors

    def apply(self, rule: FilterRule, mask: int) -> None:
        if rule.minor is not None:
            self.minors[rule.minor] = _changed(self.minors.get(rule.minor, self.default), rule.allow, mask)
            return
        self.default = _changed(self.default, rule.allow, mask)
        if mask == ALL_ACCESS:
            self.minors.clear()
        else:
            self.minors = {minor: _changed(bits, rule.allow, mask) for minor, bits in self.minors.items()}

    def tidied(self) -> "_Group":
        return _Group(self.default, {minor: bits for minor, bits in self.minors.items() if bits != self.default})


def _changed(bits: int, allow: bool, mask: int) -> int:
    return bits | mask if allow else bits & ~mask


class Policy:
    """The decision that a list of rules comes to, for every device: built once, then asked or compiled.

    Raises SpecError (OCIGPU-SPEC-3) if the rules are so many and so tangled that evaluating them would take long.
    """

    def __init__(self, rules: "list[FilterRule] | tuple[FilterRule, ...]") -> None:
        groups: dict[tuple[str, int | None], _Group] = {(kind, None): _Group(0, {}) for kind in TYPE_NUMBERS}
        steps = 0
        for rule in rules:
            mask = access_mask(rule.access)
            for kind in TYPE_NUMBERS if rule.type == "a" else rule.type:
                if rule.major is not None:
                    key = (kind, rule.major)
                    if key not in groups:  # a device not named so far is treated like any other
                        default = groups[kind, None]
                        groups[key] = _Group(default.default, dict(default.minors))
                        steps += len(default.minors)
                    touched = [groups[key]]
                elif rule.minor is None and mask == ALL_ACCESS:
                    groups = {key: group for key, group in groups.items() if key[0] != kind or key[1] is None}
                    touched = [groups[kind, None]]
                else:
                    touched = [group for key, group in groups.items() if key[0] == kind]
                for group in touched:
                    steps += 1 + (len(group.minors) if rule.minor is None else 0)
                    group.apply(rule, mask)
            if steps > MAX_STEPS:
                raise SpecError("OCIGPU-SPEC-3", "linux.resources.devices: the rules are too many to be evaluated")
        tidy = {key: group.tidied() for key, group in groups.items()}
        self.groups: dict[tuple[str, int | None], _Group] = {
            key: group
            for key, group in tidy.items()
            if key[1] is None
            or (group.default, group.minors) != (tidy[key[0], None].default, tidy[key[0], None].minors)
        }

    def allowed(self, kind: str, major: int, minor: int) -> int:
        """Return the access bits that are allowed for one device."""
        group = self.groups.get((kind, major)) or self.groups[kind, None]
        return group.minors.get(minor, group.default)


# Instructions (linux/bpf.h, Documentation/bpf/standardization/instruction-set.rst): u8 code, u8 src << 4 | dst,
# s16 jump distance from the next instruction, s32 immediate.
_R0, _R1, _TYPE, _ACCESS, _MAJOR, _MINOR = range(6)
_LOAD_U32 = 0x61
_AND32 = 0x54
_SHIFT_RIGHT32 = 0x74
_MOVE32 = 0xB4
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_NOT_EQUAL = 0x55
_EXIT = 0x95


def _instruction(code: int, target: int = 0, source: int = 0, jump: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | target, jump, value)


def _answer(mask: int) -> bytes:
    """Return instructions that end the program: allow if nothing but the bits of ``mask`` is asked for."""
    if mask in (0, ALL_ACCESS):
        return _instruction(_MOVE32, _R0, value=int(mask == ALL_ACCESS)) + _instruction(_EXIT)
    return (
        _instruction(_AND32, _ACCESS, value=0xFFFF & ~mask)
        + _instruction(_MOVE32, _R0, value=0)
        + _instruction(_JUMP_IF_NOT_EQUAL, _ACCESS, jump=1, value=0)
        + _instruction(_MOVE32, _R0, value=1)
        + _instruction(_EXIT)
    )


def _group_code(group: _Group) -> bytes:
    """Return instructions that decide by the minor and end the program."""
    by_mask: dict[int, list[int]] = {}
    for minor, bits in sorted(group.minors.items()):
        by_mask.setdefault(bits, []).append(minor)
    code = []
    for bits, minors in sorted(by_mask.items()):
        answer = _answer(bits)
        for position, minor in enumerate(minors[:-1]):
            code.append(_instruction(_JUMP_IF_EQUAL, _MINOR, jump=len(minors) - 1 - position, value=minor))
        code.append(_instruction(_JUMP_IF_NOT_EQUAL, _MINOR, jump=len(answer) // 8, value=minors[-1]))
        code.append(answer)
    code.append(_answer(group.default))
    return b"".join(code)


def policy_program(policy: Policy) -> bytes:
    """Return the instructions that enforce a policy.

    One block for each major: ``type? major? minors... answer``.  Every block ends the program, so that the
    verifier's work grows with the length of the program only; jumps never leave a block (their distance is 16 bits,
    and a block has at most 10,000 minors).  Loads are of whole u32 fields: narrow loads of the context are refused
    by some kernels and differ on big-endian machines.
    """
    code = (
        _instruction(_LOAD_U32, _TYPE, _R1, jump=0)
        + _instruction(_AND32, _TYPE, value=0xFFFF)
        + _instruction(_LOAD_U32, _ACCESS, _R1, jump=0)
        + _instruction(_SHIFT_RIGHT32, _ACCESS, value=16)
        + _instruction(_LOAD_U32, _MAJOR, _R1, jump=4)
        + _instruction(_LOAD_U32, _MINOR, _R1, jump=8)
    )
    blocks = [code]
    for (kind, major), group in sorted(policy.groups.items(), key=lambda item: (item[0][1] is None, item[0])):
        body = _group_code(group)
        if major is not None:
            body = _instruction(_JUMP_IF_NOT_EQUAL, _MAJOR, jump=len(body) // 8, value=major) + body
        elif group.default == 0 and not group.minors:
            continue  # the end of the program says the same
        blocks.append(_instruction(_JUMP_IF_NOT_EQUAL, _TYPE, jump=len(body) // 8, value=TYPE_NUMBERS[kind]) + body)
    blocks.append(_answer(0))
    return b"".join(blocks)


def device_program(rules: "list[FilterRule] | tuple[FilterRule, ...]") -> bytes:
    """Return the instructions of the BPF_PROG_TYPE_CGROUP_DEVICE program that enforces ``rules``; default: deny."""
    return policy_program(Policy(rules))
