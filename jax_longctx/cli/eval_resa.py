"""`jax-longctx eval resa-errors`: how far sparse attention is from full attention."""

from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jax_longctx.cli import options
from jax_longctx.cli.inputs import read_text
from jax_longctx.cli.results import check_file, hand_over
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError

__all__ = ["resa_errors"]


def resa_errors(
    *,
    checkpoint: options.Checkpoint,
    selectors: Annotated[
        list[str] | None,
        typer.Option("--selector", help="quest, arkvale or ideal; all three unless given."),
    ] = None,
    ratios: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio", help="Share of the prompt selected; 0.025, 0.05, 0.1 unless given."
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Texts, cut from one at even distances.")] = 3,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 2048,
    queries: Annotated[int, typer.Option(min=1, help="Last tokens of each that query.")] = 64,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            allow_dash=True,
            help="Text to read; the help texts of Python unless given.",
        ),
    ] = None,
    dtype: options.Dtype = None,
    out: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
) -> None:
    """Errors of attention scores and outputs of RESA, and of its selectors alone (lambda 0).

    Over all layers; the first 4 and last 64 tokens are read beside the budget.

    [bold]Example[/bold]

        jax-longctx eval resa-errors -c smollm2 --selector quest --ratio 0.05
    """
    check_file(out)
    terminal = Terminal()
    model = options.ModelChoice(checkpoint, dtype=dtype).open(terminal)
    from jax_longctx.evaluation.haystack import python_topics
    from jax_longctx.methods import make_method
    from jax_longctx.studies.resa_errors import attention_errors

    ids = model.tokenizer.encode(python_topics() if text is None else read_text(str(text)))
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
            records += attention_errors(model.engine, cut, methods, queries=queries)
    hand_over(terminal, records, out, _show)


def _show(records: list[dict[str, Any]]) -> None:
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for header in ("selector", "ratio", "lambda", "score error", "below", "output error", "below"):
        table.add_column(header, justify="left" if header == "selector" else "right")
    plain: dict[Any, dict[str, Any]] = {}
    for record in records:
        settings = record["settings"]
        key = settings["selector"], settings["ratio"]
        if settings["lam"] == 0:
            plain[key] = record
        table.add_row(
            settings["selector"],
            f"{settings['ratio']:.1%}",
            f"{settings['lam']:.2f}",
            f"{record['score_error']:.3f}",
            _layers_below(record, plain.get(key), 0),
            f"{record['output_error']:.3f}",
            _layers_below(record, plain.get(key), 1),
        )
    console = rich.console.Console(highlight=False)
    console.print(table)
    console.print(
        f"{records[0]['queries']} queries in each layer; below: layers whose error is below the "
        "selector's alone"
    )


def _layers_below(record: dict[str, Any], plain: dict[str, Any] | None, which: int) -> str:
    """`28/30`: in how many layers the score's (0) or the output's (1) error is smaller."""
    if plain is None or record is plain:
        return ""
    pairs = list(zip(record["by_layer"], plain["by_layer"], strict=True))
    return f"{sum(mine[which] < alone[which] for mine, alone in pairs)}/{len(pairs)}"
