"""A GGUF file, llama.cpp's format: metadata, tokenizer and (quantised) tensors in one.

The `gguf` package maps the file and reads its directory. Then the tensors' bytes are read in ranges
and dequantised a few rows at a time, so neither the file nor a float32 copy of a tensor is ever
whole in memory.

llama.cpp writes a model's settings under the name of its architecture (`llama.block_count`). Three
settings follow from the tensors instead: tied embeddings (no `output.weight`), biases, and the
rotary scalings of llama3 and longrope, whose divisors of each frequency are stored (`ROPES`). What
a file does not say is as transformers has it for the family, as in llama.cpp.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits as dequantised_types  # it has no public list
from gguf.quants import dequantize

from checkpoints_convert.config import MOST_LAYERS, model_config
from checkpoints_convert.files import Source, SourceTensor, check_tensors
from checkpoints_convert.vocabulary import gguf_tokenizer_files
from jax_longctx.errors import CheckpointError, ConfigError
from jax_longctx.files import first_line
from jax_longctx.models import rope
from jax_longctx.models.families import FAMILIES, Family

READABLE = ("F32", "F16", *(kind.name for kind in dequantised_types))
# Divisors of rotary frequencies: llama3's, and longrope's in short and in long texts.
ROPES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# A file of a model in parts.
SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
# Our names of numbers -> llama.cpp's.
NUMBERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_divisor": "logit_scale",
    "logits_multiplier": "logit_scale",
    "attention_cap": "attn_logit_softcapping",
    "logits_cap": "final_logit_softcapping",
}
# `query_width` is the width of a head, but in these models, which llama.cpp knows by their layers:
# there it is the model's width for each head.
WIDE_QUERIES = {("gemma2", 46), ("gemma3", 62)}
# llama.cpp's name of `rope.GROWTH`.
GROWTH = "attention.temperature_scale"
# Of these the files do not say that the ends of YaRN's ramp are no whole channels.
UNTRUNCATED = ("gpt-oss",)
# The format's default (llama.cpp, `rope_freq_base`).
DEFAULT_THETA = 10000.0
# The most entries of an array, of the metadata, and tensors; vocabularies have some 300,000.
MOST_ENTRIES = 1 << 21


def open_gguf(path: Path, label: str) -> Source:
    """A GGUF file. Quantised values count as float32: dequantising is exact there.

    Raises:
      CheckpointError: the file is not GGUF, incomplete or damaged.
      ConfigError: the architecture is not implemented.
    """
    metadata, found, factors = _read_parts(path)
    shapes = {tensor.name: tensor.shape for tensor in found}
    described = config_from_metadata(path, metadata, shapes, factors)
    config = model_config(described, str(path))
    return Source(
        label=label,
        config=config,
        extras={
            key: described[key] for key in ("bos_token_id", "eos_token_id") if key in described
        },
        naming="gguf",
        tensors=check_tensors(label, found, config, "gguf"),
        read_files={},
        tokenizer=gguf_tokenizer_files(path, metadata),
    )


Directory = tuple[dict[str, Any], list[SourceTensor], dict[str, np.ndarray]]


def _read_parts(path: Path) -> Directory:
    """`read_directory` of a whole model: of all parts where the file is one of several.

    Raises:
      CheckpointError: a part is missing, or is not named as llama.cpp names it.
    """
    metadata, tensors, factors = read_directory(path)
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return metadata, tensors, factors
    name = SPLIT.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts, expected the name STEM-00001-of-{count:05d}.gguf; "
            f"rename the parts, or merge them (llama-gguf-split --merge)"
        )
    whole: dict[str, Any] = {}
    tensors, factors = [], {}
    for number in range(count, 0, -1):
        part = path.with_name(f"{name['stem']}-{number:05d}-of-{count:05d}.gguf")
        if not part.exists():
            raise CheckpointError(f"{part} is missing: the model has {count} parts")
        own, more, divisors = read_directory(part)
        # The first part has the model's metadata.
        whole, tensors, factors = whole | own, more + tensors, factors | divisors
    said = whole.get("split.tensors.count", len(tensors))
    stored = len(tensors)
    if stored != said:
        raise CheckpointError(f"{path}: the parts hold {stored} tensors, expected {said}")
    return whole, tensors, factors


def read_directory(path: Path) -> Directory:
    """Metadata, tensors in the order of the file, and the tensors of `ROPES` that are stored.

    Raises:
      CheckpointError: the file is not GGUF, or truncated.
    """
    try:
        reader = Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = [_tensor(path, entry) for entry in reader.tensors]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"{path} is not a GGUF file that can be read: {first_line(error)} "
            f"(expected a Hugging Face directory or a GGUF file)"
        ) from error
    if reader.byte_order != "I":
        raise CheckpointError(f"{path} has the other byte order; convert it for this machine first")
    factors = {
        entry.name: np.array(entry.data, np.float32).reshape(-1)
        for entry in reader.tensors
        if entry.name in ROPES
    }
    return metadata, sorted(tensors, key=lambda tensor: tensor.offset), factors


def _tensor(path: Path, entry: Any) -> SourceTensor:
    kind = entry.tensor_type
    if kind.name not in READABLE:
        raise CheckpointError(
            f"{path}: tensor {entry.name} has type {kind.name}; implemented are "
            f"{', '.join(READABLE)}"
        )
    floats = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
    dtype = np.dtype(floats.get(kind.name, np.float32))

    def decode(raw: bytes, rows: range) -> np.ndarray:
        if kind.name in floats:
            return np.frombuffer(raw, dtype).reshape(len(rows), -1)
        return dequantize(np.frombuffer(raw, np.uint8).reshape(len(rows), -1), kind)

    return SourceTensor(
        name=entry.name,
        shape=tuple(int(size) for size in reversed(entry.shape)),
        dtype=dtype,
        file=path,
        offset=int(entry.data_offset),
        nbytes=int(entry.n_bytes),
        decode=decode,
        blocks=kind.name not in floats,
    )


class Reader(gguf.GGUFReader):
    """A reader whose errors name the end of a damaged file, or the tensor a truncated one lacks.

    The mapped file is a plain array: the package's hundreds of thousands of small slices are twice
    as fast as with numpy's memmap class.
    """

    def __init__(self, path: Path):
        self.path = path
        super().__init__(path)

    @property
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._plain = mapped.view(np.ndarray)

    def _get(
        self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None
    ) -> np.ndarray:
        # The package would read empty arrays past the end, up to a damaged length.
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError(f"it is truncated or damaged at byte {offset} of its metadata")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            if kind[0] == gguf.GGUFValueType.ARRAY:
                raise ValueError("its metadata nests arrays, which no model needs")
            _check_count("entries of an array", length[0])
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_fields(self, offs: int, count: Any) -> int:
        _check_count("metadata entries", count)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: Any) -> tuple[int, list[Any]]:
        _check_count("tensors", count)
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, sizes, kind, offset = field.parts
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            end = start_offs + int(offset[0]) + math.prod(map(int, sizes)) * block_bytes // block
            if end > len(self.data):
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {bytes(name).decode('utf-8', 'replace')} "
                    f"ends at byte {end}, the file at {len(self.data)}; fetch it again"
                )
        super()._build_tensors(start_offs, fields)


def _check_count(what: str, count: Any) -> None:
    if count > MOST_ENTRIES:
        raise ValueError(f"it says that it holds {count} {what}, expected at most {MOST_ENTRIES}")


def config_from_metadata(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """A config as `model_config` reads it.

    Raises:
      CheckpointError: the metadata lacks something.
      ConfigError: an architecture or rotary scaling that is not implemented.
    """
    said = _Settings(path, metadata, str(metadata.get("general.architecture")))
    family = _family_of(said)
    traits, window = FAMILIES[family], said.get("attention.sliding_window", None)
    heads, width = said.need("attention.head_count"), said.need("embedding_length")
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    config = {
        "model_type": family,
        "architectures": [traits.architecture],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": said.need("feed_forward_length"),
        "num_hidden_layers": said.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("attention.head_count_kv", heads),
        "head_dim": said.get("attention.key_length", width // heads),
        traits.key("activation", "hidden_act"): traits.activation,
        traits.key("norm_eps", "rms_norm_eps"): _decimal(
            said.need(
                f"attention.layer_norm_{'' if traits.norm == 'layer' else 'rms_'}epsilon", float
            )
        ),
        "rope_theta": _decimal(said.get("rope.freq_base", DEFAULT_THETA, float)),
        "max_position_embeddings": said.need("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        traits.key("qkv_bias", "attention_bias"): "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }
    config["rope_scaling"] = _rope_scaling(said, config, factors)
    if (names := traits.experts) is not None:
        config |= {names.count: said.need("expert_count")}
        config |= {"num_experts_per_tok": said.need("expert_used_count")}
        width = said.get("expert_feed_forward_length", config["intermediate_size"])
        config |= {names.width: width} | ({names.normed: True} if names.normed else {})
    if (scaling := config["rope_scaling"]) and scaling["rope_type"] == "longrope":
        # Phi-3's config says it beside the scaling.
        length = "original_max_position_embeddings"
        config[length] = scaling[length]
    if traits.partial_rotary:
        rotated = said.get("rope.dimension_count", config["head_dim"])
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    if traits.windows != "none" and window is not None:
        # Phi-4 says 0 for none; early files of Gemma 2 leave it to the family's default.
        config["sliding_window"] = window or None
    config |= _of_family(said, traits, config)
    for key in ("bos_token_id", "eos_token_id"):
        if isinstance(token := metadata.get(f"tokenizer.ggml.{key}"), int):
            config[key] = token
    _check_plain(said, config)
    return config


def _family_of(said: "_Settings") -> str:
    """The `model_type` of a file's model."""
    path, architecture = said.path, said.architecture
    known = dict.fromkeys(name for traits in FAMILIES.values() for name in traits.gguf)
    if architecture not in known:
        raise ConfigError(
            f"{path}: architecture {architecture!r} is not implemented; "
            f"implemented are {', '.join(known)}"
        )
    # Of the families that share an architecture one has windows (Mistral), one experts (Mixtral),
    # one queries that grow (Ministral 3).
    experts, grows = bool(said.get("expert_count", 0)), bool(said.get(GROWTH, 0.0, float))
    families = [
        name
        for name, traits in FAMILIES.items()
        if architecture in traits.gguf
        and (traits.experts is not None, traits.growing_queries) == (experts, grows)
    ]
    if not families:
        raise ConfigError(f"{path}: {architecture} with{'out' * (not experts)} experts is unknown")
    window = said.get("attention.sliding_window", None)
    slides = [name for name in families if FAMILIES[name].windows != "none"]
    return slides[0] if window and slides else families[0]


