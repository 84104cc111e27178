"""The choice of each row's next token by penalties, form, temperature, top-k, top-p, min-p.

Every row of a batch has values of its own (`RowValues`), which are arrays: rows with other values
need no other program. What is static is only which kinds of choice a program holds. A step costs
what the most demanding of its unfinished rows needs. A row's token does not depend on the others.

Which tokens a form allows next depends on the tokens that its row has chosen. The host finds that
out and gives the device a bit for each token. So a batch with such a row comes back to the host for
each token. `jax_longctx.forms` makes forms of JSON schemas. A batch without forms and penalties by
count has the programs that it would have if there were neither.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jax_longctx.errors import InputError
from jax_longctx.settings import Sampling

# Kinds of choice, each more work than the one before: the largest logit; the largest with noise;
# with noise among at most `FEW` best tokens; with noise among any number of best tokens.
GREEDY, DRAWN, AMONG_FEW, AMONG_ALL = range(4)
KINDS = (GREEDY, DRAWN, AMONG_FEW, AMONG_ALL)
# Best tokens of a row that are ranked without a sort of the vocabulary.
FEW = 128
# Most tokens of a step whose log-probabilities are reported beside the chosen one's.
MOST_LOGPROBS = 20
# Ids that end an answer: their number is a multiple of this.
STOPS = 8


class SamplingStatic(NamedTuple):
    """What programs are compiled for.

    Attributes:
      kinds: the kinds of choice that a row may have, ascending.
      logprobs: whether rows may want log-probabilities.
    """

    kinds: tuple[int, ...]
    logprobs: bool = False


# Rows of any values.
ANY = SamplingStatic(KINDS, logprobs=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowValues:
    """What each row's request says.

    Attributes:
      temperature: 0 is greedy.
      top_k, top_p, min_p, penalty: as in `Sampling`.
      keys: of the random draws: two words of the row's seed.
      limit: most tokens of the row's answer.
      stops: token ids that end it, padded with -1.
      logprobs: whether log-probabilities are wanted.
      counted: presence and frequency penalty; None where no row has any.
      allowed: the tokens that a row's form allows next, 32 in a word, the first in its lowest bit;
        None where no row has a form.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    penalty: Float[Array, " B"]
    keys: UInt32[Array, "B 2"]
    limit: Int[Array, " B"]
    stops: Int[Array, "B E"]
    logprobs: Bool[Array, " B"]
    counted: Float[Array, "B 2"] | None = None
    allowed: UInt32[Array, "B U"] | None = None

    @property
    def kind(self) -> Int[Array, " B"]:
        """Each row's kind of choice."""
        some, ranked = self.top_k > 0, (self.top_k > 0) | (self.top_p < 1)
        kind = jnp.where(some & (self.top_k <= FEW), AMONG_FEW, AMONG_ALL)
        return jnp.where(self.temperature == 0, GREEDY, jnp.where(ranked, kind, DRAWN))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choices:
    """The tokens of X steps.

    Attributes:
      token: -1 where a row chose none.
      logprob: the token's natural-log probability under the model's own logits, before penalty and
        temperature; None where no row may want it.
      best, best_logprob: the M most likely tokens under these logits, the first the likeliest.
    """

    token: Int[Array, "B X"]
    logprob: Float[Array, "B X"] | None = None
    best: Int[Array, "B X M"] | None = None
    best_logprob: Float[Array, "B X M"] | None = None

    def with_column(self, index: Any, column: "Choices") -> "Choices":
        """These, with the X = 1 `column` at `index`."""

        def put(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=1)

        return jax.tree.map(put, self, column)


def no_choices(rows: int, columns: int, vocabulary: int, static: SamplingStatic) -> Choices:
    """Columns before any row has chosen."""

    def filled(value: Any, *size: int) -> Any:
        # Of one number in memory: a constant where it is traced, and no program where it is not.
        return np.broadcast_to(value, (rows, columns, *size))

    token = filled(np.int32(-1))
    if not static.logprobs:
        return Choices(token)
    most = min(MOST_LOGPROBS, vocabulary)
    zero = np.float32(0)
    return Choices(token, filled(zero), filled(np.int32(0), most), filled(zero, most))


def row_keys(sampling: Sampling, rows: int) -> UInt32[np.ndarray, "B 2"]:
    """Each row's key of two words, of `rows` rows; those that pad the batch get zeros."""
    assert isinstance(sampling.seed, tuple)
    keys = np.zeros((rows, 2), np.uint32)
    keys[: len(sampling.seed)] = [(seed >> 32, seed % 2**32) for seed in map(int, sampling.seed)]
    return keys


