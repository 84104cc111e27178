"""`jax-longctx eval` on plain texts: perplexity, agreement with full attention."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_longctx.cli import options
from jax_longctx.cli.options import only, option
from jax_longctx.cli.terminal import Terminal, check_plot, read_text
from jax_longctx.errors import InputError
from jax_longctx.evaluation.specs import PROTOCOLS, Protocol, Spec
from jax_longctx.files import write_whole
from jax_longctx.methods import make_method
from jax_longctx.origin import MADE_FROM, digest_of
from jax_longctx.run_spec import run_facts

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.engine import Engine

# Of `eval agreement`: newest queries whose attention is compared, and k of the recall.
QUERIES, TOP = 16, 64


def _files() -> Any:
    return option(
        "Text to read; repeat for several. The help texts of Python unless given.",
        "--text",
        exists=True,
        dir_okay=False,
        allow_dash=True,
    )


def _count(default: int) -> Any:
    return option("Texts, at even distances.", default=default, min=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """The texts, and which of their tokens are scored."""

    protocol: str = option(
        "P1: the last 256 tokens, decoded; P2: the last 50; P3, P4: every token of a stream, in "
        "prefill; P5: the last 256 tokens as a question.",
        default="P1",
    )
    text: list[Path] | None = _files()
    length: int | None = option("Tokens of a text; the protocol's unless given.", min=1)
    score: int | None = option("Last tokens that are scored; the protocol's unless given.", min=1)
    texts: int = _count(1)
    batch: int = option("Texts of one batch.", default=1, min=1)
    window: int | None = option("Scored tokens of a point of the curve.", min=1)
    question: list[str] | None = option(
        "P3, P4: the question for methods that need one at prefill; one run each."
    )

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            known = ", ".join(PROTOCOLS)
            raise InputError(f"--protocol {self.protocol!r} is not one of {known}")
        if self.question and self.kind.through != "context":
            raise InputError("--question is for P3 and P4; in the others the text's own tokens ask")

    @property
    def kind(self) -> Protocol:
        return PROTOCOLS[self.protocol]


@options.command
def perplexity(
    *,
    model: options.ModelChoice = only("checkpoint", *options.RUN),
    scoring: Scoring,
    output: options.Output,
    overwrite: bool = options.overwrite("a file, or an interrupted run of it,"),
    methods: list[str] | None = options.methods(),
    plot: Path | None = option("Write a PNG: perplexity by position."),
) -> None:
    """Perplexity of long texts under each method, against full attention on the same texts.

    Texts are cut from the files; each begins with the beginning-of-text token. In P1 and P2 the
    length includes the scored tokens. With --out the same command goes on after an interruption.

    [bold]Examples[/bold]

        jax-longctx eval perplexity -c smollm2 -m full -m snapkv:budget=512 --length 4096

        jax-longctx eval perplexity -c smollm2 --protocol P3 -m streaming-llm -m citrus-standard
    """
    check_plot(plot, "--plot")
    chosen, terminal, kind = options.parse_specs(methods), output.terminal(), scoring.kind
    length = scoring.length or kind.length
    with terminal.starting():
        made = _made(chosen)
        plans = _plans(made, scoring)

    how = {"join": kind.stream}
    loaded, tokens, engines = _opened(
        model, terminal, made, lambda each: _cut(each, scoring.text, scoring.texts, length, **how)
    )
    from jax_longctx.evaluation.perplexity import markdown, perplexity_rows, score_piece
    from jax_longctx.jobs.loop import compute_pieces, finish_pieces

    score, window = scoring.score or kind.score, scoring.window or kind.window
    sizes = {name: getattr(scoring, name) for name in ("protocol", "question", "batch")}
    sizes |= {"score": score, "window": window}
    made_from = _record("eval perplexity", loaded, chosen, tokens, **sizes)
    starts = range(0, len(tokens), scoring.batch)
    pieces = [(spec, asked, start) for spec, asked in plans for start in starts]
    with terminal.progress("scoring") as update:

        def compute(number: int) -> dict[str, Any]:
            spec, asked, start = pieces[number]
            return score_piece(
                engines[spec],
                tokens[start : start + scoring.batch],
                through=kind.through,
                score=score,
                batch=scoring.batch,
                question=loaded.tokenizer.encode(asked),
                progress=lambda done, total: update(
                    number * total + done, len(pieces) * total, spec.name
                ),
            )

        # Pieces are of a batch's texts, the finished file's scores of each text. Earlier versions
        # said how they scored methods that look ahead.
        free = ("batch", "ahead")
        found = compute_pieces(
            output.out, made_from, len(pieces), compute, overwrite=overwrite, free=free
        )
    if found is None:
        return
    runs = _runs(scoring, plans, found, engines, made_from)
    finish_pieces(output.out, {MADE_FROM: made_from, "runs": runs})
    if plot is not None:
        _draw([row for run in runs for row in perplexity_rows(run)], plot)
    terminal.records(runs, markdown)


def _draw(rows: list[Any], plot: Path) -> None:
    from jax_longctx.evaluation.plots import curves

    (drawn,) = curves(rows)
    write_whole(drawn.png(), plot)


def _plans(made: dict[Spec, Any], scoring: Scoring) -> list[tuple[Spec, str]]:
    """Each method, once for each question that it reads the texts for."""
    plans: list[tuple[Spec, str]] = []
    for spec, method in made.items():
        reads_for = method.info.needs_question and scoring.kind.through == "context"
        if reads_for and not scoring.question:
            raise InputError(f"{spec.name} reads a text for a question: give one with --question")
        plans += [(spec, asked) for asked in (scoring.question or [] if reads_for else [""])]
    return list(dict.fromkeys(plans))


def _runs(
    scoring: Scoring,
    plans: list[tuple[Spec, str]],
    found: list[dict[str, Any]],
    engines: dict[Spec, "Engine"],
    made_from: dict[str, Any],
) -> list[dict[str, Any]]:
    """The result of each plan, from the pieces of all."""
    from jax_longctx.evaluation.perplexity import joined

    length, count = scoring.length or scoring.kind.length, len(found) // len(plans)
    runs: list[dict[str, Any]] = []
    for number, (spec, asked) in enumerate(plans):
        facts = {**run_facts(engines[spec]), "given": dict(spec.settings)}
        own = joined(found[number * count :][:count], length, made_from["window"])
        about = {"question": asked, "protocol": scoring.protocol, "batch": scoring.batch}
        runs.append({**facts, **about, "text_hashes": made_from["texts"], **own})
    return runs


def _record(
    command: str, loaded: "LongContext", chosen: list[Spec], tokens: Any, **sizes: Any
) -> dict[str, Any]:
    """What the pieces of a run are made from."""
    texts, methods = list(map(digest_of, tokens.tolist())), [spec.label for spec in chosen]
    return {"command": command, "texts": texts, "methods": methods, **sizes, **loaded.made_by}


def _made(chosen: list[Spec]) -> dict[Spec, Any]:
    return {spec: make_method(spec.name, dict(spec.settings)) for spec in chosen}


def _opened(
    model: options.ModelChoice,
    terminal: Terminal,
    made: dict[Spec, Any],
    cut: Callable[["LongContext"], Any],
) -> tuple["LongContext", Any, dict[Spec, "Engine"]]:
    """The model, the texts that `cut` makes, and an engine for each method.

    Texts and methods that do not fit are refused before the weights load.
    """
    texts: list[Any] = []

    def engines(loaded: "LongContext") -> dict[Spec, "Engine"]:
        from jax_longctx.evaluation.compute import engine_of

        return {spec: engine_of(loaded, each, model.run) for spec, each in made.items()}

    def check(loaded: "LongContext") -> None:
        engines(loaded)
        texts.append(cut(loaded))

    loaded = model.open(terminal, next(iter(made)), resident=True, check=check)
    return loaded, texts[0], engines(loaded)


def _cut(
    model: "LongContext", files: list[Path] | None, count: int, length: int, *, join: bool = False
) -> Any:
    """`[n, T]` token ids; with `join` a text may continue in the next file."""
    from jax_longctx.evaluation.haystack import python_topics
    from jax_longctx.evaluation.perplexity import cut_texts

    encode = model.tokenizer.encode
    read = [read_text(str(file)) for file in files] if files else [python_topics()]
    documents = [encode(part, begins=True) for part in read]
    if join:
        documents = [[token for document in documents for token in document]]
    return cut_texts(documents, count=count, length=length, lead=encode("", bos=True))


@options.command
def agreement(
    *,
    model: options.ModelChoice = only("checkpoint", "dtype", "mesh", "chunk", "kv", "weights"),
    output: options.Output,
    overwrite: bool = options.overwrite("a file, or an interrupted run of it,"),
    methods: list[str] | None = options.methods(),
    text: list[Path] | None = _files(),
    length: int = option("Tokens of a text.", default=2048, min=1),
    score: int = option("Last tokens that are scored.", default=64, min=1),
    texts: int = _count(3),
    batch: int = option("Rows of one batch.", default=8, min=1),
    attention: bool = option(
        "Compare attention too: one pass over the text for every --batch times head-dim tokens "
        "of it, with a cache for every head-dim tokens. A larger --batch is quicker.",
        default=True,
    ),
) -> None:
    """A method's predictions and attention, against full attention on the same texts.

    The last tokens of every text are decoded one by one. KL is of full attention's next-token
    distribution to the method's; mass and recall are of the weights of full attention in the newest
    16 queries, and of the 64 largest of these. With --out the same command goes on after an
    interruption.

    [bold]Example[/bold]

        jax-longctx eval agreement -c smollm2 -m snapkv:budget=256 -m quest:budget=256
    """
    chosen, terminal = options.parse_specs(methods), output.terminal()
    exactly = Spec("full")
    with terminal.starting():
        made = _made([*chosen, exactly])
    loaded, tokens, engines = _opened(
        model, terminal, made, lambda loaded: _cut(loaded, text, texts, length)
    )
    from jax_longctx.evaluation.agreement import compare, markdown
    from jax_longctx.jobs.loop import compute_pieces, finish_pieces

    sizes = {"score": score, "queries": min(QUERIES, score), "top": TOP}
    how = {"attention": attention, "batch": batch, **sizes}
    made_from = _record("eval agreement", loaded, chosen, tokens, **how)
    count = -(-texts // batch)
    with terminal.progress("comparing", "texts") as update:

        def compute(number: int) -> list[dict[str, Any]]:
            return compare(
                engines[exactly],
                [engines[spec] for spec in chosen],
                tokens[number * batch :][:batch],
                attention=attention,
                batch=batch,
                progress=lambda done, total: update(number * total + done, count * total),
                **sizes,
            )

        free = ("batch",)
        found = compute_pieces(
            output.out, made_from, count, compute, overwrite=overwrite, free=free
        )
    if found is None:
        return
    runs: list[dict[str, Any]] = []
    for spec, own in zip(chosen, zip(*found, strict=True), strict=True):
        facts = {**run_facts(engines[spec]), "given": dict(spec.settings), "length": length}
        runs.append({**facts, **sizes, **_joined(own)})
        if attention and runs[-1]["attention"] is None:
            why = "reads a text in parts side by side, or chooses by values"
            terminal.note(f"{spec.name} {why}: no weights shown")
    finish_pieces(output.out, {MADE_FROM: made_from, "runs": runs})
    terminal.records(runs, markdown)


def _joined(pieces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What `compare` found of each text; no attention where one piece has none."""
    found = {key: [each[key] for each in pieces] for key in ("kl", "same", "attention")}
    none = None in found["attention"]
    whole = {key: [one for part in parts for one in part or ()] for key, parts in found.items()}
    return whole | ({"attention": None} if none else {})
