"""Methods and tasks as the command line and suites write them: `name:key=value,...`."""

import dataclasses
import re

from jax_longctx.errors import InputError

# A share of the length: "L/8", or all of it.
_SHARE = re.compile(r"L(?:/(\d+))?")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A name and settings as text.

    A setting `L/8` is an eighth of the prompt's length, in tokens.
    """

    name: str
    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """`"citrus:budget=1024,chunk=256"`. Raises InputError where it reads otherwise."""
        name, _, rest = text.partition(":")
        pairs = [pair.partition("=") for pair in rest.split(",") if pair]
        for key, equals, value in pairs:
            if not (key and equals and value):
                raise InputError(f"{text!r} is not understood; expected NAME:KEY=VALUE,...")
            if [other for other, _, _ in pairs].count(key) > 1:
                raise InputError(f"{text!r} gives {key} twice; give it once")
        return cls(name.strip(), tuple((key.strip(), value.strip()) for key, _, value in pairs))

    @property
    def label(self) -> str:
        """In tables, and what tells rows of one run apart: `citrus budget=1024`."""
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.settings)])

    def at(self, length: int) -> dict[str, str]:
        """The settings for prompts of `length` tokens, shares of it as numbers.

        Raises InputError at `L/0`.
        """
        values = {}
        for key, value in self.settings:
            share = _SHARE.fullmatch(value)
            if share and share[1] is not None and not int(share[1]):
                raise InputError(f"{key}={value} of {self.name} is no share of a length")
            values[key] = str(length // int(share[1] or 1)) if share else value
        return values
