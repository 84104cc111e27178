"""Tensor names and layouts of Hugging Face, InternLM2 and GGUF files, against our parameters.

Names come from the table of families (`jax_longctx.models.config`); the `gguf` package maps them to
those of GGUF files. The layout follows from a parameter's logical axes: a file has the outputs as
rows and the inputs as columns (`[out, in]`). Reading and writing use one description, so an export
restores each bit.

Rows have another order in three cases, which `Part.rows` undoes:
- A family may store several parameters in one tensor, one after another.
- InternLM2 fuses q, k and v: for each kv head its G query heads, then its key, then its value.
- llama.cpp pairs neighbouring rows of q and k for interleaved rotary embedding, in files of
  architecture llama and internlm2 (not qwen2 and qwen3).
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jax_longctx.models.config import LLAMA_NAMES, ModelConfig
from jax_longctx.models.llama import ParamInfo
from jax_longctx.models.params import param_infos

# Our modules -> InternLM2's.
INTERNLM2_NAMES = {
    "embed": "model.tok_embeddings",
    "layers.*.attn_norm": "model.layers.*.attention_norm",
    **{f"layers.*.attn.{letter}": "model.layers.*.attention.wqkv" for letter in "qkv"},
    "layers.*.attn.o": "model.layers.*.attention.wo",
    "layers.*.mlp_norm": "model.layers.*.ffn_norm",
    "layers.*.mlp.gate": "model.layers.*.feed_forward.w1",
    "layers.*.mlp.up": "model.layers.*.feed_forward.w3",
    "layers.*.mlp.down": "model.layers.*.feed_forward.w2",
    "final_norm": "model.norm",
    "head": "output",
}

# Rotary tables, which follow from the config.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq|.*\.rope\.inv_freq|rope_freqs\.weight")

Rows = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Part:
    """One of our parameters in a tensor of a file.

    Attributes:
      rows: selects and orders the parameter's rows in the file's tensor.
    """

    path: str
    info: ParamInfo
    rows: Rows | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """Our axes in the file's order: outputs, then inputs."""
        inputs = self.info.inputs
        return (*(axis for axis in range(len(self.info.shape)) if axis not in inputs), *inputs)

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape in the file, after `rows`."""
        columns = math.prod(self.info.shape[axis] for axis in self.info.inputs)
        rows = math.prod(self.info.shape) // columns
        return (rows, columns) if self.info.inputs else (rows,)

    def from_file(self, array: np.ndarray) -> np.ndarray:
        """Our array, as a view of the file's tensor where no rows are reordered.

        The array may also be of the scales of the tensor's rows, `[rows, 1]`.
        """
        if self.rows is not None:
            array = self.rows(array)
        # Of scales the file's tensor would have one column.
        info = self.info if array.shape[1:] == self.file_shape[1:] else self.info.of_scales
        split = array.reshape([info.shape[axis] for axis in self.order])
        return split.transpose(np.argsort(self.order))

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The file's rows, for parameters whose rows are not reordered."""
        return array.transpose(self.order).reshape(self.file_shape)


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor that a file must hold, and the parameters in it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def nbytes(self, dtype: np.dtype) -> int:
        """Bytes of the tensor in a type."""
        return math.prod(self.shape) * dtype.itemsize


def expected_tensors(config: ModelConfig, naming: str) -> dict[str, FileTensor]:
    """The tensors of a model's files by name; `naming` is "hf", "internlm2" or "gguf"."""
    found: dict[str, list[Part]] = {}
    for path, info in param_infos(config).items():
        part = Part(path, info, _reordered(config, naming, path.split(".")[-1]))
        found.setdefault(tensor_name(config, naming, path), []).append(part)
    tensors = {}
    for name, parts in found.items():
        first = parts[0].file_shape
        ends = [0, *itertools.accumulate(part.file_shape[0] for part in parts)]
        if len(parts) > 1:
            parts = [
                part
                if part.rows
                else dataclasses.replace(part, rows=functools.partial(_run, begin, end))
                for part, begin, end in zip(parts, ends, ends[1:], strict=False)
            ]
        tensors[name] = FileTensor(name, (ends[-1], *first[1:]), tuple(parts))
    return tensors


def tensor_name(config: ModelConfig, naming: str, path: str) -> str:
    """The name of a parameter's tensor in the files."""
    suffix = "bias" if path.endswith("_bias") else "weight"
    module = re.sub(r"(_bias|\.scale|\.table)$", "", path)
    layer = re.search(r"\d+", module)
    names = {"hf": config.traits.names, "internlm2": INTERNLM2_NAMES, "gguf": LLAMA_NAMES}[naming]
    name = names[re.sub(r"\d+", "*", module, count=1)]
    if layer:
        name = name.replace("*", layer.group())
    if naming == "gguf":
        name = _gguf_names(config.traits.gguf[0], config.num_layers).get_name(name)
    return f"{name}.{suffix}"


@functools.lru_cache(maxsize=4)
def _gguf_names(architecture: str, layers: int) -> Any:
    import gguf

    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, layers)


def naming_of(names: Iterable[str]) -> str:
    """The naming of a Hugging Face directory's tensors: "hf" or "internlm2"."""
    return "internlm2" if any(".attention.wqkv." in name for name in names) else "hf"


def _reordered(config: ModelConfig, naming: str, kind: str) -> Rows | None:
    letter, heads, kv_heads = kind.removesuffix("_bias"), config.num_heads, config.num_kv_heads
    if naming == "internlm2" and letter in ("q", "k", "v"):
        return functools.partial(_fused, kv_heads, heads // kv_heads, letter)
    if naming == "gguf" and config.traits.interleaved and letter in ("q", "k"):
        return functools.partial(_paired, heads if letter == "q" else kv_heads)
    return None


def _run(begin: int, end: int, array: np.ndarray) -> np.ndarray:
    """Consecutive rows."""
    return array[begin:end]


def _fused(kv_heads: int, group: int, letter: str, array: np.ndarray) -> np.ndarray:
    """The q, k or v rows of InternLM2's `wqkv`."""
    rest = array.shape[1:]
    split = array.reshape(
        kv_heads, group + 2, -1, *rest
    )  # [kv heads, G queries + key + value, H, D]
    at = {"q": slice(0, -2), "k": slice(-2, -1), "v": slice(-1, None)}[letter]
    return split[:, at].reshape(-1, *rest)


def _paired(heads: int, array: np.ndarray) -> np.ndarray:
    """Rows paired for interleaved rotary embedding, back to halves."""
    rest = array.shape[1:]
    split = array.reshape(heads, -1, 2, *rest)  # [heads, H/2 pairs, first or second, D]
    return split.swapaxes(1, 2).reshape(-1, *rest)
