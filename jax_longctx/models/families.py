"""The table of families: what sets each apart in its computation, its config and its files.

A new family of this decoder is one entry of `FAMILIES`. A new kind of activation or norm is one
function in `jax_longctx.models.llama` (`ACTIVATIONS`, `NORMS`). Nothing else names a family.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from jax_longctx.errors import ConfigError

# Settings of each kind of rotary embedding: those that it needs, and those that it may have.
ROPE_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}

LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "layers.*.attn_norm": "model.layers.*.input_layernorm",
    "layers.*.attn.q": "model.layers.*.self_attn.q_proj",
    "layers.*.attn.k": "model.layers.*.self_attn.k_proj",
    "layers.*.attn.v": "model.layers.*.self_attn.v_proj",
    "layers.*.attn.o": "model.layers.*.self_attn.o_proj",
    "layers.*.attn.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attn.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
# Those that only a family with `qk_norm` needs.
QK_NORM_NAMES = {"layers.*.attn.q_norm", "layers.*.attn.k_norm"}


def _head_scale(head_dim: int) -> float:
    return head_dim**-0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family apart; the defaults are Llama's.

    Attributes:
      architecture: as the `architectures` of a `config.json` name it.
      defaults: the `model_type` whose defaults its config has. None: its own. A family that
        transformers does not know must name one that transformers knows (`"llama"`).
      names: our modules -> those of its Hugging Face files; `*` is the layer, and `.weight` or
        `.bias` is appended. Modules that share a name lie in one tensor, the rows of one after
        those of the other. Every key of `LLAMA_NAMES` is needed, with two exceptions: `q_norm` and
        `k_norm` only with `qk_norm`; `head` not in a family that always ties its embeddings.
      activation: of the gated MLP: a key of `llama.ACTIVATIONS`, and Hugging Face's `hidden_act`.
      norm: a key of `llama.NORMS`.
      softmax_scale: what scores are multiplied by, from the width of a head.
      embed_scale: what embeddings are multiplied by, from the width of the model.
      rope_kinds: the kinds of rotary embedding that it may have.
      bias_flags: which flags its config may have. `attention_bias` adds biases to q, k, v and o,
        `mlp_bias` to gate, up and down.
      qkv_bias: q, k and v always have biases, o has none by itself; the config has no flag for it.
      qk_norm: norms of queries and keys per head, before rotary embedding.
      windows: whether sliding windows are in no layer, in all or none, or said layer by layer.
      gguf: llama.cpp's names of its architecture, the usual one first.
      interleaved: llama.cpp pairs the rows of its q and k for interleaved rotary embedding.
    """

    architecture: str
    defaults: str | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: LLAMA_NAMES)
    activation: str = "silu"
    norm: str = "rms"
    softmax_scale: Callable[[int], float] = _head_scale
    embed_scale: Callable[[int], float] | None = None
    rope_kinds: tuple[str, ...] = tuple(ROPE_KINDS)
    bias_flags: tuple[Literal["attention_bias", "mlp_bias"], ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Literal["none", "all", "by layer"] = "none"
    gguf: tuple[str, ...] = ()
    interleaved: bool = False

    def __post_init__(self) -> None:
        optional = {"head"} if self.qk_norm else {"head", *QK_NORM_NAMES}
        needed = LLAMA_NAMES.keys() - optional
        if lacking := sorted(needed - self.names.keys()):
            raise ConfigError(f"{self.architecture}: `names` lacks {', '.join(lacking)}")

    @property
    def has_head(self) -> bool:
        """Whether its files may hold an output head beside the embedding."""
        return "head" in self.names


# By the `model_type` of a Hugging Face config.
FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        bias_flags=("attention_bias", "mlp_bias"),
        # InternLM2's fused projection is split in a GGUF file, which makes it a Llama.
        gguf=("llama", "internlm2"),
        interleaved=True,
    ),
    # In a GGUF file it is a Llama with a window.
    "mistral": Family(
        architecture="MistralForCausalLM", windows="all", gguf=("llama",), interleaved=True
    ),
    # Its config does not say that q, k and v have biases.
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", qkv_bias=True, windows="by layer", gguf=("qwen2",)
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        bias_flags=("attention_bias",),
        qk_norm=True,
        windows="by layer",
        gguf=("qwen3",),
    ),
}
