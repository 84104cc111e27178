"""Tensor names and layouts of Hugging Face, InternLM2 and GGUF files, against our parameters.

Names come from the table of families (`jax_longctx.models.config`); the `gguf` package maps them to
those of GGUF files. The layout follows from a parameter's logical axes: a file has the outputs as
rows and the inputs as columns (`[out, in]`). Reading and writing use one description, so an export
restores each bit.

Rows have another order in four cases, which `Part.rows` undoes:
- A family may store several parameters in one tensor, one after another.
- InternLM2 fuses q, k and v: for each kv head its G query heads, then its key, then its value.
- Files pair neighbouring rows of q and k for interleaved rotary embedding: llama.cpp's of some
  families, or a family's own (`Family.interleaved`).
- Where a share of a head is rotated, the files have its channels first; see `RopeConfig`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import NORMS
from jax_longctx.models.mixture import EXPERT_NAMES
from jax_longctx.models.params import param_infos
from jax_longctx.sharding import ParamInfo

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
IGNORED = re.compile(
    r".*\.rotary_emb\.inv_freq|.*\.rope\.inv_freq|rope_(freqs|factors_(short|long))\.weight"
)

# Rows of a tensor: a run, or each by its number.
Rows = slice | np.ndarray


@dataclasses.dataclass(frozen=True)
class Part:
    """One of our parameters in a tensor of a file, or one expert's part of it.

    Attributes:
      rows: the parameter's rows in the file's tensor, behind the axis of experts; None for all, as
        they are.
      shift: what the file's numbers are above the parameter's.
      expert: the place of the part along the parameter's first axis; None for the whole.
    """

    path: str
    info: ParamInfo
    rows: Rows | None = None
    shift: float = 0.0
    expert: int | None = None

    @property
    def own(self) -> ParamInfo:
        """Of what the tensor holds."""
        if self.expert is None:
            return self.info
        return ParamInfo(self.info.shape[1:], self.info.axes[1:])

    @property
    def order(self) -> tuple[int, ...]:
        """Our axes in the file's order: outputs, then inputs."""
        inputs = self.own.inputs
        return (*(axis for axis in range(len(self.own.shape)) if axis not in inputs), *inputs)

    @property
    def leading(self) -> tuple[int, ...]:
        """The file's axes before the rows: of the experts, where they are in one tensor."""
        return self.own.shape[: self.own.axes[0] == "experts" and len(self.own.shape) > 1]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape in the file, after `rows`; the experts are apart."""
        own, leading = self.own, self.leading
        columns = math.prod(own.shape[axis] for axis in own.inputs)
        rows = math.prod(own.shape) // columns // math.prod(leading)
        return (*leading, rows, columns) if own.inputs else (*leading, rows)

    @property
    def at(self) -> tuple[Rows, ...]:
        """The index of `rows` in the file's tensor."""
        rows = slice(None) if self.rows is None else self.rows
        return (*[slice(None) for _ in self.leading], rows)

    def from_file(self, array: np.ndarray) -> np.ndarray:
        """Our array, as a view of the file's tensor where its numbers and their order are ours.

        The array may also be of the scales of the tensor's rows, `[rows, 1]`.
        """
        if self.rows is not None:
            array = array[self.at]
        if self.shift:
            array = array - array.dtype.type(self.shift)
        # Of scales the file's tensor would have one column.
        info = self.own if array.shape[-1] == self.file_shape[-1] else self.own.of_scales
        split = array.reshape([info.shape[axis] for axis in self.order])
        return split.transpose(np.argsort(self.order))

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The parameter's rows of the file, in our order; see `FileTensor.to_file`."""
        return array.transpose(self.order).reshape(self.file_shape)


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor that a file must hold, and the parameters in it.

    Attributes:
      swapped: its matrices have inputs before outputs, so that its columns are the rows of `parts`.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    swapped: bool = False

    def turned(self, array: np.ndarray) -> np.ndarray:
        """The file's tensor with rows before columns, or back."""
        return array.swapaxes(-1, -2) if self.swapped else array

    def to_file(self, parts: Iterable[np.ndarray]) -> np.ndarray:
        """The file's tensor, from its parts in their order."""
        arrays = [part.to_file(array) for part, array in zip(self.parts, parts, strict=True)]
        if self.parts[0].rows is None:
            return self.turned(arrays[0])
        whole = np.empty(self.shape, arrays[0].dtype)
        for part, array in zip(self.parts, arrays, strict=True):
            self.turned(whole)[part.at] = array
        return whole

    def nbytes(self, dtype: np.dtype) -> int:
        """Bytes of the tensor in a type."""
        return math.prod(self.shape) * dtype.itemsize


