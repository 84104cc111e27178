"""The table of families: what sets one apart from Llama."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jax_longctx.errors import ConfigError
from jax_longctx.models.mixture import EXPERT_NAMES, MIXTRAL_NAMES, MixtureNames
from jax_longctx.models.rope import ROPE_KINDS

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
BEFORE = ("layers.*.attn_norm", "layers.*.mlp_norm")
# Norms of what attention and MLP put out, before it is added.
NORMS_AFTER = {
    **{ours: theirs for ours, theirs in LLAMA_NAMES.items() if ours not in BEFORE},
    "layers.*.attn_out_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_out_norm": "model.layers.*.post_feedforward_layernorm",
}
FOUR_NORMS = {
    **LLAMA_NAMES,
    **NORMS_AFTER,
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
}
GEMMA_KEYS = {
    "activation": "hidden_activation",
    "query_width": "query_pre_attn_scalar",
    "logits_cap": "final_logit_softcapping",
}
COHERE_NAMES = {ours: theirs for ours, theirs in LLAMA_NAMES.items() if ours != BEFORE[1]}
# The norms of a layer, by `Family.norms`.
NORM_PLACES = {
    "before": ("attn_norm", "mlp_norm"),
    "after": ("attn_out_norm", "mlp_out_norm"),
    "both": ("attn_norm", "mlp_norm", "attn_out_norm", "mlp_out_norm"),
    "shared": ("attn_norm",),
}
QK_NORMS = ("layers.*.attn.q_norm", "layers.*.attn.k_norm")
# Our names of numbers that only some families' configs have: fields of `ModelConfig`.
NUMBERS = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_divisor"),
    *("logits_multiplier", "attention_cap", "logits_cap"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family apart; the defaults are Llama's.

    Attributes:
      architecture: its name in the `architectures` of a `config.json`.
      also: other architectures that its configs name. As in transformers, `model_type` decides.
      defaults: the `model_type` whose defaults its config has; None for its own. A family that is
        not in transformers must name one that is (`"llama"`).
      names: our modules -> its Hugging Face files'; `*` is the layer, and `.weight` or
        `.bias` is appended. Modules with the same name share a tensor, one's rows after the other's
        in the order of `names`. All modules that a layer has are required; `head` only where the
        embeddings may be apart. A name that ends in `_` is the whole name of a tensor, and of its
        biases with `bias` appended: its matrices have inputs before outputs, and the outputs of
        modules that share it take turns.
      keys: what its config names otherwise than Llama's, or Llama's lacks: `activation`,
        `norm_eps`, `query_width`, `unrotated`, `qkv_bias` (a flag for q, k and v without o), a size
        (`config.SIZES`; where the key is there, it comes first) or one of `NUMBERS` -> the config's
        key. Unrotated is a layer whose entry is 0, or `full_attention` where the key is
        `layer_types`.
      only: keys of its config with the one value that is implemented; None counts as that value.
      activation: of the gated MLP: a key of `llama.ACTIVATIONS`, and Hugging Face's `hidden_act`.
      norm: a key of `llama.NORMS`.
      norms: where a layer has norms: before attention and MLP (`attn_norm`, `mlp_norm`), after them
        and before they are added (`attn_out_norm`, `mlp_out_norm`), or both; or one that is shared:
        attention and MLP stand side by side behind `attn_norm`, and what they put out is added.
      norm_bias: its norms add a bias.
      softmax_scale: factor of the scores, from the width of a head (or `query_width`); None for one
        over its root.
      embed_scale: factor of the embeddings, from the width of the model.
      rope_kinds: its kinds of rotary embedding.
      partial_rotary: its config may say what share of a head's channels is rotated.
      growing_queries: its `rope_parameters` say `llama_4_scaling_beta` (`RopeConfig.query_growth`).
      local_rope: layers with a window have a rotary embedding of their own.
      bias_flags: flags of its config. `attention_bias` adds biases to q, k, v and o, `mlp_bias` to
        gate, up and down.
      qkv_bias, mlp_bias: q, k and v, or gate, up, down and router, always have biases; the config
        has no flag for them.
      qk_norm: norms of queries and keys before rotary embedding, of each head or over all heads.
      windows: sliding windows in no layer, in all layers or none, or set layer by layer.
      sinks: each query head has a learned logit, of one more column of its softmax.
      gguf: llama.cpp's names of its architecture, the usual one first.
      interleaved: files that pair the rows of q and k, for interleaved rotary embedding: those of
        llama.cpp ("gguf"), and the family's own ("hf").
      experts: what its config says of its experts; None for an MLP. Then `names` has their router,
        and `#` in the names of gate, up and down is the expert.
    """

    architecture: str
    also: tuple[str, ...] = ()
    defaults: str | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: LLAMA_NAMES)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    activation: str = "silu"
    norm: str = "rms"
    norms: Literal["before", "after", "both", "shared"] = "before"
    norm_bias: bool = False
    softmax_scale: Callable[[float], float] | None = None
    embed_scale: Callable[[int], float] | None = None
    rope_kinds: tuple[str, ...] = tuple(kind for kind in ROPE_KINDS if kind != "longrope")
    partial_rotary: bool = False
    growing_queries: bool = False
    local_rope: bool = False
    bias_flags: tuple[Literal["attention_bias", "mlp_bias"], ...] = ()
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "heads"] | None = None
    windows: Literal["none", "all", "by layer"] = "none"
    sinks: bool = False
    gguf: tuple[str, ...] = ()
    interleaved: tuple[Literal["gguf", "hf"], ...] = ()
    experts: MixtureNames | None = None

    def __post_init__(self) -> None:
        needed = LLAMA_NAMES.keys() - {*BEFORE, *QK_NORMS, "head"}
        needed |= {f"layers.*.{name}" for name in NORM_PLACES[self.norms]}
        needed |= set(QK_NORMS) if self.qk_norm else set()
        needed |= {"layers.*.attn.sinks"} if self.sinks else set()
        if lacking := sorted(needed - self.names.keys()):
            raise ConfigError(f"{self.architecture}: `names` lacks {', '.join(lacking)}")

    def key(self, ours: str, usual: str) -> str:
        """The key of its config for a setting that most configs call `usual`."""
        return self.keys.get(ours, usual)

    @property
    def has_head(self) -> bool:
        """Whether its files may hold an output head besides the embedding."""
        return "head" in self.names


