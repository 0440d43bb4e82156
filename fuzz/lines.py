"""Which lines of the product a corpus reaches: ``python -m fuzz.lines NAME DIRECTORY...`` prints "REACHED TOTAL".

TOTAL counts the lines of the functions that are entered: what a target does not call at all says nothing about it.
"""

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from fuzz import targets

PRODUCT = str(targets.ROOT / "ocigpu")


def main() -> None:
    name, *directories = sys.argv[1:]
    reached: dict[CodeType, set[int]] = {}

    def on_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        lines = reached.setdefault(frame.f_code, set())

        def on_line(frame: FrameType, event: str, _argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return on_line

        return on_line

    sys.settrace(on_call)
    for directory in directories:
        for path in sorted(Path(directory).iterdir()):
            targets.run(name, path.read_bytes())
    sys.settrace(None)
    targets.clean()
    total = {code: {line for *_, line in code.co_lines() if line and line != code.co_firstlineno} for code in reached}
    print(sum(len(reached[code] & total[code]) for code in reached), sum(map(len, total.values())))


if __name__ == "__main__":
    main()
