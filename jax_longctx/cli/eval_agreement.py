"""`jax-longctx eval agreement`: how far a method is from full attention on the same tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jax_longctx.cli import options
from jax_longctx.cli.eval import parse_method
from jax_longctx.cli.eval_perplexity import Texts, engines_of, texts_of
from jax_longctx.cli.results import check_file, save
from jax_longctx.cli.terminal import Terminal

if TYPE_CHECKING:
    from jax_longctx.engine import Engine

__all__ = ["agreement"]

Asked = Annotated[
    int, typer.Option(min=1, help="Tokens before the scored ones that are the question.")
]
Queries = Annotated[
    int, typer.Option(min=1, help="Newest scored tokens whose attention is looked at.")
]
Attention = Annotated[
    bool,
    typer.Option(
        help="Also what is attended; each layer's weights cost a pass over the text for every "
        "head-dim tokens of it."
    ),
]


def agreement(
    *,
    checkpoint: options.Checkpoint,
    methods: options.MethodSpecs = None,
    text: Texts = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 2048,
    score: Annotated[int, typer.Option(min=1, help="Last tokens that are scored.")] = 64,
    asked: Asked = 1,
    texts: Annotated[int, typer.Option(min=1, help="Texts, at even distances.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Rows that are read together.")] = 8,
    attention: Attention = True,
    queries: Queries = 16,
    top: Annotated[int, typer.Option(min=1, help="k of the recall of full attention's best.")] = 64,
    dtype: options.Dtype = None,
    mesh: options.MeshSizes = None,
    chunk: options.Chunk = 512,
    out: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """What a method predicts and attends, against full attention on the same texts.

    The last tokens of every text are decoded one by one. KL is of full attention's next-token
    distribution to the method's; mass and recall are of full attention's weights.

    [bold]Example[/bold]

        jax-longctx eval agreement -c smollm2 -m snapkv:budget=256 -m quest:budget=256
    """
    check_file(out)
    chosen = [parse_method(spec) for spec in methods or ["full"]]
    terminal = Terminal(as_json=as_json)
    choice = options.ModelChoice(checkpoint, *chosen[0], mesh=mesh, dtype=dtype, chunk=chunk)
    model = choice.open(terminal)
    engines = engines_of(model, chosen)
    (full, _), *_ = engines_of(model, [("full", [])])
    tokens = texts_of(model, text, texts, length, join=False)
    # Of more queries than are scored there would be nothing to look at.
    queries = min(queries, score)
    runs: list[dict[str, Any]] = []
    for engine, given in engines:
        model.engine = engine
        sizes = {"length": length, "score": score, "asked": asked, "queries": queries, "top": top}
        runs.append({**options.run_facts(model), "given": given, **sizes, "attention": None})
    how = {"score": score, "asked": asked, "batch": batch}
    _predicted(full, [engine for engine, _ in engines], tokens, runs, how, terminal)
    save({"runs": runs}, out)
    if attention:
        how |= {"queries": queries, "top": top}
        _attended(full, [engine for engine, _ in engines], tokens, runs, how, terminal)
        save({"runs": runs}, out)
    _report(runs, terminal)


def _predicted(
    full: "Engine",
    engines: list["Engine"],
    tokens: Any,
    runs: list[dict[str, Any]],
    how: dict[str, Any],
    terminal: Terminal,
) -> None:
    """Adds each run's `kl` and `same`."""
    from jax_longctx.evaluation.agreement import divergences, scored_states

    with terminal.waiting("full attention's predictions"):
        exact = scored_states(full, tokens, **how)
    for engine, run in zip(engines, runs, strict=True):
        with terminal.waiting(f"{run['method']}'s predictions"):
            kl, same = divergences(full, exact, scored_states(engine, tokens, **how))
        run["kl"] = kl.mean(1, dtype="float64").tolist()
        run["same"] = same.mean(1).tolist()


def _attended(
    full: "Engine",
    engines: list["Engine"],
    tokens: Any,
    runs: list[dict[str, Any]],
    how: dict[str, Any],
    terminal: Terminal,
) -> None:
    """Adds each run's `attention`."""
    from jax_longctx.evaluation.agreement import attention_agreement

    with terminal.progress("attention", "texts") as update:
        found = attention_agreement(full, engines, tokens, progress=update, **how)
    for run, records in zip(runs, found, strict=True):
        run["attention"] = records
        if records is None:
            terminal.note(f"{run['method']} reads a text in parts side by side: no weights shown")


def _report(runs: list[dict[str, Any]], terminal: Terminal) -> None:
    from jax_longctx.evaluation.agreement import markdown

    if terminal.as_json:
        for run in runs:
            terminal.record(run)
    else:
        terminal.write(markdown(runs))
