"""One target under atheris, in a process of its own: ``python -m fuzz.one NAME [libFuzzer options] DIRECTORY...``."""

import sys

import atheris

with atheris.instrument_imports(include=["ocigpu", "tomllib"]):
    import tomllib  # noqa: F401 - read_settings imports it when it needs it, which would be too late to instrument it

    from fuzz import targets


def main() -> None:
    name = sys.argv[1]
    atheris.Setup([sys.argv[0], *sys.argv[2:]], lambda data: targets.run(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
