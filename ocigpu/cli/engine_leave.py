"""``ocigpu engine leave``: before ocigpu is removed from a machine."""

import os
import sys
from collections.abc import Sequence

from ocigpu.cli.show import count
from ocigpu.core.errors import OcigpuError, printable


def leave_command(program: str = "", root: str = "/") -> None:
    from ocigpu.engines.carry_out import carry_out, check_plan, remaining_step
    from ocigpu.engines.configure import ConfigureOptions
    from ocigpu.engines.files import Root, locked
    from ocigpu.engines.leave import entries_of, find_entries, find_generated, find_users, find_waiting, note_waiting
    from ocigpu.engines.places import find_program
    from ocigpu.engines.remove import plan_removal
    from ocigpu.engines.status import RUNTIME, read_engine_status
    from ocigpu.engines.wanted import Wanted

    beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), RUNTIME)
    shim = beside if root == "/" else find_program(root, RUNTIME)
    statuses = read_engine_status(root)
    if program:
        hint = "take it out: ocigpu engine remove ENGINE; or install what has this name"
        _refuse(find_entries(root, shim, statuses, program), hint)
        return
    _refuse(find_users(root, shim, statuses), "end and remove them first (docker rm)")
    waiting = find_waiting(root)
    for status in statuses:
        if not entries_of(root, shim, status):
            continue
        main = status.target if status.engine in ("docker", "containerd") else ""
        options = ConfigureOptions(status.engine, Wanted("", "", False, False), config=main, root=root)
        with locked(), Root(root) as files:
            plan = plan_removal(files, options)
            if plan.changed:
                check_plan(files, plan)
                carry_out(files, plan)
        step = remaining_step(options, plan) if plan.changed else ""
        if plan.changed:
            print(printable(f"{status.engine}: taken out of {', '.join(edit.file.path for edit in plan.edits)}"))
        if step and status.is_default and status.running:
            note_waiting(root, status, step)
            waiting.append((status.engine, step))
        elif step:
            print(f"remains to be done: {step}")
    _refuse(find_entries(root, shim, read_engine_status(root)), "take it out by hand, or install what has this name")
    for name in find_generated(root, shim, statuses):
        print(f"remains to be done: systemctl restart {name}: pods whose runtime class names ocigpu fail until then")
    texts = dict.fromkeys(f"{engine} starts every container with it until: {step}" for engine, step in waiting)
    _refuse([*texts], "its file is as it was before ocigpu; do this step, then remove ocigpu again")


def _refuse(needs: Sequence[str], hint: str) -> None:
    if needs:
        more = f" (and {count(len(needs) - 1, 'other')})" if needs[1:] else ""
        raise OcigpuError("OCIGPU-ENG-6", f"still needed: {needs[0]}{more}", hint)
