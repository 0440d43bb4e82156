"""What an API server holds requests to: roles, schemas and rules of custom resources, admission policies.

Sources: "Using RBAC Authorization", "Extend the Kubernetes API with CustomResourceDefinitions" (pruning, defaulting,
validation rules), "Validating Admission Policy".
"""

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import celpy
import jsonschema
from celpy.evaluation import base_functions

from ocigpu.kubernetes.dra.cel import new_environment

Object = dict[str, Any]
Store = Mapping[str, Mapping[tuple[str, str], Object]]


class Problem(Exception):  # noqa: N818 - an answer, no defect
    """An answer that is a Status of failure."""

    def __init__(self, code: int, reason: str, message: str, kind: Any = None, name: str = "") -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.kind, self.name = code, reason, message, kind, name

    def status(self) -> Object:
        details = {"name": self.name, "kind": self.kind.plural, "group": self.kind.group} if self.kind else {}
        head: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**head, "message": self.message, "reason": self.reason, "details": details, "code": self.code}


# Roles


def allows(store: Store, user: Any, verb: str, group: str, resource: str, namespace: str, name: str) -> bool:
    """Whether a role bound to the user, or to a group of the user's, has a rule for the request."""
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        for (space, _), binding in store[kind].items():
            if kind == "RoleBinding" and space != namespace:
                continue
            if not any(_is_subject(subject, user) for subject in binding.get("subjects", [])):
                continue
            reference = binding["roleRef"]
            role = store[reference["kind"]].get(
                ("" if reference["kind"] == "ClusterRole" else space, reference["name"])
            )
            for rule in (role or {}).get("rules", []):
                names = rule.get("resourceNames", [])
                if (
                    {verb, "*"} & set(rule["verbs"])
                    and {group, "*"} & set(rule.get("apiGroups", []))
                    and {resource, "*"} & set(rule.get("resources", []))
                    and (not names or name in names)
                ):
                    return True
    return False


def _is_subject(subject: Object, user: Any) -> bool:
    if subject["kind"] == "ServiceAccount":
        return bool(user.name == f"system:serviceaccount:{subject['namespace']}:{subject['name']}")
    return subject["name"] == user.name if subject["kind"] == "User" else subject["name"] in user.groups


# Custom resources


def default_custom(value: Any, schema: Object, top: bool = True) -> Any:
    """Return a value without what the schema does not know, and with its defaults."""
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        keep = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-embedded-resource")
        result = {}
        for name, found in value.items():
            if top and name in ("apiVersion", "kind", "metadata"):
                result[name] = found
            elif name in properties:
                result[name] = default_custom(found, properties[name], top=False)
            elif isinstance(others, dict):
                result[name] = default_custom(found, others, top=False)
            elif keep or others is True:
                result[name] = found
        for name, known in properties.items():
            if "default" in known and (name not in result or (result[name] is None and not known.get("nullable"))):
                result[name] = default_custom(copy.deepcopy(known["default"]), known, top=False)
        return result
    if isinstance(value, list):
        return [default_custom(one, schema.get("items", {}), top=False) for one in value]
    return value


def check_custom(kind: Any, document: Object, old: Object | None, schema: Object) -> None:
    """Hold an object to its schema and rules; raises Problem with every violation."""
    name = document["metadata"]["name"]
    checked = {key: value for key, value in document.items() if key != "metadata"}
    validator = _validator(json.dumps(schema, sort_keys=True))
    faults = [f"{_path(error.absolute_path)}: {error.message}" for error in validator.iter_errors(checked)]
    faults = faults or list(_broken_rules(document, old, schema, ""))
    if faults:
        raise Problem(422, "Invalid", f'{kind.kind}.{kind.group} "{name}" is invalid: {"; ".join(faults)}', kind, name)


@functools.cache
def _validator(schema: str) -> Any:
    def plain(found: Any) -> Any:
        if isinstance(found, list):
            return [plain(one) for one in found]
        if not isinstance(found, dict):
            return found
        result = {name: plain(value) for name, value in found.items() if name != "default"}
        if found.get("x-kubernetes-int-or-string") is True:
            result["type"] = ["integer", "string"]
        elif found.get("nullable") is True:
            result["type"] = [found["type"], "null"]
        return result

    document = plain(json.loads(schema))
    document.get("properties", {}).pop("metadata", None)
    return jsonschema.Draft4Validator(document, format_checker=jsonschema.Draft4Validator.FORMAT_CHECKER)


