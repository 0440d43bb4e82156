#!/usr/bin/env python3
"""Renders the Helm chart without Helm, for the plain manifests and the tests.

    render.py [--namespace NAME] [--values FILE] [--plain | --tenants | --leases | --caas]

It knows the part of Go's text/template and of Helm's functions that the chart uses, and refuses everything else; so a
template that it renders is one that Helm renders alike.  Values are held to the chart's schema, as Helm does.
``--plain``: with the namespace, as in ocigpu.yaml.  ``--tenants``: what tenancies need, as in tenants.yaml.
``--leases``: agent and device plugin of tenants' nodes, as in leases.yaml.  ``--caas``: the service that takes tenants'
requests, as in caas.yaml.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import jsonschema
    import yaml
except ModuleNotFoundError as error:
    sys.exit(f"render.py: {error.name} is not installed: apt-get install python3-jsonschema python3-yaml")

HERE = Path(__file__).parent
CHART = HERE / "chart"
_SPLIT = re.compile(r"\{\{(-)?\s*(.*?)\s*(?:(?<=\s)(-))?\}\}", re.S)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9]+|:=|[()|,]|\$?[A-Za-z_]\w*(?:\.\w+)*|\$(?:\.\w+)*|(?:\.\w+)+|\.|\S')
_HEADER = "# Rendered from the chart by packaging/kubernetes/render.py --{}: change the chart, then run it again.\n"
_OTHERS = ("devicePlugin", "exporter", "nodeLabels")
_NAMESPACE = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {}\n  labels:\n{}"
_PRIVILEGED = "    # hostPath volumes\n    pod-security.kubernetes.io/enforce: privileged\n"


class ChartError(Exception):
    """What is wrong with a template, or what it says with fail."""


Node = str | tuple[str, Any]
"""A piece of a template: its text, or ("action", expression), or "if" or "range" with branches (condition, nodes)."""


def parse(source: str, defined: dict[str, list[Node]]) -> list[Node]:
    """Return the nodes of a template and add the templates that it defines."""
    nodes, stop = _parse(_pieces(source), defined)
    if stop:
        raise ChartError(f"unexpected: {stop}")
    return nodes


def _parse(pieces: Iterator[tuple[str, str]], defined: dict[str, list[Node]]) -> tuple[list[Node], str]:
    """Return the nodes up to the end of a block or its "else", and that action."""
    nodes: list[Node] = []
    for kind, text in pieces:
        word, _, condition = text.partition(" ")
        if kind == "text":
            nodes.append(text)
        elif word in ("end", "else"):
            return nodes, text
        elif word in ("if", "range", "define"):
            branches = []
            stop = "else"
            while stop.startswith("else") and (word == "if" or not branches):
                body, stop = _parse(pieces, defined)
                branches.append((condition, body))
                condition = stop.removeprefix("else").strip().removeprefix("if ") or "true"
            if stop != "end":
                raise ChartError(f"a block without its end: {text}")
            if word == "define":
                defined[json.loads(branches[0][0])] = branches[0][1]
            else:
                nodes.append((word, branches))
        elif not text.startswith("/*"):
            nodes.append(("action", text))
    return nodes, ""


def _pieces(source: str) -> Iterator[tuple[str, str]]:
    position, trim = 0, False
    for match in _SPLIT.finditer(source):
        text = source[position : match.start()]
        text = text.lstrip() if trim else text
        yield "text", text.rstrip() if match.group(1) else text
        yield "action", match.group(2)
        position, trim = match.end(), bool(match.group(3))
    yield "text", source[position:].lstrip() if trim else source[position:]


class Renderer:
    """Executes parsed templates; ``functions`` are those that templates may call."""

    def __init__(self, defined: dict[str, list[Node]]) -> None:
        self.defined = defined
        self.functions: dict[str, Callable[..., Any]] = {
            "include": lambda name, data: self.run(self.defined[name], {"$": data, ".": data}),
            "default": lambda fallback, value="": value or fallback,
            "printf": lambda form, *values: form % values,
            "quote": lambda value: json.dumps(str(value), ensure_ascii=False),
            "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
            "toJson": lambda value: json.dumps(value, separators=(",", ":")),
            "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip("\n"),
            "nindent": lambda width, text: "\n" + "\n".join(" " * width + line for line in text.split("\n")),
            "eq": lambda one, two: one == two,
            "ne": lambda one, two: one != two,
            "gt": lambda one, two: one > two,
            "len": len,
            "list": lambda *values: list(values),
            "first": lambda items: items[0],
            "not": lambda value: not value,
            "and": lambda *values: next((value for value in values if not value), values[-1]),
            "or": lambda *values: next((value for value in values if value), values[-1]),
            "contains": lambda part, text: part in text,
            "has": lambda item, items: item in items,
            "hasKey": lambda mapping, name: name in mapping,
            "fail": self._fail,
            ".Files.Get": lambda name: (CHART / name).read_text(),
        }

    @staticmethod
    def _fail(message: str) -> str:
        raise ChartError(message)

    def run(self, nodes: list[Node], variables: dict[str, Any]) -> str:
        """Return the text; ``variables`` by name, "." among them."""
        out = []
        for node in nodes:
            if isinstance(node, str):
                out.append(node)
                continue
            kind, content = node
            if kind == "if":
                chosen = (body for condition, body in content if self.value(condition, variables))
                out.append(self.run(next(chosen, []), dict(variables)))
            elif kind == "range":
                out += self._range(*content[0], variables)
            elif ":=" in content:
                name, _, expression = content.partition(":=")
                variables[name.strip()] = self.value(expression, variables)
            else:
                value = self.value(content, variables)
                out.append(str(value).lower() if isinstance(value, bool) else "" if value is None else str(value))
        return "".join(out)

    def _range(self, header: str, body: list[Node], variables: dict[str, Any]) -> Iterator[str]:
        left, assigned, expression = header.rpartition(":=")
        names = [name.strip() for name in left.split(",")] if assigned else []
        items = self.value(expression, variables)
        pairs = sorted(items.items()) if isinstance(items, dict) else enumerate(items)
        for key, value in pairs:
            values = (key, value)[-len(names) :] if names else ()
            yield self.run(body, {**variables, ".": value, **dict(zip(names, values, strict=True))})

    def value(self, expression: str, variables: dict[str, Any]) -> Any:
        """Return the value of a pipeline."""
        tokens = _TOKEN.findall(expression)
        result = self._pipeline(tokens, variables)
        if tokens:
            raise ChartError(f"cannot read: {expression}")
        return result

    def _pipeline(self, tokens: list[str], variables: dict[str, Any]) -> Any:
        """Return the value of commands, of which each has the one before as its last argument."""
        last: list[Any] = []
        while True:
            name = tokens[0]
            if name in self.functions:
                tokens.pop(0)
                arguments = []
                while tokens and tokens[0] not in ("|", ")"):
                    arguments.append(self._operand(tokens, variables))
                last = [self.functions[name](*arguments, *last)]
            else:
                last = [self._operand(tokens, variables)]
            if not tokens or tokens[0] != "|":
                return last[0]
            tokens.pop(0)

    def _operand(self, tokens: list[str], variables: dict[str, Any]) -> Any:
        word = tokens.pop(0)
        if word == "(":
            value = self._pipeline(tokens, variables)
            tokens.pop(0)
            return value
        if word.startswith('"'):
            return json.loads(word)
        if word in ("true", "false"):
            return word == "true"
        if word.lstrip("-").isdecimal():
            return int(word)
        first, *path = word.split(".")
        if first not in ("", *variables):
            raise ChartError(f"unknown: {word}")
        value = variables[first or "."]
        for part in filter(None, path):
            if not isinstance(value, dict):
                raise ChartError(f"{word}: nothing has {part}")
            value = value.get(part)
        return value


def merge(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return values with others over them, as Helm merges: mappings key by key, null removes."""
    found = dict(base)
    for key, value in other.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = merge(found[key], value)
        else:
            found[key] = value
    return found


