"""What a model is, read from a Hugging Face `config.json`; nothing is defaulted in silence.

`ModelConfig.from_hf` refuses by name what is not implemented: an architecture, a rope type, an
activation. A value that decides numbers (rope theta, norm epsilon) must be in the file.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax_longctx.errors import ConfigError

__all__ = ["FAMILIES", "ROPE_KINDS", "ModelConfig", "RopeConfig"]

# model_type of config.json -> architectures of the same computation.
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "internlm2": ("InternLM2ForCausalLM",),
}
# Flags of config.json that add biases.
BIAS_FLAGS: dict[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": (),
    "qwen2": ("attention_bias",),
    "qwen3": ("attention_bias",),
    "internlm2": ("bias",),
}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding (see `jax_longctx.models.rope` for the kinds).

    Attributes:
      theta: base of the frequencies.
      trained_length: tokens the frequencies were trained at, before scaling.
      factor: of every kind but `default`.
      low_freq_factor, high_freq_factor: of `llama3`.
      beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: of `yarn`.
    """

    kind: str
    theta: float
    trained_length: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(
                f"rope type {self.kind!r} is not implemented; implemented: {', '.join(ROPE_KINDS)}"
            )
        checks = {
            "theta": self.theta > 1,
            "trained_length": self.trained_length >= 1,
            "factor": self.factor >= 1,
            "high_freq_factor": self.high_freq_factor > self.low_freq_factor,
            "beta_fast": self.beta_fast > self.beta_slow,
        }
        for name, good in checks.items():
            if not good:
                raise ConfigError(
                    f"rope {self.kind!r}: {name}={getattr(self, name)} is out of range"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder of the Llama family.

    Attributes:
      max_position: `max_position_embeddings`; see `trained_length`.
      qkv_bias, o_bias, mlp_bias: biases of the projections.
      qk_norm: RMS norm of queries and keys per head, before rotary embedding (Qwen3).
      windows: sliding window in tokens of each layer, None for a layer without.
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

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"family {self.family!r} is unknown; known: {', '.join(FAMILIES)}")
        sizes = ("vocab_size", "num_layers", "model_dim", "mlp_dim", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs")
        if not self.norm_eps > 0:
            raise ConfigError(f"norm_eps must be above 0, got {self.norm_eps}")
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} windows given for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"a sliding window must be at least 1 token, got {self.windows}")

    @property
    def trained_length(self) -> float:
        """Tokens that the model was trained or extended to; infinite where nothing limits them.

        `linear` and `yarn` stretch a length by their factor, as transformers documents them: the
        checkpoint may name the length before or after. `dynamic` stretches to any. Where all layers
        slide, no distance exceeds the widest window.
        """
        rope, length = self.rope, self.max_position
        if rope.kind in ("linear", "yarn"):
            length = max(length, int(rope.trained_length * rope.factor))
        widest = max(math.inf if window is None else window for window in self.windows)
        return math.inf if rope.kind == "dynamic" or widest <= length else length

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a Hugging Face config.

        Raises:
          ConfigError: an architecture, rope type or activation that is not implemented, or a key
            that is missing.
        """
        family = _family(config)
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ConfigError(f"hidden_act {activation!r} is not implemented; implemented: silu")
        heads, width = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        layers = _size(config, "num_hidden_layers")
        bias = _bias(config, family)
        return cls(
            family=family,
            vocab_size=_size(config, "vocab_size"),
            num_layers=layers,
            model_dim=width,
            mlp_dim=_size(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=_kv_heads(config, family, heads),
            head_dim=_head_dim(config, family, width, heads),
            norm_eps=_number(config, "rms_norm_eps"),
            rope=_rope(config),
            max_position=_size(config, "max_position_embeddings"),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            windows=_windows(config, family, layers),
            # Qwen2 has biases on q, k, v and its config does not say so.
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` gives the same config back."""
        return {**dataclasses.asdict(self), "windows": list(self.windows)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The config that `to_dict` described. Raises ConfigError on unknown or missing fields."""
        try:
            rope = RopeConfig(**values["rope"])
            return cls(**{**values, "rope": rope, "windows": tuple(values["windows"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"model config is damaged: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that `from_hf` and transformers read as this model.

        Raises:
          ConfigError: the family's config has no words for this model (a Llama with windows).
        """
        hf: dict[str, Any] = {
            "model_type": self.family,
            "architectures": [FAMILIES[self.family][0]],
            "vocab_size": self.vocab_size,
            "hidden_size": self.model_dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": self.tie_embeddings,
            "rope_theta": self.rope.theta,
            **_rope_to_hf(self.rope, self.max_position),
            **_windows_to_hf(self),
        }
        biases = {"attention_bias": self.o_bias, "bias": self.o_bias, "mlp_bias": self.mlp_bias}
        if self.family != "qwen2":
            hf |= {flag: biases[flag] for flag in BIAS_FLAGS[self.family]}
        read = ModelConfig.from_hf(hf)
        if read != self:
            ours, theirs = self.to_dict(), read.to_dict()
            lost = [f"{key}={ours[key]}" for key in ours if ours[key] != theirs[key]]
            raise ConfigError(
                f"a Hugging Face config of family {self.family!r} cannot say {', '.join(lost)}"
            )
        return hf


def _need(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ConfigError(
            f"config.json lacks {key!r}; it cannot be guessed, add it from the source"
        )
    return value


def _size(config: Mapping[str, Any], key: str) -> int:
    value = _need(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key!r} must be a whole number above 0, got {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = _need(config, key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"config.json: {key!r} must be a number, got {value!r}")
    return float(value)


def _family(config: Mapping[str, Any]) -> str:
    """By architecture, or by model_type where no architecture is named; both must agree."""
    known = {name: family for family, names in FAMILIES.items() for name in names}
    family, names = config.get("model_type"), config.get("architectures") or ()
    for name in names:
        if name not in known:
            raise ConfigError(
                f"architecture {name!r} is not implemented; implemented: {', '.join(known)}"
            )
        if family is not None and family != known[name]:
            raise ConfigError(f"architecture {name!r} contradicts model_type {family!r}")
        return known[name]
    if family not in FAMILIES:
        raise ConfigError(
            f"model_type {family!r} is not implemented; implemented: {', '.join(FAMILIES)}"
        )
    return family


def _bias(config: Mapping[str, Any], family: str) -> bool:
    """Whether q, k, v and o have biases; a flag that the family does not know is refused."""
    for flag in ("attention_bias", "bias", "mlp_bias"):
        if config.get(flag) and flag not in BIAS_FLAGS[family]:
            raise ConfigError(f"{flag}={config[flag]} is not part of family {family!r}")
    flag = "bias" if family == "internlm2" else "attention_bias"
    return family != "qwen2" and bool(config.get(flag, False))


def _kv_heads(config: Mapping[str, Any], family: str, heads: int) -> int:
    # What a missing key means differs from family to family; here it means multi-head attention.
    if family in ("llama", "internlm2") and config.get("num_key_value_heads") is None:
        return heads
    return _size(config, "num_key_value_heads")


def _head_dim(config: Mapping[str, Any], family: str, width: int, heads: int) -> int:
    # Qwen3's heads are not hidden_size / heads wide, whatever the file leaves out.
    if family == "qwen3" or config.get("head_dim") is not None:
        return _size(config, "head_dim")
    if width % heads:
        raise ConfigError(f"hidden_size={width} is not a multiple of num_attention_heads={heads}")
    return width // heads


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both the older keys (`rope_theta`, `rope_scaling`) and `rope_parameters`."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ConfigError(f"rope parameters by layer type ({', '.join(scaling)}) not implemented")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"rope type {kind!r} is not implemented; implemented: {', '.join(ROPE_KINDS)}"
        )
    said = {"rope_theta": config.get("rope_theta"), **scaling}
    if said.get("rope_theta") is None:
        raise ConfigError(
            "config.json gives no rope theta ('rope_theta'); it cannot be guessed, "
            "add it from the model's source"
        )
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ConfigError(f"partial_rotary_factor={partial} is not implemented; implemented: 1")
    fields: dict[str, Any] = {"kind": kind, "theta": _number(said, "rope_theta")}
    fields["trained_length"] = _trained_length(config, scaling, kind)
    if kind != "default":
        fields["factor"] = _rope_number(scaling, kind, "factor")
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            fields[name] = _rope_number(scaling, kind, name)
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            if scaling.get(name) is not None:
                fields[name] = _rope_number(scaling, kind, name)
        fields["truncate"] = bool(scaling.get("truncate", True))
    return RopeConfig(**fields)


def _rope_number(scaling: Mapping[str, Any], kind: str, key: str) -> float:
    if scaling.get(key) is None:
        raise ConfigError(f"rope type {kind!r} needs {key!r} in config.json; it has {[*scaling]}")
    return _number(scaling, key)


def _trained_length(config: Mapping[str, Any], scaling: Mapping[str, Any], kind: str) -> int:
    longest = _size(config, "max_position_embeddings")
    # Only these two kinds extend a length that they name; the others scale what was trained.
    if kind not in ("llama3", "yarn"):
        return longest
    key = "original_max_position_embeddings"
    given = {place[key] for place in (scaling, config) if place.get(key) is not None}
    if len(given) > 1:
        raise ConfigError(f"config.json gives two values of {key!r}: {sorted(given)}")
    if given:
        return _size({key: given.pop()}, key)
    if kind == "llama3":
        raise ConfigError(f"rope type 'llama3' needs {key!r} in config.json")
    return longest


def _rope_to_hf(rope: RopeConfig, longest: int) -> dict[str, Any]:
    if rope.kind == "default":
        return {}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.trained_length != longest or rope.kind == "llama3":
        scaling["original_max_position_embeddings"] = rope.trained_length
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        scaling |= {n: getattr(rope, n) for n in optional if getattr(rope, n) is not None}
        scaling["truncate"] = rope.truncate
    return {"rope_scaling": scaling}


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Mistral slides everywhere; Qwen slides only when told, from a layer on or by layer types."""
    if family in ("llama", "internlm2"):
        if config.get("sliding_window") is not None:
            raise ConfigError(
                f"sliding_window={config['sliding_window']} is not part of family {family!r}"
            )
        return (None,) * layers
    types = config.get("layer_types") or []
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) not in (0, layers):
        raise ConfigError(f"{len(types)} layer_types for {layers} layers; unknown: {unknown}")
    if family == "mistral":
        if "sliding_window" not in config:
            raise ConfigError("config.json lacks 'sliding_window'; null says that there is none")
        if "full_attention" in types:
            raise ConfigError("layer_types with 'full_attention' is not part of family 'mistral'")
        slides = [config["sliding_window"] is not None] * layers
    elif types:
        slides = [kind == "sliding_attention" for kind in types]
    elif config.get("use_sliding_window"):
        first = _need(config, "max_window_layers")
        slides = [layer >= first for layer in range(layers)]
    else:
        slides = [False] * layers
    if family != "mistral" and any(slides) and not config.get("use_sliding_window"):
        raise ConfigError("layer_types has 'sliding_attention' but use_sliding_window is not true")
    return tuple(_size(config, "sliding_window") if slide else None for slide in slides)


def _windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    window = next((window for window in config.windows if window is not None), None)
    if config.family == "mistral":
        return {"sliding_window": window}
    if window is None:
        return {}
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    # max_window_layers also speaks to transformers versions that do not read layer_types.
    first = kinds.index("sliding_attention")
    return {
        "sliding_window": window,
        "use_sliding_window": True,
        "max_window_layers": first,
        "layer_types": kinds,
    }
