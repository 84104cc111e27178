"""`jax-longctx eval` on plain texts: perplexity, agreement with full attention, papers' figures."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_longctx.cli import options
from jax_longctx.cli.options import only, option
from jax_longctx.cli.terminal import Terminal, check_plot, read_text, table
from jax_longctx.errors import InputError
from jax_longctx.evaluation.specs import PROTOCOLS, Protocol, Spec
from jax_longctx.methods import make_method
from jax_longctx.origin import MADE_FROM, digest_of

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.engine import Engine

# Of `eval agreement`: newest queries whose attention is compared, and k of the recall.
QUERIES, TOP = 16, 64
INSTRUCTION = "\n\nQuestion: What does the text above say, and about what?\nAnswer:"


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
    model: options.ModelChoice = only(
        "checkpoint", "dtype", "mesh", "chunk", "kv", "weights", "offload", "working_set"
    ),
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
    chosen = options.parse_specs(methods)
    terminal, kind = output.terminal(), scoring.kind
    length = scoring.length or kind.length
    plans: list[tuple[Spec, str]] = []
    with terminal.starting():
        made = _made(chosen)
        for spec in chosen:
            reads_for = made[spec].info.needs_question and kind.through == "context"
            if reads_for and not scoring.question:
                said = f"{spec.name} reads a text for a question: give one with --question"
                raise InputError(said)
            plans += [(spec, asked) for asked in (scoring.question or [] if reads_for else [""])]
    plans = list(dict.fromkeys(plans))

    def cut(loaded: "LongContext") -> Any:
        return _cut(loaded, scoring.text, scoring.texts, length, join=kind.stream)

    loaded, tokens, engines = _opened(model, terminal, made, cut)
    from jax_longctx.api import LongContext
    from jax_longctx.evaluation.perplexity import joined, markdown, score_piece
    from jax_longctx.evaluation.perplexity import plot as draw
    from jax_longctx.jobs.loop import compute_pieces, finish_pieces

    hashes = list(map(digest_of, tokens.tolist()))
    score, window = scoring.score or kind.score, scoring.window or kind.window
    made_from = {
        "command": "eval perplexity",
        "texts": hashes,
        "methods": [spec.label for spec in chosen],
        "score": score,
        "window": window,
        **{name: getattr(scoring, name) for name in ("protocol", "question")},
        **loaded.made_by,
    }
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

        # Earlier versions said how they scored methods that look ahead.
        how: dict[str, Any] = {"overwrite": overwrite, "free": ("ahead",)}
        found = compute_pieces(output.out, made_from, len(pieces), compute, **how)
    if found is None:
        return
    runs: list[dict[str, Any]] = []
    for number, (spec, asked) in enumerate(plans):
        scored = LongContext(engines[spec], loaded.tokenizer, loaded.manifest)
        facts = {**options.run_facts(scored), "given": dict(spec.settings), "question": asked}
        own = joined(found[number * len(starts) :][: len(starts)], length, window)
        about = {"protocol": scoring.protocol, "batch": scoring.batch, "text_hashes": hashes}
        runs.append({**facts, **about, **own})
    finish_pieces(output.out, {MADE_FROM: made_from, "runs": runs})
    if plot is not None:
        draw(runs, plot)
    terminal.records(runs, markdown)


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
        "Compare attention too; each layer's weights cost one pass over the text for every "
        "head-dim tokens of it.",
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
    chosen = options.parse_specs(methods)
    terminal = output.terminal()
    exactly = Spec("full")
    with terminal.starting():
        made = _made([*chosen, exactly])
    loaded, tokens, engines = _opened(
        model, terminal, made, lambda loaded: _cut(loaded, text, texts, length)
    )
    from jax_longctx.api import LongContext
    from jax_longctx.evaluation.agreement import compare, markdown
    from jax_longctx.jobs.loop import compute_pieces, finish_pieces

    sizes = {"score": score, "queries": min(QUERIES, score), "top": TOP}
    made_from = {
        "command": "eval agreement",
        "texts": list(map(digest_of, tokens.tolist())),
        "methods": [spec.label for spec in chosen],
        "attention": attention,
        **sizes,
        **loaded.made_by,
    }
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

        found = compute_pieces(output.out, made_from, count, compute, overwrite=overwrite)
    if found is None:
        return
    runs: list[dict[str, Any]] = []
    for spec, own in zip(chosen, zip(*found, strict=True), strict=True):
        scored = LongContext(engines[spec], loaded.tokenizer, loaded.manifest)
        facts = {**options.run_facts(scored), "given": dict(spec.settings), "length": length}
        means = {key: [each for part in own for each in part[key]] for key in ("kl", "same")}
        parts = [part["attention"] for part in own]
        shown = None if None in parts else [each for part in parts for each in part]
        runs.append({**facts, **sizes, **means, "attention": shown})
        if attention and shown is None:
            why = "reads a text in parts side by side, or chooses by values"
            terminal.note(f"{spec.name} {why}: no weights shown")
    finish_pieces(output.out, {MADE_FROM: made_from, "runs": runs})
    terminal.records(runs, markdown)


@options.command
def citrus_overlap(
    model: options.ModelChoice = only("checkpoint", "dtype"),
    output: options.Output = only("out"),
    text: list[Path] | None = _files(),
    texts: int = _count(20),
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

        jax-longctx eval citrus-overlap -c smollm2 --texts 50 --top 50
    """
    terminal = output.terminal()
    loaded = model.open(terminal)
    from jax_longctx.evaluation.perplexity import pipe_table
    from jax_longctx.studies.attention import importance, intersections

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


@options.command
def resa_spectrum(
    model: options.ModelChoice = only("checkpoint", "dtype"),
    output: options.Output = only("out"),
    text: list[Path] | None = _files(),
    texts: int = option("Texts of each length.", default=3, min=1),
    lengths: list[int] | None = option(
        "Tokens of a text; repeat. 512, 1024, 2048 unless given.", "--length"
    ),
) -> None:
    """How close attention logits are to rank one, by length. (RESA, Figs. 2 and 4)

    The first singular value, its share of the sum (40-50% in the paper), and the cosine between
    its right vector and RESA's estimate, the mean query's logits; over all heads and layers.

    [bold]Example[/bold]

        jax-longctx eval resa-spectrum -c smollm2 --length 1024 --length 4096
    """
    terminal = output.terminal()
    loaded = model.open(terminal)
    import numpy as np

    from jax_longctx.evaluation.perplexity import pipe_table
    from jax_longctx.studies.attention import spectrum

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
    text: Path | None = option(
        "Text to read; the help texts of Python unless given.",
        exists=True,
        dir_okay=False,
        allow_dash=True,
    ),
) -> None:
    """Errors of attention scores and outputs of RESA, and of its selectors alone (lambda 0).

    Over all layers; the first 4 and last 64 tokens are attended beside the budget.

    [bold]Example[/bold]

        jax-longctx eval resa-errors -c smollm2 --selector quest --ratio 0.05
    """
    terminal = output.terminal()
    loaded = model.open(terminal)
    from jax_longctx.evaluation.haystack import python_topics
    from jax_longctx.studies.resa_errors import attention_errors

    whole = python_topics() if text is None else read_text(str(text))
    ids = loaded.tokenizer.encode(whole, begins=True)
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
