"""Rotary embedding: its kinds, their frequencies, and how a Hugging Face config says them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax_longctx.errors import ConfigError
from jax_longctx.models.values import need, number, size

# Kinds of rotary embedding whose settings name the length that they extend.
NAMED_LENGTH = ("llama3", "yarn", "longrope")

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
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}
# Llama 4's and Ministral 3's name of `RopeConfig.query_growth`.
GROWTH = "llama_4_scaling_beta"
# Settings with a number for each frequency.
LISTS = ("short_factor", "long_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, which turns channels i and i + H/2 of a head by position * f_i.

    The kinds differ in the frequencies f_i, and `yarn` and `longrope` in a factor on cos and sin:

    - `default`: f_i = theta^(-2i/R) (Su et al. 2021, section 3.2.2);
    - `linear`: f_i / factor (Chen et al. 2023, position interpolation);
    - `dynamic`: theta grows with the total length beyond the trained one (NTK-aware scaling);
    - `llama3`: low frequencies divided by the factor, high ones kept, a ramp between (Llama 3.1);
    - `yarn`: a ramp over channels between interpolated and kept frequencies, and an attention
      temperature as a factor on cos and sin (Peng et al. 2023, sections 3.2 to 3.4);
    - `longrope`: f_i / short_factor[i], in texts above the trained length f_i / long_factor[i]
      (Ding et al. 2024, section 3.2).

    R channels of a head turn, a `share` of its H. The other ones have frequency 0. Files have them
    behind the R; here they stand behind either half of the R, so that each channel keeps its
    partner i + H/2 (`checkpoints_convert.names`).

    `LayerContext.rotate` applies it.

    Attributes:
      theta: base of the frequencies.
      trained_length: tokens the frequencies were trained at, before scaling.
      share: of a head's channels, R / H; 0 turns none.
      factor: of every kind but `default`.
      low_freq_factor, high_freq_factor: of `llama3`.
      beta_fast, beta_slow, mscale, mscale_all_dim, truncate: of `yarn`.
      attention_factor: of `yarn` and `longrope`.
      short_factor, long_factor: of `longrope`, R/2 numbers.
      query_growth: g of Llama 4's temperature, also without scaling: queries at position p are
        multiplied by 1 + g log(1 + floor(p / trained_length)).
    """

    kind: str
    theta: float
    trained_length: int
    share: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    query_growth: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(
                f"rope type {self.kind!r} is not implemented; implemented: {', '.join(ROPE_KINDS)}"
            )
        checks = {
            "theta": (self.theta > 1, "above 1"),
            "trained_length": (self.trained_length >= 1, "at least 1"),
            "share": (0 <= self.share <= 1, "from 0 to 1"),
            "factor": (self.factor >= 1, "at least 1"),
            "high_freq_factor": (
                self.high_freq_factor > self.low_freq_factor,
                f"above low_freq_factor {self.low_freq_factor}",
            ),
            "query_growth": (self.query_growth >= 0, "at least 0"),
            "beta_fast": (self.beta_fast > self.beta_slow, f"above beta_slow {self.beta_slow}"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise ConfigError(
                    f"rope {self.kind!r}: {name} must be {expected}, got {getattr(self, name)}"
                )

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the whole text."""
        return self.kind in ("dynamic", "longrope")

    def turned(self, head_dim: int) -> int:
        """R: how many channels of a head turn."""
        return int(head_dim * self.share)

    def check_width(self, head_dim: int) -> None:
        """Raises ConfigError where the channels of a head do not pair, or lists do not fit them."""
        turned = self.turned(head_dim)
        if head_dim % 2 or turned % 2:
            share = f", {turned} of them rotated," if turned < head_dim else ""
            raise ConfigError(f"head_dim={head_dim}{share} is odd; rotary embedding needs pairs")
        for name in LISTS if self.kind == "longrope" and turned else ():
            if len(getattr(self, name)) != turned // 2:
                raise ConfigError(
                    f"rope {self.kind!r}: {name} must have {turned // 2} numbers, one a pair of "
                    f"rotated channels, got {len(getattr(self, name))}"
                )

    def frequencies(self, head_dim: int, *, long: bool = False) -> list[float]:
        """The H/2 frequencies of every kind but `dynamic`, which has other ones at each length.

        Args:
          long: of a text above the trained length, where `longrope` has other ones.
        """
        turned = self.turned(head_dim)
        base = [self.theta ** (-2 * i / turned) for i in range(turned // 2)]
        if self.kind == "longrope" and turned:
            divisors = self.long_factor if long else self.short_factor
            found = [f / divisor for f, divisor in zip(base, divisors, strict=True)]
        else:
            kept = self._kept(turned, base)
            found = [f * (k + (1 - k) / self.factor) for f, k in zip(base, kept, strict=True)]
        return found + [0.0] * (head_dim // 2 - len(found))

    def _kept(self, turned: int, base: list[float]) -> list[float]:
        """The share of each frequency that stays; the rest of it is divided by the factor."""
        if self.kind == "default" or not base:
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
            return turned * math.log(ratio) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, turned - 1)
        if low == high:
            high += 0.001
        return [1 - _from_0_to_1((i - low) / (high - low)) for i in range(len(base))]

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by; 1 for every kind but `yarn` and `longrope`."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            if self.factor <= 1:
                return 1.0
            return math.sqrt(1 + math.log(self.factor) / math.log(self.trained_length))

        def temperature(scale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return temperature(self.mscale) / temperature(self.mscale_all_dim)
        return temperature(1.0)

    def scales(self, head_dim: int) -> list[float]:
        """`scale` for each of the H/2 pairs, 1 for those that do not turn."""
        turning = self.turned(head_dim) // 2
        return [self.scale] * turning + [1.0] * (head_dim // 2 - turning)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RopeConfig":
        """What `dataclasses.asdict` gave, also from JSON. Raises TypeError on unknown fields."""
        return cls(**{**values, **{name: tuple(values.get(name, ())) for name in LISTS}})


def _from_0_to_1(x: float) -> float:
    return min(max(x, 0.0), 1.0)


def read_rope(
    config: Mapping[str, Any], said: Mapping[str, Any], *, partial: bool, growing: bool
) -> RopeConfig:
    """The embedding that `rope_parameters`, or an entry in them, describe.

    Args:
      config: the whole config that `said` is of.
      partial: whether a share of the channels may be rotated.
      growing: whether queries grow with the position.

    Raises:
      ConfigError: a kind that is not implemented, or a setting that is missing or out of range.
    """
    if any(isinstance(value, Mapping) for value in said.values()):
        raise ConfigError(f"rope parameters by layer type ({', '.join(said)}) not implemented")
    kind = str(need(said, "rope_type"))
    share = said.get("partial_rotary_factor", 1)
    if share != 1 and not partial:
        raise ConfigError(f"partial_rotary_factor={share!r} is not implemented; implemented: 1")
    # `RopeConfig` refuses a kind that is not known.
    needed, optional = ROPE_KINDS.get(kind, ((), ()))
    fields: dict[str, Any] = {
        name: _numbers(said, name) if name in LISTS else number(said, name)
        for name in (*needed, *optional)
        if name in needed or said.get(name) is not None
    }
    if kind == "yarn":
        fields["truncate"] = bool(said.get("truncate", True))
    longest = length = size(config, "max_position_embeddings")
    if kind in NAMED_LENGTH:
        length = size(said, "original_max_position_embeddings")
    if kind == "longrope":
        fields.setdefault("factor", longest / length)
    if growing:
        fields["query_growth"] = number(said, GROWTH)
    if partial:
        fields["share"] = 1.0 if share == 1 else number(said, "partial_rotary_factor")
    return RopeConfig(kind=kind, theta=number(said, "rope_theta"), trained_length=length, **fields)


def _numbers(said: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = need(said, key)
    if not isinstance(values, list | tuple):
        raise ConfigError(f"config.json: {key!r} must be a list of numbers, got {values!r}")
    return tuple(number({key: value}, key) for value in values)


def written_rope(rope: RopeConfig, *, partial: bool, growing: bool) -> dict[str, Any]:
    """`read_rope` undone: `rope_parameters`, or an entry of them."""
    needed, optional = ROPE_KINDS[rope.kind]
    settings = {name: getattr(rope, name) for name in (*needed, *optional)}
    said: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    said |= {
        name: [*value] if name in LISTS else value
        for name, value in settings.items()
        if value is not None
    }
    if rope.kind in NAMED_LENGTH:
        said["original_max_position_embeddings"] = rope.trained_length
    if rope.kind == "yarn":
        said["truncate"] = rope.truncate
    said |= {GROWTH: rope.query_growth} if growing else {}
    return {**said, "partial_rotary_factor": rope.share} if partial else said
