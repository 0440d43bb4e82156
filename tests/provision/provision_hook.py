"""A prestart hook that carries out the plan of ``provision_lab`` on the host directory given as argument.

Arguments: the repository, the host directory, "new" or "old" kernel, then optionally the journal entry to fail at and
how.  Writes what came of it, and what it found, to <host directory>.answer.
"""

import json
import os
import sys


def main() -> int:
    repository, host, kernel, *failure = sys.argv[1:]
    sys.path[:0] = [repository, os.path.dirname(os.path.abspath(__file__))]
    from pathlib import Path

    import provision_lab

    from ocigpu.core.actions import AllowDevice, Plan, RefreshLdCache
    from ocigpu.core.errors import OcigpuError
    from ocigpu.core.settings import Settings
    from ocigpu.provision import apply

    state = json.load(sys.stdin)
    bundle = state["bundle"]
    config = json.loads(Path(bundle, "config.json").read_text())
    if kernel == "old":
        provision_lab.old_kernel()
    if failure:
        provision_lab.fail_at(int(failure[0]), failure[1])()
    plan = provision_lab.make_plan(Path(host))
    ldconfig = next(path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if os.path.exists(path))
    actions = (*plan.actions, RefreshLdCache(ldconfig, ("/usr/lib64",), "loader"), AllowDevice(195, 0, "rw", "GPU"))
    try:
        notes = apply.provision(
            Plan(actions), state["pid"], os.path.join(bundle, config["root"]["path"]), config, Settings()
        )
    except OcigpuError as error:
        print(error.render("hook"), file=sys.stderr)
        return 1
    answer = {
        "notes": notes,
        "pivoted": os.stat(f"/proc/{state['pid']}/root")[1:3] != os.stat("/")[1:3],
        "status": state["status"],
    }
    Path(f"{host}.answer").write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
