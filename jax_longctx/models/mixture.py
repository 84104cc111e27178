"""A mixture of experts in place of the MLP: what families name it, and what a config says of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_longctx.errors import ConfigError

# The experts' modules in the files of Qwen3-MoE: `#` is the expert.
EXPERT_NAMES = {
    "layers.*.mlp.router": "model.layers.*.mlp.gate",
    "layers.*.mlp.gate": "model.layers.*.mlp.experts.#.gate_proj",
    "layers.*.mlp.up": "model.layers.*.mlp.experts.#.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.experts.#.down_proj",
}

MIXTRAL_NAMES = {
    "layers.*.mlp.router": "model.layers.*.block_sparse_moe.gate",
    "layers.*.mlp.gate": "model.layers.*.block_sparse_moe.experts.#.w1",
    "layers.*.mlp.up": "model.layers.*.block_sparse_moe.experts.#.w3",
    "layers.*.mlp.down": "model.layers.*.block_sparse_moe.experts.#.w2",
}
# The number of experts by the names of transformers' versions.
COUNTS = ("num_local_experts", "num_experts")
# gpt-oss' gate, of which its configs say the limit or nothing.
CLAMPS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureNames:
    """How a family's Hugging Face config describes its experts.

    Attributes:
      count: the key of their number, which `read` takes by either of transformers' two names.
      width: the key of the width of one.
      normed: the key of `Mixture.normed`; None where it is always true.
      clamps: whether the gate is gpt-oss', of `swiglu_alpha` and `swiglu_limit`.
    """

    count: str = COUNTS[0]
    width: str = "intermediate_size"
    normed: str | None = None
    clamps: bool = False

    @property
    def keys(self) -> dict[str, str]:
        """Fields of `Mixture` -> keys of the config."""
        keys = {"count": self.count, "chosen": "num_experts_per_tok"}
        keys |= {"normed": self.normed} if self.normed else {}
        return keys | ({"alpha": "swiglu_alpha", "limit": "swiglu_limit"} if self.clamps else {})

    @property
    def known(self) -> set[str]:
        """All keys that `read` may look at."""
        return {*COUNTS, self.width, *self.keys.values()}

    def read(self, config: Mapping[str, Any]) -> "Mixture":
        """Raises ConfigError where a key is missing, or its value not implemented."""
        count = next((config[key] for key in COUNTS if config.get(key) is not None), None)
        config = {**(CLAMPS if self.clamps else {}), **config, self.count: count}
        lacking = [key for key in self.keys.values() if config.get(key) is None]
        if lacking:
            raise ConfigError(f"the model's config lacks {lacking[0]!r}; add it from the source")
        return Mixture(**{ours: config[theirs] for ours, theirs in self.keys.items()})

    def write(self, mixture: "Mixture", width: int) -> dict[str, Any]:
        """`read` undone."""
        said = {theirs: getattr(mixture, ours) for ours, theirs in self.keys.items()}
        return {**said, self.width: width}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Experts, of which a router chooses some for each token.

    Attributes:
      count: experts of a layer.
      chosen: experts of a token.
      normed: whether the weights of a token's experts add up to 1: the softmax is over the chosen
        ones' logits then, else over all.
      alpha, limit: of gpt-oss' gate, which is in `experts.clamped_swiglu`; None for the family's
        activation.
    """

    count: int
    chosen: int
    normed: bool = True
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        whole = all(type(n) is int for n in (self.count, self.chosen))
        if not whole or not 0 < self.chosen <= self.count:
            raise ConfigError(
                f"a token needs 1 to all of the experts, got {self.chosen!r} of {self.count!r}"
            )
        if not isinstance(self.normed, bool):
            raise ConfigError(f"norm_topk_prob must be true or false, got {self.normed!r}")
        for name in ("alpha", "limit"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and value > 0):
                raise ConfigError(f"swiglu_{name} must be above 0, got {value!r}")
