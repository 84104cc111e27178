"""What a model is: configurations, read from a whole Hugging Face config by the table of families.

A new family of this decoder is one entry of `FAMILIES` (`jax_longctx.models.families`). A new
activation or norm is one entry in `jax_longctx.models.llama` (`ACTIVATIONS`, `NORMS`). Nothing else
names a family, but for InternLM2: it is a Llama in other files, which `checkpoints_convert` knows.

`ModelConfig.from_hf` has no defaults, and refuses what is not implemented: a family, a rope type,
an activation. `checkpoints_convert.read_config` fills in what a `config.json` leaves out.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax_longctx.errors import ConfigError
from jax_longctx.models.families import FAMILIES, NUMBERS, Family
from jax_longctx.models.mixture import Mixture
from jax_longctx.models.rope import RopeConfig, read_rope, written_rope
from jax_longctx.models.values import need, number, size
from jax_longctx.settings import check_name, look_up

# Our names of a model's sizes -> a Hugging Face config's.
SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "model_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder of the Llama family.

    Attributes:
      max_position: `max_position_embeddings`; see `trained_length`.
      qkv_bias, o_bias, mlp_bias: biases of the projections.
      qk_norm: norms of queries and keys, before rotary embedding (Qwen3).
      windows: sliding window in tokens of each layer, None for a layer without.
      local_rope: rotary embedding of the layers with a window; None for that of all layers.
      unrotated: layers without rotary embedding.
      query_width: what scores are scaled for in place of the width of a head (Gemma).
      attention_multiplier: factor of the scores, in place of the family's.
      embedding_multiplier: factor of the embeddings, in place of the family's.
      residual_multiplier: factor of what attention and MLP add to the hidden states.
      logits_divisor, logits_multiplier: what logits are divided or multiplied by.
      experts: of every layer, each `mlp_dim` wide; None for an MLP.
      attention_cap, logits_cap: scores x, or logits, become cap * tanh(x / cap).
      sinks: each query head has a learned logit, of one more column of its softmax.
    """

    family: str
    vocab_size: int
    num_layers: int
    model_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    local_rope: RopeConfig | None = None
    unrotated: tuple[int, ...] = ()
    query_width: int | None = None
    attention_multiplier: float | None = None
    embedding_multiplier: float | None = None
    residual_multiplier: float | None = None
    logits_divisor: float | None = None
    logits_multiplier: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    experts: Mixture | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        check_name(FAMILIES, self.family, "family")
        self._check_ropes()
        if not (self.tie_embeddings or self.traits.has_head):
            raise ConfigError(
                f"family {self.family!r} has no head beside its embedding; "
                f"set tie_word_embeddings to true in config.json"
            )
        for name in (*SIZES, "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        for name in ("norm_eps", "query_width", *NUMBERS):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}")
        if (self.experts is None) != (self.traits.experts is None):
            raise ConfigError(f"family {self.family!r} and experts={self.experts} do not agree")
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} windows given for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"a sliding window must be at least 1 token, got {self.windows}")

    def _check_ropes(self) -> None:
        for rope in (self.rope, self.local_rope or self.rope):
            if rope.kind not in self.traits.rope_kinds:
                raise ConfigError(
                    f"rope type {rope.kind!r} is not implemented for family {self.family!r}; "
                    f"implemented: {', '.join(self.traits.rope_kinds)}"
                )
            rope.check_width(self.head_dim)
            if rope.share != self.rope.share:
                raise ConfigError(
                    f"layers that rotate other shares of a head ({self.rope.share} and "
                    f"{rope.share}) are not implemented"
                )

    @property
    def traits(self) -> Family:
        """The family's entry in the table."""
        return FAMILIES[self.family]

    @property
    def softmax_scale(self) -> float:
        """The factor of attention scores before the softmax."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        width, rule = self.query_width or self.head_dim, self.traits.softmax_scale
        return width**-0.5 if rule is None else rule(width)

    @property
    def embed_scale(self) -> float | None:
        """The factor of the embeddings; None for 1."""
        rule = self.traits.embed_scale
        if self.embedding_multiplier is not None or rule is None:
            return self.embedding_multiplier
        return rule(self.model_dim)

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotary embedding of a layer, which may turn no channel."""
        rope = self.rope if self.windows[layer] is None else self.local_rope or self.rope
        return dataclasses.replace(rope, share=0.0) if layer in self.unrotated else rope

    def cut(self, layers: int) -> "ModelConfig":
        """The model that ends after `layers` layers."""
        return dataclasses.replace(
            self,
            num_layers=layers,
            windows=self.windows[:layers],
            unrotated=tuple(index for index in self.unrotated if index < layers),
        )

    @property
    def trained_length(self) -> float:
        """Tokens that the model was trained or extended to; infinite without a limit.

        `linear` and `yarn` extend a length by their factor, as documented in transformers: the
        checkpoint may name the length before or after. `dynamic` extends to any length. Where all
        layers have windows, no distance exceeds the widest one.
        """
        rope, length = self.rope, self.max_position
        if rope.kind in ("linear", "yarn"):
            length = max(length, int(rope.trained_length * rope.factor))
        widest = max(math.inf if window is None else window for window in self.windows)
        return math.inf if rope.kind == "dynamic" or widest <= length else length

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a complete Hugging Face config, such as transformers' `to_dict` returns.

        `checkpoints_convert.read_config` reads a `config.json`, whose missing keys have defaults.

        Raises:
          ConfigError: the family, rope type or activation is not implemented, or a key is missing.
        """
        family = str(need(config, "model_type"))
        traits = look_up(FAMILIES, family, "family")
        own = {SIZES[ours]: config.get(key) for ours, key in traits.keys.items() if ours in SIZES}
        config = {**config, **{usual: value for usual, value in own.items() if value is not None}}
        for key, value in traits.only.items():
            if config.get(key, value) not in (value, None):
                raise ConfigError(f"{key}={config[key]!r} is not implemented; implemented: {value}")
        activation = need(config, traits.key("activation", "hidden_act"))
        if activation != traits.activation:
            raise ConfigError(
                f"hidden_act {activation!r} is not implemented; implemented: {traits.activation}"
            )
        keys = SIZES if traits.experts is None else {**SIZES, "mlp_dim": traits.experts.width}
        sizes = {ours: size(config, theirs) for ours, theirs in keys.items()}
        flags = {name: bool(config.get(name)) for name in traits.bias_flags}
        bias = flags.get("attention_bias", False)
        return cls(
            family=family,
            **sizes,
            head_dim=_head_dim(config, sizes["model_dim"], sizes["num_heads"]),
            norm_eps=number(config, traits.key("norm_eps", "rms_norm_eps")),
            tie_embeddings=bool(need(config, "tie_word_embeddings")),
            windows=_windows(config, traits, sizes["num_layers"]),
            qkv_bias=bias or traits.qkv_bias or bool(config.get(traits.keys.get("qkv_bias", ""))),
            o_bias=bias,
            mlp_bias=flags.get("mlp_bias", traits.mlp_bias),
            qk_norm=traits.qk_norm is not None,
            sinks=traits.sinks,
            unrotated=_unrotated(config, traits, sizes["num_layers"]),
            experts=None if traits.experts is None else traits.experts.read(config),
            **_ropes(config, traits),
            **_numbers(config, traits),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` gives the same config back."""
        lists = {"windows": list(self.windows), "unrotated": list(self.unrotated)}
        return {**dataclasses.asdict(self), **lists}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The config that `to_dict` described. Raises ConfigError on unknown or missing fields."""
        try:
            local, experts = values.get("local_rope"), values.get("experts")
            read = {
                "rope": RopeConfig.from_dict(values["rope"]),
                "local_rope": None if local is None else RopeConfig.from_dict(local),
                "experts": None if experts is None else Mixture(**experts),
                "windows": tuple(values["windows"]),
                "unrotated": tuple(values.get("unrotated", ())),
            }
            return cls(**{**values, **read})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"model config is damaged: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that `from_hf` and transformers read as this model.

        Version 4 of transformers reads all but `longrope`, which version 5 reads.

        Raises:
          ConfigError: the family's config cannot describe this model (a Llama with windows).
        """
        biases = {"attention_bias": self.o_bias, "mlp_bias": self.mlp_bias}
        traits = self.traits
        said = {theirs: getattr(self, ours, None) for ours, theirs in traits.keys.items()}
        if "unrotated" in traits.keys:
            rotated = [int(index not in self.unrotated) for index in range(self.num_layers)]
            said[traits.keys["unrotated"]] = rotated
        hf: dict[str, Any] = {
            **said,
            **traits.only,
            "model_type": self.family,
            "architectures": [traits.architecture],
            **{theirs: getattr(self, ours) for ours, theirs in SIZES.items()},
            "head_dim": self.head_dim,
            traits.key("activation", "hidden_act"): traits.activation,
            traits.key("norm_eps", "rms_norm_eps"): self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            **_ropes_to_hf(self),
            **_windows_to_hf(self),
            **{flag: biases[flag] for flag in traits.bias_flags},
        }
        if self.traits.experts is not None and self.experts is not None:
            hf |= self.traits.experts.write(self.experts, self.mlp_dim)
        read = ModelConfig.from_hf(hf)
        if read != self:
            ours, theirs = self.to_dict(), read.to_dict()
            lost = [f"{key}={ours[key]}" for key in ours if ours[key] != theirs[key]]
            raise ConfigError(
                f"a Hugging Face config of family {self.family!r} cannot say {', '.join(lost)}"
            )
        return hf


