"""Calls of C: system calls by their numbers, and the parts of ``ctypes`` that NVML needs.

Importing ``ctypes`` takes 2 ms of a container's start, so this module uses ``_ctypes`` directly.  Names and meanings
are those of ``ctypes``.  ``_ctypes`` is private to CPython; if its form differs, ``ctypes`` does the work.  A snapshot
of the interpreter has only :func:`call` and :func:`address` (packaging/snapshot/snapshot.c).
"""

# ruff: noqa: F403 - the names are in __all__

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import *

    def call(number: int, *arguments: int | bytes | bytearray | None) -> int:
        """Return the result of syscall(2); raises OSError.  Memory is passed by its address, None is 0."""

    def address(buffer: bytes | bytearray) -> int:
        """Return where the contents of an object are in memory, as long as it exists and is not resized."""

elif "_syscall" in sys.builtin_module_names:
    from _syscall import address, call
else:
    import os

    try:
        from _ctypes import (
            FUNCFLAG_CDECL,
            FUNCFLAG_USE_ERRNO,
            CFuncPtr,
            _SimpleCData,
            addressof,
            byref,
            dlopen,
            dlsym,
            get_errno,
        )  # fmt: skip
    except ImportError:  # another Python than CPython
        from ctypes import *
    else:

        def _simple(name, letter):
            """Return a simple type; the letters are those of the module struct, but for "z" and "P", pointers."""
            return type(_SimpleCData)(name, (_SimpleCData,), {"_type_": letter})

        c_char, c_int, c_uint = _simple("c_char", "c"), _simple("c_int", "i"), _simple("c_uint", "I")
        c_long, c_ulong = _simple("c_long", "l"), _simple("c_ulong", "L")
        c_char_p, c_void_p = _simple("c_char_p", "z"), _simple("c_void_p", "P")

        class _Function(CFuncPtr):
            _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
            _restype_ = c_int

        class CDLL:
            """A shared library that is loaded already, by subscription: every time another function object."""

            def __init__(self, name, use_errno):
                assert use_errno
                self._handle = dlopen(name, 0)

            def __getitem__(self, name):
                return _Function(dlsym(self._handle, name))

        def create_string_buffer(content, size=0):
            """Return an array of characters: of a size, all zero, or of just these bytes."""
            if isinstance(content, int):
                return (c_char * content)()
            buffer = (c_char * (size or len(content) + 1))()
            buffer.raw = content
            return buffer

    _syscall = CDLL(None, use_errno=True)["syscall"]
    _syscall.restype = c_long

    def call(number, *arguments):
        result = _syscall(c_long(number), *map(_argument, arguments))
        if result == -1:
            raise OSError(get_errno(), os.strerror(get_errno()))
        return result

    def _argument(value):
        return c_ulong(value) if isinstance(value, int) else _array(value) if isinstance(value, bytearray) else value

    def _array(buffer):
        return (c_char * len(buffer)).from_buffer(buffer)

    def address(buffer):
        if isinstance(buffer, bytearray):
            return addressof(_array(buffer))
        return c_void_p.from_buffer(c_char_p(buffer)).value


__all__ = [
    "CDLL", "address", "byref", "c_char_p", "c_int", "c_uint", "c_void_p", "call", "create_string_buffer",
]  # fmt: skip