def sampling_values(
    sampling: Sampling,
    rows: int,
    *,
    max_tokens: int = 1,
    stop_ids: Sequence[int] = (),
    logprobs: bool = False,
) -> RowValues:
    """The values of `rows` rows, as numpy arrays; `sampling` has a seed for each that is asked.

    Floats are within float32's normal numbers: others would be infinite, or zero to processors that
    flush.
    """
    limits = np.finfo(np.float32)

    def number(value: float) -> Any:
        return np.full(rows, np.clip(value, limits.tiny, limits.max), np.float32)

    # A k beyond int32 is every vocabulary.
    top_k = min(sampling.top_k, np.iinfo(np.int32).max)
    values: Any = dict(
        temperature=number(sampling.temperature) * np.float32(sampling.temperature > 0),
        top_k=np.full(rows, top_k, np.int32),
        top_p=number(sampling.top_p),
        min_p=np.full(rows, sampling.min_p, np.float32),
        penalty=number(sampling.repetition_penalty),
        keys=row_keys(sampling, rows),
        limit=np.full(rows, max_tokens, np.int32),
        stops=np.tile(stop_columns(stop_ids), (rows, 1)),
        logprobs=np.full(rows, logprobs),
    )
    return RowValues(**values)


def stop_columns(stop_ids: Sequence[int]) -> Int[np.ndarray, " E"]:
    """The ids, padded with -1 to a multiple of `STOPS`: few numbers of them are ever compiled."""
    ids = sorted(set(stop_ids))
    return np.array([*ids, *[-1] * (-len(ids) % STOPS or (0 if ids else STOPS))], np.int32)


def sampling_static(sampling: Sampling) -> SamplingStatic:
    """The static part of a batch whose rows differ only in their seeds."""
    seeded = dataclasses.replace(sampling, seed=(0,))
    (kind,) = np.asarray(sampling_values(seeded, 1).kind)
    return SamplingStatic((int(kind),))


def next_token(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    count: Int[Array, " B"],
    active: Bool[Array, " B"],
    values: RowValues,
    static: SamplingStatic,
    counts: Int[Array, "B V"] | None = None,
) -> Int[Array, " B"]:
    """The next token of each row: penalty, temperature, top-k, top-p, min-p, as in transformers.

    Presence and frequency penalty follow the repetition penalty. They are as in OpenAI's API:
    platform.openai.com/docs/api-reference/chat/create. What a form forbids is never chosen.

    Args:
      seen: tokens under the repetition penalty; None when it is off in every row.
      count: tokens the row has generated so far (part of its random key).
      active: rows whose token is used; the others' is any.
      counts: how often each token is in the row's answer; needed where `values.counted` is.
    """
    if seen is not None:
        penalty_B1 = values.penalty[:, None]
        lowered = jnp.where(logits > 0, logits / penalty_B1, logits * penalty_B1)
        logits = jnp.where(seen, lowered, logits)
    if values.counted is not None:
        assert counts is not None
        presence_B1, frequency_B1 = jnp.split(values.counted, 2, axis=1)
        logits = logits - (counts > 0) * presence_B1 - counts * frequency_B1
    if values.allowed is not None:
        logits = jnp.where(_unpacked(values.allowed, logits.shape[-1]), logits, -jnp.inf)
    kind_B = values.kind

    def choice(kind: int) -> Int[Array, " B"]:
        return _choice(logits, kind_B, count, values, kind)

    if len(static.kinds) == 1:
        return choice(static.kinds[0])
    needed = jnp.max(jnp.where(active, kind_B, GREEDY))
    branches = [lambda kind=kind: choice(kind) for kind in static.kinds]
    return jax.lax.switch(jnp.searchsorted(jnp.array(static.kinds), needed), branches)


def _unpacked(words: UInt32[Array, "B U"], vocabulary: int) -> Bool[Array, "B V"]:
    bits_BUX = (words[..., None] >> jnp.arange(32, dtype=words.dtype)) & 1
    # [B, 32 U]
    return bits_BUX.reshape(len(words), -1)[:, :vocabulary] > 0


def _choice(
    logits: Float[Array, "B V"],
    kind_B: Int[Array, " B"],
    count: Int[Array, " B"],
    values: RowValues,
    most: int,
) -> Int[Array, " B"]:
    """Each row's token by its own kind, which is `most` at most."""
    best_B = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if most == GREEDY:
        return best_B
    vocabulary = logits.shape[-1]
    temperature_B1 = jnp.where(kind_B == GREEDY, 1.0, values.temperature)[:, None]
    # From the largest: a small temperature takes the others to -inf, and none to +inf.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature_B1

    def noise(key: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), index)
        return jax.random.gumbel(key, (vocabulary,), jnp.float32)

    noise_BV = jax.vmap(noise)(values.keys, count)
    # The largest logit is 0 now, so this is a share of its probability.
    least_B1 = jnp.log(values.min_p)[:, None]
    likely = jnp.where(logits >= least_B1, logits, -jnp.inf)
    token_B = jnp.argmax(likely + noise_BV, axis=-1).astype(jnp.int32)
    if most > DRAWN:
        width = min(FEW, vocabulary) if most == AMONG_FEW else vocabulary
        ranked, tokens = jax.lax.top_k(logits, width)
        # A row of few has the same sums under both kinds of program, so the same token.
        few_B1 = (kind_B == AMONG_FEW)[:, None]
        kept = _kept(ranked[:, :FEW], values)
        kept = jnp.pad(kept, ((0, 0), (0, width - kept.shape[1])), constant_values=-jnp.inf)
        if most == AMONG_ALL:
            kept = jnp.where(few_B1, kept, _kept(ranked, values))
        kept = jnp.where(ranked >= least_B1, kept, -jnp.inf)
        # Noise goes with the token, not with its rank, which rounding may change.
        pick_B = jnp.argmax(kept + jnp.take_along_axis(noise_BV, tokens, axis=-1), axis=-1)
        picked_B = jnp.take_along_axis(tokens, pick_B[:, None], axis=-1)[:, 0].astype(jnp.int32)
        token_B = jnp.where(kind_B >= AMONG_FEW, picked_B, token_B)
    return jnp.where(kind_B == GREEDY, best_B, token_B)


