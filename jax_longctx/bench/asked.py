"""What each benchmark measures, beside how the model runs (`RunSpec`). It needs no JAX.

The fields are options of `jax-longctx bench`, whose help says what they mean.
"""

import dataclasses

from jax_longctx.errors import InputError
from jax_longctx.evaluation.specs import Spec
from jax_longctx.methods import METHODS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """Methods under a model of random weights."""

    methods: list[str] | None = None
    model: str = "llama-3.1-8b"

    def named(self) -> list[tuple[str, dict[str, str]]]:
        """Names and settings of the methods; all where none is named."""
        if not self.methods:
            return [(name, {}) for name in METHODS]
        return [(spec.name, dict(spec.settings)) for spec in map(Spec.parse, self.methods)]

    def beside_full(self) -> list[tuple[str, dict[str, str]]]:
        """Full attention, then the other methods."""
        full = ("full", {})
        return [full, *(each for each in self.named() if each != full)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Compared):
    """Decode steps of a batch."""

    random_cache: bool = False
    kernels: bool = True
    blocks: int = 5
    layers: int | None = None
    cases: list[str] | None = None

    def __post_init__(self) -> None:
        _ = self.sizes

    @property
    def sizes(self) -> list[tuple[int | None, int]]:
        """Rows and tokens of each case; None for the most rows that fit."""
        expected = "BATCHxCONTEXT or CONTEXT, as 3x131072"
        found = [_numbers(text, "x", expected) for text in self.cases or ["1x32768"]]
        return [(batch[0] if batch else None, context) for *batch, context in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(Compared):
    """Many answers over one context, and prefill beside them."""

    context: int = 131072
    rows: int = 16
    question: int = 32
    read: int | None = None
    blocks: int = 5
    random_cache: bool = True

    def named(self) -> list[tuple[str, dict[str, str]]]:
        """Names and settings; full attention and quest where none is named."""
        return Compared(methods=self.methods or ["full", "quest"]).named()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill(Compared):
    """Time to first token."""

    layers: int | None = None
    cases: list[str] | None = None
    runs: int = 3
    question: int = 1

    def __post_init__(self) -> None:
        _ = self.sizes

    @property
    def sizes(self) -> list[tuple[int, int | None]]:
        """Tokens, and the block size of methods that have one, of each case."""
        expected, cases = "TOKENS or TOKENS:BLOCK, as 131072:32768", self.cases
        found = [_numbers(text, ":", expected) for text in cases or ["32768:8192", "131072:32768"]]
        return [(tokens, block[0] if block else None) for tokens, *block in found]


def _numbers(text: str, between: str, expected: str) -> list[int]:
    """`"3x131072"` -> `[3, 131072]`: one number or two."""
    numbers = text.split(between)
    whole = all(number.isdecimal() and int(number) for number in numbers)
    if not whole or len(numbers) > 2:
        raise InputError(f"--case {text!r} is not understood; expected {expected}")
    return [int(number) for number in numbers]
