#!/usr/bin/env python3
"""Renders the Helm chart without Helm, for the plain manifests and the tests.

    render.py [--namespace NAME] [--values FILE] [--plain]

It knows the part of Go's text/template and of Helm's functions that the chart uses, and refuses everything else; so a
template that it renders is one that Helm renders alike.  Values are held to the chart's schema, as Helm does.
``--plain``: with the namespace, as in ocigpu.yaml.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CHART = HERE / "chart"
_SPLIT = re.compile(r"\{\{(-)?\s*(.*?)\s*(?:(?<=\s)(-))?\}\}", re.S)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9]+|:=|[()|,]|\$?[A-Za-z_]\w*(?:\.\w+)*|\$(?:\.\w+)*|(?:\.\w+)+|\.|\S')
_HEADER = "# Rendered from the chart by packaging/kubernetes/render.py --plain: change the chart, then run it again.\n"
_NAMESPACE = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {}\n  labels:\n{}"
_PRIVILEGED = "    # hostPath volumes\n    pod-security.kubernetes.io/enforce: privileged\n"


class ChartError(Exception):
    """What is wrong with a template, or what it says with fail."""


class Node:
    """A piece of a template: text, an action, or a block with branches of (condition, nodes)."""

    def __init__(self, kind: str, text: str = "") -> None:
        self.kind = kind
        self.text = text
        self.branches: list[tuple[str, list[Node]]] = []


def parse(source: str, defined: dict[str, list[Node]]) -> list[Node]:
    """Return the nodes of a template and add the templates that it defines."""
    root: list[Node] = []
    stack: list[tuple[Node | None, list[Node]]] = [(None, root)]
    for kind, text in _pieces(source):
        nodes = stack[-1][1]
        word, _, rest = text.partition(" ")
        if kind == "text":
            nodes.append(Node("text", text))
        elif text.startswith("/*"):
            continue
        elif word in ("if", "range", "define"):
            block = Node(word)
            block.branches.append((rest, []))
            if word == "define":
                defined[json.loads(rest)] = block.branches[0][1]
            else:
                nodes.append(block)
            stack.append((block, block.branches[0][1]))
        elif word == "else":
            owner = stack.pop()[0]
            if owner is None or owner.kind != "if" or (rest and not rest.startswith("if ")):
                raise ChartError(f"unexpected: {text}")
            owner.branches.append((rest.removeprefix("if ") or "true", []))
            stack.append((owner, owner.branches[-1][1]))
        elif word == "end":
            stack.pop()
        else:
            nodes.append(Node("action", text))
    if len(stack) != 1:
        raise ChartError("a block without its end")
    return root


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
            "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip("\n"),
            "nindent": lambda width, text: "\n" + "\n".join(" " * width + line for line in text.split("\n")),
            "eq": lambda one, two: one == two,
            "ne": lambda one, two: one != two,
            "gt": lambda one, two: one > two,
            "len": len,
            "not": lambda value: not value,
            "and": lambda *values: next((value for value in values if not value), values[-1]),
            "or": lambda *values: next((value for value in values if value), values[-1]),
            "contains": lambda part, text: part in text,
            "has": lambda item, items: item in items,
            "hasKey": lambda mapping, name: name in mapping,
            "fail": self._fail,
        }

    @staticmethod
    def _fail(message: str) -> str:
        raise ChartError(message)

    def run(self, nodes: list[Node], variables: dict[str, Any]) -> str:
        """Return the text; ``variables`` by name, "." among them."""
        out = []
        for node in nodes:
            if node.kind == "text":
                out.append(node.text)
            elif node.kind == "if":
                chosen = (body for condition, body in node.branches if self.value(condition, variables))
                out.append(self.run(next(chosen, []), dict(variables)))
            elif node.kind == "range":
                out += self._range(node, variables)
            elif ":=" in node.text:
                name, _, expression = node.text.partition(":=")
                variables[name.strip()] = self.value(expression, variables)
            else:
                out.append(_text(self.value(node.text, variables)))
        return "".join(out)

    def _range(self, node: Node, variables: dict[str, Any]) -> Iterator[str]:
        header, body = node.branches[0]
        left, assigned, expression = header.partition(":=")
        names = [name.strip() for name in left.split(",")] if assigned else []
        expression = expression if assigned else header
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
        result = self._command(tokens, variables, [])
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            result = self._command(tokens, variables, [result])
        return result

    def _command(self, tokens: list[str], variables: dict[str, Any], last: list[Any]) -> Any:
        name = tokens[0]
        if name not in self.functions:
            return self._operand(tokens, variables)
        tokens.pop(0)
        arguments = []
        while tokens and tokens[0] not in ("|", ")"):
            arguments.append(self._operand(tokens, variables))
        return self.functions[name](*arguments, *last)

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


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


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


_KINDS: dict[str, type] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
_LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "enum": lambda value, allowed: value in allowed,
    "pattern": lambda value, form: re.search(form, value) is not None,
    "minimum": lambda value, least: value >= least,
    "maximum": lambda value, most: value <= most,
    "minLength": lambda value, least: len(value) >= least,
    "minItems": lambda value, least: len(value) >= least,
    "minProperties": lambda value, least: len(value) >= least,
}
_ANNOTATIONS = ("$schema", "description")


def check(value: Any, schema: dict[str, Any], where: str = "values") -> None:
    """Raise ChartError for what the schema refuses; a keyword of JSON Schema that is not known here is refused too."""
    kind = schema.get("type")
    if kind and (not isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, bool))):
        raise ChartError(f"{where}: {json.dumps(value, default=str)} is not of type {kind}")
    known = schema.get("properties", {})
    for keyword, wanted in schema.items():
        if keyword in _LIMITS:
            if not _LIMITS[keyword](value, wanted):
                raise ChartError(f"{where}: {json.dumps(value, default=str)}: {keyword} is {json.dumps(wanted)}")
        elif keyword == "required":
            for name in wanted:
                if name not in value:
                    raise ChartError(f"{where}: {json.dumps(name)} is missing")
        elif keyword == "items":
            for number, item in enumerate(value):
                check(item, wanted, f"{where}[{number}]")
        elif keyword == "propertyNames":
            for name in value:
                check(name, wanted, f"{where}: key {json.dumps(name)}")
        elif keyword == "properties":
            for name in value.keys() & known.keys():
                check(value[name], known[name], f"{where}.{name}")
        elif keyword == "additionalProperties":
            for name in sorted(value.keys() - known.keys()):
                if wanted is False:
                    raise ChartError(f"{where}: unknown value {json.dumps(name)}")
                check(value[name], wanted, f"{where}.{name}")
        elif keyword not in ("type", *_ANNOTATIONS):
            raise ChartError(f"values.schema.json: {keyword} is not known to render.py")


def render(values: dict[str, Any], namespace: str = "ocigpu", release: str = "ocigpu", service: str = "Helm") -> str:
    """Return all objects of the chart as YAML documents; raises ChartError."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    merged = merge(yaml.safe_load((CHART / "values.yaml").read_text()), values)
    check(merged, json.loads((CHART / "values.schema.json").read_text()))
    top = {
        "Values": merged,
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": release, "Namespace": namespace, "Service": service},
    }
    defined: dict[str, list[Node]] = {}
    paths = [path for path in sorted((CHART / "templates").iterdir()) if path.suffix != ".txt"]
    parsed = [parse(path.read_text(), defined) for path in paths]
    renderer = Renderer(defined)
    texts = [renderer.run(nodes, {"$": top, ".": top}) for nodes in parsed]
    return "".join(f"{text.strip()}\n" for text in texts if text.strip())


def plain(values: dict[str, Any], namespace: str = "ocigpu") -> str:
    """Return all objects as :func:`render` does, and their namespace; without values that is ocigpu.yaml."""
    lines = render(values, namespace, service="kubectl").split("\n")
    text = "".join(f"{line.rstrip()}\n" for line in lines if line.strip())
    return f"{_HEADER}---\n{_NAMESPACE.format(namespace, _PRIVILEGED)}{text}"


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description="Render the chart.")
    parser.add_argument("--namespace", default="ocigpu")
    parser.add_argument("--values", type=Path)
    parser.add_argument("--plain", action="store_true", help="with the namespace, as ocigpu.yaml")
    words = parser.parse_args()
    try:
        values = yaml.safe_load(words.values.read_text()) if words.values else {}
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise ChartError(f"{words.values}: it is not a mapping of values")
        print(plain(values, words.namespace) if words.plain else render(values, words.namespace), end="")
    except (ChartError, OSError, yaml.YAMLError) as error:
        sys.exit(f"render.py: {error}")


if __name__ == "__main__":
    main()