def _of_family(said: "_Settings", traits: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """What only some families' files say."""
    found: dict[str, Any] = {}
    for ours, theirs in NUMBERS.items():
        if ours in traits.keys and (value := said.get(theirs, None, float)) is not None:
            found[traits.keys[ours]] = _decimal(value)
    if "query_width" in traits.keys:
        wide = (said.architecture, config["num_hidden_layers"]) in WIDE_QUERIES
        each = config["hidden_size"] // config["num_attention_heads"]
        found[traits.keys["query_width"]] = each if wide else config["head_dim"]
    if (theta := said.get("rope.freq_base_swa", None, float)) is not None:
        found["rope_local_base_freq"] = _decimal(theta)
    pattern = said.window_pattern(config["num_hidden_layers"])
    if pattern is not None and traits.windows == "by layer":
        kinds = "full_attention", "sliding_attention"
        found["layer_types"] = [kinds[bool(slides)] for slides in pattern]
    return found


class _Settings:
    """The metadata of one architecture."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str):
        self.path, self._metadata, self._prefix = path, metadata, architecture
        self.architecture = architecture

    def window_pattern(self, layers: int) -> list[Any] | None:
        """Whether each layer has a window; None where the file does not say it."""
        value = self._metadata.get(f"{self._prefix}.attention.sliding_window_pattern")
        if isinstance(value, list) or value is None:
            return value
        turn = self.get("attention.sliding_window_pattern", None)
        # The last of each `turn` layers has none; with 0 all have one.
        return [not turn or (layer + 1) % turn > 0 for layer in range(min(layers, MOST_LAYERS))]

    def get(self, key: str, default: Any, kind: type = int) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, list):
            # A number for each layer.
            if not value or value != len(value) * value[:1]:
                raise ConfigError(
                    f"{self.path}: {self._prefix}.{key} differs by layer: {value!s:.80}"
                )
            value = value[0]
        if value is not default and not isinstance(value, kind):
            raise CheckpointError(
                f"{self.path}: {self._prefix}.{key} is {value!r:.80}, expected {kind.__name__}"
            )
        return value

    def need(self, key: str, kind: type = int) -> Any:
        value = self.get(key, None, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata has no {self._prefix}.{key}")
        if value == 0:
            raise CheckpointError(f"{self.path}: {self._prefix}.{key} is 0")
        return value


def _decimal(value: float | np.floating) -> float:
    """The shortest decimal with this float32 value: 1e-05 for 9.999999747e-06."""
    return float(str(np.float32(value)))


def _check_plain(said: _Settings, config: Mapping[str, Any]) -> None:
    rotated = said.get("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"] and "partial_rotary_factor" not in config:
        raise ConfigError(
            f"{said.path}: rotates {rotated} of {config['head_dim']} dimensions of a head; "
            f"partial rotary embedding is not implemented"
        )
    if said.architecture == "granite" and not said.get("rope.scaling.finetuned", True, bool):
        # As llama.cpp reads it; of other architectures it only prints it.
        raise ConfigError(
            f"{said.path}: its layers have no rotary embedding (rope.scaling.finetuned is false), "
            f"which is not implemented for granite"
        )
    if said.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise ConfigError(f"{said.path}: values of another size than keys are not implemented")


def _rope_scaling(
    said: _Settings, config: Mapping[str, Any], factors: Mapping[str, np.ndarray]
) -> dict[str, Any] | None:
    kind = said.get("rope.scaling.type", "none", str)
    # Old files, without a type of scaling.
    linear = said.get("rope.scale_linear", 1.0, float)
    if kind == "none" and linear != 1.0:
        return {"rope_type": "linear", "factor": _decimal(linear)}
    divisors, short, long = (factors.get(name) for name in ROPES)
    if short is not None and long is not None:
        return _longrope(said, short, long)
    if divisors is not None and not np.all(divisors == 1.0):
        if kind != "none":
            raise ConfigError(f"{said.path}: rope_freqs.weight together with {kind} scaling")
        return llama3_scaling(said.path, config, divisors)
    if kind == "none":
        return None
    factor = _decimal(said.need("rope.scaling.factor", float))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(f"{said.path}: rotary scaling {kind!r} is not implemented")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": said.need("rope.scaling.original_context_length"),
        "truncate": said.architecture not in UNTRUNCATED,
    }
    names = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
    for key, name in {**names, GROWTH: rope.GROWTH}.items():
        if (value := said.get(key, None, float)) is not None:
            scaling[name] = _decimal(value)
    if scales := said.get("rope.scaling.yarn_log_multiplier", 0.0, float):
        # llama.cpp takes the other one for 1.
        scaling |= {"mscale": 1.0, "mscale_all_dim": _decimal(scales)}
    # llama.cpp's script writes Hugging Face's number, which replaces YaRN's own factor, as
    # yarn_attn_factor. By attn_factor llama.cpp multiplies YaRN's own.
    whole = said.get("rope.scaling.yarn_attn_factor", None, float)
    times = said.get("rope.scaling.attn_factor", 1.0, float)
    if whole is not None:
        scaling["attention_factor"] = _decimal(whole)
    elif times != 1.0:
        scaling["attention_factor"] = _decimal(times) * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return scaling


def _longrope(said: _Settings, short: np.ndarray, long: np.ndarray) -> dict[str, Any]:
    scaling = {
        "rope_type": "longrope",
        "short_factor": [_decimal(value) for value in short],
        "long_factor": [_decimal(value) for value in long],
        "original_max_position_embeddings": said.need("rope.scaling.original_context_length"),
    }
    attention = said.get("rope.scaling.attn_factor", None, float)
    return scaling if attention is None else scaling | {"attention_factor": _decimal(attention)}


def llama3_scaling(path: Path, config: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """The parameters of llama3 scaling, from the divisor of each frequency.

    A frequency of wavelength w is divided by 1 / ((1 - s) / factor + s), where
    s = (trained / w - low) / (high - low) clipped to 0..1. So s is linear in 1 / w between the two
    ends: a line through the divisors that are neither 1 nor `factor` gives trained / low and
    high / low. Only these ratios matter; low is 1 in every Llama.

    Raises:
      ConfigError: the divisors do not follow this formula.
    """
    head_dim = config["head_dim"]
    wrong = ConfigError(f"{path}: rope_freqs.weight is no llama3 scaling")
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inverse_wave = config["rope_theta"] ** -exponents / (2 * math.pi)
    divisors = factors.astype(np.float64)
    if divisors.shape != inverse_wave.shape or not np.all((divisors >= 1) & np.isfinite(divisors)):
        raise wrong
    factor = _decimal(divisors.max())
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (divisors > 1.0) & (divisors < divisors.max())
    if between.sum() < 2:
        raise wrong
    slope, offset = np.polyfit(inverse_wave[between], smooth[between], 1)
    low = 1.0
    # The line falls below 0 where frequencies are divided by the whole factor.
    if not offset < 0 < slope:
        raise wrong
    high, trained = low - low / offset, -slope * low / offset
    high, trained = round(high, 2), round(trained)
    line = (trained * inverse_wave - low) / (high - low)
    again = 1 / ((1 - line.clip(0, 1)) / factor + line.clip(0, 1))
    if not np.allclose(again, divisors, rtol=1e-4):
        raise wrong
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }
