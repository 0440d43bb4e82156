"""The seccomp filter, run by a small interpreter of classic BPF and by the kernel."""

import errno
import os
import re
import signal
import struct

import pytest
from support import requirements

from ocigpu.core.errors import ApplyError
from ocigpu.provision import fence
from ocigpu.system import libc

ALLOW, KILL, REFUSE = fence.SECCOMP_RET_ALLOW, fence.SECCOMP_RET_KILL_PROCESS, fence.SECCOMP_RET_ERRNO | errno.EPERM


def run_filter(code, arch, number):
    data = struct.pack("=II", number, arch)
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, operand = struct.unpack_from("=HBBI", code, at * 8)
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x06:
            return operand
        else:
            holds = accumulator == operand if operation == 0x15 else accumulator >= operand
            assert operation in (0x15, 0x35)
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", fence.SYSCALLS)
def test_the_listed_calls_pass_and_no_others(machine):
    code, arch = fence.build_filter(machine), fence.AUDIT_ARCH[machine]
    numbers = fence.SYSCALLS[machine]
    without_effect = {numbers["fsync"], numbers["fdatasync"]}
    answers = {number: run_filter(code, arch, number) for number in range(600)}
    assert {number for number in answers if answers[number] == ALLOW} == set(numbers.values()) - without_effect
    assert {number for number in answers if answers[number] == fence.SECCOMP_RET_ERRNO} == without_effect
    assert set(answers.values()) == {ALLOW, REFUSE, fence.SECCOMP_RET_ERRNO}


def test_calls_of_the_x32_abi_and_of_other_architectures_do_not_pass():
    code = fence.build_filter("x86_64")
    assert run_filter(code, fence.AUDIT_ARCH["x86_64"], 0x40000000) == REFUSE
    assert run_filter(code, fence.AUDIT_ARCH["x86_64"], 0xFFFFFFFF) == REFUSE
    assert run_filter(code, 0x40000003, 0) == KILL  # i386


@pytest.mark.parametrize("machine", fence.SYSCALLS)
@pytest.mark.parametrize(
    "name", ["socket", "clone", "clone3", "fork", "mount", "unshare", "setns", "ptrace", "bpf", "prctl", "setuid",
             "chroot", "pivot_root", "open_by_handle_at", "keyctl", "io_uring_setup", "mknodat", "kill"],
)  # fmt: skip
def test_dangerous_calls_are_not_listed(machine, name):
    assert name not in fence.SYSCALLS[machine]


@pytest.mark.parametrize("machine", fence.SYSCALLS)
def test_the_numbers_are_those_of_the_kernels_headers(machine):
    requirements.require(requirements.system_calls(machine))
    text = requirements.SYSTEM_CALLS[machine].read_text()
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", text, re.M)}
    if machine == "aarch64":  # 64-bit names of the generic table, and a call it leaves to architectures
        numbers.update(newfstatat=numbers["fstatat"], prlimit64=numbers["prlimit64"])
    assert {name: numbers[name] for name in fence.SYSCALLS[machine]} == fence.SYSCALLS[machine]


def test_an_unknown_machine_is_refused():
    with pytest.raises(ApplyError) as caught:
        fence.build_filter("riscv64")
    assert caught.value.message == "ldconfig sandbox: no list of system calls for riscv64"


def exit_of(function):
    """Return the wait status of a forked child: 0 if the function returned true."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def test_the_kernel_enforces_the_filter():
    def attempt():
        fence.load_prctl()
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        pipe, _ = os.pipe()
        fence.install_filter(fence.build_filter(os.uname().machine))
        os.fsync(pipe)  # succeeds and does nothing: without the filter it is EINVAL
        try:
            os.mkfifo("/tmp/ocigpu-never")
        except PermissionError:
            return True
        return False

    assert exit_of(attempt) == 0


@pytest.mark.root
@pytest.mark.parametrize("uid", [0, 1234])
def test_privileges_are_gone_for_good(uid):
    def attempt():
        fence.load_prctl()
        fence.forgo_privileges()
        fence.drop_privileges(uid, uid)
        with open("/proc/self/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        sets = {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
        ids = os.getresuid() + os.getresgid()
        return sets == {"0" * 16} and status["NoNewPrivs"] == "1" and ids == (uid,) * 6 and os.getgroups() == []

    assert exit_of(attempt) == 0


def test_limits_are_lowered_and_never_raised():
    import resource

    def attempt():
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        fence.set_limits()
        return (
            resource.getrlimit(resource.RLIMIT_NOFILE) == (20, 20)
            and resource.getrlimit(resource.RLIMIT_FSIZE) == (4 << 20, 4 << 20)
            and resource.getrlimit(resource.RLIMIT_CPU) == (10, 10)
        )

    assert exit_of(attempt) == 0


def test_signals_that_the_interpreter_ignores_get_their_default_back():
    def attempt():
        fence.reset_signals()
        return signal.getsignal(signal.SIGPIPE) == signal.getsignal(signal.SIGXFSZ) == signal.SIG_DFL

    assert exit_of(attempt) == 0
