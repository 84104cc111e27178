"""DuoAttention: retrieval heads keep the whole text, the others its first and last tokens.

Xiao et al. 2024, "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming
Heads", section 3. Few heads look far back; most attend to the first tokens and the newest ones. At
the end of the context a retrieval head keeps every token, and a streaming head the first `sink` and
the last `recent` ones. Question and answer follow in all heads.

Which heads retrieve is a property of the model. The authors learn a number for each kv head, and
publish files of them. `jax-longctx calibrate` measures one (`evaluation.heads`). The
`share` of all heads with the largest numbers retrieves.

Prefill is full attention, as in kvpress; the authors let streaming heads read the text through
their window. Nothing leaves a streaming head after the context. Layers with other numbers of
retrieval heads are other programs. A layer's tokens take the memory of its heads' sum, in whole
pages (`caches.uneven`).
"""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_longctx.caches.uneven import uneven
from jax_longctx.contract import LayerContext, Stage, method
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts.appending import Appending
from jax_longctx.parts.tables import read_numbers


@method(source="Xiao et al. 2024 (DuoAttention), section 3")
class DuoAttention(Appending):
    """After the context, retrieval heads keep all of it, the others the first and last tokens.

    Attributes:
      heads: a file that `jax-longctx calibrate` or DuoAttention's authors wrote, a row for each
        layer and a number for each kv head, apart by tabs; or which heads retrieve: 1 for each one
        that does, 0 for the others, "/" between layers. One row is repeated over heads and layers.
        "#" and the model's identity are added where the file says of which one it is.
      share: of all kv heads, how many of a file's retrieve.
      sink: first tokens that the others keep.
      recent: last tokens of the context that they keep.
    """

    heads: str = ""
    share: float = 0.5
    sink: int = 128
    recent: int = 256

    phase = "decode"
    keeps_all = False
    hands_over = "context"
    cannot_hand_over = "its heads keep numbers of tokens of their own"

    def __post_init__(self) -> None:
        self.fraction("share")
        self.at_least(0, "sink", "recent")
        if self.heads and not re.fullmatch("[01/]+(#[0-9a-f]{16})?", self.heads):
            # The dataclass is frozen, and keeps what the file says.
            scores, of = read_numbers(self.heads, "heads")
            told = f"#{of['weights']}" if "weights" in of else ""
            pattern = pattern_of(np.clip(scores, 0, 1), self.share)
            object.__setattr__(self, "heads", f"{pattern}{told}")

    @property
    def weights_of(self) -> str | None:
        return self.heads.partition("#")[2] or None

    @property
    def _rows(self) -> list[str]:
        return self.heads.partition("#")[0].split("/")

    def validate(self, config: ModelConfig) -> None:
        rows = self._rows
        if not all(rows):
            raise self.refused(
                "which heads retrieve is a property of the model: write a file with jax-longctx "
                "calibrate, or take one of DuoAttention's, and name it: --set heads=FILE"
            )
        shape = config.num_layers, config.num_kv_heads
        if len(rows) > 1 and ((len(rows), len(rows[0])) != shape or len({*map(len, rows)}) > 1):
            raise self.refused(
                f"heads has {len(rows)} layers of {len(rows[0])} kv heads, this model {shape[0]} "
                f"of {shape[1]}; take a file of this model"
            )

    def of_layer(self, layer: int, layers: int) -> "DuoAttention":
        rows = self._rows
        own = {"sink": self.sink, "recent": self.recent}
        return DuoAttention(heads=rows[layer % len(rows)], **own)

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        slots, heads = cache.sizes[2] * ctx.seq_size, cache.sizes[1] * ctx.head_shards
        whole_K = np.array([self.heads[head % len(self.heads)] == "1" for head in range(heads)])
        index_S, length_B1 = jnp.arange(slots), cache.length[:, None]
        near_BS = (index_S < self.sink) | (index_S >= length_B1 - self.recent)
        kept_BKS = whole_K[:, None] | near_BS[:, None]
        kept_BKS &= (index_S < length_B1)[:, None]
        # A row leaves `reserve` slots free, so no row is longer.
        longest = max(slots - reserve, 1)
        few = min(self.sink + self.recent, longest)
        most = int(np.sum(np.where(whole_K, longest, few)))
        return uneven(cache, kept_BKS, most, reserve, ctx).end_context(reserve)


def pattern_of(scores: np.ndarray, share: float) -> str:
    """Which heads retrieve, as `heads` has them: the `share` of all with the largest numbers."""
    retrieves = np.ones(scores.size, bool)
    retrieves[np.argsort(scores, axis=None)[: round(scores.size * (1 - share))]] = False
    rows = retrieves.reshape(scores.shape).astype(int)
    return "/".join("".join(map(str, row)) for row in rows)
