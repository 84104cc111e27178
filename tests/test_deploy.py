"""The manifests of `deploy`: their kinds' own schemas hold them, and their commands parse."""

import json
import math
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.test_docs import parsed_here

ROOT = Path(__file__).parents[1]
# Of the projects that define the kinds (Apache-2.0: see `sources`); tests/manifests.py makes it.
SCHEMAS = json.loads((ROOT / "tests/manifest_schemas.json").read_text())
MANIFESTS = sorted((ROOT / "deploy").glob("*.yaml"))


def faults(document):
    """What the schema of the document's kind has against it."""
    schema = SCHEMAS["kinds"][f"{document['apiVersion']}/{document['kind']}"]
    checked = jsonschema.Draft202012Validator({**schema, "$defs": SCHEMAS["$defs"]})
    return [f"{error.json_path}: {error.message}" for error in checked.iter_errors(document)]


def parts(value, name):
    """All values of that name in a document."""
    if isinstance(value, dict):
        found = [value[name]] if name in value else []
        return found + [each for inner in value.values() for each in parts(inner, name)]
    return (
        [each for inner in value for each in parts(inner, name)] if isinstance(value, list) else []
    )


def limits(document):
    """Accelerators of each pod that has some."""
    found = [{**each} for each in parts(document, "limits")]
    return [count for each in found for name, count in each.items() if "/" in name]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_what_its_kinds_schema_and_our_commands_say(path, tmp_path, monkeypatch):
    (document,) = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    assert faults(document) == []
    assert {*parts(document, "image")} == {"IMAGE"}
    words = parts(document, "command") or [shlex.split(document["spec"]["entrypoint"])]
    ((program, *given),) = words
    assert program == "jax-longctx"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("key")
    (tmp_path / "run.toml").write_text("")
    given = [re.sub("^/(data|keys)/", "", word) for word in given]
    parsed = parsed_here(given).params
    (each,) = limits(document)
    if document["kind"] == "RayJob":
        # A replica's mesh fits into one node, and as many as there may be into all.
        mesh = math.prod(map(int, re.findall(r"=(\d+)", parsed["mesh"])))
        (group,) = document["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        most = parsed.get("max_replicas") or parsed["replicas"]
        assert each % mesh == 0
        assert parsed["replicas"] * mesh <= group["minReplicas"] * each
        assert most * mesh == group["maxReplicas"] * each
        return
    # One process for each pod, and one device of the mesh for each accelerator.
    pods = parts(document, "size") or parts(document, "completions")
    assert [*parts(document, "parallelism")] in ([], pods)
    if "mesh" in parsed:
        assert math.prod(map(int, re.findall(r"=(\d+)", parsed["mesh"]))) == each * pods[0]
    told = {each["name"]: each.get("value") for env in parts(document, "env") for each in env}
    if told:
        assert told["JAX_NUM_PROCESSES"] in (str(pods[0]), "$(LWS_GROUP_SIZE)")
        assert {"JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"} <= {*told}


def test_a_wrong_manifest_is_found():
    document = yaml.safe_load((ROOT / "deploy/jobset-batch-tpu.yaml").read_text())
    (job,) = document["spec"]["replicatedJobs"]
    job["template"]["spec"]["complitions"] = 4
    job["replicas"] = "one"
    document["spec"]["failurePolicy"]["maxRestarts"] = None
    said = "\n".join(faults(document))
    for fault in ("'complitions' was unexpected", "'one' is not of type", "None is not of type"):
        assert fault in said, said
