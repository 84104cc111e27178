"""What each benchmark measures, beside how the model runs (`RunSpec`). It needs no JAX.

The fields are the options of the commands, whose help says what they mean.
"""

import dataclasses
from pathlib import Path

from jax_longctx.cli import options
from jax_longctx.cli.options import option
from jax_longctx.errors import InputError
from jax_longctx.evaluation.specs import Spec
from jax_longctx.methods import METHODS, STUDIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """Methods under a model of random weights."""

    methods: list[str] | None = options.methods(
        "A method and its settings; repeat for several. All methods unless given."
    )
    model: str = options.shape(names=("--model", "--preset"))

    def named(self) -> list[tuple[str, dict[str, str]]]:
        """Names and settings of the methods; all that are not for studies where none is named."""
        if not self.methods:
            return [(name, {}) for name in METHODS if name not in STUDIES]
        return [(spec.name, dict(spec.settings)) for spec in map(Spec.parse, self.methods)]

    def beside_full(self) -> list[tuple[str, dict[str, str]]]:
        """Full attention, then the other methods."""
        full = ("full", {})
        return [full, *(each for each in self.named() if each != full)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps(Compared):
    """Decode steps."""

    random_cache: bool = option(
        "Draw the cache at random instead of reading a context (methods that keep all keys).",
        default=False,
    )
    kernels: bool = option(
        "Count the kernels of a step in a profile (on GPUs).",
        "--kernels/--no-kernels",
        default=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Steps):
    """Decode steps of a batch."""

    layers: int | None = option(
        "Time this many layers, and one, and scale to all; all unless given."
    )
    cases: list[str] | None = option(
        "E.g. 3x131072; repeat for several.", "--case", metavar="BATCHxCONTEXT"
    )
    blocks: int = option("Blocks of 32 steps that are timed.", default=5, min=1)

    def __post_init__(self) -> None:
        _ = self.sizes

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and tokens of each case."""
        expected = "BATCHxCONTEXT, as 3x131072"
        found = [_numbers(text, "x", expected) for text in self.cases or ["1x32768"]]
        return [(batch, context) for batch, context in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput(Steps):
    """Decode steps of the largest batch that fits."""

    contexts: list[int] | None = option(
        "Tokens of context of each row; repeat for several.", "--context"
    )
    most: int | None = option("Try no batch of more rows.", "--rows", min=1)
    memory: float | None = option(
        "GiB of each device that caches may use; what is free unless given.", metavar="GIB"
    )
    blocks: int = option("Blocks of 32 steps that are timed.", default=3, min=1)

    def __post_init__(self) -> None:
        for length in self.contexts or ():
            if length < 1:
                raise InputError(f"--context must be at least 1 token, got {length}")
        if self.memory is not None and self.memory <= 0:
            raise InputError(f"--memory must be above 0 GiB, got {self.memory:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(Compared):
    """Many answers over one context, and reading beside them."""

    methods: list[str] | None = options.methods(
        "A method and its settings; repeat for several. full and quest unless given."
    )
    context: int = option("Tokens of the text that all rows ask about.", default=131072, min=1)
    rows: int = option("Answers that are decoded together.", default=16, min=1)
    question: int = option("Tokens of each question.", default=32, min=1)
    read: int | None = option(
        "Tokens of another text that is read between decode blocks; 0 reads none. As --context "
        "unless given.",
        metavar="TOKENS",
        min=0,
    )
    blocks: int = option("Blocks of 32 steps that are timed.", default=5, min=1)
    random_cache: bool = option(
        "Draw the context's cache at random instead of reading it (methods that keep all keys).",
        default=True,
    )

    def named(self) -> list[tuple[str, dict[str, str]]]:
        """Names and settings; full attention and quest where none is named."""
        return Compared(methods=self.methods or ["full", "quest"]).named()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill(Compared):
    """Time to first token."""

    methods: list[str] | None = options.methods(
        "A method and its settings; repeat for several. Speed is relative to the first.",
        default=...,
    )
    model: str = options.shape()
    layers: int | None = option(
        "Time this many layers, and one, and scale to all; all unless given."
    )
    cases: list[str] | None = option(
        "Tokens of context, question and answer, and Star's block; repeat for several.",
        "--case",
        metavar="TOKENS[:BLOCK]",
    )
    runs: int = option("Runs; the median counts.", default=3, min=1)
    blocks: int = option(
        "Blocks of 32 decode steps that are timed; 0 times none.", default=2, min=0
    )
    question: int = option(
        "Tokens of the question, which some methods read beside each chunk.", default=1, min=1
    )

    def __post_init__(self) -> None:
        _ = self.sizes

    @property
    def sizes(self) -> list[tuple[int, int | None]]:
        """Tokens, and the block size of methods that have one, of each case."""
        expected, cases = "TOKENS or TOKENS:BLOCK, as 131072:32768", self.cases
        found = [
            _numbers(text, ":", expected, least=1)
            for text in cases or ["32768:8192", "131072:32768"]
        ]
        return [(tokens, block[0] if block else None) for tokens, *block in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cold(Compared):
    """A process's first answer."""

    checkpoint: Path | None = option(
        "Converted checkpoint in place of a shape with random weights.",
        "--checkpoint",
        "-c",
        metavar="DIR",
        callback=options.checked(options.check_checkpoint),
    )
    length: int = option("Tokens of context.", default=16000, min=1)
    answer: int = option("Tokens of the answer.", default=60, min=2)
    ahead: bool | None = option(
        "Compile the programs side by side before the prefill begins, or each when it is called. "
        "As the other commands do unless given: side by side, but not on a CPU.",
        "--ahead/--no-ahead",
        show_default=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """A whole model under full attention."""

    model: str = options.shape()
    contexts: list[int] | None = option(
        "Context length in tokens; repeat for several.", "--context"
    )
    runs: int = option("Runs; the median counts.", default=3, min=1)
    peer: bool = option("Also run transformers (needs PyTorch with CUDA).", default=True)
    compiled: bool = option(
        "Also transformers' compiled decode over a static cache.", default=False
    )


def _numbers(text: str, between: str, expected: str, least: int = 2) -> list[int]:
    """`"3x131072"` -> `[3, 131072]`: two numbers, or at least `least`."""
    numbers = text.split(between)
    whole = all(number.isdecimal() and int(number) for number in numbers)
    if not (whole and least <= len(numbers) <= 2):
        raise InputError(f"--case {text!r} is not understood; expected {expected}")
    return [int(number) for number in numbers]
