"""Names of devices, kinds and annotations, by the tables of the reference library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.core.cdi_names import DeviceName, check_annotation_name, check_kind, is_qualified, parse_device_name
from ocigpu.core.errors import CdiError

VALID = [
    ("a/b=c", "a/b", "c"),
    ("vendor.com/class=0", "vendor.com/class", "0"),
    ("nvidia.com/gpu=0:0", "nvidia.com/gpu", "0:0"),
    ("nvidia.com/gpu=GPU-4d4f434b-0000-0000-0000-000000000000", "nvidia.com/gpu",
     "GPU-4d4f434b-0000-0000-0000-000000000000"),
    ("yet_another-vendor2.com/c-lass_2=dev_1:2.3", "yet_another-vendor2.com/c-lass_2", "dev_1:2.3"),
    ("V.com/" + "c" * 300 + "=d", "V.com/" + "c" * 300, "d"),
]  # fmt: skip
INVALID = [
    "", "/dev/null", "vendor.com/class", "vendor.com=dev", "=dev", "/class=dev", "vendor.com/=dev", "vendor.com/class=",
    "vendor3.com=device3", "_invalid.com/class=dev", "invalid2.com-/class=dev", "x.com/_class=dev", "x.com/class_=dev",
    "x.com/class=-dev", "x.com/class=dev:", "*.com/*dev=*gpu*", "0x.com/class=dev", "x.com/0class=dev", "x.com/a/b=dev",
    "x.com/class=a=b", "x.com/class= dev", "x.com/class=dev\n", "é.com/class=dev", "x.com/class=dé", "x.com/class=a/b",
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "device"), VALID, ids=[text[:40] for text, _, _ in VALID])
def test_a_qualified_name_has_a_kind_and_a_device(text: str, kind: str, device: str) -> None:
    assert parse_device_name(text) == DeviceName(kind, device)
    assert is_qualified(text)


@pytest.mark.parametrize("text", INVALID)
def test_what_is_no_qualified_name_is_refused_in_one_line(text: str) -> None:
    assert not is_qualified(text)
    with pytest.raises(CdiError) as caught:
        parse_device_name(text)
    assert caught.value.code == "OCIGPU-CDI-1"
    assert caught.value.render("ocigpu").count("\n") == 1


@given(st.text(max_size=30))
def test_a_name_is_parsed_exactly_if_it_is_qualified(text: str) -> None:
    try:
        assert "=".join(parse_device_name(text)) == text
        assert is_qualified(text)
    except CdiError:
        assert not is_qualified(text)


def test_a_kind_without_a_slash_says_how_one_is_written() -> None:
    assert check_kind("vcom") == "a kind is written vendor/class"


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("name", ""),
        ("vendor.com/name.x_y-z", ""),
        ("VENDOR.com/Name", ""),
        ("ocigpu/fingerprint", ""),
        ("bad key!!", "start and end"),
        ("bad key", 'character " "'),
        ("/name", "not a DNS name"),
        ("a..b/name", "not a DNS name"),
        ("-a/name", "not a DNS name"),
        ("a_b/name", "not a DNS name"),
        ("a/b/name", "not a DNS name"),
        ("a." * 127 + "/n", "not a DNS name"),
        ("x/", "empty name"),
        ("", "empty name"),
        ("n" * 64, "longer than 63"),
    ],
)
def test_the_key_of_an_annotation_in_a_specification_is_checked(key: str, problem: str) -> None:
    found = check_annotation_name(key)
    assert bool(found) == bool(problem)
    assert problem in found
