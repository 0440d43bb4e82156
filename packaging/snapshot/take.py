"""What a snapshot has loaded, and how a program begins in it: executed by snapshot.c, with these ``sys.words``.

HERE LIBRARY LIBRARY-NOW SITE SITE-NOW STUBS: this directory; that of our package and that of python-prctl, where they
will be and where they are; and that of the stubs of PROGRAMS as scripts, which have the code for the interpreter.
"""

import _imp
import _thread
import gc
import importlib.util
import marshal
import os
import sys

import _syscall

PROGRAMS = {
    "ocigpu-runtime": ("ocigpu.runtime", 0),
    "ocigpu-hook": ("ocigpu.hook", 0),
    "ocigpu-container-cli": ("ocigpu.entry.container_cli.main", 1),
}
"""The module of each program, and how many of the words, which begin with its name, its main does not take."""
WHEN_USED = ("shutil", "locale")
"""What argparse imports when it is used."""
OF_STARTS = (
    "read_fingerprint", "is_here", "has_driver", "parse_request", "request_devices", "select_devices", "read_facts",
    "read_now", "make_plan",
)  # fmt: skip
"""What a start asks a vendor: fields of :class:`ocigpu.gpus.vendors.Vendor`, which name their modules in texts."""
ELSEWHERE = (
    "ocigpu.gpus.nvidia.nvml_child.", "ocigpu.cdi.yaml_child.", "ctypes.", "_ctypes.",
    "ocigpu.entry.container_cli.load.", "platform.",
)  # fmt: skip
"""What only the ordinary interpreter loads."""
CODECS = ("ascii", "latin_1", "unicode_escape")
"""What the interpreter imports when it is used by name."""
SWITCH = b"OCIGPU_NO_IMAGE"


class Finder:
    """Finds modules where they are now, and names them as where they will be."""

    def __init__(self, places: list[tuple[str, str]]) -> None:
        self.places = places

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> object:
        """Return how a module is loaded, None for one that is not in these places."""
        relative = name.replace(".", "/")
        for shown, now in self.places:
            for file in (f"{relative}/__init__.py", f"{relative}.py"):
                # no stat: numbers of inodes, some of which are small, would make two snapshots different
                if os.access(f"{now}/{file}", os.F_OK):
                    is_package = file.endswith("/__init__.py")
                    spec = importlib.util.spec_from_loader(name, self, origin=f"{shown}/{file}", is_package=is_package)
                    spec.loader_state, spec.has_location = f"{now}/{file}", True
                    if is_package:
                        spec.submodule_search_locations.append(f"{shown}/{relative}")
                    return spec
        return None

    def create_module(self, _spec: object) -> None:
        """Leave the making of the module to the import system."""

    def exec_module(self, module: object) -> None:
        """Execute a module's source."""
        shown, module.__file__ = module.__file__, module.__spec__.loader_state  # it may read a file beside it
        exec(apart(compile_file, module.__file__, shown), module.__dict__)  # noqa: S102 - our own sources, as import does
        module.__file__ = shown


def read(path: str) -> str:
    """Return the text of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def apart(function: object, *arguments: str) -> object:
    """Return what a function returns in a process of its own: nothing that it needs memory for is kept."""
    answer = os.memfd_create("answer")
    if os.fork() == 0:
        os.write(answer, marshal.dumps(function(*arguments)))
        os._exit(0)
    os.wait()
    result = marshal.loads(os.pread(answer, os.lseek(answer, 0, os.SEEK_END), 0))  # noqa: S302 - our own child's
    os.close(answer)
    return result


def compile_file(path: str, shown: str) -> object:
    """Return the code of a source."""
    return compile(read(path), shown, "exec")


def list_imports(path: str) -> list[str]:
    """Return the modules that a source may import, and what might be one; sorted."""
    from imports import find_imports

    names = find_imports(read(path))
    return sorted({name.partition(":")[0] for name in names} | {name.replace(":", ".") for name in names})


def vendors_names() -> list[str]:
    """Return the modules that vendors name."""
    from ocigpu.core.vendors import VENDORS
    from ocigpu.gpus.vendors import load_vendor

    functions = [getattr(load_vendor(name), field) for name in VENDORS for field in OF_STARTS]
    texts = [function.__closure__[0].cell_contents for function in functions if function.__closure__]
    return [f"ocigpu.gpus.{text.partition(':')[0]}" for text in texts]


def import_whole(names: list[str]) -> None:
    """Import these modules and all that they, and what they import of ours, can ever import."""
    ahead, seen = list(names), set()
    while ahead:
        name = ahead.pop()
        if name in seen or f"{name}.".startswith(ELSEWHERE):
            continue
        seen.add(name)
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is None:  # the name of a function, or a module of another system
            continue
        __import__(name)
        if name.partition(".")[0] == "ocigpu":
            ahead += apart(list_imports, spec.loader_state)


def read_code(stub: str) -> str:
    """Return the code that a stub gives to the interpreter; compiled, it ends the last line too."""
    import re

    return re.search(r"-c '(.*?)' \"\$0\"", read(stub), re.DOTALL)[1] + "\n"


NONE = (None, 0)


def begin(words: list[bytes], environment: list[bytes]) -> None:
    """Run the program of a command line, as the ordinary interpreter would; returns if that is to do it."""
    arguments = [os.fsdecode(word) for word in words]
    main, first = mains.get(arguments[4], NONE) if words[1:4] == [b"-I", b"-S", b"-c"] else NONE
    variables: dict[bytes, bytes] = {}
    for entry in environment:
        name, equals, value = entry.partition(b"=")
        if equals:
            variables.setdefault(name, value)
    if main is None or variables.get(SWITCH):
        return
    _imp.exec_builtin(_imp.create_builtin(signal_spec))  # reads which signals the caller ignores
    environ.clear()
    environ.update(variables)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            setattr(sys, name, None)
    sys.argv[:] = ["-c", *arguments[5:]]
    try:
        status = main(arguments[5 + first :])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    if status != ORDINARY:
        leave(status)


here, library, library_now, site, site_now, stubs = sys.words
sys.meta_path[2:] = [Finder([(library, library_now), (site, site_now), (sys.path[0], sys.path[0]), (here, here)])]
programs = [module for module, _ in PROGRAMS.values()]
import_whole([*programs, *WHEN_USED, *vendors_names(), *(f"encodings.{name}" for name in CODECS)])
from ocigpu import ORDINARY, leave  # noqa: E402 - after what is imported apart

environ = os.environ._data  # noqa: SLF001 - the table behind it
mains = {
    apart(read_code, f"{stubs}/.{name}.sh"): (sys.modules[module].main, first)
    for name, (module, first) in PROGRAMS.items()
}
signal_spec = sys.modules["_signal"].__spec__
environ.clear()
sys.path[:] = [library, site]
del sys.meta_path[2:]  # nothing is imported from files any more
sys.path_hooks.clear()
sys.path_importer_cache.clear()
del sys.words
for name in ("Finder", "read", "apart", "compile_file", "list_imports", "vendors_names", "import_whole", "read_code"):
    del globals()[name]
_thread.stack_size(1 << 20)  # as with the GNU library; musl's own default is 128 KiB
_syscall.set_start(begin)
gc.disable()
gc.collect()
_syscall.make_immortal(gc.get_objects())
gc.freeze()
