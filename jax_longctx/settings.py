"""Users' settings, checked without JAX: names, `--set key=value`, TOML files, meshes, sampling.

`parse_settings` converts text to a dataclass's fields; `from_toml` converts a parsed file to a
dataclass of sections. Both convert by the fields' annotations.
"""

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from jax_longctx.errors import ConfigError, InputError, LongctxError
from jax_longctx.files import expanded, read_text

MESH_AXES = ("data", "seq", "tensor")
# The value of `--method`, and of `--mesh`, that leaves the choice to the library.
AUTO = "auto"
# Largest repetition penalty: a larger product with a logit could exceed float32's range.
MOST_PENALTY = 1e6
SEEDS = 2**64
# Of weights and caches.
DTYPES = ("float32", "bfloat16", "float16")
# The 8-bit form of keys and values, or of weights; bfloat16 is the model's own dtype.
StoredForm = Literal["int8"]
FORM_NAMES = ("bfloat16", "int8")

_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
}


def look_up[T](table: Mapping[str, T], name: str, noun: str) -> T:
    """`table[name]`; raises ConfigError like `check_name`."""
    check_name(table, name, noun)
    return table[name]


def check_name(table: Collection[str], name: str, noun: str) -> None:
    """Raises ConfigError for an unknown name, with the known names and the most similar one."""
    if name in table:
        return
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown {noun} {name!r}; known: {', '.join(table)}{hint}")


def check_form(name: str, noun: str, known: Collection[str] = FORM_NAMES) -> None:
    """Raises ConfigError for an unknown form of keys and values, or of weights."""
    if name == "fp8":
        raise ConfigError(
            f"{noun} fp8 is not offered any more: int8 takes the same bytes and loses less; "
            f"use int8"
        )
    check_name(known, name, noun)


def at_least(
    least: float,
    given: object,
    *names: str,
    within: str = "",
    error: type[LongctxError] = ConfigError,
) -> None:
    """Raises an error unless each of these attributes is None or at least so large."""
    for name in names:
        value = getattr(given, name)
        if value is not None and not value >= least:
            raise error(f"{within}{name} must be at least {least}, got {value}")


def stored_form(
    noun: str, name: str | None, dtype: str, held: StoredForm | None = None
) -> StoredForm | None:
    """The 8-bit form of keys and values or of weights by its name; None for the model's `dtype`.

    Args:
      noun: "kv" or "weights".
      held: a checkpoint's own form of weights; None for floats.

    Raises:
      ConfigError: an unknown name, or "bfloat16" for a model of another dtype or for a checkpoint
        of 8 bits.
    """
    if name is None:
        return held
    check_form(name, noun)
    if held is not None and name != held:
        raise ConfigError(
            f"{noun} {name}: the checkpoint was converted with {noun} {held}, and what they "
            f"were rounded from is gone; leave {noun} away, or convert the source again"
        )
    if name != "bfloat16":
        return cast(StoredForm, name)
    if dtype != "bfloat16":
        raise ConfigError(
            f"{noun} bfloat16: this model is loaded in {dtype}, and so are its weights, keys and "
            f"values; leave {noun} away, or load the model with dtype bfloat16"
        )
    return None