def _broken_rules(value: Any, old: Any, schema: Object, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in rule["rule"] and old is None and not rule.get("optionalOldSelf"):
            continue
        variables = {"self": value} if "oldSelf" not in rule["rule"] else {"self": value, "oldSelf": old}
        try:
            holds = evaluate(rule["rule"], variables)
        except celpy.CELEvalError as error:
            yield f"{path or '<root>'}: rule failed: {rule['rule']}: {error}"
            continue
        if not holds:
            message = rule.get("message") or f"failed rule: {rule['rule']}"
            if "messageExpression" in rule:
                message = str(evaluate(rule["messageExpression"], variables))
            yield f"{path or '<root>'}{rule.get('fieldPath', '')}: {message}"
    if isinstance(value, dict):
        before = old if isinstance(old, dict) else {}
        for name, found in value.items():
            known = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if isinstance(known, dict) and (path or name not in ("apiVersion", "kind", "metadata")):
                yield from _broken_rules(found, before.get(name), known, f"{path}.{name}".strip("."))
    elif isinstance(value, list):
        # old elements are found only where the list is a map
        keys = schema.get("x-kubernetes-list-map-keys") if schema.get("x-kubernetes-list-type") == "map" else None
        marks = [json.dumps([one.get(key) for key in keys] if keys else one, sort_keys=True) for one in value]
        if schema.get("x-kubernetes-list-type") in ("map", "set") and len(set(marks)) < len(marks):
            yield f"{path}: Duplicate value"
        olds = {json.dumps([one.get(key) for key in keys]): one for one in (old or [])} if keys else {}
        for number, (one, mark) in enumerate(zip(value, marks, strict=True)):
            yield from _broken_rules(one, olds.get(mark), schema.get("items", {}), f"{path}[{number}]")


def _path(words: Any) -> str:
    return "".join(f"[{word}]" if isinstance(word, int) else f".{word}" for word in words).strip(".") or "<root>"


# Common Expression Language

_ENVIRONMENT = new_environment()


@functools.cache
def _program(expression: str) -> Any:
    # words that CEL reserves are written __so__ by Kubernetes
    tree = _ENVIRONMENT.compile(re.sub(r"\.__([a-z]+)__", r".\1", expression))
    functions = {
        "_==_": _equal,
        "_!=_": lambda one, other: celpy.celtypes.BoolType(not _equal(one, other)),
        "split": lambda text, mark: celpy.json_to_cel(str(text).split(str(mark))),
    }
    return _ENVIRONMENT.program(tree, functions=functions)


def _equal(one: Any, other: Any) -> Any:
    """Anything can be compared with null, which the library does not know."""
    return celpy.celtypes.BoolType(one is other) if one is None or other is None else base_functions["_==_"](one, other)


def as_cel(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables as the library has them; those that it has already stay."""
    return {
        name: value if isinstance(value, celpy.celtypes.MapType) else celpy.json_to_cel(value)
        for name, value in variables.items()
    }


def evaluate(expression: str, variables: Mapping[str, Any]) -> Any:
    """Return the value; raises celpy.CELEvalError."""
    try:
        return _program(expression).evaluate(as_cel(variables))
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # what the library lets through
        raise celpy.CELEvalError(str(error)) from error


# Admission policies

NO_PARAMETERS = (
    "failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction",
    "Invalid",
)


def admit(
    store: Store, request: Any, operation: str, document: Object | None, old: Object | None, space: Object | None
) -> None:
    """Hold a request to the policies that are bound; raises Problem for the first that denies it.

    A policy's own objects, and those of the API server's configuration, are never held to policies.
    """
    if request.kind.group in ("admissionregistration.k8s.io", "apiextensions.k8s.io"):
        return
    for binding in store["ValidatingAdmissionPolicyBinding"].values():
        policy = store["ValidatingAdmissionPolicy"].get(("", binding["spec"]["policyName"]))
        if policy is None or "Deny" not in binding["spec"]["validationActions"]:
            continue
        spec = policy["spec"]
        scopes = (spec.get("matchConstraints", {}), binding["spec"].get("matchResources", {}))
        if not all(_is_concerned(scope, request, operation, document or old, space) for scope in scopes):
            continue
        parameters = _parameters(store, binding, spec, request.namespace)
        denials = (_denial(spec, request, operation, document, old, space, one) for one in parameters or ())
        denied = next(
            (denial for denial in denials if denial is not None), NO_PARAMETERS if parameters is None else None
        )
        if denied is not None:
            name, bound = policy["metadata"]["name"], binding["metadata"]["name"]
            words = f"ValidatingAdmissionPolicy '{name}' with binding '{bound}' denied request: {denied[0]}"
            what = f"{request.kind.describe(request.name)} is forbidden: {words}"
            raise Problem({"Forbidden": 403}.get(denied[1], 422), denied[1], what, request.kind, request.name)


def _denial(
    spec: Object,
    request: Any,
    operation: str,
    document: Object | None,
    old: Object | None,
    space: Object | None,
    params: Any,
) -> tuple[str, str] | None:
    """Return the message and the reason; a failure of an expression denies, unless the policy ignores it."""
    resource = {"group": request.kind.group, "version": request.version, "resource": request.kind.plural}
    variables: dict[str, Any] = {
        "object": document,
        "oldObject": old,
        "namespaceObject": space,
        "params": params,
        "request": {
            "operation": operation,
            # k8s.io/api/admission/v1: omitempty, so an expression that reads one without has() fails
            **{
                key: value
                for key, value in (
                    ("name", request.name),
                    ("namespace", request.namespace),
                    ("subResource", request.sub),
                )
                if value
            },
            "resource": resource,
            "kind": {"group": request.kind.group, "version": request.version, "kind": request.kind.kind},
            "userInfo": {
                "username": request.user.name,
                "groups": list(request.user.groups),
                "extra": request.user.extra,
            },
            "dryRun": bool(request.query.get("dryRun")),
        },
        "variables": {},
    }
    variables = as_cel(variables)
    ignore = spec.get("failurePolicy") == "Ignore"
    try:
        # the API server does not tell match conditions of the namespace (webhook/matchconditions/matcher.go)
        known = {**variables, "namespaceObject": None}
        if not all(evaluate(one["expression"], known) for one in spec.get("matchConditions", [])):
            return None
    except celpy.CELEvalError as error:
        return None if ignore else (f"match condition: {error}", "Forbidden")
    for one in spec.get("variables", []):
        try:
            variables["variables"][celpy.celtypes.StringType(one["name"])] = evaluate(one["expression"], variables)
        except celpy.CELEvalError:
            continue  # a validation that uses it fails
    for one in spec.get("validations", []):
        try:
            if evaluate(one["expression"], variables):
                continue
            message = one.get("message") or f"failed expression: {one['expression']}"
            if "messageExpression" in one:
                message = str(evaluate(one["messageExpression"], variables))
        except celpy.CELEvalError as error:
            if ignore:
                continue
            return f"expression '{one['expression']}' resulted in error: {error}", "Invalid"
        return message, one.get("reason", "Invalid")
    return None


def _parameters(store: Store, binding: Object, spec: Object, namespace: str) -> list[Any] | None:
    """Return the objects that a policy is asked with, one after the other: it holds if it does with each.

    None: there are none, and the binding denies then.
    """
    reference = binding["spec"].get("paramRef")
    if not reference or not spec.get("paramKind"):
        return [None]
    found = store[spec["paramKind"]["kind"]]
    if "selector" in reference:  # without a namespace: those of the request's
        space = reference.get("namespace", namespace)
        chosen = [one for (where, _), one in found.items() if where == space and selects(reference["selector"], one)]
        return chosen or ([] if reference["parameterNotFoundAction"] == "Allow" else None)
    return [found.get((reference.get("namespace", ""), reference.get("name", "")))]


def _is_concerned(scope: Object, request: Any, operation: str, document: Object | None, space: Object | None) -> bool:
    resource = f"{request.kind.plural}/{request.sub}" if request.sub else request.kind.plural

    def named(rule: Object) -> bool:
        return (
            {operation, "*"} <= {*rule["operations"], "*"}
            and rule.get("scope", "*") in ("*", "Namespaced" if request.kind.namespaced else "Cluster")
            and bool({request.kind.group, "*"} & set(rule["apiGroups"]))
            and bool({request.version, "*"} & set(rule["apiVersions"]))
            and bool(
                {resource, "*/*", f"{request.kind.plural}/*", *(() if request.sub else ("*",))} & set(rule["resources"])
            )
            and (not rule.get("resourceNames") or request.name in rule["resourceNames"])
        )

    rules = scope.get("resourceRules")
    if rules is not None and not any(named(rule) for rule in rules):
        return False
    if any(named(rule) for rule in scope.get("excludeResourceRules", [])):
        return False
    if (request.kind.namespaced or request.kind.kind == "Namespace") and not selects(
        scope.get("namespaceSelector", {}), space
    ):
        return False
    return selects(scope.get("objectSelector", {}), document)


def selects(selector: Object, document: Object | None) -> bool:
    """Whether a label selector selects an object; an empty one selects all."""
    labels = (document or {}).get("metadata", {}).get("labels") or {}
    if any(labels.get(name) != value for name, value in selector.get("matchLabels", {}).items()):
        return False
    for term in selector.get("matchExpressions", []):
        name, operator, values = term["key"], term["operator"], term.get("values", [])
        holds = {
            "In": labels.get(name) in values,
            "NotIn": labels.get(name) not in values,
            "Exists": name in labels,
            "DoesNotExist": name not in labels,
        }[operator]
        if not holds:
            return False
    return True
