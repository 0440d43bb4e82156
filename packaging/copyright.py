"""copyright.py DIRECTORY INSTALLED [PACKAGE]: prints the copyright file of a package that carries these libraries.

INSTALLED: where these are once the package is installed. PACKAGE: of libraries alone, without ocigpu. Licences are
named as the libraries' own metadata has them.
"""

import importlib.metadata
import sys

HEAD = """\
ocigpu is licensed under the Apache License, version 2.0
(https://www.apache.org/licenses/LICENSE-2.0; on Debian /usr/share/common-licenses/Apache-2.0).

The package carries these libraries for {}, unchanged, from https://pypi.org:
"""
TAIL = """\

python-prctl is licensed under the GNU General Public License, version 3 or later
(https://www.gnu.org/licenses/gpl-3.0.txt; on Debian /usr/share/common-licenses/GPL-3).
Its complete source is in /usr/share/doc/ocigpu/source.

/usr/bin/ocigpu-runtime and /usr/bin/ocigpu-hook are linked with musl (https://musl.libc.org, MIT), or, in a package
built without it, with the GNU C library, which is licensed under the GNU Lesser General Public License, version 2.1 or
later (https://www.gnu.org/licenses/lgpl-2.1.txt; on Debian /usr/share/common-licenses/LGPL-2.1).  What they are made of
is in /usr/share/doc/ocigpu/source, too.
"""


def describe(distribution: importlib.metadata.Distribution, installed: str) -> str:
    data = distribution.metadata
    text = data.get("License-Expression") or data.get("License", "").split("\n")[0]
    classifiers = [line for line in data.get_all("Classifier", []) if line.startswith("License ::")]
    licence = text or ", ".join(line.rpartition(" :: ")[2] for line in classifiers)
    files = [
        f"  {installed}/{file}"
        for file in distribution.files or []
        if ".dist-info/" in str(file) and any(word in file.name.upper() for word in ("LICEN", "COPYING", "NOTICE"))
    ]
    return "\n".join([f"{data['Name']} {data['Version']}: {licence}", *files])


if __name__ == "__main__":
    found = importlib.metadata.distributions(path=[sys.argv[1]])
    print(HEAD.format("commands of ocigpu" if sys.argv[3:] else "its command line"))
    print("\n".join(describe(one, sys.argv[2]) for one in sorted(found, key=lambda one: one.metadata["Name"].lower())))
    print("" if sys.argv[3:] else TAIL, end="")
