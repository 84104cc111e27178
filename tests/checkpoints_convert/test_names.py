import jax
import numpy as np

from checkpoints_convert.config import model_config
from checkpoints_convert.names import expected_tensors, naming_of
from tests.checkpoints_convert.tiny import hf_config, random_state


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def assert_same_parameters(found, expected, *, sharded=False):
    """That the trees hold the same bits of the same types, and over the same devices if asked."""
    found, expected = dict(flat(found)), dict(flat(expected))
    assert set(found) == set(expected)
    for path, value in expected.items():
        assert found[path].dtype == value.dtype, path
        assert jax.tree.structure(found[path]) == jax.tree.structure(value), path
        for ours, theirs in zip(jax.tree.leaves(found[path]), jax.tree.leaves(value), strict=True):
            assert not sharded or ours.sharding == theirs.sharding, path
            np.testing.assert_array_equal(ours, theirs, err_msg=path)


def internlm2_state(state, config):
    """A Llama's state dict as InternLM2 stores it: q, k and v of each group in one tensor."""
    renamed = {
        "embed_tokens": "tok_embeddings",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "lm_head": "output",
    }
    found = {}
    for name, value in state.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        if "q_proj" in name:
            parts = [state[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            groups = [part.reshape(config.num_kv_heads, -1, *value.shape[1:]) for part in parts]
            name = name.replace("self_attn.q_proj", "attention.wqkv")
            value = np.concatenate(groups, axis=1).reshape(-1, *value.shape[1:])
        if "_proj" not in name:
            found[name] = value
    return found


def paired_rows(weight, heads):
    """What llama.cpp does to q and k: row 2j of a head was row j, row 2j+1 was row j + H/2."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def test_a_naming_is_known_by_the_tensors_that_it_expects():
    described = hf_config("llama")
    config, state = model_config(described), random_state(described)
    for naming, tensors in (("hf", state), ("internlm2", internlm2_state(state, config))):
        assert naming_of(tensors) == naming
        assert expected_tensors(config, naming).keys() == tensors.keys()
