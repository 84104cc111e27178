"""`jax-longctx eval perplexity`: how well long texts are predicted under each method."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jax_longctx.cli import options, processes
from jax_longctx.cli.eval import parse_method
from jax_longctx.cli.inputs import read_text
from jax_longctx.cli.results import check_file, check_plot, save
from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.engine import Engine
    from jax_longctx.evaluation.perplexity import Protocol

__all__ = ["Texts", "engines_of", "perplexity", "texts_of"]

Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        exists=True,
        dir_okay=False,
        allow_dash=True,
        help="Text to read; repeat for several. The help texts of Python unless given.",
    ),
]


ProtocolName = Annotated[
    str,
    typer.Option(
        help="P1: the last 256 tokens decoded; P2: the last 50; P3, P4: a stream, every token "
        "as it is read; P5: the last 256 tokens as a question."
    ),
]
Length = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a text; the protocol's unless given.")
]
Score = Annotated[
    int | None,
    typer.Option(min=1, help="Last tokens that are scored; the protocol's unless given."),
]
Window = Annotated[int | None, typer.Option(min=1, help="Scored tokens of a point of the curve.")]
Question = Annotated[
    list[str] | None,
    typer.Option(
        help="P3, P4: what methods that need a question at prefill read for; one run each."
    ),
]
Ahead = Annotated[
    bool,
    typer.Option(
        "--ahead",
        help="P3 to P5: score methods whose chunks choose together by the chunk, marked; "
        "else token by token.",
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Write a PNG: perplexity by position.")]


def perplexity(
    *,
    checkpoint: options.Checkpoint,
    methods: options.MethodSpecs = None,
    protocol: ProtocolName = "P1",
    text: Texts = None,
    length: Length = None,
    score: Score = None,
    texts: Annotated[int, typer.Option(min=1, help="Texts, at even distances.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Texts that are read together.")] = 1,
    window: Window = None,
    question: Question = None,
    ahead: Ahead = False,
    dtype: options.Dtype = None,
    mesh: options.MeshSizes = None,
    chunk: options.Chunk = 512,
    out: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
    plot: Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Perplexity of long texts under each method, against full attention on the same texts.

    Texts are cut from what is given, each beginning with the beginning-of-text token; P1 and P2
    count the scored tokens in the length.

    [bold]Examples[/bold]

        jax-longctx eval perplexity -c smollm2 -m full -m snapkv:budget=512 --length 4096

        jax-longctx eval perplexity -c smollm2 --protocol P3 -m streaming-llm -m citrus-standard
    """
    check_file(out)
    check_plot(plot, "--plot")
    chosen = [parse_method(spec) for spec in methods or ["full"]]
    terminal = Terminal(as_json=as_json)
    choice = options.ModelChoice(checkpoint, *chosen[0], mesh=mesh, dtype=dtype, chunk=chunk)
    with starting(terminal):
        kind = _protocol(protocol, question or [])
    model = choice.open(terminal)
    plans = _plans(engines_of(model, chosen), chosen, question or [], kind)
    tokens = texts_of(model, text, texts, length or kind.length, join=kind.stream)
    how = {"score": score or kind.score, "batch": batch, "window": window or kind.window}
    runs: list[dict[str, Any]] = []
    for engine, given, asked in plans:
        model.engine = engine
        facts = {**options.run_facts(model), "given": given, "question": asked, "ahead": ahead}
        found = _run(model, tokens, kind, facts, how, terminal)
        runs.append({**facts, "protocol": protocol, **found})
        save({"runs": runs}, out)
    _report(runs, plot, terminal)


def _protocol(name: str, questions: list[str]) -> "Protocol":
    from jax_longctx.evaluation.perplexity import PROTOCOLS

    if name not in PROTOCOLS:
        raise InputError(f"--protocol {name!r} is not one of {', '.join(PROTOCOLS)}")
    if questions and PROTOCOLS[name].through != "context":
        raise InputError("--question is for P3 and P4; in the others the text's own tokens ask")
    return PROTOCOLS[name]


def engines_of(
    model: "LongContext", chosen: list[tuple[str, list[str]]]
) -> list[tuple["Engine", dict[str, str]]]:
    """An engine and the given settings of each method; all are made before any runs."""
    from jax_longctx.engine import Engine
    from jax_longctx.methods import make_method

    base, found = model.engine, []
    for name, pairs in chosen:
        given = options.parse_settings(pairs)
        method = make_method(name, given)
        engine = Engine(base.config, base.params, method, base.mesh, chunk=base.chunk)
        found.append((engine, given))
    return found


def texts_of(
    model: "LongContext", files: list[Path] | None, count: int, length: int, *, join: bool
) -> Any:
    """`[n, T]` token ids; `join` lets a text run on from one file to the next."""
    from jax_longctx.evaluation.haystack import python_topics
    from jax_longctx.evaluation.perplexity import cut_texts

    encode = model.tokenizer.encode
    read = [read_text(str(file)) for file in files] if files else [python_topics()]
    documents = [encode(part) for part in read]
    if join:
        documents = [[token for document in documents for token in document]]
    return cut_texts(documents, count=count, length=length, lead=encode("", bos=True))


def _plans(
    engines: list[tuple["Engine", dict[str, str]]],
    chosen: list[tuple[str, list[str]]],
    questions: list[str],
    kind: "Protocol",
) -> list[tuple["Engine", dict[str, str], str]]:
    """Engine, settings and question of every run."""
    plans = []
    for (engine, given), (name, _) in zip(engines, chosen, strict=True):
        reads_for = engine.method.info.needs_question and kind.through == "context"
        if reads_for and not questions:
            raise InputError(f"{name} reads a text for a question: give one with --question")
        plans += [(engine, given, asked) for asked in (questions if reads_for else [""])]
    return plans


def _run(
    model: "LongContext",
    tokens: Any,
    kind: "Protocol",
    facts: dict[str, Any],
    how: dict[str, Any],
    terminal: Terminal,
) -> dict[str, Any]:
    from jax_longctx.evaluation.perplexity import score_texts, windows

    with terminal.progress(facts["method"]) as update:
        found = score_texts(
            model.engine,
            tokens,
            through=kind.through,
            score=how["score"],
            batch=how["batch"],
            question=model.tokenizer.encode(facts["question"]),
            ahead=facts["ahead"],
            progress=update,
        )
    count, length = tokens.shape
    scored = found.losses.shape[1]
    return {
        "length": length,
        "score": scored,
        "texts": count,
        "batch": how["batch"],
        "through": found.through,
        "ahead": found.ahead,
        "means": found.losses.mean(1, dtype="float64").tolist(),
        "windows": windows(found.losses, first=length - scored, window=how["window"]),
        "read_seconds": found.read_seconds,
        "score_seconds": found.score_seconds,
    }


def _report(runs: list[dict[str, Any]], plot: Path | None, terminal: Terminal) -> None:
    from jax_longctx.evaluation import perplexity as report

    if plot is not None and processes.is_leader():
        report.plot(runs, plot)
    if terminal.as_json:
        for run in runs:
            terminal.record(run)
    else:
        terminal.write(report.markdown(runs))
