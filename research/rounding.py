"""What rounding keys and values costs full attention, by hand: forms of 8 and of 4 bits.

    python -m research.rounding CHECKPOINT --texts 8 --length 1024

Each token of a text is scored as if all before it had been decoded one by one: it attends the
tokens of its cache as they are stored at that time. One pass over the text does that. Every query
has two logits for a key, with the key that was rounded and with the one that was not, and its place
says which counts; and so for values. Stored numbers are rounded and then floats again, so the
figures are of rounding alone.

Forms of a token's key or value are `int8`, as `--kv` stores it, and `int4`, with a least number and
a step in float16, for keys of `group` tokens of a channel, for values of `group` channels of a
token. As in KIVI (Liu et al. 2024, section 3, arXiv 2402.02750) keys are rounded in blocks of
`newest` tokens, values when `newest` tokens have followed.

The result is one JSON object a form: its perplexity, and the mean of the texts' differences in
log-perplexity in percent, with a 95% interval by Student's t. With `--behind N` the first N tokens
are read without rounding, as one chunk, and the others alone are scored, as in `eval perplexity
--protocol P1`.
"""

import argparse
import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats

import jax_longctx
from jax_longctx.caches import AppendCache
from jax_longctx.contract import QKV, LayerContext, Segment, WithCache
from jax_longctx.evaluation.haystack import python_topics
from jax_longctx.evaluation.perplexity import cut_texts, perplexity, score_texts
from jax_longctx.parts.appending import Appending
from pallas_kernels.common import group_heads
from pallas_kernels.quantised import dequantised, quantise


def rounded(
    x: Float[Array, "B K S H"], form: str, group: int, *, keys: bool
) -> Float[Array, "B K S H"]:
    """The numbers that are stored for `x`."""
    if form == "int8":
        return dequantised(quantise(x))
    if form == "int4":
        return _int4(x, group, axis=2 if keys else 3)
    raise ValueError(f"unknown form {form!r}")


def _int4(x: Float[Array, "B K S H"], group: int, axis: int) -> Float[Array, "B K S H"]:
    """Sixteen numbers from the least to the largest of each group along an axis."""
    size = x.shape[axis]
    spare = [(0, -size % group if number == axis else 0) for number in range(x.ndim)]
    # What fills the last group must not widen its range.
    padded = jnp.moveaxis(jnp.pad(x, spare, mode="edge"), axis, -1)
    groups = padded.reshape(*padded.shape[:-1], -1, group)
    least = jnp.min(groups, axis=-1, keepdims=True).astype(jnp.float16).astype(x.dtype)
    step = (jnp.max(groups, axis=-1, keepdims=True) - least) / 15
    step = step.astype(jnp.float16).astype(x.dtype)
    number = jnp.round((groups - least) / jnp.where(step == 0, 1.0, step))
    groups = jnp.clip(number, 0, 15) * step + least
    return jnp.moveaxis(groups.reshape(padded.shape)[..., :size], -1, axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounded(Appending):
    """Full attention to keys and values of these forms; None leaves them as they are.

    Attributes:
      group, newest: of `int4`; other forms round every token at once.
      behind: tokens that are read as one chunk, without rounding.
    """

    keys: str | None = None
    values: str | None = None
    group: int = 32
    newest: int = 0
    behind: int = 0

    def attend(
        self, new: QKV, cache: AppendCache, segment: Segment, ctx: LayerContext
    ) -> WithCache:
        q, k, v = new
        # On a CPU, of texts of one length, in one chunk.
        positions_BT = cache.position[:, None] + jnp.arange(q.shape[1])
        q, k = ctx.rotate(q, positions_BT), ctx.rotate(k, positions_BT)
        cache = cache.append(k, v, segment.valid_of(), ctx)
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, K, S, H]
        at_T1, at_S = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[2])
        late_T1 = at_T1 >= self.behind
        old_keys = late_T1 & (at_S < self._stored(at_T1 + 1, blocks=True))
        old_values = late_T1 & (at_S < self._stored(at_T1 + 1, blocks=False))
        stored_k = k if self.keys is None else rounded(k, self.keys, self.group, keys=True)
        stored_v = v if self.values is None else rounded(v, self.values, self.group, keys=False)
        grouped = group_heads(q, k.shape[1])  # [B, K, G, T, H]
        old, found = (jnp.einsum("BKGTH,BKSH->BKGTS", grouped, x) for x in (stored_k, k))
        found = jnp.where(at_S <= at_T1, jnp.where(old_keys, old, found) * ctx.scale, -jnp.inf)
        lse = jax.nn.logsumexp(found, axis=-1, keepdims=True)
        weights = jnp.exp(found - lse)
        out = sum(
            jnp.einsum("BKGTS,BKSH->BKGTH", jnp.where(which, weights, 0), x)
            for which, x in ((old_values, stored_v), (~old_values, v))
        )
        heads = (q.shape[0], q.shape[2], q.shape[1], -1)
        out, lse = (jnp.swapaxes(x.reshape(heads), 1, 2) for x in (out, lse))
        return (out, lse[..., 0]), cache

    def _stored(self, length: Array, *, blocks: bool) -> Array:
        """How many of so many tokens are rounded."""
        if not self.newest:
            return length
        return length // self.newest * self.newest if blocks else length - self.newest


EXACT = "as they are"
FORMS: dict[str, dict[str, Any]] = {
    EXACT: {},
    "int8": {"keys": "int8", "values": "int8"},
    "int4, groups of 32, newest 128, keys alone": {"keys": "int4", "newest": 128},
    "int4, groups of 32, newest 128, values alone": {"values": "int4", "newest": 128},
}
for group, newest in ((32, 32), (32, 128), (64, 128), (128, 128)):
    how = {"keys": "int4", "values": "int4", "group": group, "newest": newest}
    FORMS[f"int4, groups of {group}, newest {newest}"] = how


def compared(means: Float[np.ndarray, " n"], base: Float[np.ndarray, " n"]) -> dict[str, Any]:
    """Perplexity, and how much more it is than the baseline's, in percent, with its interval."""
    more, count = 100 * (means - base), len(means)
    half = float(stats.t.ppf(0.975, count - 1) * np.std(more, ddof=1)) / math.sqrt(count)
    middle = float(np.mean(more))
    return {
        "perplexity": round(perplexity(means), 4),
        "more": round(middle, 3),
        "interval": [round(middle - half, 3), round(middle + half, 3)],
        "n": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    for option, value in (("texts", 8), ("length", 1024), ("behind", 0), ("batch", 2)):
        parser.add_argument(f"--{option}", type=int, default=value)
    parser.add_argument("--form", action="append", choices=list(FORMS), help="all unless given")
    given = parser.parse_args()
    length, base = given.length, None
    model = jax_longctx.load(given.checkpoint, dtype="float32", chunk=length)
    encode = model.tokenizer.encode
    lead, book = encode("", bos=True), encode(python_topics())
    texts = cut_texts([book], count=given.texts, length=length, lead=lead)
    how = {"through": "context", "score": length - 1 - given.behind, "batch": given.batch}
    for name in dict.fromkeys([EXACT, *(given.form or FORMS)]):
        engine = model.with_method(Rounded(**FORMS[name], behind=given.behind)).engine
        losses = score_texts(engine, texts, **how).losses.mean(1, dtype=np.float64)
        base = losses if base is None else base
        print(json.dumps({"form": name, **compared(losses, base)}), flush=True)


if __name__ == "__main__":
    main()
