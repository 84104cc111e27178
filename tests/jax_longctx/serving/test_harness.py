"""lm-evaluation-harness, unmodified, asks the server by its `local-completions`."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install '.[harness]'")
pytest.importorskip("tenacity", reason="needs what its API models need: pip install 'lm_eval[api]'")

import lm_eval
from lm_eval.tasks import TaskManager

import checkpoints_convert
import jax_longctx
from jax_longctx.serving.prompts import Lengths
from tests.goldens.harness_cases import MAX_LENGTH, write_model, write_tasks

DATA = Path(__file__).parents[2] / "goldens/data/lm_harness.json"
GOLDENS = json.loads(DATA.read_text(encoding="utf-8"))["bos.plain"]
# Prompts as token ids, three in a request; and as texts, two requests at a time. The harness keeps
# two tokens of a rolling window for itself, and cuts prompts of generations to the rest.
WAYS = [
    ({"batch_size": 3, "add_bos_token": True, "max_length": MAX_LENGTH + 2}, "tiny_rolling"),
    ({"tokenized_requests": False, "num_concurrent": 2}, "tiny_answer"),
]


def flat(responses):
    if isinstance(responses, list | tuple):
        return [each for response in responses for each in flat(response)]
    return [responses]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "task"), WAYS)
def test_results_are_those_of_the_harness_own_model(serve, tmp_path, way, task):
    write_tasks(tmp_path / "tasks")
    source = write_model(tmp_path / "hf", adds_bos=True)
    checkpoints_convert.convert(source, tmp_path / "model")
    running = serve(
        jax_longctx.load(tmp_path / "model", chunk=32),
        lengths=Lengths(whole=256, question=32, answer=64),
    )
    address = {"base_url": f"{running.url}/v1/completions", "model": "tiny"}
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={**address, "tokenizer": str(source), **way},
        tasks=["tiny_choice", task],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    for name in ("tiny_choice", task):
        samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        found = flat([sample["resps"] for sample in samples])
        for each, golden in zip(found, flat(GOLDENS[name]["responses"]), strict=True):
            assert each == (pytest.approx(golden, abs=1e-3) if type(golden) is float else golden)
        scores = {key: results["results"][name][key] for key in GOLDENS[name]["scores"]}
        assert scores == pytest.approx(GOLDENS[name]["scores"], abs=1e-5)
