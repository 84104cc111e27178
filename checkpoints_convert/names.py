"""Tensor names and layouts of Hugging Face, InternLM2 and GGUF files, against our parameters.

`LAYOUTS` says how each kind of parameter is laid out in a file: the axes of our array in the
order the file has them, of which the first `lead` are flattened into the rows (`[out, in]`).
Reading and writing are the two directions of that one table, so an export gives back every bit.

Two file formats store rows in another order, which `Part.rows` undoes:
- InternLM2 fuses q, k and v: for each kv head its G query heads, then its key, then its value.
- llama.cpp pairs neighbouring rows of q and k for interleaved rotary embedding, in files of
  architecture llama and internlm2 (not qwen2 and qwen3).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_longctx.errors import CheckpointError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import ParamInfo, param_infos

__all__ = [
    "FileTensor",
    "Part",
    "expected_tensors",
    "infos_of",
    "insert",
    "naming_of",
    "params_from_hf",
]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Our axes in the file's order; the first `lead` of them are the file's rows."""

    order: tuple[int, ...]
    lead: int


LAYOUTS = {
    "table": Layout((0, 1), 1),
    "scale": Layout((0,), 1),
    # [D, heads, H] here, [heads * H, D] in the file.
    "q": Layout((1, 2, 0), 2),
    "k": Layout((1, 2, 0), 2),
    "v": Layout((1, 2, 0), 2),
    # [N, H, D] here, [D, N * H] in the file.
    "o": Layout((2, 0, 1), 1),
    "q_bias": Layout((0, 1), 2),
    "k_bias": Layout((0, 1), 2),
    "v_bias": Layout((0, 1), 2),
    "o_bias": Layout((0,), 1),
    "gate": Layout((1, 0), 1),
    "up": Layout((1, 0), 1),
    "down": Layout((1, 0), 1),
    "gate_bias": Layout((0,), 1),
    "up_bias": Layout((0,), 1),
    "down_bias": Layout((0,), 1),
}

# Our path -> the file's name; `*` is the layer.
HF_NAMES = {
    "embed.table": "model.embed_tokens.weight",
    "layers.*.attn_norm.scale": "model.layers.*.input_layernorm.weight",
    "layers.*.attn.q": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attn.k": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attn.v": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attn.o": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attn.q_bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attn.k_bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attn.v_bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attn.o_bias": "model.layers.*.self_attn.o_proj.bias",
    "layers.*.attn.q_norm.scale": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attn.k_norm.scale": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.mlp_norm.scale": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj.weight",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj.weight",
    "layers.*.mlp.gate_bias": "model.layers.*.mlp.gate_proj.bias",
    "layers.*.mlp.up_bias": "model.layers.*.mlp.up_proj.bias",
    "layers.*.mlp.down_bias": "model.layers.*.mlp.down_proj.bias",
    "final_norm.scale": "model.norm.weight",
    "head.table": "lm_head.weight",
}

INTERNLM2_NAMES = {
    "embed.table": "model.tok_embeddings.weight",
    "layers.*.attn_norm.scale": "model.layers.*.attention_norm.weight",
    "layers.*.attn.q": "model.layers.*.attention.wqkv.weight",
    "layers.*.attn.k": "model.layers.*.attention.wqkv.weight",
    "layers.*.attn.v": "model.layers.*.attention.wqkv.weight",
    "layers.*.attn.o": "model.layers.*.attention.wo.weight",
    "layers.*.attn.q_bias": "model.layers.*.attention.wqkv.bias",
    "layers.*.attn.k_bias": "model.layers.*.attention.wqkv.bias",
    "layers.*.attn.v_bias": "model.layers.*.attention.wqkv.bias",
    "layers.*.attn.o_bias": "model.layers.*.attention.wo.bias",
    "layers.*.mlp_norm.scale": "model.layers.*.ffn_norm.weight",
    "layers.*.mlp.gate": "model.layers.*.feed_forward.w1.weight",
    "layers.*.mlp.up": "model.layers.*.feed_forward.w3.weight",
    "layers.*.mlp.down": "model.layers.*.feed_forward.w2.weight",
    "final_norm.scale": "model.norm.weight",
    "head.table": "output.weight",
}

GGUF_NAMES = {
    "embed.table": "token_embd.weight",
    "layers.*.attn_norm.scale": "blk.*.attn_norm.weight",
    "layers.*.attn.q": "blk.*.attn_q.weight",
    "layers.*.attn.k": "blk.*.attn_k.weight",
    "layers.*.attn.v": "blk.*.attn_v.weight",
    "layers.*.attn.o": "blk.*.attn_output.weight",
    "layers.*.attn.q_bias": "blk.*.attn_q.bias",
    "layers.*.attn.k_bias": "blk.*.attn_k.bias",
    "layers.*.attn.v_bias": "blk.*.attn_v.bias",
    "layers.*.attn.o_bias": "blk.*.attn_output.bias",
    "layers.*.attn.q_norm.scale": "blk.*.attn_q_norm.weight",
    "layers.*.attn.k_norm.scale": "blk.*.attn_k_norm.weight",
    "layers.*.mlp_norm.scale": "blk.*.ffn_norm.weight",
    "layers.*.mlp.gate": "blk.*.ffn_gate.weight",
    "layers.*.mlp.up": "blk.*.ffn_up.weight",
    "layers.*.mlp.down": "blk.*.ffn_down.weight",
    "layers.*.mlp.gate_bias": "blk.*.ffn_gate.bias",
    "layers.*.mlp.up_bias": "blk.*.ffn_up.bias",
    "layers.*.mlp.down_bias": "blk.*.ffn_down.bias",
    "final_norm.scale": "output_norm.weight",
    "head.table": "output.weight",
}