def _head_dim(config: Mapping[str, Any], width: int, heads: int) -> int:
    # transformers' rule; Qwen2's configs have no such key.
    if config.get("head_dim") is not None:
        return size(config, "head_dim")
    if width % heads:
        raise ConfigError(f"hidden_size={width} is not a multiple of num_attention_heads={heads}")
    return width // heads


def _numbers(config: Mapping[str, Any], traits: Family) -> dict[str, Any]:
    keys = {"query_width": size, **dict.fromkeys(NUMBERS, number)}
    return {
        ours: read(config, traits.keys[ours])
        for ours, read in keys.items()
        if ours in traits.keys and config.get(traits.keys[ours]) is not None
    }


def _unrotated(config: Mapping[str, Any], traits: Family, layers: int) -> tuple[int, ...]:
    if "unrotated" not in traits.keys:
        return ()
    key = traits.keys["unrotated"]
    rotated = need(config, key)
    if not isinstance(rotated, list | tuple) or len(rotated) < layers:
        raise ConfigError(f"{key!r} must have an entry for each of {layers} layers, got {rotated}")
    return tuple(n for n in range(layers) if rotated[n] in (0, "full_attention"))


def _ropes(config: Mapping[str, Any], traits: Family) -> dict[str, RopeConfig]:
    said = need(config, "rope_parameters")
    entries = {"rope": said}
    if traits.local_rope:
        entries = {
            "rope": need(said, "full_attention"),
            "local_rope": need(said, "sliding_attention"),
        }
    how = _how_ropes(traits)
    return {name: read_rope(config, entry, **how) for name, entry in entries.items()}


