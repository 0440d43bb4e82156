"""A createContainer hook that carries out the plan of ``test_apply_here`` in the namespaces it is started in.

Arguments: the repository, the bundle's directory, "new" or "old" kernel, then optionally the journal entry to fail at
and how.  Adds a line with its notes to <directory>/host.answer; holds a lock on <directory>/host.lock.
"""

import fcntl
import json
import os
import sys


def main() -> int:
    repository, place, kernel, *failure = sys.argv[1:]
    sys.path[:0] = [repository, os.path.dirname(os.path.abspath(__file__))]
    from pathlib import Path

    import provision_lab

    from ocigpu.core.errors import OcigpuError
    from ocigpu.core.settings import Settings
    from ocigpu.provision import apply

    bundle = json.load(sys.stdin)["bundle"]
    lock_fd = os.open(f"{place}/host.lock", os.O_WRONLY | os.O_CREAT, 0o666)  # every process of the hook inherits it
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    config = json.loads(Path(bundle, "config.json").read_text())
    if kernel == "old":
        provision_lab.old_kernel()
    if failure:
        provision_lab.fail_at(int(failure[0]), failure[1])()
    plan = provision_lab.make_plan_here(Path(place, "host"))
    try:
        notes = apply.provision_here(plan, os.path.join(bundle, config["root"]["path"]), Settings())
    except OcigpuError as error:
        print(error.render("hook"), file=sys.stderr)
        return 1
    with open(f"{place}/host.answer", "a") as file:
        file.write(json.dumps(notes) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
