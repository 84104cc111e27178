"""`jax-longctx calibrate`: measure the heads of a model, once for methods that need it."""

import random
from pathlib import Path
from typing import Any

from jax_longctx.cli import options
from jax_longctx.cli.options import option
from jax_longctx.cli.terminal import Terminal, check_checkpoint
from jax_longctx.evaluation.haystack import python_topics
from jax_longctx.run_spec import RunSpec

# What is written beside the checkpoint.
HEADS, FILTERS = "retrieval_heads.tsv", "query_filters.tsv"


@options.command
def calibrate(
    *,
    checkpoint: Path = option(
        "Converted checkpoint.",
        "--checkpoint",
        "-c",
        default=...,
        metavar="DIR",
        callback=options.checked(check_checkpoint),
    ),
    out: Path | None = option(
        f"Folder for {HEADS} and {FILTERS}; the checkpoint unless given.",
        "--out",
        "-o",
        metavar="DIR",
    ),
    tokens: int = option("Tokens of each text.", default=4000, min=600),
    texts: int = option("Texts, each with a passage elsewhere.", default=4, min=1),
    passage: int = option("Tokens of a passage.", default=64, min=8, max=256),
    seed: int = option("Fixes the passages.", default=0),
    run: RunSpec = options.run("dtype"),
    as_json: bool = options.as_json(),
) -> None:
    """Measure the heads of a model for duo-attention and q-filters, and write a file for each.

    A passage of random words lies in a text and follows it once more. A head's number for
    duo-attention is the attention that the copy gives to what is neither at the text's beginning
    nor near. Its filter for q-filters is the direction in which its queries of all texts point. It
    takes one pass over each text.

    [bold]Examples[/bold]

        jax-longctx calibrate -c qwen

        jax-longctx ask book.txt "Who?" -c qwen -m duo-attention:heads=qwen/retrieval_heads.tsv

        jax-longctx ask book.txt "Who?" -c qwen -m q-filters:filters=qwen/query_filters.tsv
    """
    terminal, folder = Terminal(as_json=as_json), out or checkpoint
    with terminal.starting():
        import numpy as np

        from jax_longctx.api import load
        from jax_longctx.evaluation.heads import measured, query_filters
        from jax_longctx.methods.duo_attention import DuoAttention
        from jax_longctx.parts.tables import shape_of, write_numbers

        model = load(checkpoint, run)
    near, prose, chosen = DuoAttention(), python_topics(), random.Random(seed)
    words = sorted({word for word in prose.split() if word.isalpha() and len(word) > 3})
    around = model.tokenizer.encode(prose)
    around *= 1 + 2 * tokens // len(around)
    prompts = []
    for number in range(texts):
        own = model.tokenizer.encode(" ".join(chosen.sample(words, passage)))[:passage]
        begin = chosen.randrange(len(around) - tokens)
        text = around[begin : begin + tokens - len(own)]
        # In the middle of as many parts of the text's first half, far from its beginning and copy.
        at = near.sink + (len(text) // 2 - near.sink) * (2 * number + 1) // (2 * texts)
        prompts.append(([*text[:at], *own, *text[at:]], own))
    with terminal.waiting("reading the texts"):
        found = [
            measured(model.engine, text, own, sink=near.sink, recent=near.recent)
            for text, own in prompts
        ]
    far, queries, products = (np.sum(each, axis=0) for each in zip(*found, strict=True))
    scores = far / texts
    filters = query_filters(queries, products, scores.shape[1])
    of = {**shape_of(model.config), "weights": model.engine.identity}
    write_numbers(scores, folder / HEADS, of)
    write_numbers(filters.reshape(len(filters), -1), folder / FILTERS, of)
    record = {"heads": str(folder / HEADS), "filters": str(folder / FILTERS)}
    record |= {"layers": len(scores), "kv_heads": len(scores[0])}
    record |= {"tokens": tokens, "texts": texts, "passage": passage, "seed": seed}
    record["scores"] = scores.tolist()
    terminal.result(record, _shown)


def _shown(record: dict[str, Any]) -> list[Any]:
    scores = sorted((x for row in record["scores"] for x in row), reverse=True)
    most, half = scores[0], scores[len(scores) // 2]
    return [
        f"{record['heads']}: {record['layers']} layers of {record['kv_heads']} kv heads; the copy "
        f"gives far tokens {most:.0%} of its attention in the first of them, {half:.0%} in the "
        "median one",
        f"use it: -m duo-attention:heads={record['heads']}",
        f"or the filters: -m q-filters:filters={record['filters']}",
    ]
