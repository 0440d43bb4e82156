"""A tiny interpreter for the BPF instructions that device filters of ours, runc and crun use, for tests only.

The instruction set is that of Documentation/bpf/standardization/instruction-set.rst; anything else raises.
"""

import struct

BLOCK, CHAR = 1, 2


def run_device_program(code: bytes, kind: int, access: int, major: int, minor: int) -> int:
    """Return what the program answers to one request: 1 allow, 0 refuse."""
    assert len(code) % 8 == 0
    program = [struct.unpack_from("=BBhi", code, at) for at in range(0, len(code), 8)]
    context = {0: access << 16 | kind, 4: major, 8: minor}
    registers: list[int | None] = [None] * 11
    registers[1] = -1  # the pointer to the context
    at = 0
    for _ in range(len(program) + 1):
        opcode, pair, jump, value = program[at]
        target, source = pair & 0xF, pair >> 4
        at += 1
        if opcode == 0x95:
            assert registers[0] is not None
            return registers[0]
        if opcode in (0x61, 0x69):
            assert registers[source] == -1
            registers[target] = context[jump] & (0xFFFFFFFF if opcode == 0x61 else 0xFFFF)
        elif opcode in (0xB4, 0xB7):
            registers[target] = value & 0xFFFFFFFF
        elif opcode in (0xBC, 0xBF):
            registers[target] = registers[source]
        elif opcode in (0x54, 0x57):
            registers[target] = known(registers[target]) & value & 0xFFFFFFFF
        elif opcode in (0x74, 0x77):
            registers[target] = (known(registers[target]) & 0xFFFFFFFF) >> value
        elif opcode == 0x05:
            at += jump
        elif opcode in (0x15, 0x55, 0x56, 0x16):
            equal = known(registers[target]) == value & 0xFFFFFFFF
            at += jump if equal == (opcode in (0x15, 0x16)) else 0
        elif opcode in (0x5D, 0x1D):
            equal = known(registers[target]) == known(registers[source])
            at += jump if equal == (opcode == 0x1D) else 0
        else:
            raise AssertionError(f"instruction {at - 1}: opcode {opcode:#x} not expected in a device filter")
    raise AssertionError("the program runs in circles")


def known(value: int | None) -> int:
    assert value is not None
    return value
