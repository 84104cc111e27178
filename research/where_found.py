"""How often the passage that holds the answer is the first of those that `find_sources` names.

`python -m research.where_found CHECKPOINT --tokens 16384 --count 50` asks RULER's needles under
each method. It counts the right answers, and of these the ones whose truth lies in the first
passage, in a passage of that length at a random place, and in the last 5% of the text. A line of
JSON for each method and task.
"""

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jax_longctx
from jax_longctx.evaluation.tasks import Sample
from jax_longctx.evaluation.tasks.ruler import RulerNiah, ruler_niah_tasks
from jax_longctx.sources import find_sources
from jax_longctx.text import PromptText

NAMES = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2")


def tasks(haystack: str | None, max_new: int) -> Iterator[RulerNiah]:
    """RULER's needles with one true passage, in its own texts or in the essays given."""
    for task in ruler_niah_tasks():
        if task.name in NAMES:
            changes: dict[str, Any] = {"max_new": max_new}
            if haystack is not None and task.published == "essays":
                changes["haystack"] = haystack
            yield dataclasses.replace(task, **changes)


def hits(model: Any, sample: Sample, draw: random.Random, max_new: int) -> list[bool] | None:
    """Whether the truth lies in the first passage, a random one, the last 5%; None if wrong."""
    encode, layout = model.tokenizer.encode, model.layout()
    prompt = layout.context(sample.context)
    start = sample.answer_prefix.strip()
    asked = PromptText.of(layout.between, sample.query.strip(), layout.after, start)
    context = model.prefill([encode(prompt, bos=True)], reserve=256)
    (answer,) = model.ask(context, [encode(asked)], max_tokens=max_new)
    if sample.outputs[0] not in answer.text:
        return None
    (found,) = find_sources(model, context, [encode(asked)], [answer], [prompt])
    at, text = sample.context.index(sample.outputs[0]), sample.context
    best, end = found.sources[0], at + len(sample.outputs[0])
    anywhere = draw.randrange(max(1, len(text) - len(best.text)))
    return [
        best.start < end and at < best.end,
        anywhere < end and at < anywhere + len(best.text),
        end > 0.95 * len(text),
    ]


def main() -> None:
    """Prints a line for each method and task."""
    parser = argparse.ArgumentParser(description="Whether the first passage holds the answer.")
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new", type=int, default=48)
    parser.add_argument("--haystack", help="a text in place of Python's documentation")
    parser.add_argument("-m", "--method", action="append", help="as for `ask`; may be repeated")
    given = parser.parse_args()
    loaded = jax_longctx.load(given.checkpoint)
    methods = given.method or ["full", "reattention", "quest"]
    encode = loaded.tokenizer.encode
    each = itertools.product(methods, tasks(given.haystack, given.max_new))
    for name, task in each:
        model = loaded.with_method(jax_longctx.make_method(name))
        draw, found = random.Random(given.seed), []
        how = {"tokens": given.tokens, "trials": given.count, "seed": given.seed}
        for sample in task.samples(lambda text: len(encode(text)), **how):
            found.append(hits(model, sample, draw, given.max_new))
        right = [each for each in found if each is not None]
        record = {"method": name, "task": task.name, "asked": len(found), "right": len(right)}
        for number, kind in enumerate(("first", "random", "last 5%")):
            record[kind] = sum(each[number] for each in right)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
