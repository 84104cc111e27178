"""The table of names and layouts, against shapes and index formulas written down apart from it."""

import numpy as np
import pytest

from checkpoints_convert.config import model_config
from checkpoints_convert.names import expected_tensors
from jax_longctx.models.llama import param_infos
from tests.checkpoints_convert.tiny import (
    FAMILIES,
    hf_config,
    hf_shapes,
    params_from_hf,
    random_state,
)

RNG = np.random.default_rng(7)


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_transformers(family):
    described = hf_config(family)
    expected = expected_tensors(model_config(described), "hf")
    assert {name: tensor.shape for name, tensor in expected.items()} == hf_shapes(described)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_filled_with_its_shape(family):
    described = hf_config(family)
    config = model_config(described)
    params = dict(flat(params_from_hf(config, random_state(described))))
    assert {path: value.shape for path, value in params.items()} == {
        path: info.shape for path, info in param_infos(config).items()
    }


def test_projections_are_laid_out_by_head():
    described = hf_config("qwen2")
    config = model_config(described)
    state = random_state(described)
    attn = params_from_hf(config, state)["layers"]["1"]["attn"]
    prefix, h = "model.layers.1.self_attn.", config.head_dim
    for d, n, i in [(0, 0, 0), (5, 3, 7), (31, 2, 1)]:
        assert attn["q"][d, n, i] == state[prefix + "q_proj.weight"][n * h + i, d]
        assert attn["k"][d, n % 2, i] == state[prefix + "k_proj.weight"][n % 2 * h + i, d]
        assert attn["v"][d, n % 2, i] == state[prefix + "v_proj.weight"][n % 2 * h + i, d]
        assert attn["o"][n, i, d] == state[prefix + "o_proj.weight"][d, n * h + i]
        assert attn["q_bias"][n, i] == state[prefix + "q_proj.bias"][n * h + i]
    mlp = params_from_hf(config, state)["layers"]["0"]["mlp"]
    assert mlp["gate"][3, 40] == state["model.layers.0.mlp.gate_proj.weight"][40, 3]
    assert mlp["up"][3, 40] == state["model.layers.0.mlp.up_proj.weight"][40, 3]
    assert mlp["down"][40, 3] == state["model.layers.0.mlp.down_proj.weight"][3, 40]


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_and_writing_are_inverse(family):
    config = model_config(hf_config(family))
    for tensor in expected_tensors(config, "hf").values():
        (part,) = tensor.parts
        values = RNG.standard_normal(tensor.shape)
        np.testing.assert_array_equal(part.to_file(part.from_file(values)), values)


def internlm2_state(state, config):
    """A Llama's state dict as InternLM2 stores it, row by row."""
    h, group = config.head_dim, config.num_heads // config.num_kv_heads
    renamed = {
        "embed_tokens": "tok_embeddings",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    found = {}
    for name, value in state.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        if "_proj" not in name:
            found["output.weight" if name == "lm_head.weight" else name] = value
    for layer in range(config.num_layers):
        q, k, v = (state[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv")
        rows = []
        for kv in range(config.num_kv_heads):
            for member in range(group):
                head = kv * group + member
                rows.append(q[head * h : (head + 1) * h])
            rows.append(k[kv * h : (kv + 1) * h])
            rows.append(v[kv * h : (kv + 1) * h])
        found[f"model.layers.{layer}.attention.wqkv.weight"] = np.concatenate(rows)
    return found


def test_fused_projection_of_internlm2_is_split():
    described = hf_config("llama", num_attention_heads=8, num_key_value_heads=2)
    config = model_config(described)
    state = random_state(described)
    fused = internlm2_state(state, config)
    expected = expected_tensors(config, "internlm2")
    assert {name: tensor.shape for name, tensor in expected.items()} == {
        name: value.shape for name, value in fused.items()
    }
    again = dict(flat(params_from_hf(config, fused)))
    for path, ours in flat(params_from_hf(config, state)):
        np.testing.assert_array_equal(ours, again[path], err_msg=path)


def paired_rows(weight, heads):
    """What llama.cpp does to q and k: row 2j of a head was row j, row 2j+1 was row j + H/2."""
    size = len(weight) // heads
    rows = []
    for head in range(heads):
        own = weight[head * size : (head + 1) * size]
        for j in range(size // 2):
            rows += [own[j], own[j + size // 2]]
    return np.stack(rows)


def test_paired_rows_of_gguf_are_undone():
    config = model_config(hf_config("llama"))
    gguf, hf = (expected_tensors(config, naming) for naming in ("gguf", "hf"))
    for letter, heads in (("q", 4), ("k", 2), ("v", None)):
        weight = RNG.standard_normal((32 if letter == "q" else 16, 32))
        stored = weight if heads is None else paired_rows(weight, heads)
        (part,) = gguf[f"blk.0.attn_{letter}.weight"].parts
        (plain,) = hf[f"model.layers.0.self_attn.{letter}_proj.weight"].parts
        np.testing.assert_array_equal(part.from_file(stored), plain.from_file(weight))