# "gguf-interleaved" is the GGUF whose q and k rows are paired.
NAMINGS: dict[str, Mapping[str, str]] = {
    "hf": HF_NAMES,
    "internlm2": INTERNLM2_NAMES,
    "gguf": GGUF_NAMES,
    "gguf-interleaved": GGUF_NAMES,
}

# Tensors that hold nothing of the model: rotary tables that follow from the config.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq|.*\.rope\.inv_freq|rope_freqs\.weight")

Rows = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Part:
    """One of our parameters as it lies in a tensor of a file."""

    path: str
    shape: tuple[int, ...]
    layout: Layout
    rows: Rows | None = None

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape in the file, once `rows` has picked and ordered the rows."""
        split = [self.shape[axis] for axis in self.layout.order]
        lead = math.prod(split[: self.layout.lead])
        rest = split[self.layout.lead :]
        return (lead, math.prod(rest)) if rest else (lead,)

    def from_file(self, array: np.ndarray) -> np.ndarray:
        """Our array, as a view of the file's tensor where no rows are reordered."""
        if self.rows is not None:
            array = self.rows(array)
        split = array.reshape([self.shape[axis] for axis in self.layout.order])
        return split.transpose(np.argsort(self.layout.order))

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The file's tensor, for parameters whose rows are not reordered."""
        return array.transpose(self.layout.order).reshape(self.file_shape)


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor that a file must hold, and what becomes of it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def expected_tensors(config: ModelConfig, naming: str) -> dict[str, FileTensor]:
    """What a file of this naming holds for a model, by name."""
    names, found = NAMINGS[naming], {}
    for path, info in infos_of(config).items():
        layer = re.search(r"\d+", path)
        name = names[re.sub(r"\d+", "*", path, count=1)]
        name = name.replace("*", layer.group()) if layer else name
        found.setdefault(name, []).append(_part(config, naming, path, info))
    tensors = {}
    for name, parts in found.items():
        shape = parts[0].file_shape
        if len(parts) > 1:
            shape = (sum(part.file_shape[0] for part in parts), *shape[1:])
        tensors[name] = FileTensor(name, shape, tuple(parts))
    return tensors


@functools.lru_cache(maxsize=4)
def infos_of(config: ModelConfig) -> Mapping[str, ParamInfo]:
    """`param_infos`, which traces the whole model, once a model."""
    return param_infos(config)


def _part(config: ModelConfig, naming: str, path: str, info: ParamInfo) -> Part:
    kind = path.split(".")[-1]
    rows: Rows | None = None
    letter = kind.removesuffix("_bias")
    if naming == "internlm2" and letter in ("q", "k", "v"):
        rows = _Fused(config.num_kv_heads, config.num_heads // config.num_kv_heads, letter)
    elif naming == "gguf-interleaved" and letter in ("q", "k"):
        rows = _Paired(config.num_heads if letter == "q" else config.num_kv_heads)
    return Part(path, info.shape, LAYOUTS[kind], rows)


@dataclasses.dataclass(frozen=True)
class _Fused:
    """The q, k or v rows of InternLM2's `wqkv`."""

    kv_heads: int
    group: int
    letter: str

    def __call__(self, array: np.ndarray) -> np.ndarray:
        rest = array.shape[1:]
        # [kv heads, G queries + key + value, H, D]
        split = array.reshape(self.kv_heads, self.group + 2, -1, *rest)
        at = {"q": slice(0, -2), "k": slice(-2, -1), "v": slice(-1, None)}[self.letter]
        return split[:, at].reshape(-1, *rest)


@dataclasses.dataclass(frozen=True)
class _Paired:
    """Rows paired for interleaved rotary embedding, back to halves."""

    heads: int

    def __call__(self, array: np.ndarray) -> np.ndarray:
        rest = array.shape[1:]
        # [heads, H/2 pairs, first or second, D]
        split = array.reshape(self.heads, -1, 2, *rest)
        return split.swapaxes(1, 2).reshape(-1, *rest)


def naming_of(names: Iterable[str]) -> str:
    """Which of the Hugging Face namings these tensor names follow."""
    return "internlm2" if any(".attention.wqkv." in name for name in names) else "hf"


def insert(tree: dict[str, Any], path: str, value: Any) -> None:
    """Puts a value into nested dicts at a dot-joined path."""
    *folders, leaf = path.split(".")
    for folder in folders:
        tree = tree.setdefault(folder, {})
    tree[leaf] = value


def params_from_hf(config: ModelConfig, state: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Our nested parameters from a Hugging Face state dict in memory, for small models."""
    params: dict[str, Any] = {}
    for name, tensor in expected_tensors(config, naming_of(state)).items():
        if name not in state:
            raise CheckpointError(f"the state dict has no tensor {name}")
        array = np.asarray(state[name])
        if array.shape != tensor.shape:
            raise CheckpointError(f"{name} has shape {array.shape}, expected {tensor.shape}")
        for part in tensor.parts:
            insert(params, part.path, jnp.asarray(part.from_file(array)))
    return params
