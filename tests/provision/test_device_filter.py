"""The device policy: reading config.json's rules, evaluating them, compiling them to BPF."""

import struct

import pytest
from bpf_interpreter import run_device_program
from hypothesis import example, given
from hypothesis import strategies as st

from ocigpu.core.errors import SpecError
from ocigpu.provision.device_filter import (
    MAX_RULES,
    RUNTIME_DEFAULTS,
    FilterRule,
    Policy,
    access_mask,
    device_program,
    effective_rules,
)

DENY_ALL = {"allow": False, "access": "rwm"}
DEFAULTS = [rule for _, rule in RUNTIME_DEFAULTS]


def config_with(*devices: object, **linux: object) -> dict:
    return {"linux": {"resources": {"devices": list(devices)}, **linux}}


def disassemble(code: bytes) -> list[tuple[int, int, int, int]]:
    return [struct.unpack_from("=BBhi", code, at) for at in range(0, len(code), 8)]


def evaluate(rules: list[FilterRule], kind: str, access: int, major: int, minor: int) -> bool:
    """The oracle: each access letter is decided by the last rule that names it for this device."""
    for bit in (1, 2, 4):
        if access & bit:
            answer = False
            for rule in rules:
                if (
                    rule.type in ("a", kind)
                    and rule.major in (None, major)
                    and rule.minor in (None, minor)
                    and access_mask(rule.access) & bit
                ):
                    answer = rule.allow
            if not answer:
                return False
    return True


PROLOGUE = [
    (0x61, 0x12, 0, 0),  # r2 = access_type
    (0x54, 0x02, 0, 0xFFFF),  # w2 &= 0xffff: type
    (0x61, 0x13, 0, 0),  # r3 = access_type
    (0x74, 0x03, 0, 16),  # w3 >>= 16: access
    (0x61, 0x14, 4, 0),  # r4 = major
    (0x61, 0x15, 8, 0),  # r5 = minor
]
REFUSE = [(0xB4, 0x00, 0, 0), (0x95, 0x00, 0, 0)]
ALLOW = [(0xB4, 0x00, 0, 1), (0x95, 0x00, 0, 0)]


def test_no_rules_compile_to_a_program_that_refuses_everything():
    assert disassemble(device_program([])) == PROLOGUE + REFUSE


def test_two_gpus_compile_to_one_block_with_one_test_of_the_major():
    rules = [FilterRule(True, "c", 195, 0, "rw"), FilterRule(True, "c", 195, 255, "rw")]
    assert disassemble(device_program(rules)) == [
        *PROLOGUE,
        (0x55, 0x02, 10, 2),  # not a character device: to the end
        (0x55, 0x04, 9, 195),  # other major: to the end
        (0x15, 0x05, 1, 0),  # minor 0: to the answer
        (0x55, 0x05, 5, 255),  # other minor: to the group's default
        (0x54, 0x03, 0, 0xFFF9),  # anything but read and write?
        (0xB4, 0x00, 0, 0),
        (0x55, 0x03, 1, 0),
        (0xB4, 0x00, 0, 1),
        (0x95, 0x00, 0, 0),
        *REFUSE,  # other minors of major 195
        *REFUSE,
    ]


def test_allowing_everything_is_short():
    code = disassemble(device_program([FilterRule(True, "a", None, None, "rwm")]))
    assert code == [*PROLOGUE, (0x55, 0x02, 2, 1), *ALLOW, (0x55, 0x02, 2, 2), *ALLOW, *REFUSE]


numbers = st.none() | st.integers(0, 4)
rule_lists = st.lists(
    st.builds(
        FilterRule,
        st.booleans(),
        st.sampled_from("abc"),
        numbers,
        numbers,
        st.sampled_from(["r", "w", "m", "rw", "rm", "wm", "rwm"]),
    ),
    max_size=12,
)
requests = st.tuples(st.sampled_from("bc"), st.integers(1, 7), st.integers(0, 5), st.integers(0, 5))


@given(rule_lists, st.lists(requests, min_size=1, max_size=12))
@example([FilterRule(True, "c", 1, 3, "r"), FilterRule(True, "c", 1, 3, "w")], [("c", 6, 1, 3)])
@example([FilterRule(True, "c", 1, 3, "rw"), FilterRule(False, "a", None, None, "w")], [("c", 6, 1, 3), ("c", 2, 1, 3)])
def test_program_and_policy_answer_like_the_list_of_rules(rules, asked):
    policy, code = Policy(rules), device_program(rules)
    for kind, access, major, minor in asked:
        expected = evaluate(rules, kind, access, major, minor)
        assert (policy.allowed(kind, major, minor) & access == access) == expected
        number = {"b": 1, "c": 2}[kind]
        assert run_device_program(code, number, access, major, minor) == int(expected)


def test_unknown_access_bits_and_types_are_refused():
    code = device_program([FilterRule(True, "c", 1, 3, "rw")])
    assert run_device_program(code, 2, 6, 1, 3) == 1
    assert run_device_program(code, 2, 8, 1, 3) == 0
    assert run_device_program(code, 3, 2, 1, 3) == 0


