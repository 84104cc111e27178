"""What a model is: the table of families, and configurations read from a whole Hugging Face config.

A new family of this decoder is one entry of `FAMILIES`. A new activation or norm is one function in
`jax_longctx.models.llama` (`ACTIVATIONS`, `NORMS`). Nothing else names a family, but for InternLM2:
it is a Llama in other files, which `checkpoints_convert` knows.

`ModelConfig.from_hf` has no defaults, and refuses what is not implemented: a family, a rope type,
an activation. `checkpoints_convert.read_config` fills in what a `config.json` leaves out.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jax_longctx.errors import ConfigError
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
# Kinds of rotary embedding whose settings name the length that they extend.
NAMED_LENGTH = ("llama3", "yarn")

# Required and optional settings of each kind of rotary embedding.
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
QK_NORM_NAMES = {"layers.*.attn.q_norm", "layers.*.attn.k_norm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family apart; the defaults are Llama's.

    Attributes:
      architecture: its name in the `architectures` of a `config.json`.
      defaults: the `model_type` whose defaults its config has; None for its own. A family that is
        not in transformers must name one that is (`"llama"`).
      names: our modules -> its Hugging Face files'; `*` is the layer, and `.weight` or
        `.bias` is appended. Modules with the same name share a tensor, one's rows after the
        other's. All keys of `LLAMA_NAMES` are required, with two exceptions: `q_norm` and `k_norm`
        only with `qk_norm`; `head` not in a family that always ties its embeddings.
      activation: of the gated MLP: a key of `llama.ACTIVATIONS`, and Hugging Face's `hidden_act`.
      norm: a key of `llama.NORMS`.
      softmax_scale: factor of the scores, from the width of a head.
      embed_scale: factor of the embeddings, from the width of the model.
      rope_kinds: its kinds of rotary embedding.
      bias_flags: flags of its config. `attention_bias` adds biases to q, k, v and o, `mlp_bias` to
        gate, up and down.
      qkv_bias: q, k and v always have biases; the config has no flag for them.
      qk_norm: norms of queries and keys per head, before rotary embedding.
      windows: sliding windows in no layer, in all layers or none, or set layer by layer.
      gguf: llama.cpp's names of its architecture, the usual one first.
      interleaved: llama.cpp pairs the rows of its q and k for interleaved rotary embedding.
    """

    architecture: str
    defaults: str | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: LLAMA_NAMES)
    activation: str = "silu"
    norm: str = "rms"
    softmax_scale: Callable[[int], float] = lambda head_dim: head_dim**-0.5
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
        if lacking := sorted(LLAMA_NAMES.keys() - self.names.keys() - optional):
            raise ConfigError(f"{self.architecture}: `names` lacks {', '.join(lacking)}")

    @property
    def has_head(self) -> bool:
        """Whether its files may hold an output head besides the embedding."""
        return "head" in self.names


# By the `model_type` of a Hugging Face config.
FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        bias_flags=("attention_bias", "mlp_bias"),
        # GGUF files hold InternLM2's fused projection split, so it is a Llama.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, which turns channels i and i + H/2 of a head by position * f_i.

    The kinds differ in the frequencies f_i, and `yarn` in a factor on cos and sin too:

    - `default`: f_i = theta^(-2i/H) (Su et al. 2021, section 3.2.2);
    - `linear`: f_i / factor (Chen et al. 2023, position interpolation);
    - `dynamic`: theta grows with the total length beyond the trained one (NTK-aware scaling);
    - `llama3`: low frequencies divided by the factor, high ones kept, a ramp between (Llama 3.1);
    - `yarn`: a ramp over channels between interpolated and kept frequencies, and an attention
      temperature as a factor on cos and sin (Peng et al. 2023, sections 3.2 to 3.4).

    `LayerContext.rotate` applies it.

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
            "theta": (self.theta > 1, "above 1"),
            "trained_length": (self.trained_length >= 1, "at least 1"),
            "factor": (self.factor >= 1, "at least 1"),
            "high_freq_factor": (
                self.high_freq_factor > self.low_freq_factor,
                f"above low_freq_factor {self.low_freq_factor}",
            ),
            "beta_fast": (self.beta_fast > self.beta_slow, f"above beta_slow {self.beta_slow}"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise ConfigError(
                    f"rope {self.kind!r}: {name} must be {expected}, got {getattr(self, name)}"
                )

    def frequencies(self, head_dim: int) -> list[float]:
        """The H/2 frequencies of every kind but `dynamic`, which has other ones at each length."""
        base = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        kept = self._kept(head_dim, base)
        return [f * (keep + (1 - keep) / self.factor) for f, keep in zip(base, kept, strict=True)]

    def _kept(self, head_dim: int, base: list[float]) -> list[float]:
        """The share of each frequency that stays; the rest of it is divided by the factor."""
        if self.kind == "default":
            return [1.0 for _ in base]
        if self.kind == "linear":
            return [0.0 for _ in base]
        if self.kind == "llama3":
            # What turns seldom over the trained length is divided.
            least, most = self.low_freq_factor, self.high_freq_factor
            turns = [self.trained_length * f / (2 * math.pi) for f in base]
            return [_from_0_to_1((each - least) / (most - least)) for each in turns]
        if self.kind != "yarn":
            raise ConfigError(f"rope kind {self.kind!r} has no fixed frequencies")

        def channel(turns: float) -> float:
            ratio = self.trained_length / (turns * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        return [1 - _from_0_to_1((i - low) / (high - low)) for i in range(len(base))]

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by; 1 for every kind but `yarn`."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def temperature(scale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return temperature(self.mscale) / temperature(self.mscale_all_dim)
        return temperature(1.0)


def _from_0_to_1(x: float) -> float:
    return min(max(x, 0.0), 1.0)


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
        check_name(FAMILIES, self.family, "family")
        if self.rope.kind not in self.traits.rope_kinds:
            raise ConfigError(
                f"rope type {self.rope.kind!r} is not implemented for family {self.family!r}; "
                f"implemented: {', '.join(self.traits.rope_kinds)}"
            )
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
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs")
        if not self.norm_eps > 0:
            raise ConfigError(f"norm_eps must be above 0, got {self.norm_eps}")
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} windows given for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"a sliding window must be at least 1 token, got {self.windows}")

    @property
    def traits(self) -> Family:
        """The family's entry in the table."""
        return FAMILIES[self.family]

    @property
    def softmax_scale(self) -> float:
        """The factor of attention scores before the softmax."""
        return self.traits.softmax_scale(self.head_dim)

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
        family, activation = str(_need(config, "model_type")), _need(config, "hidden_act")
        traits = look_up(FAMILIES, family, "family")
        if activation != traits.activation:
            raise ConfigError(
                f"hidden_act {activation!r} is not implemented; implemented: {traits.activation}"
            )
        sizes = {ours: _size(config, theirs) for ours, theirs in SIZES.items()}
        flags = {name: bool(config.get(name)) for name in traits.bias_flags}
        bias = flags.get("attention_bias", False)
        return cls(
            family=family,
            **sizes,
            head_dim=_head_dim(config, sizes["model_dim"], sizes["num_heads"]),
            norm_eps=_number(config, "rms_norm_eps"),
            rope=_rope(config),
            tie_embeddings=bool(_need(config, "tie_word_embeddings")),
            windows=_windows(config, traits, sizes["num_layers"]),
            qkv_bias=bias or traits.qkv_bias,
            o_bias=bias,
            mlp_bias=flags.get("mlp_bias", False),
            qk_norm=traits.qk_norm,
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
        """A `config.json` that `from_hf` and transformers, since version 4, read as this model.

        Raises:
          ConfigError: the family's config cannot describe this model (a Llama with windows).
        """
        biases = {"attention_bias": self.o_bias, "mlp_bias": self.mlp_bias}
        hf: dict[str, Any] = {
            "model_type": self.family,
            "architectures": [self.traits.architecture],
            **{theirs: getattr(self, ours) for ours, theirs in SIZES.items()},
            "head_dim": self.head_dim,
            "hidden_act": self.traits.activation,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            **_rope_to_hf(self.rope),
            **_windows_to_hf(self),
            **{flag: biases[flag] for flag in self.traits.bias_flags},
        }
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
            f"the model's config lacks {key!r}; it cannot be guessed, add it from the source"
        )
    return value


