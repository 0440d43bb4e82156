#!/usr/bin/env python3
"""Writes the Helm chart's objects as plain manifests, with Helm: ``helm template`` with the values of each form.

    render.py [--namespace NAME] [--values FILE] [--plain | --tenants | --leases | --caas]

``--plain``: with the namespace, as in ocigpu.yaml.  ``--tenants``: what tenancies need, as in tenants.yaml.
``--leases``: agent and device plugin of tenants' nodes, as in leases.yaml.  ``--caas``: the service that takes tenants'
requests, as in caas.yaml.  Helm is that of this environment (packaging/kubernetes/get_helm.py), else that of PATH.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CHART = HERE / "chart"
_HEADER = "# Rendered from the chart by packaging/kubernetes/render.py --{}: change the chart, then run it again.\n"
_OTHERS = ("devicePlugin", "exporter", "nodeLabels")
_NAMESPACE = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {}\n  labels:\n{}"
_PRIVILEGED = "    # hostPath volumes\n    pod-security.kubernetes.io/enforce: privileged\n"
_SOURCE = re.compile(r"^# Source: ocigpu/templates/(\S+)\n", re.MULTILINE)
_KINDS = "kinds.yaml"
_BY = "app.kubernetes.io/managed-by: {}\n"


class ChartError(Exception):
    """What is wrong with values or a template, in Helm's words, or why there is no Helm: one line."""


Values = dict[str, Any] | Path
"""Values themselves, or a file of them."""


def find_helm() -> str:
    """Return the path of Helm; raises ChartError for none."""
    found = shutil.which("helm", path=os.pathsep.join((os.path.join(sys.prefix, "bin"), os.environ.get("PATH", ""))))
    if not found:
        raise ChartError("no helm: install it (https://helm.sh), or run packaging/kubernetes/get_helm.py DIRECTORY")
    return found


def call_helm(command: list[str], values: Iterable[Values]) -> str:
    """Return what a command of Helm prints for the chart with these values over each other; raises ChartError."""
    with tempfile.TemporaryDirectory() as directory:
        words = [find_helm(), *command]
        for number, each in enumerate(values):
            path = each if isinstance(each, Path) else Path(directory, f"{number}.json")
            if not isinstance(each, Path):
                path.write_text(json.dumps(each))
            words += ["--values", str(path)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ChartError(" ".join(done.stderr.removeprefix("Error: ").split()))
    return done.stdout


def render(*values: Values, namespace: str = "ocigpu", release: str = "ocigpu", without: str = "") -> str:
    """Return all objects of the chart as YAML documents, those of one file left out; raises ChartError."""
    text = call_helm(["template", release, str(CHART), "--namespace", namespace], values)
    documents = [each for each in re.split(r"^---\n", text, flags=re.MULTILINE) if each.strip()]
    sources = [_SOURCE.match(each) for each in documents]
    kept = [_SOURCE.sub("", each, 1) for each, of in zip(documents, sources, strict=True) if not of or of[1] != without]
    return "".join(f"---\n{each.strip()}\n" for each in kept)


def notes(release: str, namespace: str) -> str:
    """Return what Helm says after an installation."""
    command = ["install", release, str(CHART), "--namespace", namespace, "--dry-run=client"]
    return call_helm(command, ()).rpartition("\nNOTES:\n")[2]


def _plainly(*values: Values, namespace: str, without: str = "") -> str:
    """Return objects that kubectl applies: without Helm's mark, and without empty lines."""
    text = render(*values, namespace=namespace, without=without).replace(_BY.format("Helm"), _BY.format("kubectl"))
    return "".join(f"{line.rstrip()}\n" for line in text.split("\n") if line.strip())


def plain(values: Values, namespace: str = "ocigpu") -> str:
    """Return all objects as :func:`render` does, and their namespace; without values that is ocigpu.yaml."""
    space = f"---\n{_NAMESPACE.format(namespace, _PRIVILEGED)}"
    return f"{_HEADER.format('plain')}{space}{_plainly(values, namespace=namespace)}"


def tenants(values: Values, namespace: str = "ocigpu") -> str:
    """Return the kinds of objects for tenants, their policies and their controller, without the programs of nodes."""
    kinds = "".join(f"---\n{path.read_text()}" for path in sorted((CHART / "kinds").iterdir()))
    space = f"---\n{_NAMESPACE.format(namespace, _PRIVILEGED)}"
    return f"{_HEADER.format('tenants')}{kinds}{space}{_only('tenants', {'enabled': True}, values, namespace)}"


def leases(values: Values, namespace: str = "ocigpu") -> str:
    """Return what runs on nodes whose GPUs are lent; their kind and namespace are those of :func:`tenants`."""
    check = "ocigpu firmware check --baseline /etc/ocigpu/check/baseline.json"
    check += " --bmc @/var/lib/ocigpu/bmc-address --bmc-ca /etc/ocigpu/check/ca.crt"
    check += " --credentials /var/lib/ocigpu/bmc"
    wanted = {"enabled": True, "check": check, "secret": "ocigpu-check", "fabric": "grpc:vsock:42:6667"}
    return f"{_HEADER.format('leases')}{_only('leases', wanted, values, namespace)}"


def caas(values: Values, namespace: str = "ocigpu") -> str:
    """Return the service that takes tenants' requests; its namespace is that of :func:`tenants`."""
    wanted = {"enabled": True, "tlsSecret": "ocigpu-caas-tls"}
    return f"{_HEADER.format('caas')}{_only('caas', wanted, values, namespace)}"


def _only(part: str, wanted: dict[str, Any], values: Values, namespace: str) -> str:
    """Return a part of the chart without the programs of nodes."""
    only: dict[str, Any] = {name: {"enabled": False} for name in _OTHERS}
    only |= {part: wanted, "config": {"existing": "none"}, "runtimeClass": {"create": False}}
    return _plainly(only, values, namespace=namespace, without=_KINDS)


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description="Render the chart.")
    parser.add_argument("--namespace", default="ocigpu")
    parser.add_argument("--values", type=Path)
    parser.add_argument("--plain", action="store_true", help="with the namespace, as ocigpu.yaml")
    parser.add_argument("--tenants", action="store_true", help="what tenancies need, as in tenants.yaml")
    parser.add_argument("--leases", action="store_true", help="what runs on tenants' nodes, as in leases.yaml")
    parser.add_argument("--caas", action="store_true", help="the service, as in caas.yaml")
    words = parser.parse_args()
    forms = {words.tenants: tenants, words.leases: leases, words.caas: caas, words.plain: plain}
    try:
        print(forms.get(True, render)(words.values or {}, namespace=words.namespace), end="")
    except ChartError as error:
        sys.exit(f"render.py: {error}")


if __name__ == "__main__":
    main()