RULES = [
    ("deny all first", DENY_ALL, [FilterRule(False, "a", None, None, "rwm")]),
    ("deny all with numbers", {"allow": False, "type": "a", "major": 1}, [FilterRule(False, "a", None, None, "rwm")]),
    (
        "character device",
        {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"},
        [FilterRule(True, "c", 195, 0, "rw")],
    ),
    (
        "null means any number",
        {"allow": True, "type": "b", "major": 8, "minor": None, "access": "r"},
        [FilterRule(True, "b", 8, None, "r")],
    ),
    (
        "minus one means any number",
        {"allow": True, "type": "c", "major": 8, "minor": -1, "access": "r"},
        [FilterRule(True, "c", 8, None, "r")],
    ),
    ("other negative numbers allow nothing", {"allow": True, "type": "c", "major": -2, "access": "rwm"}, []),
    (
        "other negative numbers deny any",
        {"allow": False, "type": "c", "major": -2, "access": "w"},
        [FilterRule(False, "c", None, None, "w")],
    ),
    ("allow without access", {"allow": True, "type": "c", "major": 1, "minor": 3}, []),
    ("deny without access", {"type": "c", "major": 1, "minor": 3}, [FilterRule(False, "c", 1, 3, "rwm")]),
    (
        "other letters",
        {"allow": True, "type": "c", "major": 1, "access": "rwa"},
        [FilterRule(True, "c", 1, None, "rw")],
    ),
    ("allow other letters only", {"allow": True, "type": "c", "major": 1, "access": "xR"}, []),
    ("deny other letters only", {"type": "c", "major": 1, "access": "xR"}, []),
    ("letters in any order", {"type": "c", "major": 1, "access": "wrw"}, [FilterRule(False, "c", 1, None, "wrw")]),
    ("numbers no device has", {"allow": True, "type": "c", "major": 1 << 33, "minor": 0, "access": "rwm"}, []),
    ("minors no device has", {"allow": True, "type": "c", "major": 1, "minor": 1 << 20, "access": "rwm"}, []),
]


@pytest.mark.parametrize(("entry", "expected"), [row[1:] for row in RULES], ids=[row[0] for row in RULES])
def test_rules_of_config_json_are_read_narrowly(entry, expected):
    assert effective_rules(config_with(entry)) == expected + DEFAULTS


WRONG = [
    ("not an object", 7, "linux.resources.devices[0]: not an object"),
    ("allow as text", {"allow": "yes"}, "allow: not true or false"),
    ("type u", {"allow": True, "type": "u", "access": "r"}, "type"),
    ("type as number", {"allow": True, "type": 1, "access": "r"}, "type"),
    ("access as list", {"allow": True, "type": "c", "access": ["r"]}, "access"),
    ("major as text", {"allow": True, "type": "c", "major": "1", "access": "r"}, "major"),
    ("major as truth", {"allow": True, "type": "c", "major": True, "access": "r"}, "major"),
    ("minor as fraction", {"allow": True, "type": "c", "minor": 1.5, "access": "r"}, "minor"),
]


@pytest.mark.parametrize(("entry", "text"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_rule_that_makes_no_sense_is_an_error(entry, text):
    with pytest.raises(SpecError) as caught:
        effective_rules(config_with(entry))
    assert caught.value.code == "OCIGPU-SPEC-3"
    assert text in caught.value.message


SECTIONS = {
    "linux": {"linux": []},
    "resources": {"linux": {"resources": 1}},
    "rules": {"linux": {"resources": {"devices": {"a": 1}}}},
    "devices": {"linux": {"devices": "x"}},
    "too many": config_with(*[DENY_ALL] * (MAX_RULES + 1)),
}


@pytest.mark.parametrize("config", SECTIONS.values(), ids=SECTIONS)
def test_sections_of_the_wrong_kind_or_size_are_errors(config):
    with pytest.raises(SpecError):
        effective_rules(config)


@pytest.mark.parametrize("config", [{}, {"linux": None}, {"linux": {"resources": None}}, config_with()])
def test_without_rules_the_runtimes_defaults_remain(config):
    assert effective_rules(config) == DEFAULTS


def test_a_default_whose_path_is_declared_as_a_device_is_left_out_as_runc_does():
    rules = effective_rules(config_with(DENY_ALL, devices=[{"path": "/dev/null", "type": "c", "major": 1, "minor": 3}]))
    assert Policy(rules).allowed("c", 1, 3) == access_mask("m")
    assert Policy(rules).allowed("c", 1, 5) == access_mask("rwm")


def test_devices_without_a_rule_are_not_opened_by_being_declared():
    rules = effective_rules(
        config_with(DENY_ALL, devices=[{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}])
    )
    assert Policy(rules).allowed("c", 10, 229) == access_mask("m")


def test_defaults_outlive_the_denials_of_config_json():
    policy = Policy(effective_rules(config_with(DENY_ALL)))
    assert policy.allowed("c", 1, 3) == access_mask("rwm")
    assert policy.allowed("c", 136, 17) == access_mask("rwm")
    assert policy.allowed("c", 195, 0) == access_mask("m")
    assert policy.allowed("b", 8, 0) == access_mask("m")


def test_the_greatest_list_of_rules_compiles_with_jumps_that_fit():
    rules = [FilterRule(True, "c", 195, minor, ("r", "w", "rw", "rwm")[minor % 4]) for minor in range(MAX_RULES)]
    code = device_program(rules)
    for minor in (0, 1, 2, 3, MAX_RULES - 1):
        assert run_device_program(code, 2, 4, 195, minor) == int(minor % 4 != 0)
    assert run_device_program(code, 2, 4, 195, MAX_RULES) == 0


def test_rules_too_tangled_to_evaluate_are_refused():
    rules = [FilterRule(True, "c", major, None, "r") for major in range(4000)]
    rules += [FilterRule(True, "c", None, minor, "w") for minor in range(4000)]
    with pytest.raises(SpecError) as caught:
        Policy(rules)
    assert "too many to be evaluated" in caught.value.message


def test_eight_gpus_cost_few_instructions():
    gpus = [FilterRule(True, "c", 195, minor, "rw") for minor in (*range(8), 254, 255)]
    gpus += [FilterRule(True, "c", 236, minor, "rw") for minor in (0, 1)]
    rules = effective_rules(config_with(DENY_ALL))
    assert len(device_program(rules + gpus)) // 8 - len(device_program(rules)) // 8 <= 42