def _kept(ranked: Float[Array, "B W"], values: RowValues) -> Float[Array, "B W"]:
    """The descending logits, -inf where top-k or top-p leaves a token out."""
    top_k_B1, top_p_B1 = values.top_k[:, None], values.top_p[:, None]
    inside = (top_k_B1 == 0) | (jnp.arange(ranked.shape[1]) < top_k_B1)
    ranked = jnp.where(inside, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    return jnp.where((before < top_p_B1) | (top_p_B1 >= 1), ranked, -jnp.inf)


def choices_of(
    logits: Float[Array, "B V"],
    token: Int[Array, " B"],
    active: Bool[Array, " B"],
    values: RowValues,
    static: SamplingStatic,
) -> Choices:
    """A column of these tokens, with log-probabilities where an active row wants them."""
    shown = jnp.where(active, token, -1)[:, None]
    nothing = no_choices(token.shape[0], 1, logits.shape[-1], static)
    if not static.logprobs:
        return Choices(shown)

    def looked_up() -> Choices:
        log_BV = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        own_B1 = jnp.take_along_axis(log_BV, token[:, None], axis=-1)
        assert nothing.best is not None
        likely, best = jax.lax.top_k(log_BV, nothing.best.shape[-1])
        return Choices(nothing.token, own_B1, best[:, None].astype(jnp.int32), likely[:, None])

    found = jax.lax.cond(jnp.any(active & values.logprobs), looked_up, lambda: nothing)
    return dataclasses.replace(found, token=shown)


class Form(Protocol):
    """The form of one row's answer, and where the answer stands in it."""

    def allowed(self) -> UInt32[np.ndarray, " U"]:
        """The tokens that may come next, at least one, as in `RowValues`.

        Raises:
          InputError: the form cannot go on.
        """
        ...

    def take(self, tokens: Sequence[int]) -> None:
        """Takes tokens that the row has chosen."""
        ...


# Makes forms of `Sampling.form`.
MakesForms = Callable[[str], Form]


def form_of(makes: MakesForms | None, sampling: Sampling) -> Form | None:
    """The form of a row that begins. InputError where it is refused, or nothing makes forms."""
    if sampling.form is None:
        return None
    if makes is None:
        raise InputError("a form needs the tokenizer; ask with LongContext, or set Engine.forms")
    return makes(sampling.form)


def with_bounds(
    values: RowValues,
    samplings: Mapping[int, Sampling],
    masks: Mapping[int, UInt32[np.ndarray, " U"]],
) -> RowValues:
    """The values with penalties by count, and with what forms allow next, where rows have any.

    Args:
      samplings: by row; rows that are not named have neither.
      masks: `Form.allowed` of the rows that have one.
    """
    rows = len(values.limit)
    if any(sampling.counted for sampling in samplings.values()):
        counted = np.zeros((rows, 2), np.float32)
        for row, each in samplings.items():
            counted[row] = each.presence_penalty, each.frequency_penalty
        values = dataclasses.replace(values, counted=jax.device_put(counted))
    if masks:
        words = len(next(iter(masks.values())))
        allowed = np.full((rows, words), np.iinfo(np.uint32).max, np.uint32)
        for row, mask in masks.items():
            allowed[row] = mask
        values = dataclasses.replace(values, allowed=jax.device_put(allowed))
    return values


class Bounds:
    """Forms and penalties of rows that begin together, of one sampling.

    Attributes:
      forms: where each row stands, by row.
    """

    def __init__(self, makes: MakesForms | None, sampling: Sampling, rows: int):
        made = [form_of(makes, sampling) for _ in range(rows)]
        self.forms = {row: form for row, form in enumerate(made) if form is not None}
        self._samplings = dict.fromkeys(range(rows), sampling)

    def of(self, values: RowValues) -> RowValues:
        """`with_bounds` for the next token."""
        masks = {row: form.allowed() for row, form in self.forms.items()}
        return with_bounds(values, self._samplings, masks)

    def take(self, tokens: list[list[int]]) -> list[list[int]]:
        """Takes each row's tokens, and returns them."""
        for row, form in self.forms.items():
            form.take(tokens[row])
        return tokens


def counts_of(
    tokens: Mapping[int, Sequence[int]], rows: int, vocabulary: int
) -> Int[np.ndarray, "B V"]:
    """How often each token is in the answers so far, by row."""
    counts = np.zeros((rows, vocabulary), np.int32)
    for row, chosen in tokens.items():
        np.add.at(counts[row], np.asarray(chosen, np.int64), 1)
    return counts
