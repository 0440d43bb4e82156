"""The doctor on hosts whose driver lies where real systems have it: nothing is wrong, and nothing is said to be."""

import pytest
from doctor.conftest import bad, examine
from support.layouts import LAYOUTS, LISTED, LaidOut, find_layout
from support.products import one_in

from ocigpu.doctor.host import Host
from ocigpu.doctor.report import render

pytestmark = pytest.mark.root
NOT_THERE = ("Install the driver", "modprobe nvidia", "apt-get install", "no driver is loaded")
"""Words for hosts with the kernel module nvidia, wrong on all others."""


@pytest.mark.parametrize("name", one_in(3, LAYOUTS))
def test_a_healthy_system_has_no_finding(name: str, laid_out: LaidOut) -> None:
    host = laid_out(name)
    findings = examine(host.directory)
    assert bad(findings) == set()
    text = "\n".join(render(Host(str(host.directory)), findings, True))
    if name in LISTED:
        directory = find_layout(name)["root"] + find_layout(name)["libraries"]
        assert f"{host.directory}{directory}: libraries of the driver" in text
    else:
        assert [words for words in NOT_THERE if words in text] == []
