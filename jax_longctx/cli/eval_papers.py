"""`jax-longctx eval citrus-overlap` and `resa-spectrum`: what two papers say of full attention."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from jax_longctx.cli import options
from jax_longctx.cli.eval_perplexity import Texts, texts_of
from jax_longctx.cli.results import check_file, save
from jax_longctx.cli.terminal import Terminal

__all__ = ["citrus_overlap", "resa_spectrum"]

INSTRUCTION = "\n\nQuestion: What does the text above say, and about what?\nAnswer:"
Out = Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")]


def citrus_overlap(
    *,
    checkpoint: options.Checkpoint,
    text: Texts = None,
    texts: Annotated[int, typer.Option(min=1, help="Texts, at even distances.")] = 20,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the first context.")] = 200,
    top: Annotated[
        list[int] | None,
        typer.Option(help="k, tokens that are kept; repeat for several. 25, 50, 100 unless given."),
    ] = None,
    instruction: Annotated[str, typer.Option(help="What is asked of the text.")] = INSTRUCTION,
    dtype: options.Dtype = None,
    out: Out = None,
) -> None:
    """Do a text and an instruction look at the same tokens? (CItruS, Fig. 3)

    The share of the k tokens that matter most to a piece of text which also matter most to an
    instruction, and, beside the paper, to another piece of text, all of as many tokens.

    [bold]Example[/bold]

        jax-longctx eval citrus-overlap -c smollm2 --texts 50 --top 50
    """
    check_file(out)
    terminal = Terminal()
    model = options.ModelChoice(checkpoint, dtype=dtype).open(terminal)
    from jax_longctx.studies.attention import importance, intersections

    asked = model.tokenizer.encode(instruction)
    # Three pieces of one text: the first context, and two that follow far behind it.
    length = 4 * (tokens + len(asked))
    rows = texts_of(model, text, texts, length, join=False).tolist()
    counts = top or [25, 50, 100]
    ratios: dict[int, list[Any]] = {count: [] for count in counts}
    with terminal.progress("overlap", "texts") as update:
        for done, row in enumerate(rows, start=1):
            first, size = row[:tokens], len(asked)
            followers = [row[-size:], asked, row[-2 * size : -size]]
            near, told, other = (importance(model.engine, first, part) for part in followers)
            for count in counts:
                pair = [intersections(near, part, count) for part in (told, other)]
                ratios[count].append(pair)
            update(done, len(rows))
    import numpy as np

    # [texts, (instruction, text), layers] -> means by layer.
    means = {count: np.mean(found, axis=0) for count, found in ratios.items()}
    by_layer = {str(count): found.tolist() for count, found in means.items()}
    record = {"tokens": tokens, "texts": len(rows), "instruction": instruction}
    save({**record, "by_layer": by_layer}, out)
    terminal.write(_overlaps(means, tokens) + f"\n\n{len(rows)} texts of {tokens} tokens.\n")


def _overlaps(means: dict[int, Any], tokens: int) -> str:
    """A line for each k and third of the layers."""
    lines = ["| k | layers | text and instruction | text and other text | chance |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for count, found in means.items():
        layers = found.shape[1]
        borders = sorted({layers * third // 3 for third in range(4)})
        for start, stop in itertools.pairwise(borders):
            told, other = found[:, start:stop].mean(1)
            lines.append(
                f"| {count} | {start}-{stop - 1} | {told:.3f} | {other:.3f} "
                f"| {count / tokens:.3f} |"
            )
    return "\n".join(lines)


def resa_spectrum(
    *,
    checkpoint: options.Checkpoint,
    text: Texts = None,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each length.")] = 3,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", help="Tokens of a text; repeat. 512, 1024, 2048 unless given."),
    ] = None,
    dtype: options.Dtype = None,
    out: Out = None,
) -> None:
    """How nearly attention logits are of rank one, by length. (RESA, Figs. 2 and 4)

    The first singular value, its share of their sum (the paper: 40-50%), and the cosine between
    its right vector and the mean query's logits, which RESA estimates by; all heads and layers.

    [bold]Example[/bold]

        jax-longctx eval resa-spectrum -c smollm2 --length 1024 --length 4096
    """
    check_file(out)
    terminal = Terminal()
    model = options.ModelChoice(checkpoint, dtype=dtype).open(terminal)
    import numpy as np

    from jax_longctx.studies.attention import spectrum

    wanted = sorted(lengths or [512, 1024, 2048])
    cut = {length: texts_of(model, text, texts, length, join=False) for length in wanted}
    records, lines = [], ["| tokens | first singular value | its share, % | cosine to the prior |"]
    lines.append("| --- | --- | --- | --- |")
    for length, rows in cut.items():
        with terminal.waiting(f"{texts} texts of {length:,} tokens"):
            found = [spectrum(model.engine, row) for row in rows.tolist()]
        means = {name: np.mean([one[name] for one in found], axis=0) for name in found[0]}
        records.append({"length": length, **{name: x.tolist() for name, x in means.items()}})
        first, share, prior = (means[name].mean() for name in ("first", "share", "prior"))
        lines.append(f"| {length:,} | {first:,.1f} | {100 * share:.1f} | {prior:.3f} |")
    save({"texts": texts, "lengths": records}, out)
    terminal.write("\n".join(lines) + f"\n\nMeans over layers, heads and {texts} texts.\n")