@dataclasses.dataclass(frozen=True)
class Offload:
    """Keys and values of contexts lie in the host's memory.

    Attributes:
      working_set: tokens of each row that every layer keeps on the device beside the fixed and the
        newest ones; None for `SHARES` times what a decode step chooses.
    """

    working_set: int | None = None

    def __post_init__(self) -> None:
        if self.working_set is not None and self.working_set < 1:
            raise ConfigError(f"working_set must be at least 1 token, got {self.working_set}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A text is read by attention to some blocks of earlier keys (`caches.sparse_reading`).

    Attributes:
      way: what estimates the attention, a name of `READINGS`.
      mass: share of the estimated attention that is kept.
      density: share of the earlier blocks that is read, in place of `mass`.
      stride: tokens of which xattention estimates one score; a divisor of 128.
      tau: how far flex's two estimates of the last queries' attention may lie apart in a head, as
        the root of their Jensen-Shannon divergence in bits.
    """

    way: str = "xattention"
    mass: float = 0.95
    density: float | None = None
    stride: int = 16
    tau: float = 0.1

    def __post_init__(self) -> None:
        for name in ("mass", "density"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"reading: {name} must be above 0 and at most 1, got {value}")
        if self.stride < 1 or 128 % self.stride:
            raise ConfigError(f"reading: stride must be a divisor of 128, got {self.stride}")
        if not 0 <= self.tau <= 1:
            raise ConfigError(f"reading: tau must be from 0 to 1, got {self.tau}")


# The ways to read a text and their settings; "dense" is attention to all earlier keys.
READINGS = {
    "dense": [],
    "xattention": ["mass", "stride", "density"],
    "flex": ["mass", "density", "tau"],
    "vertical-slash": ["mass", "density"],
}


def parse_reading(text: str | None) -> Reading | None:
    """`"xattention:mass=0.98"` -> `Reading(mass=0.98)`; None for "dense" and None.

    Raises:
      ConfigError: an unknown name or setting.
    """
    name, settings = parse_named(text or "dense")
    names = look_up(READINGS, name, "reading")
    values = parse_settings(Reading, dict(settings), noun="reading", name=name, names=names)
    return None if name == "dense" else Reading(way=name, **values)


# Times what a step chooses that a working set holds unless its size is given: methods choose much
# of what they chose in the last steps.
SHARES = 4


def parse_pairs(pairs: Iterable[str], option: str = "--set") -> dict[str, str]:
    """`["budget=512"]`, the values of an option, -> `{"budget": "512"}`; InputError for others."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise InputError(f"{option} {pair!r} is not understood; expected KEY=VALUE")
        if key in settings:
            raise InputError(f"{option} {key} is given twice; give it once")
        settings[key] = value
    return settings


def parse_settings(
    kind: type,
    settings: Mapping[str, object],
    *,
    noun: str,
    name: str,
    names: Iterable[str],
) -> dict[str, Any]:
    """Values of the fields `names` of `kind`, from text or from values, which become text.

    Args:
      noun, name: of the dataclass in errors: the method 'citrus'.

    Raises:
      ConfigError: a setting that is not in `names`, or text that is no value of its type.
    """
    names, hints, values = list(names), typing.get_type_hints(kind), {}
    for key, text in settings.items():
        if key not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(f"{noun} {name!r} has no setting {key!r}; it has: {known}")
        try:
            values[key] = _convert(str(text), hints[key], text=True)
        except _WrongError as error:
            expected, _ = error.args
            raise ConfigError(f"{name}: setting {key}={text}: expected {expected}") from None
    return values


# What stands between two methods of which the second follows the first.
THEN = " > "
# The parts of such a pair, as its settings name them: `second.budget`.
PAIR = ("first", "second")


def parse_named(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A name and settings: `"quest:budget=512"` -> `("quest", (("budget", "512"),))`.

    Of two methods that follow one another, `"snapkv:budget=4096 > quest"`, the name is `"snapkv >
    quest"`, and settings are `first.budget` and so on.

    Raises:
      InputError: text of another form.
    """
    parts = text.split(THEN.strip())
    if len(parts) > len(PAIR):
        raise InputError(f"{text!r} names {len(parts)} methods; one method may follow another one")
    if len(parts) > 1:
        each = [parse_named(part) for part in parts]
        named = zip(PAIR, each, strict=True)
        pairs = ((f"{which}.{key}", value) for which, (_, own) in named for key, value in own)
        return THEN.join(name for name, _ in each), tuple(pairs)
    name, _, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise InputError(f"{text!r} is not understood; expected NAME:KEY=VALUE,...")
        if [other for other, _, _ in pairs].count(key) > 1:
            raise InputError(f"{text!r} gives {key} twice; give it once")
    return name.strip(), tuple((key.strip(), value.strip()) for key, _, value in pairs)


def named_text(
    name: str, settings: Mapping[str, object], before: str = ":", between: str = ","
) -> str:
    """`parse_named` undone; with other signs before the settings and between two of them."""
    if THEN in name:
        parts = zip(PAIR, name.split(THEN), strict=True)
        own = ((part, settings_within(which, settings)) for which, part in parts)
        return THEN.join(named_text(part, inner, before, between) for part, inner in own)
    pairs = between.join(f"{key}={value}" for key, value in settings.items())
    return f"{name}{before}{pairs}" if pairs else name


def settings_within(name: str, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings of the setting `name`, which is a method: those under `name.KEY`."""
    own = f"{name}."
    return {key.removeprefix(own): x for key, x in settings.items() if key.startswith(own)}


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file. Raises InputError when it cannot be read or is not TOML."""
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # TOML and UTF-8
        raise InputError(f"{path} is not TOML: {error}") from error


def from_toml[T](kind: type[T], given: Mapping[str, Any], name: str = "") -> T:
    """The dataclass `kind` from a parsed file, or from its section `name`.

    A field that is a dataclass is a section, which may be left out; a field that is a tuple of
    dataclasses is the tables [[field]].

    Raises:
      ConfigError: a section or key is missing, unknown or of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    hints = typing.get_type_hints(kind)
    sections = {key: {} for key in fields if dataclasses.is_dataclass(hints[key])}
    before = f"[{name}] " if name else ""
    noun = "section" if len(sections) == len(fields) else f"{before}key"
    for key in given:
        check_name(fields, key, noun)
    values: dict[str, Any] = {**sections, **given}
    for key, field in fields.items():
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if key not in values and not optional:
            raise ConfigError(f"config: {before}needs {key}")
    for key, value in values.items():
        hint, (part, *_) = hints[key], (*typing.get_args(hints[key]), None)
        if key in sections and not isinstance(value, Mapping):
            raise ConfigError(f"config: {key} must be a section [{key}], got {value!r}")
        try:
            if key in sections:
                values[key] = from_toml(hint, value, key)
            elif dataclasses.is_dataclass(part) and isinstance(value, list):
                values[key] = tuple(from_toml(typing.cast(Any, part), item, key) for item in value)
            else:
                values[key] = _convert(value, hint)
        except _WrongError as error:
            expected, found = error.args
            raise ConfigError(f"config: {before}{key} must be {expected}, got {found!r}") from None
    return kind(**values)


class _WrongError(ValueError):
    """Arguments: the expected kind of value in words, and the found value."""


def _convert(value: Any, hint: Any, *, text: bool = False) -> Any:
    """The value, or with `text` the text, converted to the annotated type.

    A TOML value is converted only from a whole number to a float, a list to a tuple, and a text to
    a path.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union) and type(None) in args:
        # TOML has no null: a TOML value has the other type.
        if text and value.lower() == "none":
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _convert(value, inner, text=text)
    if origin is Literal:
        for choice in args:
            if value == (str(choice) if text else choice):
                return choice
        raise _WrongError(f"one of {', '.join(map(str, args))}", value)
    if origin is tuple and not text:
        endless = args[-1] is ...
        kinds = args[:1] * len(value) if endless and isinstance(value, list) else args
        if not isinstance(value, list) or len(value) != len(kinds):
            raise _WrongError("a list" if endless else f"a list of {len(args)}", value)
        return tuple(_convert(item, kind) for item, kind in zip(value, kinds, strict=True))
    if hint not in _NOUNS:
        raise TypeError(f"settings of type {hint} cannot be read")
    found = value
    if text and hint is bool:
        found = {"true": True, "false": False}.get(value.lower())
    elif text or (hint, type(value)) in ((float, int), (Path, str)):
        try:
            found = expanded(value) if hint is Path else hint(value)
        except ValueError:
            found = None
    if type(found) is hint or (hint is Path and isinstance(found, Path)):
        return found
    raise _WrongError(_NOUNS[hint], value)


def type_name(hint: Any) -> str:
    """`int`, `float | None`, `Literal['max', 'mean']`."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=1,seq=2,tensor=4"` -> sizes for `make_mesh`; missing axes have size 1 there."""
    sizes: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        if name not in MESH_AXES or not value.isdecimal() or name in sizes:
            raise ConfigError(
                f"mesh {text!r} is not understood at {part!r}; expected e.g. data=1,seq=2,tensor=4"
            )
        sizes[name] = int(value)
    return sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
      temperature: divides the logits; 0 is greedy (and ignores top_k, top_p, min_p and seed).
      top_k: samples from the k most likely tokens only; 0 is all.
      top_p: samples from the smallest set of most likely tokens whose probability reaches p; 1 is
        all.
      min_p: samples from tokens of at least this share of the likeliest one's probability alone,
        after temperature (Nguyen et al. 2025); 0 is all.
      repetition_penalty: divides positive and multiplies negative logits of tokens that are
        already in prompt or answer (Keskar et al. 2019, section 4.1); 1 is off.
      presence_penalty: is subtracted from the logits of tokens that are already in the answer, as
        in OpenAI's API; 0 is off.
      frequency_penalty: the same, times how often a token is already in the answer.
      form: a grammar that the answer's text follows (`jax_longctx.forms`); None for any text.
      seed: one seed for all rows; each row derives its own by its place, so that equal
        prompts get different samples; or a tuple with the seed of each row, which then does not
        depend on its place.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | tuple[int, ...] = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    form: str | None = None

    def __post_init__(self) -> None:
        seeds = self.seed if isinstance(self.seed, tuple) else (self.seed,)
        least, most = 1 / MOST_PENALTY, MOST_PENALTY
        # NaN fails every comparison.
        checks = {
            "temperature": (0 <= self.temperature < math.inf, "at least 0 and finite"),
            "top_k": (self.top_k >= 0, "at least 0 (0 is off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (
                least <= self.repetition_penalty <= most,
                f"from {least:g} to {most:,.0f}",
            ),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "from -2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            "seed": (
                len(seeds) > 0 and all(0 <= seed < SEEDS for seed in seeds),
                "from 0 to 2^64 - 1, or a tuple with one for each row",
            ),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise InputError(f"{name} must be {expected}, got {getattr(self, name)}")

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def counted(self) -> bool:
        """Whether it matters how often a token is in the answer."""
        return bool(self.presence_penalty or self.frequency_penalty)

    def record(self) -> dict[str, Any]:
        """All values, as results state them; the last fields only where they have an effect."""
        later = ("presence_penalty", "frequency_penalty", "form")
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if value or name not in later}

    def at(self, places: Iterable[tuple[int, ...]]) -> "Sampling":
        """The same sampling with seeds for rows at these places of the input.

        A place is the index of the input's row and, where it has several questions, of the
        question: (row,) and (row, 0) are the same. By default a call's places are (0,), (1,) ...
        """
        if isinstance(self.seed, tuple):
            raise InputError("every row has a seed of its own already; give one seed or places")
        return dataclasses.replace(self, seed=tuple(_derived(self.seed, at) for at in places))

    def of_rows(self, rows: int) -> "Sampling":
        """The same sampling with a seed for each of `rows` rows.

        Raises:
          InputError: it already has another number of seeds.
        """
        if not isinstance(self.seed, tuple):
            return self.at((row,) for row in range(rows))
        if len(self.seed) != rows:
            raise InputError(
                f"{rows} rows need as many seeds, {len(self.seed)} given; or give one for all"
            )
        return self


def _derived(seed: int, place: tuple[int, ...]) -> int:
    """The seed of the request at `place`: 64 bits, so that two are equal after billions only."""
    import numpy as np

    index, question = (*place, 0)[:2]
    words = (seed % 2**32, seed >> 32, index % 2**32, index >> 32, question)
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