def _size(config: Mapping[str, Any], key: str) -> int:
    value = _need(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key!r} must be a whole number above 0, got {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = _need(config, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"config.json: {key!r} must be a finite number, got {value!r}")
    return float(value)


def _head_dim(config: Mapping[str, Any], width: int, heads: int) -> int:
    # transformers' rule; Qwen2's configs have no such key.
    if config.get("head_dim") is not None:
        return _size(config, "head_dim")
    if width % heads:
        raise ConfigError(f"hidden_size={width} is not a multiple of num_attention_heads={heads}")
    return width // heads


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    said = _need(config, "rope_parameters")
    if any(isinstance(value, Mapping) for value in said.values()):
        raise ConfigError(f"rope parameters by layer type ({', '.join(said)}) not implemented")
    kind = str(_need(said, "rope_type"))
    if said.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"partial_rotary_factor={said['partial_rotary_factor']!r} is not implemented; "
            f"implemented: 1"
        )
    # `RopeConfig` refuses a kind that is not known.
    needed, optional = ROPE_KINDS.get(kind, ((), ()))
    fields: dict[str, Any] = {
        name: _number(said, name)
        for name in (*needed, *optional)
        if name in needed or said.get(name) is not None
    }
    if kind == "yarn":
        fields["truncate"] = bool(said.get("truncate", True))
    if kind in NAMED_LENGTH:
        length = _size(said, "original_max_position_embeddings")
    else:
        length = _size(config, "max_position_embeddings")
    theta = _number(said, "rope_theta")
    return RopeConfig(kind=kind, theta=theta, trained_length=length, **fields)


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    needed, optional = ROPE_KINDS[rope.kind]
    settings = {name: getattr(rope, name) for name in (*needed, *optional)}
    said: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    said["rope_type"] = rope.kind
    if rope.kind in NAMED_LENGTH:
        said["original_max_position_embeddings"] = rope.trained_length
    if rope.kind == "yarn":
        said["truncate"] = rope.truncate
    whole = {"rope_theta": rope.theta, "rope_parameters": {"rope_theta": rope.theta, **said}}
    # Version 4 of transformers reads only rope_theta and rope_scaling.
    return whole if rope.kind == "default" else {**whole, "rope_scaling": said}


def _windows(config: Mapping[str, Any], traits: Family, layers: int) -> tuple[int | None, ...]:
    if traits.windows == "none":
        slides = [False] * layers
    elif traits.windows == "all":
        slides = [config.get("sliding_window") is not None] * layers
    else:
        types = _need(config, "layer_types")
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) != layers:
            raise ConfigError(f"{len(types)} layer_types for {layers} layers; unknown: {unknown}")
        slides = [kind == "sliding_attention" for kind in types]
    return tuple(_size(config, "sliding_window") if slide else None for slide in slides)


def _windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    window = next((window for window in config.windows if window is not None), None)
    if config.traits.windows != "by layer":
        return {} if config.traits.windows == "none" else {"sliding_window": window}
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        # For older versions of transformers, which ignore layer_types.
        "max_window_layers": config.windows.index(window) if window else config.num_layers,
        "layer_types": kinds,
    }
