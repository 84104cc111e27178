"""`config.json` -> `ModelConfig`, with transformers' defaults for keys that a file leaves out.

Published files leave out keys: Llama 2 has no `rope_theta`, Mistral 7B has no `head_dim`. The
configuration classes of transformers fill them in. They get a dict of known keys with bounded
values: transformers opens no file here and runs no code from a checkpoint (`auto_map`).
"""

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.errors import ConfigError
from jax_longctx.files import read_json
from jax_longctx.models.config import SIZES, ModelConfig
from jax_longctx.models.families import FAMILIES

# The keys that the computation depends on.
KEYS = {
    *SIZES.values(),
    *("head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
    *("attention_bias", "mlp_bias"),
    *("layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
    *("sliding_window_pattern", "no_rope_layer_interval"),
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"),
    *("rope_local_base_freq", "original_max_position_embeddings"),
    *(key for traits in FAMILIES.values() if traits.experts for key in traits.experts.known),
}

# Positions and shapes are 32-bit integers.
LARGEST = 2**31 - 1
# transformers makes lists with an entry a layer.
MOST_LAYERS = 10_000

INTERNLM2 = "internlm2"


def read_config(path: Path) -> ModelConfig:
    """The model that a `config.json` describes.

    Raises:
      CheckpointError: the file is not JSON.
      ConfigError: the model is not implemented, or a value is out of range.
    """
    return model_config(read_json(path), str(path))


def model_config(described: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The model that the entries of a `config.json` describe.

    Args:
      where: the file that they are of, for errors.

    Raises:
      ConfigError: a model that is not implemented, or a value out of range.
    """
    try:
        return _model_config(text_part(described))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def text_part(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of the text model, which a model of text and images has inside of its own."""
    nested = described.get("text_config")
    if not (isinstance(nested, Mapping) and "model_type" in nested):
        return described
    tied = {key: described[key] for key in ("tie_word_embeddings",) if key in described}
    return {**tied, **nested}


def _model_config(described: Mapping[str, Any]) -> ModelConfig:
    family = _family(described)
    traits = FAMILIES.get(family)
    own = () if traits is None else (*traits.keys.values(), *traits.only)
    known = {key: described[key] for key in (*KEYS, *own) if key in described}
    for key, value in known.items():
        most = MOST_LAYERS if key == "num_hidden_layers" else LARGEST
        for number in _integers(value):
            if abs(number) > most:
                raise ConfigError(f"{key!r} holds {number!s:.20}, expected at most {most}")
    if family == INTERNLM2:
        # With its fused projection split, it is a Llama. Its flag of biases has another name.
        family, known["attention_bias"] = "llama", described.get("bias", True)
    if FAMILIES[family].windows == "all" and known.get("layer_types"):
        # transformers reads a Mistral with layer_types as another family (Ministral).
        raise ConfigError(f"layer_types is not part of family {family!r}")
    if not FAMILIES[family].has_head:
        known.setdefault("tie_word_embeddings", True)
    return ModelConfig.from_hf(_with_defaults(family, known))


def _family(described: Mapping[str, Any]) -> str:
    """By architecture, or by model_type where no architecture is named; both must agree."""
    known = {traits.architecture: family for family, traits in FAMILIES.items()}
    known["InternLM2ForCausalLM"] = INTERNLM2
    family, names = described.get("model_type"), described.get("architectures") or ()
    if not isinstance(names, list | tuple):
        raise ConfigError(f"'architectures' must be a list, got {names!r}")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"architecture {name!r} is not implemented; implemented: {', '.join(known)}"
            )
        if family in FAMILIES and name in FAMILIES[family].also:
            return family
        if family is not None and family != known[name]:
            raise ConfigError(f"architecture {name!r} contradicts model_type {family!r}")
        return known[name]
    if not isinstance(family, str) or family not in known.values():
        both = ", ".join(f"{ours} ({name})" for name, ours in known.items())
        raise ConfigError(f"model_type {family!r} is not implemented; implemented: {both}")
    return family


def _integers(value: Any) -> Iterable[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _integers(item)


def _with_defaults(family: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of the family, with the defaults of transformers."""
    # Only the configuration classes are used, so PyTorch may be missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reading a config.json needs the package {error.name}; install it: "
            f"pip install 'jax-longctx[convert]'"
        ) from error
    like = FAMILIES[family].defaults or family
    if like not in CONFIG_MAPPING:
        raise ConfigError(
            f"family {family!r}: transformers knows no model_type {like!r}; say in the family's "
            f"entry of FAMILIES whose defaults it has, such as defaults='llama'"
        )
    # transformers warns of some values that ModelConfig accepts or refuses.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # The classes change the dicts that they get.
        config = AutoConfig.for_model(like, **copy.deepcopy(dict(known)))
        # As before inference: a trained length outside the rope settings takes precedence.
        config.standardize_rope_params()
        return {**config.to_dict(), "model_type": family}
    except Exception as error:  # wrong values raise many classes, KeyError among them
        said = " ".join(str(error).split())
        raise ConfigError(f"it cannot be used: {said:.300}") from error
    finally:
        logging.set_verbosity(verbosity)
