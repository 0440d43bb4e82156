"""``python -m ocigpu.kubernetes.api [DIRECTORY]``: generate the modules of the .proto files (needs grpcio-tools).

DIRECTORY: where the package ``ocigpu`` is, or is to be; default: this one.
"""

import sys
from pathlib import Path

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE.parents[2]


def generate(directory: str) -> None:
    """Write _pb2.py and _pb2.pyi of every .proto file below ``directory``; raises SystemExit when protoc refuses."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    files = [str(path.relative_to(SOURCES)) for path in sorted(PACKAGE.glob("*.proto"))]
    status = protoc.main(
        ["protoc", f"--proto_path={SOURCES}", f"--python_out={directory}", f"--pyi_out={directory}", *files]
    )
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    generate(sys.argv[1] if len(sys.argv) > 1 else str(SOURCES))
