"""Makes what the lm-evaluation-harness tests compare with, from the harness's own `hf` model.

    python3.11 tests/goldens/make_harness_goldens.py            writes data/lm_harness.json
    python3.11 tests/goldens/make_harness_goldens.py --check    makes and compares; 1: it differs

Needs torch, transformers, accelerate and lm_eval; our own packages are not imported.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from harness_cases import MAX_LENGTH, RUNS, write_model, write_tasks

DATA = Path(__file__).parent / "data" / "lm_harness.json"
# Largest difference of a log-likelihood between two makings on different processors.
TOLERANCE = 1e-4
# The two best logits of every greedy step differ by more than this, or another seed is needed.
MIN_GAP = 1e-3


def make_all(folder: Path) -> dict[str, Any]:
    """Requests, responses and scores of every run, for a tokenizer that adds BOS and one not."""
    from lm_eval.models.huggingface import HFLM

    tasks = write_tasks(folder / "tasks")
    made = {}
    for adds_bos in (True, False):
        name = "bos" if adds_bos else "no_bos"
        where = str(write_model(folder / name, adds_bos=adds_bos))
        options: Any = {"device": "cpu", "dtype": "float32", "batch_size": 1}
        short = HFLM(pretrained=where, max_length=MAX_LENGTH, **options)
        long = HFLM(pretrained=where, **options)
        for run, settings in RUNS.items():
            made[f"{name}.{run}"] = run_all(short, long, tasks, settings)
        check_gaps(long, made)
    return made


def run_all(short: Any, long: Any, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Task -> its scores and every request with its response."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = {}
    others = {key: value for key, value in settings.items() if key != "tasks"}
    for task in settings["tasks"]:
        results = simple_evaluate(
            model=short if "rolling" in task else long,
            tasks=[task],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
            **others,
        )
        samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
        found[task] = {
            "scores": {k: v for k, v in results["results"][task].items() if isinstance(v, float)},
            "arguments": [[list(args) for args in sample["arguments"]] for sample in samples],
            "responses": [sample["resps"] for sample in samples],
        }
    return found


def check_gaps(model: Any, made: dict[str, Any]) -> None:
    """Refuses answers where another processor's rounding may choose another token."""
    for name, tasks in made.items():
        for task, found in tasks.items():
            if task not in ("tiny_answer", "tiny_prefix"):
                continue
            for [[prompt, _]], [[answer]] in zip(
                found["arguments"], found["responses"], strict=True
            ):
                before = model.tok_encode(prompt)
                tokens = before + model.tok_encode(answer, add_special_tokens=False)
                logits = model._model_call(torch.tensor([tokens]))[0, len(before) - 1 : -1]
                best = torch.topk(logits, 2).values
                if answer and (gap := float((best[:, 0] - best[:, 1]).min())) < MIN_GAP:
                    raise SystemExit(f"{name}.{task}: two logits {gap:.1e} apart; change the seed")


def difference(made: Any, kept: Any, where: str = "") -> str | None:
    """The first place where two goldens differ."""
    if isinstance(made, float) and isinstance(kept, float):
        return None if abs(made - kept) <= TOLERANCE else f"{where}: {made}, was {kept}"
    if isinstance(made, dict) and isinstance(kept, dict) and made.keys() == kept.keys():
        pairs = [(f"{where}.{key}", made[key], kept[key]) for key in made]
    elif isinstance(made, list) and isinstance(kept, list) and len(made) == len(kept):
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(made, kept, strict=True))]
    else:
        return None if made == kept else f"{where}: {made!r}, was {kept!r}"
    found = (difference(one, other, place) for place, one, other in pairs)
    return next((line for line in found if line), None)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(make_all(Path(folder)), indent=1)
    made = json.loads(text)
    if not options.check:
        DATA.write_text(text + "\n", encoding="utf-8")
        return 0
    found = difference(made, json.loads(DATA.read_text(encoding="utf-8")))
    if found:
        print(f"harness goldens: differ at {found}", file=sys.stderr)
        return 1
    print("harness goldens: as committed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