# By the `model_type` of a Hugging Face config.
FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        also=("MistralForCausalLM",),
        bias_flags=("attention_bias", "mlp_bias"),
        # GGUF files hold InternLM2's fused projection split, so it is a Llama.
        gguf=("llama", "internlm2"),
        interleaved=("gguf",),
    ),
    # In a GGUF file it is a Llama with a window, or of a later model's architecture.
    "mistral": Family(
        architecture="MistralForCausalLM",
        windows="all",
        gguf=("llama", "mistral3"),
        interleaved=("gguf",),
    ),
    "ministral3": Family(
        architecture="Ministral3ForCausalLM",
        rope_kinds=("yarn",),
        growing_queries=True,
        windows="all",
        gguf=("mistral3",),
        interleaved=("gguf",),
    ),
    # Its config does not say that q, k and v have biases.
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", qkv_bias=True, windows="by layer", gguf=("qwen2",)
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        bias_flags=("attention_bias",),
        qk_norm="head",
        windows="by layer",
        gguf=("qwen3",),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        names=LLAMA_NAMES | MIXTRAL_NAMES,
        windows="all",
        # In a GGUF file it is a Llama with experts.
        gguf=("llama",),
        interleaved=("gguf",),
        experts=MixtureNames(),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        names=LLAMA_NAMES | EXPERT_NAMES,
        # Layers with an MLP, and a window in all layers: no published model has them.
        only={"decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": None},
        bias_flags=("attention_bias",),
        qk_norm="head",
        gguf=("qwen3moe",),
        experts=MixtureNames(
            count="num_experts",
            width="moe_intermediate_size",
            normed="norm_topk_prob",
        ),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        names={
            **LLAMA_NAMES,
            "layers.*.attn.sinks": "model.layers.*.self_attn.sinks_",
            "layers.*.mlp.router": "model.layers.*.mlp.router",
            "layers.*.mlp.gate": "model.layers.*.mlp.experts.gate_up_proj_",
            "layers.*.mlp.up": "model.layers.*.mlp.experts.gate_up_proj_",
            "layers.*.mlp.down": "model.layers.*.mlp.experts.down_proj_",
        },
        norm="wide rms",
        bias_flags=("attention_bias",),
        mlp_bias=True,
        windows="by layer",
        sinks=True,
        gguf=("gpt-oss",),
        experts=MixtureNames(clamps=True),
    ),
    # Some layers have no rotary embedding.
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        keys={"unrotated": "no_rope_layers"},
        bias_flags=("attention_bias", "mlp_bias"),
        windows="by layer",
        gguf=("smollm3",),
        interleaved=("gguf",),
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        keys={
            "attention_multiplier": "attention_multiplier",
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "logits_divisor": "logits_scaling",
        },
        bias_flags=("attention_bias", "mlp_bias"),
        gguf=("granite",),
        interleaved=("gguf",),
    ),
    # Phi-3, and Phi-4, which is one.
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        names={
            **LLAMA_NAMES,
            **{f"layers.*.attn.{x}": "model.layers.*.self_attn.qkv_proj" for x in "qkv"},
            "layers.*.mlp.gate": "model.layers.*.mlp.gate_up_proj",
            "layers.*.mlp.up": "model.layers.*.mlp.gate_up_proj",
        },
        rope_kinds=("default", "longrope"),
        partial_rotary=True,
        windows="all",
        gguf=("phi3",),
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        names=NORMS_AFTER,
        norm="wide rms",
        norms="after",
        bias_flags=("attention_bias",),
        qk_norm="heads",
        gguf=("olmo2",),
    ),
    # In a GGUF file it is an OLMo 2 with windows, whose layers have a plain rotary embedding.
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        names=NORMS_AFTER,
        norm="wide rms",
        norms="after",
        local_rope=True,
        bias_flags=("attention_bias",),
        qk_norm="heads",
        windows="by layer",
        gguf=("olmo2",),
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        names=FOUR_NORMS,
        keys=GEMMA_KEYS,
        activation="gelu_pytorch_tanh",
        norm="rms plus one",
        norms="both",
        embed_scale=lambda width: width**0.5,
        local_rope=True,
        bias_flags=("attention_bias",),
        qk_norm="head",
        windows="by layer",
        gguf=("gemma3",),
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        names=FOUR_NORMS,
        keys={**GEMMA_KEYS, "attention_cap": "attn_logit_softcapping"},
        activation="gelu_pytorch_tanh",
        norm="rms plus one",
        norms="both",
        embed_scale=lambda width: width**0.5,
        bias_flags=("attention_bias",),
        windows="by layer",
        gguf=("gemma2",),
    ),
    "cohere": Family(
        architecture="CohereForCausalLM",
        names=COHERE_NAMES,
        keys={
            "norm_eps": "layer_norm_eps",
            "logits_multiplier": "logit_scale",
            # Of 131,072 in the first Command R, which says 8,192 under the usual key.
            "max_position": "model_max_length",
        },
        norm="layer",
        norms="shared",
        bias_flags=("attention_bias",),
        gguf=("command-r",),
        interleaved=("gguf", "hf"),
    ),
    "stablelm": Family(
        architecture="StableLmForCausalLM",
        keys={"norm_eps": "layer_norm_eps", "qkv_bias": "use_qkv_bias"},
        # StableLM 2 12B has both.
        only={"use_parallel_residual": False, "qk_layernorm": False},
        norm="layer",
        norm_bias=True,
        rope_kinds=("default",),
        partial_rotary=True,
        gguf=("stablelm",),
    ),
}
# Only the layers with a window have a rotary embedding.
FAMILIES["cohere2"] = dataclasses.replace(
    FAMILIES["cohere"],
    architecture="Cohere2ForCausalLM",
    keys={**FAMILIES["cohere"].keys, "unrotated": "layer_types"},
    windows="by layer",
    gguf=("cohere2",),
)
