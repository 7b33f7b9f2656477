"""The published schemas of the objects sent to a cluster. Each file of `schemas/` names its source."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

FOLDER = Path(__file__).parent / "schemas"
CORE = json.loads((FOLDER / "core-v1.json").read_text())
REGISTRY: Any = Registry().with_resource("core-v1.json", Resource(CORE, DRAFT7))


def find_schema(kind: str) -> dict[str, Any]:
    """The schema of a kind, changed to refuse unknown fields."""
    if kind == "ConfigMap":
        return {"$ref": "core-v1.json#/definitions/V1ConfigMap"}
    schema: dict[str, Any] = json.loads((FOLDER / f"{kind.lower()}.json").read_text())
    return schema


def list_faults(document: dict[str, Any]) -> list[str]:
    """The violations of the schema of the document's kind."""
    validator = Draft7Validator(find_schema(document["kind"]), registry=REGISTRY)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def inline(schema: Any) -> Any:
    """A schema with inlined references, as CustomResourceDefinitions need it."""
    definitions = {**CORE["definitions"], **schema.get("definitions", {})}

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        if node.get("type") == ["string", "integer"]:
            both = [{"type": "integer"}, {"type": "string"}]
            return {"anyOf": both, "pattern": node["pattern"], "x-kubernetes-int-or-string": True}
        if "const" in node:
            return {"type": "string", "enum": [node["const"]]}
        skipped = ("$comment", "definitions", "additionalProperties" if "properties" in node else "")
        return {key: resolve(value) for key, value in node.items() if key not in skipped}

    return resolve(schema)
