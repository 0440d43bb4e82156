"""Applies a container's device rules once more, as systemd does after daemon-reload: from config.json alone.

    python reapply.py v1|v2 CGROUP CONFIG.JSON

``CGROUP``: its path below the hierarchy's top.  Run it where the wanted hierarchy is in sight.
"""

import json
import os
import sys
from pathlib import Path

from ocigpu.provision.device_filter import FilterRule, device_program, effective_rules
from ocigpu.system import bpf


def line(rule: FilterRule) -> str:
    """Return a rule as devices.allow and devices.deny read it."""
    numbers = ("*" if number is None else str(number) for number in (rule.major, rule.minor))
    return "a" if rule.type == "a" else f"{rule.type} {':'.join(numbers)} {rule.access}"


def apply_v1(directory: Path, rules: list[FilterRule]) -> None:
    for rule in rules:
        (directory / ("devices.allow" if rule.allow else "devices.deny")).write_text(line(rule))


def apply_v2(directory: Path, rules: list[FilterRule]) -> None:
    cgroup_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    attached = bpf.query_device_programs(cgroup_fd)
    assert attached.ids, "no device policy at all"
    for program_id in attached.ids:
        old, new = bpf.open_program(program_id), bpf.load_device_program(device_program(rules))
        bpf.attach_device_program(cgroup_fd, new, attached.flags & bpf.BPF_F_ALLOW_MULTI, old)


def main(version: str, cgroup: str, config: str) -> None:
    rules = effective_rules(json.loads(Path(config).read_text()))
    if version == "v1":
        apply_v1(Path("/sys/fs/cgroup/devices", cgroup), rules)
    else:
        apply_v2(Path("/sys/fs/cgroup", cgroup), rules)


if __name__ == "__main__":
    main(*sys.argv[1:])