def check(values: dict[str, Any]) -> None:
    """Raise ChartError for values that the chart's schema refuses."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    for error in jsonschema.Draft7Validator(schema).iter_errors(values):
        raise ChartError(f"values{error.json_path[1:]}: {error.message}")


def render(
    values: dict[str, Any],
    namespace: str = "ocigpu",
    release: str = "ocigpu",
    service: str = "Helm",
    without: str = "",
) -> str:
    """Return all objects of the chart as YAML documents, those of one file left out; raises ChartError."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    merged = merge(yaml.safe_load((CHART / "values.yaml").read_text()), values)
    check(merged)
    top = {
        "Values": merged,
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": release, "Namespace": namespace, "Service": service},
    }
    defined: dict[str, list[Node]] = {}
    paths = [path for path in sorted((CHART / "templates").iterdir()) if path.suffix != ".txt" and path.name != without]
    parsed = [parse(path.read_text(), defined) for path in paths]
    renderer = Renderer(defined)
    texts = [renderer.run(nodes, {"$": top, ".": top}) for nodes in parsed]
    return "".join(f"{text.strip()}\n" for text in texts if text.strip())


def plain(values: dict[str, Any], namespace: str = "ocigpu") -> str:
    """Return all objects as :func:`render` does, and their namespace; without values that is ocigpu.yaml."""
    lines = render(values, namespace, service="kubectl").split("\n")
    text = "".join(f"{line.rstrip()}\n" for line in lines if line.strip())
    return f"{_HEADER.format('plain')}---\n{_NAMESPACE.format(namespace, _PRIVILEGED)}{text}"


