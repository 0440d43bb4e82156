"""What we use of ``ctypes``, by the module behind it: ``ctypes`` itself is 2 ms of a container's start.

Names and meanings are those of ``ctypes``.  Where ``_ctypes``, which is private to CPython, has another form,
``ctypes`` does the work.
"""

# ruff: noqa: F403 - what is taken is in __all__

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from ctypes import *

    Buffer = ctypes.Array[ctypes.c_char]
else:
    try:
        from _ctypes import (
            FUNCFLAG_CDECL,
            FUNCFLAG_USE_ERRNO,
            CFuncPtr,
            Structure,
            _SimpleCData,
            addressof,
            byref,
            dlopen,
            dlsym,
            get_errno,
            sizeof,
        )  # fmt: skip
    except ImportError:  # another Python than CPython
        from ctypes import *
    else:

        def _simple(name, letter):
            """Return a simple type; the letters are those of the module struct, but for "z" and "P", pointers."""
            return type(_SimpleCData)(name, (_SimpleCData,), {"_type_": letter})

        c_char, c_int, c_uint = _simple("c_char", "c"), _simple("c_int", "i"), _simple("c_uint", "I")
        c_long, c_ulong, c_uint64 = _simple("c_long", "l"), _simple("c_ulong", "L"), _simple("c_uint64", "Q")
        c_char_p, c_void_p = _simple("c_char_p", "z"), _simple("c_void_p", "P")
        c_uint32, c_size_t = c_uint, c_ulong

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


__all__ = [
    "CDLL", "Structure", "addressof", "byref", "c_char_p", "c_int", "c_long", "c_size_t", "c_uint", "c_uint32",
    "c_uint64", "c_ulong", "c_void_p", "create_string_buffer", "get_errno", "sizeof",
]  # fmt: skip
