"""Makes `manifest_schemas.json`, by which the manifests of `deploy` are checked.

    python tests/manifests.py JOBSET LWS KUBERAY > tests/manifest_schemas.json

The arguments are clones of kubernetes-sigs/jobset, kubernetes-sigs/lws and ray-project/kuberay. Of
the custom resource definitions of the releases below there stay the kinds that are used, without
descriptions and defaults. Equal parts are there once, and no object may have an unknown field.
"""

import hashlib
import json
import subprocess
import sys

import yaml

CRDS = {
    "kubernetes-sigs/jobset": ("v0.12.0", "config/components/crd/bases/jobset.x-k8s.io_jobsets"),
    "kubernetes-sigs/lws": (
        "v0.10.0",
        "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets",
    ),
    "ray-project/kuberay": ("v1.7.0", "ray-operator/config/crd/bases/ray.io_rayjobs"),
}
LICENCE = "Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0; changed: see tests/manifests.py"
KEPT = {"type", "required", "enum", "pattern", "minimum", "maximum", "minItems", "maxItems"}
KEPT |= {"minLength", "maxLength"}
# Shorter parts stand where they are used.
SHORT = 60


def reduced(schema, parts):
    """What is kept of an OpenAPI v3 schema, as JSON schema; longer parts go into `parts`."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {name: value for name, value in schema.items() if name in KEPT}
    for name in {"anyOf", "oneOf", "allOf"} & {*schema}:
        kept[name] = [reduced(each, parts) for each in schema[name]]
    for name in {"items", "additionalProperties"} & {*schema}:
        inner = schema[name]
        kept[name] = reduced(inner, parts) if isinstance(inner, dict) else inner
    if "properties" in schema:
        given = schema["properties"].items()
        kept["properties"] = {name: reduced(each, parts) for name, each in given}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept.setdefault("additionalProperties", False)
    text = json.dumps(kept, sort_keys=True)
    if len(text) <= SHORT:
        return kept
    name = hashlib.sha256(text.encode()).hexdigest()[:8]
    assert parts.setdefault(name, kept) == kept
    return {"$ref": f"#/$defs/{name}"}


def main(clones):
    parts, kinds, sources = {}, {}, []
    for clone, (project, (release, path)) in zip(clones, CRDS.items(), strict=True):
        command = ["git", "-C", clone, "show", f"{release}:{path}.yaml"]
        described = yaml.safe_load(subprocess.check_output(command))["spec"]
        for version in described["versions"]:
            if version["storage"]:
                name = f"{described['group']}/{version['name']}/{described['names']['kind']}"
                kinds[name] = reduced(version["schema"]["openAPIV3Schema"], parts)
        sources.append(f"{project} {release}, {path}.yaml, {LICENCE}")
    json.dump({"sources": sources, "kinds": kinds, "$defs": parts}, sys.stdout, sort_keys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
