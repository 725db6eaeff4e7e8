"""Judge written Kubernetes manifests by the schema of LeaderWorkerSet's custom resource: names, types and required fields.

    pip install jsonschema pyyaml
    python benchmarks/export_check/leader_worker_set.py --lws CHECKOUT FOLDER

A LeaderWorkerSet must be one of the schema, with no field that the schema lacks (as `kubectl apply --validate=strict` asks). The
pod templates of a Deployment are judged by the schema of a leader's, which is the same type, and services must not have the name
of a LeaderWorkerSet, which its controller gives to the headless service of the pods.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from engine_words import judge
from jsonschema import Draft202012Validator

SCHEMA_FILE = "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"


def strict_schema(schema: Any) -> Any:
    """Return a structural schema of Kubernetes as JSON schema: fields without a name there are refused."""
    if isinstance(schema, list):
        return [strict_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {
        key: strict_schema(value) for key, value in schema.items() if not key.startswith("x-") and key != "format"
    }
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        strict["properties"] = {name: strict_schema(value) for name, value in schema["properties"].items()}
        if "additionalProperties" not in schema and schema["properties"]:
            strict["additionalProperties"] = False
    return strict


def read_schema(checkout: Path) -> Mapping[str, Any]:
    """Return the schema of a LeaderWorkerSet."""
    resource = yaml.safe_load((checkout / SCHEMA_FILE).read_text(encoding="utf-8"))
    version = next(version for version in resource["spec"]["versions"] if version["name"] == "v1")
    schema: Mapping[str, Any] = strict_schema(version["schema"]["openAPIV3Schema"])
    return {**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}}


class ManifestJudge:
    """Schemas of LeaderWorkerSets and of pod templates."""

    def __init__(self, checkout: Path) -> None:
        schema = read_schema(checkout)
        template = schema["properties"]["spec"]["properties"]["leaderWorkerTemplate"]["properties"]["leaderTemplate"]
        self.workload, self.template = Draft202012Validator(schema), Draft202012Validator(template)

    def problems_of(self, folder: Path, expected: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is wrong with a folder's manifest."""
        path = folder / "kubernetes.yaml"
        if not path.exists():
            if "pools" in expected or expected["num_nodes"] == 1:
                yield "no manifest"
            return
        objects = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
        sets = [item for item in objects if item["kind"] == "LeaderWorkerSet"]
        for item in sets:
            yield from self._schema_problems(self.workload, item)
        for item in objects:
            if item["kind"] == "Deployment":
                yield from self._schema_problems(self.template, item["spec"]["template"])
        taken = {item["metadata"]["name"] for item in sets}
        for item in objects:
            if item["kind"] == "Service" and item["metadata"]["name"] in taken:
                yield f"the service {item['metadata']['name']} has the name of a LeaderWorkerSet"

    @staticmethod
    def _schema_problems(validator: Draft202012Validator, item: Mapping[str, Any]) -> Iterator[str]:
        for error in validator.iter_errors(item):
            yield f"{item.get('kind', 'template')}: {'.'.join(map(str, error.absolute_path))}: {error.message[:160]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lws", type=Path, required=True, help="a checkout of kubernetes-sigs/lws")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    return judge(arguments.folder.resolve(), ManifestJudge(arguments.lws).problems_of)


if __name__ == "__main__":
    sys.exit(main())
