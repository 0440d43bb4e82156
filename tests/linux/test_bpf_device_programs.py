"""bpf(2) for real, in a scratch cgroup v2."""

import errno
import os

import pytest
from support import machine, requirements
from support.bpf_programs import detach_device_program, read_instructions, read_program_id

from ocigpu.provision.device_filter import FilterRule, device_program
from ocigpu.system import bpf, libc

pytestmark = pytest.mark.root

DENY_ALL = device_program([])
ALLOW_NULL = device_program([FilterRule(True, "c", 1, 3, "rwm")])


@pytest.fixture
def cgroup_fd():
    path = f"{requirements.CGROUP2}/{machine.NAME}"
    os.mkdir(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)
    os.rmdir(path)


def test_a_program_is_loaded_and_shown_as_it_was_given(cgroup_fd):
    fd = bpf.load_device_program(ALLOW_NULL)
    assert not os.get_inheritable(fd)
    again = bpf.open_program(read_program_id(fd))
    assert read_instructions(again) == ALLOW_NULL
    os.close(again)
    os.close(fd)


def test_a_program_of_the_greatest_list_of_rules_passes_the_verifier():
    rules = [FilterRule(True, "c", 1 + minor % 7, minor, ("r", "rw")[minor % 2]) for minor in range(10_000)]
    os.close(bpf.load_device_program(device_program(rules)))


def test_a_bad_program_is_refused_with_the_verifiers_words():
    with pytest.raises(OSError, match="R0 !read_ok") as caught:
        bpf.load_device_program(b"\x95" + bytes(7))
    assert caught.value.errno in (errno.EACCES, errno.EINVAL)


def test_attached_programs_are_listed_and_replaced_in_place(cgroup_fd):
    assert bpf.query_device_programs(cgroup_fd) == bpf.Attached((), 0)
    old, new = bpf.load_device_program(DENY_ALL), bpf.load_device_program(ALLOW_NULL)
    bpf.attach_device_program(cgroup_fd, old, bpf.BPF_F_ALLOW_MULTI)
    assert bpf.query_device_programs(cgroup_fd) == bpf.Attached((read_program_id(old),), bpf.BPF_F_ALLOW_MULTI)
    bpf.attach_device_program(cgroup_fd, new, bpf.BPF_F_ALLOW_MULTI, old)
    assert bpf.query_device_programs(cgroup_fd).ids == (read_program_id(new),)
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        bpf.attach_device_program(cgroup_fd, old, bpf.BPF_F_ALLOW_MULTI, old)
    detach_device_program(cgroup_fd, new)
    assert bpf.query_device_programs(cgroup_fd).ids == ()
    os.close(old)
    os.close(new)


def test_all_of_more_programs_than_the_first_buffer_holds_are_listed(cgroup_fd, monkeypatch):
    monkeypatch.setattr(bpf, "FIRST_ROOM", 2)
    programs = [bpf.load_device_program(ALLOW_NULL) for _ in range(7)]
    for program in programs:
        bpf.attach_device_program(cgroup_fd, program, bpf.BPF_F_ALLOW_MULTI)
    assert bpf.query_device_programs(cgroup_fd).ids == tuple(map(read_program_id, programs))
    for program in programs:
        os.close(program)


def test_a_directory_that_is_no_cgroup_is_refused(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        bpf.query_device_programs(fd)
    os.close(fd)


def test_a_program_that_is_gone_cannot_be_opened():
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        bpf.open_program(0x7FFFFFFF)


def test_an_architecture_without_a_known_number_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(libc, "_machine", "sparc64")
    with pytest.raises(OSError, match="no system call number known for sparc64: 'bpf'"):
        bpf.load_device_program(DENY_ALL)
