"""`jax-longctx` with the methods of `research` and its studies: `python -m research eval ...`."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax_longctx.cli import options
from jax_longctx.cli.eval import eval_app
from jax_longctx.cli.main import main
from jax_longctx.cli.options import only, option
from jax_longctx.cli.terminal import read_text, table
from jax_longctx.errors import InputError
from research import offer

INSTRUCTION = "\n\nQuestion: What does the text above say, and about what?\nAnswer:"
TEXT = option(
    "Text to read; the help texts of Python unless given.",
    exists=True,
    dir_okay=False,
    allow_dash=True,
)


def _ids(model: Any, text: Path | None) -> list[int]:
    from jax_longctx.evaluation.haystack import python_topics

    whole = python_topics() if text is None else read_text(str(text))
    return model.tokenizer.encode(whole, begins=True)


def _cut(model: Any, text: Path | None, count: int, length: int) -> Any:
    """`count` texts of `length` tokens each, at even distances: int32 `[texts, length]`."""
    from jax_longctx.evaluation.perplexity import cut_texts

    lead = model.tokenizer.encode("", bos=True)
    return cut_texts([_ids(model, text)], count=count, length=length, lead=lead)


@eval_app.command("citrus-overlap")
@options.command
def citrus_overlap(
    model: options.ModelChoice = only("checkpoint", "dtype"),
    output: options.Output = only("out"),
    text: Path | None = TEXT,
    texts: int = option("Texts, at even distances.", default=20, min=1),
    tokens: int = option("Tokens of the first context.", default=200, min=1),
    top: list[int] | None = option(
        "k, tokens that are kept; repeat for several. 25, 50, 100 unless given."
    ),
    instruction: str = option("The instruction.", default=INSTRUCTION),
) -> None:
    """Do a text and an instruction attend to the same tokens? (CItruS, Fig. 3)

    Of the k most important tokens to a piece of text, the share that is also among the k most
    important to an instruction and (not in the paper) to another piece of text of the same length.

    [bold]Example[/bold]

        python -m research eval citrus-overlap -c smollm2 --texts 50 --top 50
    """
    terminal = output.terminal()
    loaded = model.open(terminal)
    from jax_longctx.evaluation.perplexity import pipe_table
    from research.attention import importance, intersections

    asked = loaded.tokenizer.encode(instruction)
    # Three pieces of one text: the first context, and two that follow far behind it.
    length = 4 * (tokens + len(asked))
    rows = _cut(loaded, text, texts, length).tolist()
    counts, ratios, size = top or [25, 50, 100], [], len(asked)
    with terminal.progress("overlap", "texts") as update:
        for done, row in enumerate(rows, start=1):
            followers = [row[-size:], asked, row[-2 * size : -size]]
            near, *others = (importance(loaded.engine, row[:tokens], part) for part in followers)
            ratios.append([[intersections(near, x, count) for x in others] for count in counts])
            update(done, len(rows))
    import numpy as np

    # [texts, counts, (instruction, text), layers] -> means over texts.
    means = dict(zip(counts, np.mean(ratios, axis=0), strict=True))
    by_layer = {str(count): found.tolist() for count, found in means.items()}
    record = {"tokens": tokens, "texts": len(rows), "instruction": instruction}
    output.save({**record, "by_layer": by_layer})
    lines = []
    # One line for each k and third of the layers.
    for count, found in means.items():
        borders = sorted({found.shape[1] * third // 3 for third in range(4)})
        for start, stop in itertools.pairwise(borders):
            shares = [*found[:, start:stop].mean(1), count / tokens]
            shown = (f"{share:.3f}" for share in shares)
            lines.append([f"{count}", f"{start}-{stop - 1}", *shown])
    head = ("k", "layers", "text and instruction", "text and other text", "chance")
    terminal.write(f"{pipe_table(head, lines)}\n{len(rows)} texts of {tokens} tokens.\n")


@eval_app.command("read-blocks")
@options.command
def read_blocks(
    model: options.ModelChoice = only("checkpoint", "dtype", "chunk"),
    output: options.Output = only("out"),
    text: Path | None = TEXT,
    texts: int = option("Texts, at even distances.", default=1, min=1),
    length: int = option("Tokens of a text.", default=32768, min=1),
    readings: list[str] | None = option(
        "As of [bold]--reading[/bold]; repeat. xattention with a mass of 0.8, 0.9, 0.95 and 0.98 "
        "unless given.",
        "--reading",
        metavar="NAME",
    ),
) -> None:
    """How many blocks sparse reading reads of a text, by layer and head, and the mass it keeps.

    [bold]Example[/bold]

        python -m research eval read-blocks -c qwen --length 32768 --chunk 4096 --out blocks.json
    """
    terminal = output.terminal()
    from jax_longctx.settings import parse_reading

    wanted = readings or [f"xattention:mass={mass}" for mass in (0.8, 0.9, 0.95, 0.98)]
    ways = [way for way in map(parse_reading, wanted) if way is not None]
    if len(ways) < len(wanted):
        raise InputError(
            "--reading dense reads all blocks: there is nothing to count; leave it away"
        )
    if length <= model.run.chunk:
        raise InputError(f"--length must be above --chunk, {model.run.chunk}; got {length}")
    loaded = model.open(terminal)
    import numpy as np

    from jax_longctx.evaluation.perplexity import pipe_table
    from research.read_blocks import counted

    with terminal.waiting(f"{texts} texts of {length:,} tokens"):
        rows = _cut(loaded, text, texts, length).tolist()
        found = [counted(loaded.engine, row, ways) for row in rows]
    density, kept = (np.mean(x, axis=0) for x in zip(*found, strict=True))
    record = {"length": length, "texts": texts, "chunk": model.run.chunk}
    by_reading = {
        name: {"density": density[i].tolist(), "kept": kept[i].tolist()}
        for i, name in enumerate(wanted)
    }
    output.save({**record, "by_reading": by_reading})
    lines = [
        [name, *(f"{x:.3f}" for x in (d.mean(), d.min(), d.max(), m.mean(), m.min()))]
        for name, d, m in zip(wanted, density, kept, strict=True)
    ]
    head = ("--reading", "blocks read", "least head", "most", "mass kept", "least head")
    terminal.write(f"{pipe_table(head, lines)}\n{texts} texts of {length:,} tokens.\n")


@eval_app.command("resa-spectrum")
@options.command
def resa_spectrum(
    model: options.ModelChoice = only("checkpoint", "dtype"),
    output: options.Output = only("out"),
    text: Path | None = TEXT,
    texts: int = option("Texts of each length.", default=3, min=1),
    lengths: list[int] | None = option(
        "Tokens of a text; repeat. 512, 1024, 2048 unless given.", "--length"
    ),
) -> None:
    """How close attention logits are to rank one, by length. (RESA, Figs. 2 and 4)

    The first singular value, its share of the sum (40-50% in the paper), and the cosine between
    its right vector and RESA's estimate, the mean query's logits; over all heads and layers.

    [bold]Example[/bold]

        python -m research eval resa-spectrum -c smollm2 --length 1024 --length 4096
    """
    terminal = output.terminal()
    loaded = model.open(terminal)
    import numpy as np

    from jax_longctx.evaluation.perplexity import pipe_table
    from research.attention import spectrum

    wanted = sorted(lengths or [512, 1024, 2048])
    cut = {length: _cut(loaded, text, texts, length) for length in wanted}
    records, lines = [], []
    for length, rows in cut.items():
        with terminal.waiting(f"{texts} texts of {length:,} tokens"):
            found = [spectrum(loaded.engine, row) for row in rows.tolist()]
        means = {name: np.mean([one[name] for one in found], axis=0) for name in found[0]}
        records.append({"length": length, **{name: x.tolist() for name, x in means.items()}})
        first, share, prior = (means[name].mean() for name in ("first", "share", "prior"))
        lines.append([f"{length:,}", f"{first:,.1f}", f"{100 * share:.1f}", f"{prior:.3f}"])
    output.save({"texts": texts, "lengths": records})
    head = ("tokens", "first singular value", "its share, %", "cosine to the prior")
    terminal.write(f"{pipe_table(head, lines)}\nMeans over layers, heads and {texts} texts.\n")


@eval_app.command("resa-errors")
@options.command
def resa_errors(
    model: options.ModelChoice = only("checkpoint", "dtype"),
    output: options.Output = only("out"),
    selectors: list[str] | None = option(
        "quest, arkvale or ideal; all three unless given.", "--selector"
    ),
    ratios: list[float] | None = option(
        "Share of the prompt selected; 0.025, 0.05, 0.1 unless given.", "--ratio"
    ),
    texts: int = option("Texts, cut from one at even distances.", default=3, min=1),
    tokens: int = option("Tokens of each text.", default=2048, min=2),
    queries: int = option("Last tokens of each text that are queries.", default=64, min=1),
    text: Path | None = TEXT,
) -> None:
    """Errors of attention scores and outputs of RESA, and of its selectors alone (lambda 0).

    Over all layers; the first 4 and last 64 tokens are attended beside the budget.

    [bold]Example[/bold]

        python -m research eval resa-errors -c smollm2 --selector quest --ratio 0.05
    """
    terminal = output.terminal()
    loaded = model.open(terminal)
    from jax_longctx.methods import make_method
    from research.resa_errors import attention_errors

    ids = _ids(loaded, text)
    if texts * tokens > len(ids):
        raise InputError(
            f"{texts} texts of {tokens:,} tokens need {texts * tokens:,}, the text has "
            f"{len(ids):,}; ask for fewer or give a longer --text"
        )
    cut = [ids[i * (len(ids) // texts) :][:tokens] for i in range(texts)]
    records: list[dict[str, Any]] = []
    for selector in selectors or ["quest", "arkvale", "ideal"]:
        methods = [
            make_method("resa", {"selector": selector, "ratio": ratio})
            for ratio in ratios or [0.025, 0.05, 0.1]
        ]
        with terminal.waiting(f"{selector}: {texts} texts of {tokens:,} tokens"):
            records += attention_errors(loaded.engine, cut, methods, queries=queries)
    output.hand_over(records, _errors)


def _errors(records: list[dict[str, Any]]) -> Iterable[Any]:
    plain: dict[Any, dict[str, Any]] = {}
    rows = []
    for record in records:
        selector, ratio, lam = (record["settings"][key] for key in ("selector", "ratio", "lam"))
        # The first record of a selector and ratio has lambda 0.
        alone = plain.setdefault((selector, ratio), record)
        cells = [selector, f"{ratio:.1%}", f"{lam:.2f}"]
        for index, error in enumerate((record["score_error"], record["output_error"])):
            layers = list(zip(record["by_layer"], alone["by_layer"], strict=True))
            below = sum(both[index] < base[index] for both, base in layers)
            cells += [f"{error:.3f}", "" if record is alone else f"{below}/{len(layers)}"]
        rows.append(cells)
    headers = ("selector", "ratio", "lambda", "score error", "below", "output error", "below")
    yield table(headers, rows)
    yield (
        f"{records[0]['queries']} queries in each layer; below: layers whose error is below the "
        "selector's alone"
    )


if __name__ == "__main__":
    offer()
    main()
