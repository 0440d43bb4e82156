"""Values for NVIDIA's Helm charts, and their equivalents in ocigpu's chart: charts.toml, and what reads it.

A values file comes from somebody else: it is read within limits of size, depth and number, and what of it is written is
checked before.  A test holds the result to the chart's own schema.
"""

import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ocigpu.cdi.yaml_child import RefusedError, build
from ocigpu.cli.front.manual import read_page
from ocigpu.cli.settings.vendor import VENDOR_KEYS, import_settings
from ocigpu.core.errors import OcigpuError, SettingsError, find_near, printable, quoted
from ocigpu.core.settings import KEYS, Key
from ocigpu.core.toml import render_settings, toml_value
from ocigpu.core.vendors import VENDORS
from ocigpu.system.options import Option, shown

CODE = "OCIGPU-KUBE-9"
MAX_BYTES = 1 << 20
"""As much as Helm stores of a release."""
MAX_PROBLEMS = 8
TAKEN, NONE, REFUSED, UNNEEDED = "taken over", "no counterpart", "refused", "not needed"
UNKNOWN, EMPTY = "unknown key", "not set"
WORDS = TAKEN, NONE, REFUSED, UNNEEDED, UNKNOWN, EMPTY
"""What becomes of a key."""
NODE_FILE = "/etc/ocigpu/config.toml"
"""The settings of a node, which the chart does not write."""
VARIABLES = "accept-nvidia-visible-devices-envvar-when-unprivileged"
MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
"""Settings of a node: how pods without CAP_SYS_ADMIN, most of the chart's own among them, may request GPUs."""
OWN_VARIABLES = {
    *("NODE_NAME", "POD_NAME", "POD_NAMESPACE", "POD_UID", "MPS_ROOT", "OCIGPU_CONFIG", "OCIGPU_KUBELET_DIRECTORY"),
    *("NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_MIG_MONITOR_DEVICES", "PGPASSWORD"),
    *(variable for _, variable, _ in VENDORS.values() if variable),
}
"""Variables that the chart sets: its schema refuses them in extraEnv."""
RIGHTS = frozenset({"NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_IMEX_CHANNELS"})
"""Variables by which a container gets more than the programs need: the schema refuses them too."""
OWN_LABELS = frozenset(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")) | {"ocigpu/config"}
"""Labels by which the chart selects its pods: its schema refuses them in podLabels."""
FILE_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?")
"""A configuration's name: it becomes part of a DaemonSet's."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_TRUE = ("true", "1", "t", "yes")
_FALSE = ("false", "0", "f", "no")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_HEADINGS = re.compile(rb"\A(USER-SUPPLIED|COMPUTED) VALUES:[ \t]*\r?(\n|\Z)")
"""What "helm get values" prints above the values, which are no YAML with it if they are null."""
_COLLECTORS = ("-f", "--collectors")
_USUAL = ("/etc/dcgm-exporter/default-counters.csv", "/etc/dcgm-exporter/dcp-metrics-included.csv")
"""Files of dcgm-exporter's image."""
_FOR_PODS = {
    "--kubernetes-enable-pod-labels": "enablePodLabels",
    "--kubernetes-enable-pod-uid": "enablePodUID",
    "--kubernetes-pod-label-allowlist-regex": "podLabelAllowlistRegex",
}
"""Options for which the exporter needs a right, by our values."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"

_DATA = tomllib.loads(Path(__file__).with_name("charts.toml").read_text("utf-8"))
_PARTS: dict[str, dict[str, Any]] = _DATA.pop("parts")


class NoCounterpartError(Exception):
    """Says why a value has no counterpart."""


class RefusedValueError(NoCounterpartError):
    """Says why our program refuses a value."""


class NodeSettingError(NoCounterpartError):
    """Names a setting of each node, which a chart cannot write."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"{name} = {toml_value(value)} in each node's {NODE_FILE}, which the chart does not write")
        self.setting = (name, value)


class UnneededError(Exception):
    """Says why a value needs nothing."""


class ChartKey(NamedTuple):
    """What charts.toml says of a key; there are the meanings."""

    key: str
    to: tuple[str, ...] = ()
    how: str = ""
    kind: str = "anything"
    none: str = ""
    unneeded: str = ""
    remark: str = ""
    below: bool = False
    flag: str = ""
    program: str = ""
    pattern: str = ""
    choices: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()
    set: dict[str, Any] = {}
    default: Any = None
    others: dict[str, str] = {}


class KeyReport(NamedTuple):
    """What became of a key: one of the words, our values, and a reason or remark.

    ``above``: the key of the row, if that is one above it.  ``setting``: name and value in each node's config.toml.
    """

    file: str
    key: str
    value: Any
    became: str
    to: tuple[str, ...] = ()
    remark: str = ""
    above: str = ""
    setting: tuple[str, Any] | None = None


class ValuesImport(NamedTuple):
    """What became of files: the chart of each, an entry for each key, our values, and what else to know.

    ``node_lines``: lines that each node's config.toml needs.
    """

    charts: tuple[tuple[str, str], ...]
    entries: tuple[KeyReport, ...]
    values: dict[str, Any]
    notes: tuple[str, ...]
    node_lines: tuple[str, ...] = ()


def _row(key: str, entry: Mapping[str, Any], here: str = "", sections: str = "") -> ChartKey:
    """Return a row; ``here`` and ``sections``: what {here} and {} stand for in a part."""
    first, *others_too = sections.split() or [""]

    def placed(text: str, section: str = first) -> str:
        return text.replace("{here}", here).replace("{}", section).lstrip(".")

    lists: dict[str, Any] = {name: tuple(entry.get(name, ())) for name in ("choices", "harmless")}
    others = {role: placed(name) for role, name in entry.get("with", {}).items()}
    plain = {name: value for name, value in entry.items() if name not in ("to", "with", "program", *lists)}
    to = tuple(dict.fromkeys(placed(name, each) for each in (first, *others_too) for name in entry.get("to", ())))
    return ChartKey(key, to, program=placed(entry.get("program", "")), others=others, **plain, **lists)


def _rows(chart: Mapping[str, Any]) -> dict[str, ChartKey]:
    rows: dict[str, ChartKey] = {}
    for here, part, sections in chart["parts"]:
        for name, entry in _PARTS[part].items():
            key = f"{here}.{name}".lstrip(".")
            rows[key] = _row(key, entry, here, sections)
    return rows | {key: _row(key, entry) for key, entry in chart["keys"].items()}


CHARTS: dict[str, dict[str, ChartKey]] = {name: _rows(chart) for name, chart in _DATA.items()}
"""The rows of each chart by key."""
_PREFIXES = {
    name: {key[:at] for key in rows for at in range(len(key)) if key[at] == "."} for name, rows in CHARTS.items()
}
"""Keys that only lead to rows."""
SWITCHES = sorted({switch for chart in _DATA.values() for switch in chart["programs"]})
"""What is on in our chart by default, and off where NVIDIA's does not contain it."""


class ValuesFile:
    """A values file: its data, and a look at any key."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key; the default for none."""
        value: Any = self.data
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value


def parse_values(text: bytes, where: str) -> ValuesFile:
    """Return a values file; raises SettingsError (OCIGPU-KUBE-9) for what is too large, not YAML or not a mapping."""
    if len(text) > MAX_BYTES:
        raise SettingsError(CODE, f"{where}: larger than {MAX_BYTES >> 20} MiB", "")
    try:
        data = build(yaml, _HEADINGS.sub(b"\n", text), may_be_empty=True)
    except (RefusedError, ValueError) as error:  # ValueError: bytes that are not UTF-8
        raise SettingsError(CODE, f"{where}: not YAML: {printable(str(error), 300)}", "") from error
    if data is not None and not isinstance(data, dict):
        raise SettingsError(CODE, f"{where}: {shown(data)} is not a mapping of values", "")
    return ValuesFile(data or {})


def walk(document: ValuesFile, chart: str) -> Iterator[tuple[str, Any, ChartKey | None]]:
    """Yield every key with its value and row: that of a key above it if that counts below, None for an unknown key."""
    yield from _walk(document.data, "", None, chart)


def _walk(
    data: Mapping[str, Any], prefix: str, above: ChartKey | None, chart: str
) -> Iterator[tuple[str, Any, ChartKey | None]]:
    for name, value in data.items():
        key = prefix + (f'"{name}"' if "." in name else name)
        row = CHARTS[chart].get(key)
        nearest = row or above
        leads = key in _PREFIXES[chart] and row is None
        if isinstance(value, dict) and value and (leads or (nearest is not None and nearest.below)):
            yield from _walk(value, f"{key}.", nearest, chart)
        elif nearest:
            yield key, value, nearest
        elif leads and value in (None, {}):
            yield key, None, ChartKey(key)
        else:
            yield key, value, None


def find_chart(document: ValuesFile, where: str) -> str:
    """Return the chart whose keys a file has; raises SettingsError where it has none, or none or several charts fit."""
    if not document.data:
        raise SettingsError(CODE, f"{where}: no values", f"Name the chart with --from: {', '.join(CHARTS)}")
    unknown: dict[str, int] = {}
    for chart in CHARTS:
        rows = [row for _, _, row in walk(document, chart)]
        if 2 * rows.count(None) <= len(rows):
            unknown[chart] = rows.count(None)
    best = [chart for chart, count in unknown.items() if count == min(unknown.values())]
    if len(best) == 1:
        return best[0]
    what = f"has keys of {', '.join(best)}" if best else "has the keys of no known NVIDIA chart"
    names = ", ".join(best or CHARTS)
    raise SettingsError(CODE, f"{where}: {what}", f"Name the chart with --from: {names}")


def import_values(files: Sequence[tuple[str, bytes]], chart: str = "") -> ValuesImport:
    """Return what became of values files, each with its name; ``chart``: that of all of them, "" to detect it.

    Raises SettingsError (OCIGPU-KUBE-9) that names every value of a wrong kind.
    """
    documents = [(name, parse_values(text, name)) for name, text in files]
    charts = [(name, chart or find_chart(document, name)) for name, document in documents]
    result = _Values()
    problems: list[str] = []
    entries: list[KeyReport] = []
    for (name, document), (_, its) in zip(documents, charts, strict=True):
        entries += _import_file(name, document, its, result, problems)
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise SettingsError(CODE, "; ".join(problems[:MAX_PROBLEMS]) + more, "Nothing was written.")
    programs = {switch for _, its in charts for switch in _DATA[its]["programs"]}
    for switch in SWITCHES:
        if switch not in programs:
            result.put({switch: False})
    settings = dict(entry.setting for entry in entries if entry.setting)
    if settings.get(VARIABLES) is False:
        settings[MOUNTS] = True
        result.put({"runtimeClass.volumeMounts": True})
    notes = dict.fromkeys(note for _, its in charts for note in _DATA[its]["notes"])
    notes |= dict.fromkeys(_notes(ValuesFile(result.values)))
    if ValuesFile(result.values).get("dra.enabled"):
        entries = [_without_plugin(entry) for entry in entries]
        result.values.get("mps", {}).pop("enabled", None)  # the chart refuses it then
    return ValuesImport(tuple(charts), tuple(entries), result.values, tuple(notes), _node_lines(settings))


def _notes(values: ValuesFile) -> Iterator[str]:
    """Yield what to know about our values."""
    if not values.get("nodeInstaller.enabled"):
        yield (
            "the nodes need ocigpu as a runtime: install its package and run ocigpu engine configure, or set "
            "nodeInstaller.enabled"
        )
    if values.get("runtimeClass.volumeMounts"):
        yield f"the chart's own pods request GPUs by a mount (runtimeClass.volumeMounts): nodes need {MOUNTS} = true"
    if values.get("dra.enabled"):
        yield "dra.enabled omits the device plugin: pods use claims, or nvidia.com/gpu with dra.extendedResource"
        if any(_shares(text) for text in values.get("config.files", {}).values()):
            yield (
                "the sharing in config.files ends: dra.enabled replaces the device plugin, which shares GPUs by it; "
                "claims share them by their parameters (sharing), or by dra.shares: docs/DRA.md"
            )
    if values.get("dra.enabled") or values.get("computeDomains.enabled"):
        yield "while NVIDIA's DRA chart is installed, set dra.deviceClasses to false: docs/DRA.md"


def _without_plugin(entry: KeyReport) -> KeyReport:
    """Return an entry with what becomes of it where no device plugin runs."""
    to = tuple(path for path in entry.to if path != "mps.enabled")
    if entry.became != TAKEN:
        return entry
    if all(path.startswith(("devicePlugin.", "mps.")) for path in to):
        why = "no effect while dra.enabled is true: no device plugin runs"
    elif any(path.startswith("config.") for path in to):
        why = "for node-labels alone while dra.enabled is true: no device plugin shares GPUs by it"
    else:
        return entry
    return entry._replace(to=to, remark="; ".join(each for each in (entry.remark, why) if each))


def _node_lines(settings: Mapping[str, Any]) -> tuple[str, ...]:
    def lines_of(key: Key, name: str) -> list[str]:
        return [f"{name} = {toml_value(settings[key.name])}"] if key.name in settings else []

    return tuple(line for line in render_settings(lines_of) if line)


class _Values:
    """Our values so far: lists are added up, mappings are merged, and another value of one kind is refused."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def put(self, found: Mapping[str, Any]) -> None:
        """Set values by dotted path; raises NoCounterpartError, and then sets none."""
        for path, value in found.items():
            was = ValuesFile(self.values).get(path)
            if was is not None and not isinstance(value, (list, dict)) and was != value:
                raise NoCounterpartError(f"{path} is {shorten(was)} already")
        for path, value in found.items():
            *above, last = path.split(".")
            place = self.values
            for name in above:
                place = place.setdefault(name, {})
            was = place.get(last)
            if isinstance(value, list) and isinstance(was, list):
                place[last] = was + [item for item in value if item not in was]
            else:
                place[last] = was | value if isinstance(value, dict) and isinstance(was, dict) else value


def _import_file(
    name: str, document: ValuesFile, chart: str, result: _Values, problems: list[str]
) -> Iterator[KeyReport]:
    seen = set()
    for key, value, row in walk(document, chart):
        seen.add(key)
        if row is None:
            yield KeyReport(name, key, value, UNKNOWN, (), _near(key, chart))
        elif row.below and document.get(f"{row.key}.enabled") is False:
            yield KeyReport(name, key, value, UNNEEDED, (), "it is off", row.key)
        elif row.key != key:  # it is below the row's
            yield _said(name, key, value, row)
        elif value is None or value in ("", [], {}):
            yield KeyReport(name, key, value, EMPTY)
        elif problem := _problem(row, value):
            problems.append(f"{name}: {printable(key, 200)}: {problem}")
        elif row.kind == "env":
            names: set[str] = set()
            for number, variable in enumerate(value):
                if variable["name"] in names:
                    twice = f"{row.key} contains it twice (entry {number + 1})"
                    yield KeyReport(name, f"{row.key}.{variable['name']}", variable.get("value"), REFUSED, (), twice)
                else:
                    yield from _variable(name, row, variable, chart, document, result, problems)
                names.add(variable["name"])
        else:
            yield _import_key(name, row, value, document, result)
    for key, row in CHARTS[chart].items():
        if row.default is not None and key not in seen:
            yield _import_key(name, row, row.default, document, result, "NVIDIA's default")


def _said(name: str, key: str, value: Any, row: ChartKey) -> KeyReport:
    """Return the entry of a key that has nothing to be converted."""
    above = row.key if key != row.key else ""
    if value is None or value in ("", [], {}):
        return KeyReport(name, key, value, EMPTY, (), "", above)
    if row.unneeded or any(value == each and type(value) is type(each) for each in row.harmless):
        return KeyReport(name, key, value, UNNEEDED, (), row.unneeded or "the same here", above)
    return KeyReport(name, key, value, NONE, (), row.none, above)


def _import_key(
    name: str, row: ChartKey, value: Any, document: ValuesFile, result: _Values, source: str = ""
) -> KeyReport:
    """Return the entry of a key after its values are set."""
    if not (row.to or row.set or row.how):
        return _said(name, row.key, value, row)
    try:
        found = CONVERTERS[row.how](row, value, document)
        result.put(found)
    except NoCounterpartError as error:
        return _refusal(KeyReport(name, row.key, value, NONE), error)
    except UnneededError as error:
        return KeyReport(name, row.key, value, UNNEEDED, (), str(error))
    remarks = (source, row.remark, _dropped(row, value), _needed(row, found))
    return KeyReport(name, row.key, value, TAKEN, tuple(found), "; ".join(each for each in remarks if each))


def _refusal(entry: KeyReport, error: NoCounterpartError) -> KeyReport:
    return entry._replace(
        became=REFUSED if isinstance(error, RefusedValueError) else NONE,
        to=(),
        remark=str(error),
        setting=error.setting if isinstance(error, NodeSettingError) else None,
    )


def _needed(row: ChartKey, found: Mapping[str, Any]) -> str:
    """Return what our values need on the nodes, "" for nothing."""
    if row.how == "strategy" and "volume-mounts" in found[row.to[0]]:
        return f"volume-mounts needs settings in each node's {NODE_FILE}: docs/KUBERNETES.md"
    return ""


def _variable(
    name: str,
    row: ChartKey,
    variable: Mapping[str, Any],
    chart: str,
    document: ValuesFile,
    result: _Values,
    problems: list[str],
) -> Iterator[KeyReport]:
    """Yield the entry of an environment variable, which may have a row of its own."""
    key = f"{row.key}.{variable['name']}"
    own = CHARTS[chart].get(key)
    value = variable.get("value")
    entry = KeyReport(name, key, value if value is not None else variable.get("valueFrom"), TAKEN, row.to)
    if own and value is not None:
        value = value.lower() in _TRUE if own.kind == "word" else value
        if problem := _problem(own._replace(kind="anything" if own.kind == "word" else own.kind), value):
            problems.append(f"{name}: {printable(key, 200)}: {problem}")
        else:
            yield _import_key(name, own, value, document, result)
    elif entry.value is None:
        yield entry._replace(became=EMPTY, to=())
    elif own:
        yield entry._replace(became=NONE, to=(), remark="its value is not in this file")
    else:
        yield _pass_variable(entry, row, variable, chart, result)


def _pass_variable(
    entry: KeyReport, row: ChartKey, variable: Mapping[str, Any], chart: str, result: _Values
) -> KeyReport:
    """Return the entry of a variable without a row: our program gets it if it reads it."""
    name = variable["name"]
    if name in OWN_VARIABLES:
        return entry._replace(became=UNNEEDED, to=(), remark="the chart sets it")
    if name in RIGHTS:
        return entry._replace(became=REFUSED, to=(), remark="the program would get more rights than it needs")
    if name.upper() in _PROXIES:
        return entry._replace(became=UNNEEDED, to=(), remark="no program here connects through a proxy")
    section = row.to[0].partition(".")[0]
    read = find_variables(section)
    if name not in read:
        rows = [key.removeprefix(f"{row.key}.") for key in CHARTS[chart] if key.startswith(f"{row.key}.")]
        near = find_near(name, [*read, *rows], likeness=0.8)
        remark = f"{section} reads no such variable" + (f": {near[0]} was meant?" if near else "")
        return entry._replace(became=UNKNOWN, to=(), remark=remark)
    present = ValuesFile(result.values).get(row.to[0], [])
    if any(each["name"] == name for each in present):
        return entry._replace(became=NONE, to=(), remark=f"{row.to[0]} contains {name} already")
    try:
        _check_variable(row, variable)
    except NoCounterpartError as error:
        return _refusal(entry, error)
    result.put({row.to[0]: [{key: each for key, each in variable.items() if each is not None}]})
    return entry


@functools.cache
def find_variables(section: str) -> tuple[str, ...]:
    """Return the variables that the program of a section of our values reads, without those that the chart sets."""
    from ocigpu.exporter import options as exporter
    from ocigpu.kubernetes.dra import options as dra
    from ocigpu.kubernetes.node import config

    tables: dict[str, Sequence[Option]] = {
        "exporter": (*exporter.OPTIONS, *exporter.REFUSED),
        "dra": dra.OPTIONS,
        **dict.fromkeys(("devicePlugin", "nodeLabels", "mps"), config.OPTIONS),
    }
    found = [variable for option in tables.get(section, ()) for variable in option.variables]
    if section in ("devicePlugin", "nodeLabels", "mps"):
        found += ["CONFIG_FILE", *config.CONFIG_VARIABLES["node-labels"]]
    if page := {"nodeInstaller": "node-installer", "migManager": "mig-manager"}.get(section):
        helps = [word.help for word in read_page(page).options.values()]
        found += re.findall(r"\[env var: (\w+)\]", " ".join(helps))
    return tuple(name for name in dict.fromkeys([*found, "OCIGPU_DEBUG"]) if name not in OWN_VARIABLES)


def _near(key: str, chart: str) -> str:
    near = find_near(key, CHARTS[chart], likeness=0.8)
    return "no key of this chart" + (f": {near[0]} was meant?" if near else "")


def shorten(value: Any) -> str:
    """Return a value for a table: short, on one line."""
    return printable(json.dumps(value, ensure_ascii=False, default=str), 60)


# --- what values must be


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_variable(value: Any) -> bool:
    if not isinstance(value, dict) or not set(value) <= {"name", "value", "valueFrom"}:
        return False
    name, text, source = (value.get(key) for key in ("name", "value", "valueFrom"))
    good = isinstance(name, str) and _VARIABLE.fullmatch(name) is not None
    return (
        good and isinstance(text, str | None) and isinstance(source, dict | None) and (text is None or source is None)
    )


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "anything": ("anything", lambda _: True),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", _is_text),
    "word": ("a text", _is_text),
    "path": ("an absolute path", lambda value: _is_text(value) and re.fullmatch(r"/[\w./@+~=-]*", value) is not None),
    "name": ("the name of an object", lambda value: _is_text(value) and _NAME.fullmatch(value) is not None),
    "count": ("a number above 0", lambda value: type(value) is int and 0 < value < 1000),
    "port": ("a port", lambda value: type(value) is int and 0 < value < 65536),
    "texts": ("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value))),
    "map": ("a mapping of texts", _is_map),
    "labels": ("a mapping of texts", _is_map),
    "object": ("a mapping", lambda value: isinstance(value, dict)),
    "objects": ("a list of mappings", lambda value: isinstance(value, list) and all(type(x) is dict for x in value)),
    "env": (
        "a list of variables with name, and value or valueFrom",
        lambda value: isinstance(value, list) and all(map(_is_variable, value)),
    ),
}


def _problem(row: ChartKey, value: Any) -> str:
    """Return why a value is not of its row's kind, "" if it is."""
    words, is_good = KINDS[row.kind]
    if not is_good(value):
        if row.kind in ("map", "labels") and isinstance(value, dict):
            key, wrong = next((key, each) for key, each in value.items() if not isinstance(each, str))
            return f"expected {words}, and {printable(key, 100)} is {shorten(wrong)}"
        return f"expected {words}, found {shown(value)}"
    if row.choices and value not in row.choices:
        return f"expected {', '.join(row.choices)}, found {shown(value)}"
    return ""


# --- converters: our values by path, for a value for NVIDIA's charts


def _copy(row: ChartKey, value: Any, _: ValuesFile) -> dict[str, Any]:
    if row.pattern and not re.fullmatch(row.pattern, value):
        raise NoCounterpartError(f"{shown(value)} has not the form of {row.to[0]}")
    if row.kind == "labels" and (own := sorted(OWN_LABELS & set(value))):
        raise NoCounterpartError(f"the chart selects its pods by {', '.join(own)}")
    return dict.fromkeys(row.to, value)


def _switch(row: ChartKey, value: Any, _: ValuesFile) -> dict[str, Any]:
    if not value:
        raise UnneededError("off here too")
    return row.set | {path: [row.flag] for path in row.to}


def _argument(row: ChartKey, value: Any, _: ValuesFile) -> dict[str, Any]:
    text = str(value).lower() if isinstance(value, bool) else value
    words = [f"{row.flag}={text}"]
    if row.program:
        _accept(row.program, words, {})
    return {path: list(words) for path in row.to}


def _mig_strategy(row: ChartKey, value: Any, document: ValuesFile) -> dict[str, Any]:
    found = _argument(row, value, document)
    return found if value == "none" else found | {"mig": True}


def _arguments(row: ChartKey, value: Any, _: ValuesFile) -> dict[str, Any]:
    if all(words[1:] and words[0] in _COLLECTORS and words[1] in _USUAL for words, _ in _groups(row, value)):
        raise UnneededError("the exporter's own metrics are the usual ones")
    groups = [words for words, why in _groups(row, value) if not why]
    if not groups:
        raise NoCounterpartError(_dropped(row, value))
    return {row.to[0]: [word for words in groups for word in words]}


def _groups(row: ChartKey, words: Sequence[str]) -> list[tuple[list[str], str]]:
    """Return each option of a command line with its values, and why our program refuses it; "" if it does not."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    return [(group, _why_refused(row.program, group)) for group in groups]


def _why_refused(program: str, words: list[str]) -> str:
    if program == "exporter" and words[0].partition("=")[0] in _COLLECTORS:
        return "metrics are exporter.collectors"
    if program == "exporter" and words[0].partition("=")[0] in ("-a", "--address"):
        return "here exporter.port"
    if program == "exporter" and (here := _FOR_PODS.get(words[0].partition("=")[0])):
        return f"here exporter.{here}, which also grants the right"
    try:
        _accept(program, words, {})
    except NoCounterpartError as error:
        return str(error)
    return ""


def _dropped(row: ChartKey, value: Any) -> str:
    """Return what of a command line was left out, and why."""
    if row.how != "arguments":
        return ""
    left = [f"without {' '.join(words)}: {why}" for words, why in _groups(row, value) if why]
    return printable("; ".join(left), 500)


def _accept(program: str, words: list[str], variables: dict[str, str]) -> None:
    """Raise NoCounterpartError for what the program of a section refuses in a command line or an environment."""
    from ocigpu.exporter.options import parse_options
    from ocigpu.kubernetes.node.config import OPTIONS as PLUGIN_OPTIONS
    from ocigpu.kubernetes.node.config import PluginOptions, parse_flags
    from ocigpu.system.options import find_values

    try:
        if program == "exporter":
            parse_options(words, variables)
        elif program in ("devicePlugin", "nodeLabels"):
            name = "device-plugin" if program == "devicePlugin" else "node-labels"
            PluginOptions(**find_values(PLUGIN_OPTIONS, parse_flags(words, {}, name).flags, variables))
    except OcigpuError as error:
        raise RefusedValueError(printable(error.message, 300)) from error


def _check_variable(row: ChartKey, variable: Mapping[str, Any]) -> None:
    if row.program and isinstance(text := variable.get("value"), str):
        _accept(row.program, [], {variable["name"]: text})


def _strategy(row: ChartKey, value: Any, _: ValuesFile) -> dict[str, Any]:
    words = value if isinstance(value, list) else [value]
    if not all(map(_is_text, words)):
        raise NoCounterpartError(f"{shown(value)} is not a list of strategies")
    text = ",".join(part.strip() for word in words for part in word.split(",") if part.strip())
    _accept("devicePlugin", [f"--device-list-strategy={text}"], {})
    return {row.to[0]: text}


def _pull_secrets(row: ChartKey, value: Any, _: ValuesFile) -> dict[str, Any]:
    entries = value if isinstance(value, list) else [value]
    names = [each.get("name") if isinstance(each, dict) else each for each in entries]
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise NoCounterpartError("an entry is not the name of a secret")
    return {row.to[0]: names}


def _affinity(row: ChartKey, value: Any, _: ValuesFile) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    terms: list[Any] = []
    for kind, part in value.items():
        if not isinstance(part, dict) or kind not in ("nodeAffinity", "podAffinity", "podAntiAffinity"):
            raise NoCounterpartError(f"{printable(kind, 100)} is no affinity")
        if kind != "nodeAffinity":
            rest |= {kind: part} if part else {}
            continue
        if unknown := set(part) - {_REQUIRED, _PREFERRED}:
            raise NoCounterpartError(f"{printable(min(unknown), 100)} is no rule of an affinity")
        if part.get(_REQUIRED):
            terms = _terms(part[_REQUIRED])
        if preferred := part.get(_PREFERRED):
            if not KINDS["objects"][1](preferred):
                raise NoCounterpartError(f"{_PREFERRED} is not a list of mappings")
            rest[kind] = {_PREFERRED: preferred}
    if not (terms or rest):
        raise UnneededError("no rule")
    return {path: part for path, part in zip(row.to, cycle((terms, rest)), strict=False) if part}


def _terms(required: Any) -> list[Any]:
    terms = required.get("nodeSelectorTerms") if isinstance(required, dict) else None
    if not terms or not KINDS["objects"][1](terms):
        raise NoCounterpartError(f"{_REQUIRED} has no terms")
    for term in terms:
        if set(term) != {"matchExpressions"} or not KINDS["objects"][1](term["matchExpressions"]):
            raise NoCounterpartError("a term selects nodes by something other than labels (matchExpressions)")
    return list(terms)


def _rolling(row: ChartKey, value: Any, document: ValuesFile) -> dict[str, Any]:
    if document.get(row.others.get("type", ""), "RollingUpdate") != "RollingUpdate":
        raise UnneededError("it means nothing for OnDelete")
    # the operator takes a number as text, and Kubernetes does not
    numbers = {key: int(each) if isinstance(each, str) and re.fullmatch("[0-9]{1,9}", each) else each
               for key, each in value.items()}  # fmt: skip
    return {
        f"{path}.{key}": each
        for path in row.to
        for key, each in (("type", "RollingUpdate"), ("rollingUpdate", numbers))
    }


def _config_map(row: ChartKey, value: Any, document: ValuesFile) -> dict[str, Any]:
    if document.get(row.others["create"]) is True:
        raise UnneededError("the name of the ConfigMap that NVIDIA's chart creates")
    if row.none:
        raise NoCounterpartError(row.none)
    return _copy(row, value, document)


def _usable(files: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield each configuration of the device plugin by name, with why it cannot be one here; "" if it can."""
    from ocigpu.kubernetes.node.config import parse_config_file

    for name, text in files.items():
        why = "" if FILE_NAME.fullmatch(name) else "a name here has at most 30 lower-case letters, digits and dashes"
        try:
            parse_config_file(text, printable(name, 60))
        except OcigpuError as error:
            why = why or printable(error.message, 300)
        yield name, text, why


def _ignored(row: ChartKey, document: ValuesFile) -> bool:
    """Return whether NVIDIA's chart takes texts only with a key "create", and it is not set."""
    return "create" in row.others and document.get(row.others["create"]) is not True


def _configs(row: ChartKey, value: Any, document: ValuesFile) -> dict[str, Any]:
    if _ignored(row, document):
        raise NoCounterpartError(f"NVIDIA's chart ignores it without {row.others['create']}")
    wrong = [f"{printable(name, 60)}: {why}" for name, _, why in _usable(value) if why]
    if wrong:
        raise RefusedValueError("; ".join(wrong))
    files = dict(value)
    chosen = document.get(row.others["default"])
    if isinstance(chosen, str) and chosen in files:
        if chosen != "default" and "default" in files:
            raise NoCounterpartError(
                f"{row.others['default']} is {shown(chosen)}, and here default is for all other nodes"
            )
        files["default"] = files[chosen]
    elif len(files) == 1:  # then it is for all nodes
        files["default"] = next(iter(files.values()))
    else:
        files.setdefault("default", "version: v1\n")
    found: dict[str, Any] = {row.to[0]: files}
    return found | ({"mps.enabled": True} if any(_shares(text).get("mps") for text in files.values()) else {})


def _shares(text: str) -> dict[str, Any]:
    """Return how a configuration shares GPUs; empty for not at all."""
    from ocigpu.kubernetes.node.config import parse_config_file

    sharing = parse_config_file(text, "")[0].get("sharing")
    return sharing if isinstance(sharing, dict) else {}


def _default_config(row: ChartKey, value: Any, document: ValuesFile) -> dict[str, Any]:
    files = document.get(row.others["files"], {})
    if _ignored(row, document) or not files:
        raise NoCounterpartError("here the key default of the ConfigMap is for all other nodes")
    if not KINDS["map"][1](files) or value not in files:
        raise NoCounterpartError(f"{row.others['files']} has no {shown(value)}")
    if any(why for _, _, why in _usable(files)) or (value != "default" and "default" in files):
        raise NoCounterpartError(f"{row.others['files']} was not taken over")
    return {row.to[0]: files[value]}


def _collectors(row: ChartKey, value: Any, _: ValuesFile) -> dict[str, Any]:
    from ocigpu.exporter.collectors import parse_collectors

    try:
        parse_collectors(value, row.key)
    except OcigpuError as error:
        raise RefusedValueError(printable(error.message, 300)) from error
    return {row.to[0]: value}


def _layouts(row: ChartKey, value: Any, document: ValuesFile) -> dict[str, Any]:
    from ocigpu.kubernetes.mig.layouts import parse_layout_file

    if _ignored(row, document) and document.get(row.others["name"]):
        raise NoCounterpartError(f"{row.others['name']} names the ConfigMap that is used")
    if "config.yaml" not in value:
        raise NoCounterpartError("it has no config.yaml")
    try:
        parse_layout_file(value["config.yaml"], "config.yaml")
    except OcigpuError as error:
        raise RefusedValueError(printable(error.message, 300)) from error
    return {row.to[0]: value["config.yaml"]}


def _driver(row: ChartKey, value: Any, document: ValuesFile) -> dict[str, Any]:
    directory = document.get(row.others["directory"])
    directory = directory if KINDS["path"][1](directory) else "/run/nvidia/driver"  # a wrong one is an error of its own
    return {row.to[0]: directory if value else "/"}


def _driver_directory(row: ChartKey, value: Any, document: ValuesFile) -> dict[str, Any]:
    if document.get(row.others["enabled"], True) is not True:
        raise UnneededError("the driver is installed on the nodes")
    return _copy(row, value, document)


def _parent(row: ChartKey, value: str, _: ValuesFile) -> dict[str, Any]:
    if not value.endswith(row.flag) or value == row.flag:
        raise NoCounterpartError(f"it is not {row.flag[1:]} below {row.to[0]}")
    return {row.to[0]: value.removesuffix(row.flag)}


def _address(row: ChartKey, value: str, document: ValuesFile) -> dict[str, Any]:
    host, _, port = value.rpartition(":")
    if host or not re.fullmatch("[1-9][0-9]{0,4}", port) or int(port) > 65535:
        raise NoCounterpartError("the exporter listens on exporter.port of all addresses")
    if "port" in row.others and document.get(row.others["port"], 9400) != int(port):
        raise NoCounterpartError("the Service's port and the exporter's are one here: exporter.port")
    return {row.to[0]: int(port)}


def _endpoint(row: ChartKey, value: str, document: ValuesFile) -> dict[str, Any]:
    if document.get(row.others["enabled"], True) is False:
        raise UnneededError("it is off")
    host, _, port = value.rpartition(":")
    if host or not re.fullmatch("[1-9][0-9]{0,4}", port) or int(port) > 65535:
        raise NoCounterpartError("metrics are served on a port of all addresses")
    return {row.to[0]: int(port)}


def _node_setting(row: ChartKey, value: str, _: ValuesFile) -> dict[str, Any]:
    """Raise what becomes of a variable for NVIDIA's toolkit container that is a key (``flag``) of its config.toml."""
    kind = VENDOR_KEYS[row.flag].kind
    if kind == "bool" and value.lower() not in (*_TRUE, *_FALSE):
        raise NoCounterpartError(f"{shown(value)} is neither true nor false")
    theirs = {"bool": value.lower() in _TRUE, "list": value.split(",")}.get(kind, value)
    try:
        result = import_settings(f"{row.flag} = {toml_value(theirs)}\n".encode(), row.key)
    except SettingsError as error:  # too long, or a character that TOML has not
        raise NoCounterpartError(printable(error.message, 300)) from error
    for left in result.left_out:
        raise NoCounterpartError(printable(left.reason, 300))
    (found,) = result.imported
    ours = found.value
    default = next(key.default for key in KEYS if key.name == found.ours)
    if ours == (list(default) if isinstance(default, tuple) else default):
        raise UnneededError("the same here")
    raise NodeSettingError(found.ours, ours)


def _runtime_class(row: ChartKey, value: Any, _: ValuesFile) -> dict[str, Any]:
    return {row.to[0]: value, "runtimeClass.create": False}


Converter = Callable[[ChartKey, Any, ValuesFile], dict[str, Any]]
CONVERTERS: dict[str, Converter] = {
    "": _copy,
    "endpoint": _endpoint,
    "switch": _switch,
    "argument": _argument,
    "arguments": _arguments,
    "mig-strategy": _mig_strategy,
    "strategy": _strategy,
    "pull-secrets": _pull_secrets,
    "affinity": _affinity,
    "rolling": _rolling,
    "config-map": _config_map,
    "configs": _configs,
    "default-config": _default_config,
    "collectors": _collectors,
    "layouts": _layouts,
    "driver": _driver,
    "driver-directory": _driver_directory,
    "parent": _parent,
    "address": _address,
    "node-setting": _node_setting,
    "runtime-class": _runtime_class,
}


# --- our values as a file


class _Dumper(yaml.SafeDumper):
    """Writes texts so that YAML 1.1 and 1.2 both read texts, long ones as lines, and repeats what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - as PyYAML calls it
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9 ./_-]+", text) and not text.endswith(" ")
    style = "|" if "\n" in text else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def render_values(result: ValuesImport) -> str:
    """Return the values file: where it comes from, what has no counterpart, and the values."""
    lines = [f"# Values for ocigpu's chart, imported from {quoted(name)[1:-1]} ({its})." for name, its in result.charts]
    lines += [f"# Note: {note}." for note in result.notes]
    if result.node_lines:
        lines.append(f"# Each node's {NODE_FILE} must contain (the chart does not write it):")
        lines += [f"#   {line}" for line in result.node_lines]
    for became in (NONE, REFUSED, UNKNOWN):
        found = [entry for entry in grouped(result.entries) if entry.became == became]
        lines += [f"# {became[0].upper()}{became[1:]}:"] if found else []
        lines += [f"#   {printable(entry.key, 200)}: {printable(entry.remark)}" for entry in found]
    text = yaml.dump(result.values, Dumper=_Dumper, sort_keys=False, width=110, default_flow_style=False)
    return "\n".join(lines) + "\n" + (text if result.values else "{}\n")


def grouped(entries: Sequence[KeyReport]) -> Iterator[KeyReport]:
    """Yield entries for people: none for empty keys, and one for those that share a key above them.

    Where these have several outcomes, each is named by itself.
    """

    def outcome(entry: KeyReport) -> tuple[str, str]:
        return entry.became, entry.remark

    outcomes: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for entry in entries:
        if entry.became != EMPTY and entry.above:
            outcomes.setdefault((entry.file, entry.above), set()).add(outcome(entry))
    seen = set()
    for entry in entries:
        group = (entry.file, entry.above)
        if entry.became == EMPTY or (entry.above and group in seen):
            continue
        if entry.above and len(outcomes[group]) == 1:
            seen.add(group)
            yield entry._replace(key=f"{entry.above}.*", value=None)
        else:
            yield entry