def _how_ropes(traits: Family) -> dict[str, bool]:
    return {"partial": traits.partial_rotary, "growing": traits.growing_queries}


def _ropes_to_hf(config: ModelConfig) -> dict[str, Any]:
    rope, local, how = config.rope, config.local_rope, _how_ropes(config.traits)
    said = written_rope(rope, **how)
    whole: dict[str, Any] = {"rope_parameters": said, "rope_theta": rope.theta}
    # Version 4 of transformers reads these, and rope_scaling.
    if how["partial"]:
        whole["partial_rotary_factor"] = rope.share
    if local is not None:
        apart = {"full_attention": said, "sliding_attention": written_rope(local, **how)}
        whole |= {"rope_parameters": apart, "rope_local_base_freq": local.theta}
    if rope.kind != "default":
        whole["rope_scaling"] = {key: said[key] for key in said if key != "rope_theta"}
    if rope.kind == "longrope":
        whole["original_max_position_embeddings"] = rope.trained_length
    return whole


def _windows(config: Mapping[str, Any], traits: Family, layers: int) -> tuple[int | None, ...]:
    if traits.windows == "none":
        slides = [False] * layers
    elif traits.windows == "all":
        slides = [config.get("sliding_window") is not None] * layers
    else:
        types = need(config, "layer_types")
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) != layers:
            raise ConfigError(f"{len(types)} layer_types for {layers} layers; unknown: {unknown}")
        slides = [kind == "sliding_attention" for kind in types]
    if not any(slides):
        return (None,) * layers
    window = size(config, "sliding_window")
    # A window of all positions hides nothing (Phi-3 with 128K positions has one).
    hides = window < size(config, "max_position_embeddings")
    return tuple(window if slide and hides else None for slide in slides)


def _windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    window = next((window for window in config.windows if window is not None), None)
    if config.traits.windows != "by layer":
        return {} if config.traits.windows == "none" else {"sliding_window": window}
    slides = [window is not None for window in config.windows]
    if config.traits.keys.get("unrotated") == "layer_types":
        slides = [index not in config.unrotated for index in range(config.num_layers)]
    if window is None and any(slides):
        # One that hides nothing, as it was read.
        window = config.max_position
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        # For older versions of transformers, which ignore layer_types.
        "max_window_layers": slides.index(True) if any(slides) else config.num_layers,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
    }
