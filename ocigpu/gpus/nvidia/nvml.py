"""NVML, queried by a forked child with no privileges, an empty environment and a deadline.

The answer comes back as JSON over a pipe.  If the library is missing, crashes, hangs or returns invalid data, the
answer says so; it never causes an exception or a hang.
"""

import os
from binascii import crc32

from ocigpu import is_snapshot
from ocigpu.core import rawjson
from ocigpu.core.errors import UNUSABLE, printable
from ocigpu.core.facts import Gpu, MigDevice
from ocigpu.core.record import NamedTuple
from ocigpu.gpus.nvidia.procfs import is_version
from ocigpu.gpus.tree import Roots, normal_bus_id
from ocigpu.system.child import Child, execute_main

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEADLINE = 10.0
"""Seconds that NVML may take: loading an idle GPU's state takes one or two each."""
ANSWER_LIMIT = 1 << 20

LIB_RM_VERSION_MISMATCH = 18
ADDRESSING_MODE_ATS = 2

BRANDS = (
    "Unknown", "Quadro", "Tesla", "NVS", "GRID", "GeForce", "TITAN", "VApps", "VPC", "VCS", "VWS", "CloudGaming",
    "QuadroRTX", "NvidiaRTX", "Nvidia", "GeForceRTX", "TitanRTX",
)  # fmt: skip
"""By nvmlBrandType_t."""


class NvmlAnswer(NamedTuple):
    """NVML's answer.  ``problem`` is empty, or one sentence on why there is no answer; ``code`` is nvmlInit's."""

    problem: str = ""
    code: int = 0
    driver_version: str = ""
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()


class NvmlChild:
    """A running query of NVML; :meth:`collect` waits for the answer, :meth:`close` aborts it."""

    def __init__(self, child: Child, library: str) -> None:
        self.child = child
        self.library = library
        self.checksum = 0
        """Of the answer."""
        self.close = child.close
        self.document: dict[str, Any] = {}
        """What the answer was made of, which says more; {} where there is none."""
        self._answer: NvmlAnswer | None = None

    def collect(self) -> NvmlAnswer:
        """Return the answer; waits at most until the deadline that :func:`start_nvml` set, and the first time only."""
        if self._answer is None:
            self._answer = self._wait()
        return self._answer

    def _wait(self) -> NvmlAnswer:
        try:
            data, status = self.child.collect(ANSWER_LIMIT)
        except TimeoutError:
            return NvmlAnswer(f"NVML did not answer within {self.child.seconds:g} s")
        except OverflowError:
            return NvmlAnswer(f"NVML answered with more than {ANSWER_LIMIT} bytes")
        if status < 0:
            return NvmlAnswer(f"NVML crashed: the library ended its process by signal {-status}")
        try:
            self.checksum = crc32(data)
            document = rawjson.parse(data.decode())
            answer = parse_answer(document)
        except UNUSABLE:
            return NvmlAnswer("NVML gave no usable answer")
        self.document = {} if answer.problem else document
        return answer


def start_nvml(library: str, roots: Roots, seconds: float = DEADLINE) -> NvmlChild:
    """Start asking the library at ``library`` (path in the driver root) and return at once.

    With a driver root of its own that also holds the device nodes the child enters it by chroot (as root).  Must be
    called from a process with one thread.
    """
    chroot = roots.driver if roots.driver != roots.host and roots.dev == roots.driver else ""
    path = library if chroot else roots.driver + library
    parent = os.getpid()

    def work(pipe: int) -> bytes:
        if is_snapshot():
            why = execute_main("ocigpu.gpus.nvidia.nvml_child", pipe, parent, path, chroot, roots.host)
            return rawjson.dump({"load": why}).encode()
        # here it overlaps with our own reading
        from ocigpu.gpus.nvidia.nvml_child import DriverPlace, answer_in_child

        return answer_in_child(parent, pipe, DriverPlace(path, chroot, roots.host))

    return NvmlChild(Child(work, seconds), library)


def parse_answer(data: "Any") -> NvmlAnswer:
    """Return the records of a child's JSON document.

    Raises one of :data:`UNUSABLE` for anything that the child does not write: the library shares its process.
    """
    if "load" in data:
        return NvmlAnswer(f"NVML cannot be loaded: {printable(str(data['load']), 300)}")
    code = int(data["init"])
    if code:
        return NvmlAnswer(f"NVML cannot be initialised: {printable(str(data['text']), 300)}", code)
    version = str(data["driver"])
    gpus: list[Gpu] = []
    notes: list[str] = []
    for item in data["gpus"]:
        gpus.append(_gpu(item))
        notes.extend(f"GPU {gpus[-1].index}: {printable(str(note), 300)}" for note in item.get("notes", ()))
    return NvmlAnswer(
        "", 0, version if is_version(version) else "", cuda_version(int(data["cuda"])), tuple(gpus), tuple(notes)
    )


def cuda_version(number: int) -> str:
    """Return NVML's CUDA version number as text: 12040 is "12.4"; "" for none."""
    return f"{number // 1000}.{number % 1000 // 10}" if number > 0 else ""


def _gpu(item: "dict[str, Any]") -> Gpu:
    brand = int(item.get("brand", 0))
    mig = item.get("mig")
    arch = item.get("arch")
    return Gpu(
        index=int(item["index"]),
        minor=int(item.get("minor", -1)),
        uuid=printable(str(item.get("uuid", "")), 96),
        bus_id=normal_bus_id(str(item.get("bus_id", ""))),
        model=printable(str(item.get("name", "")), 96),
        brand=BRANDS[brand] if 0 <= brand < len(BRANDS) else BRANDS[0],
        architecture=f"{int(arch[0])}.{int(arch[1])}" if arch else "",
        mig_capable=mig is not None,
        mig_enabled=mig is not None and int(mig[0]) == 1,
        mig_devices=tuple(
            MigDevice(
                int(device["index"]),
                printable(str(device["uuid"]), 96),
                printable(str(device["profile"]), 96),
                int(device["gi"]),
                int(device["ci"]),
                -1,
                -1,
            )
            for device in item.get("migs", ())
        ),
        coherent=int(item.get("addressing", 0)) == ADDRESSING_MODE_ATS,
        error=printable(str(item.get("error", "")), 300),
    )