def expected_tensors(config: ModelConfig, naming: str) -> dict[str, FileTensor]:
    """The tensors of a model's files by name.

    Args:
      naming: "hf", "internlm2" or "gguf"; "mxfp4" for Hugging Face's of a gpt-oss whose experts are
        packed, which have outputs before inputs (`mxfp4.unpacked`).
    """
    found: dict[str, list[Part]] = {}
    for path, info in param_infos(config).items():
        scale = path.endswith("norm.scale")
        # llama.cpp's norms multiply with the numbers of its files.
        shift = 1 - NORMS[config.traits.norm].fresh if naming == "gguf" and scale else 0.0
        part = Part(path, info, shift=shift)
        name = tensor_name(config, naming, path)
        if "#" not in name:
            found.setdefault(name, []).append(part)
            continue
        for expert in range(info.shape[0]):
            own = dataclasses.replace(part, expert=expert)
            found.setdefault(name.replace("#", str(expert)), []).append(own)
    tensors, order_of = {}, [*config.traits.names]
    for name, parts in found.items():
        begin, placed = 0, []
        parts.sort(key=lambda part: order_of.index(_module(part.path)))
        first, lead = parts[0], len(parts[0].leading)
        bare = naming != "gguf" and config.traits.names[_module(first.path)].endswith("_")
        for number, part in enumerate(parts):
            count = part.file_shape[lead]
            order = _order(config, naming, part)
            rows = slice(begin, begin + count) if len(parts) > 1 else None
            if rows is not None and bare:
                rows = slice(number, None, len(parts))
            if order is not None:
                # Of InternLM2's wqkv the order is of the whole tensor's rows.
                rows = order if naming == "internlm2" else begin + order
            placed.append(dataclasses.replace(part, rows=rows))
            begin += count
        shape = (*first.leading, begin, *first.file_shape[lead + 1 :])
        swapped = bare and naming == "hf" and bool(first.own.inputs)
        if swapped:
            shape = (*shape[:-2], shape[-1], shape[-2])
        tensors[name] = FileTensor(name, shape, tuple(placed), swapped)
    return tensors


def tensor_name(config: ModelConfig, naming: str, path: str) -> str:
    """The name of a parameter's tensor in the files."""
    suffix = "bias" if path.endswith("bias") else "weight"
    layer = re.search(r"\d+", path)
    names = INTERNLM2_NAMES if naming == "internlm2" else config.traits.names
    if naming == "gguf" and config.experts is not None:
        names = {**names, **{ours: it.replace(".#", "") for ours, it in EXPERT_NAMES.items()}}
    name = names[_module(path)]
    if layer:
        name = name.replace("*", layer.group())
    whole = name.removesuffix("_")
    if naming == "gguf":
        name = _gguf_names(config.traits.gguf[0], config.num_layers).get_name(whole)
    elif name != whole:
        return whole if suffix == "weight" else f"{name}{suffix}"
    return f"{name}.{suffix}"


def _module(path: str) -> str:
    """The key of a parameter in `Family.names`."""
    module = re.sub(r"(_bias|\.bias|\.scale|\.table)$", "", path)
    return re.sub(r"\d+", "*", module, count=1)


@functools.lru_cache(maxsize=4)
def _gguf_names(architecture: str, layers: int) -> Any:
    import gguf

    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, layers)


def naming_of(names: Iterable[str]) -> str:
    """The naming of a Hugging Face directory's tensors, as in its files."""
    marks = {".attention.wqkv.": "internlm2", "_proj_blocks": "mxfp4"}
    found = (naming for name in names for mark, naming in marks.items() if mark in name)
    return next(found, "hf")


def _order(config: ModelConfig, naming: str, part: Part) -> np.ndarray | None:
    """The file's row of each of a parameter's rows; None where they are in the file's order."""
    module = part.path.removesuffix(".scale").rpartition(".")[2]
    letter = module.removesuffix("_bias").removesuffix("_norm")
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    if naming == "internlm2" and letter in ("q", "k", "v"):
        return _fused(kv_heads, heads // kv_heads, width, letter)
    turned = config.rope.turned(width)
    paired = naming in config.traits.interleaved
    if letter not in ("q", "k") or not (paired or turned < width):
        return None
    return _of_heads(part.file_shape[0] // width, width, turned, paired)


@functools.lru_cache(maxsize=16)
def _fused(kv_heads: int, group: int, width: int, letter: str) -> np.ndarray:
    """The q, k or v rows of InternLM2's `wqkv`."""
    # [kv heads, G queries + key + value, H]
    rows = np.arange(kv_heads * (group + 2) * width).reshape(kv_heads, group + 2, width)
    at = {"q": slice(0, -2), "k": slice(-2, -1), "v": slice(-1, None)}[letter]
    return rows[:, at].reshape(-1)


@functools.lru_cache(maxsize=16)
def _of_heads(heads: int, width: int, turned: int, paired: bool) -> np.ndarray:
    """Rows of heads: channels that turn together stand half a head apart."""
    rows = np.arange(heads * width).reshape(heads, width)
    if paired:
        # They are neighbours in the file.
        rows = rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(heads, width)
    first, second = np.split(rows[:, :turned], 2, axis=1)
    still = np.split(rows[:, turned:], 2, axis=1)
    return np.concatenate([first, still[0], second, still[1]], axis=1).reshape(-1)
