"""Validation of a manifest by the schema of its custom resource, as strictly as `kubectl create` does it.

A field that the schema does not know is an error. A keyword of a schema that is not checked here is a `KeyError`,
unless it is about documentation, defaults, merging, or changes of an object.
"""

import re

SILENT = {"description", "default", "format", "x-kubernetes-list-map-keys", "x-kubernetes-list-type"}
SILENT |= {"x-kubernetes-map-type", "x-kubernetes-validations", "anyOf"}
"""`anyOf` stands only beside `x-kubernetes-int-or-string`; rules in CEL are about names and changes."""

KINDS = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list, "number": float}


def faults(value, schema, place="manifest"):
    """The differences between a value and a schema, as lines.

    >>> faults({"name": 3, "nam": "x"}, {"type": "object", "properties": {"name": {"type": "string"}}})
    ['manifest.name is of type int, not string', 'manifest.nam is unknown']
    """
    kinds = (int, str) if schema.get("x-kubernetes-int-or-string") else (KINDS[schema["type"]],)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = "int or string" if len(kinds) > 1 else schema["type"]
        return [f"{place} is of type {type(value).__name__}, not {wanted}"]
    found = []
    for keyword, wanted in schema.items():
        if keyword not in SILENT | {"type", "x-kubernetes-int-or-string"}:
            found += CHECKS[keyword](value, wanted, schema, place)
    return found


def _properties(value, wanted, schema, place):
    found = []
    for name, inner in value.items():
        found += faults(inner, wanted[name], f"{place}.{name}") if name in wanted else [f"{place}.{name} is unknown"]
    return found


def _additional(value, wanted, schema, place):
    return [fault for name, inner in value.items() for fault in faults(inner, wanted, f"{place}.{name}")]


def _items(value, wanted, schema, place):
    return [fault for i, inner in enumerate(value) for fault in faults(inner, wanted, f"{place}[{i}]")]


def _required(value, wanted, schema, place):
    return [f"{place}.{name} is missing" for name in wanted if name not in value]


def _limit(holds, said):
    return lambda value, wanted, schema, place: [] if holds(value, wanted) else [f"{place} {said} {wanted}: {value!r}"]


CHECKS = {
    "properties": _properties,
    "additionalProperties": _additional,
    "items": _items,
    "required": _required,
    "enum": _limit(lambda value, wanted: value in wanted, "is none of"),
    "maxItems": _limit(lambda value, wanted: len(value) <= wanted, "is longer than"),
    "maxLength": _limit(lambda value, wanted: len(value) <= wanted, "is longer than"),
    "minLength": _limit(lambda value, wanted: len(value) >= wanted, "is shorter than"),
    "minProperties": _limit(lambda value, wanted: len(value) >= wanted, "has fewer fields than"),
    "minimum": _limit(lambda value, wanted: value >= wanted, "is less than"),
    "maximum": _limit(lambda value, wanted: value <= wanted, "is more than"),
    "pattern": _limit(lambda value, wanted: re.search(wanted, str(value)) is not None, "does not match"),
}