def tenants(values: dict[str, Any], namespace: str = "ocigpu") -> str:
    """Return the kinds of objects for tenants, their policies and their controller, without the programs of nodes."""
    kinds = "".join(f"---\n{path.read_text()}" for path in sorted((CHART / "kinds").iterdir()))
    space = f"---\n{_NAMESPACE.format(namespace, _PRIVILEGED)}"
    return f"{_HEADER.format('tenants')}{kinds}{space}{_only('tenants', {'enabled': True}, values, namespace)}"


def leases(values: dict[str, Any], namespace: str = "ocigpu") -> str:
    """Return what runs on nodes whose GPUs are lent; their kind and namespace are those of :func:`tenants`."""
    check = "ocigpu firmware check --baseline /etc/ocigpu/check/baseline.json"
    check += " --bmc @/var/lib/ocigpu/bmc-address --credentials /var/lib/ocigpu/bmc"
    wanted = {"enabled": True, "check": check, "secret": "ocigpu-check", "fabric": "grpc:vsock:42:6667"}
    return f"{_HEADER.format('leases')}{_only('leases', wanted, values, namespace)}"


def caas(values: dict[str, Any], namespace: str = "ocigpu") -> str:
    """Return the service that takes tenants' requests; its namespace is that of :func:`tenants`."""
    wanted = {"enabled": True, "tlsSecret": "ocigpu-caas-tls"}
    return f"{_HEADER.format('caas')}{_only('caas', wanted, values, namespace)}"


def _only(part: str, wanted: dict[str, Any], values: dict[str, Any], namespace: str) -> str:
    """Return a part of the chart without the programs of nodes."""
    only = {name: {"enabled": False} for name in _OTHERS}
    only |= {part: wanted, "config": {"existing": "none"}, "runtimeClass": {"create": False}}
    lines = render(merge(only, values), namespace, service="kubectl", without="kinds.yaml").split("\n")
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


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
    try:
        values = yaml.safe_load(words.values.read_text()) if words.values else {}
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise ChartError(f"{words.values}: it is not a mapping of values")
        forms = {words.tenants: tenants, words.leases: leases, words.caas: caas, words.plain: plain}
        form = forms.get(True, render)
        print(form(values, words.namespace), end="")
    except yaml.YAMLError as error:
        sys.exit(f"render.py: {words.values}: {' '.join(str(error).split())}")
    except OSError as error:
        sys.exit(f"render.py: {error.filename}: {error.strerror}")
    except ChartError as error:
        sys.exit(f"render.py: {error}")


if __name__ == "__main__":
    main()
