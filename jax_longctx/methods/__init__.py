"""The methods by name. Adding one is a file in this folder and a line of `METHODS`."""

from collections.abc import Mapping

from jax_longctx.methods.arkvale import ArkVale
from jax_longctx.methods.citrus import Citrus, CitrusStandard
from jax_longctx.methods.citrus_individual import CitrusIndividual
from jax_longctx.methods.dynamic_ntk import DynamicNTK
from jax_longctx.methods.full import Full
from jax_longctx.methods.h2o import H2O
from jax_longctx.methods.h2o_shared import H2OShared
from jax_longctx.methods.ideal_topk import IdealTopK
from jax_longctx.methods.infllm import InfLLM
from jax_longctx.methods.quest import Quest
from jax_longctx.methods.reattention import ReAttention
from jax_longctx.methods.refreshkv import RefreshKV
from jax_longctx.methods.resa import Resa
from jax_longctx.methods.ring import Ring
from jax_longctx.methods.roco import RoCo
from jax_longctx.methods.settings import describe_method, make_from, method_settings
from jax_longctx.methods.snapkv import SnapKV
from jax_longctx.methods.star import Star
from jax_longctx.methods.streaming_llm import StreamingLLM
from jax_longctx.methods.tova import TOVA

__all__ = [
    "H2O",
    "METHODS",
    "TOVA",
    "ArkVale",
    "Citrus",
    "CitrusIndividual",
    "CitrusStandard",
    "DynamicNTK",
    "Full",
    "H2OShared",
    "IdealTopK",
    "InfLLM",
    "Quest",
    "ReAttention",
    "RefreshKV",
    "Resa",
    "Ring",
    "RoCo",
    "SnapKV",
    "Star",
    "StreamingLLM",
    "describe",
    "make_method",
    "settings_of",
]

METHODS: dict[str, type] = {
    "full": Full,
    "dynamic-ntk": DynamicNTK,
    "reattention": ReAttention,
    "infllm": InfLLM,
    "streaming-llm": StreamingLLM,
    "h2o": H2O,
    "tova": TOVA,
    "roco": RoCo,
    "snapkv": SnapKV,
    "refreshkv": RefreshKV,
    "citrus": Citrus,
    "citrus-individual": CitrusIndividual,
    "citrus-standard": CitrusStandard,
    "h2o-shared": H2OShared,
    "quest": Quest,
    "arkvale": ArkVale,
    "ideal-topk": IdealTopK,
    "resa": Resa,
    "star": Star,
    "ring": Ring,
}


def make_method(name: str, settings: Mapping[str, object] | None = None):
    """The method of that name with `--set key=value` settings, typed and validated.

    Raises:
      ConfigError: unknown method, unknown setting, or a value of the wrong type or range.
    """
    return make_from(METHODS, name, settings or {})


def describe(name: str) -> dict[str, object]:
    """Metadata and settings of a method, JSON-able (`jax-longctx methods --json`)."""
    return describe_method(METHODS, name)


def settings_of(method: object) -> dict[str, object]:
    """A method instance as its name and settings, JSON-able; `make_method` takes it back."""
    return method_settings(METHODS, method)
