"""Reading on a CPU timed beside others: what is compared is alike, and the profile adds up."""

import argparse
import functools
import math
from unittest.mock import Mock, create_autospec

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from checkpoints_convert import convert
from jax_longctx.bench import cpu_reading
from jax_longctx.errors import InputError
from jax_longctx.models.storage import load_params
from tests.checkpoints_convert.test_gguf import write_gguf
from tests.checkpoints_convert.test_names import flat
from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint
from tests.support import tiny_config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A GGUF file of 8-bit blocks; a checkpoint of bytes, and a text of 40."""
    folder = tmp_path_factory.mktemp("cpu")
    config = hf_config("llama", hidden_size=64, intermediate_size=96)
    write_gguf(folder / "m.gguf", config, random_state(config), kind=Kind.Q8_0)
    config = hf_config("llama", vocab_size=258)
    write_checkpoint(folder / "hf", config, random_state(config))
    convert(folder / "hf", folder / "checkpoint", dtype="float32")
    (folder / "text").write_text("Forty bytes of text, as each is a token.")
    return folder


def asked(model, **changes):
    paths = {"checkpoint": model / "checkpoint", "gguf": model / "m.gguf"}
    paths |= {"texts": [model / "text"], "peers": None, "revision": []}
    sizes = {"tokens": 24, "threads": 1, "chunk": 16, "runs": 2, "rounds": 2}
    return argparse.Namespace(**paths | sizes | changes)


def test_unpacked_values_are_those_of_the_blocks(model):
    whole, packed, trees = model / "whole.gguf", model / "m.gguf", []
    cpu_reading.unpacked(packed, whole)
    for source in (whole, packed):
        kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(source).tensors}
        assert (kinds == {Kind.F32}) if source == whole else Kind.Q8_0 in kinds
        target = model / f"of-{source.stem}"
        convert(source, target, dtype="float32")
        trees.append(dict(flat(load_params(target))))
    found, expected = trees
    assert set(found) == set(expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.mark.slow
def test_two_revisions_read_the_same_tokens_in_processes_of_their_own(model, monkeypatch):
    """The second process is told of alone: it would print what the first does."""
    said, commands, real = [], [], cpu_reading.printed
    printed = functools.cache(lambda: real(*commands[0]))
    stub = create_autospec(real, side_effect=lambda *given: commands.append(given) or printed())
    monkeypatch.setattr(cpu_reading, "printed", stub)
    another = f"another={cpu_reading.ROOT}={model / 'checkpoint'}"
    found = cpu_reading.run(asked(model, revision=[another], rounds=1), said.append)
    assert [row["reader"] for row in found["rows"]] == ["this revision", "another"]
    first, second = commands
    assert first == second and first[1]["PYTHONPATH"] == str(cpu_reading.ROOT)
    assert len({row["token"] for row in found["rows"]}) == 1
    for row in found["rows"]:
        assert 0 < row["seconds"] <= row["median_seconds"]
        assert 0 < row["processor"] <= row["median_processor"]
        assert row["rate"] == pytest.approx(24 / row["seconds"])
        assert row["processor_rate"] == pytest.approx(24 / row["processor"])
    profile = found["profile"]
    parts = [profile[f"{part}_seconds"] for part in ("products", "attention", "rest")]
    assert math.fsum(parts) == pytest.approx(profile["spent_seconds"])
    assert profile["spent_seconds"] == found["rows"][0]["processor"]
    assert sum("round 1" in text for text in said) == 2


def test_readers_that_fail_or_disagree_are_errors(model, monkeypatch):
    read = [({"token": token, "version": "", "reads": [[1.0, 2.0]]}, "") for token in "ab"]
    for answers, changes, message in [
        (read, {}, r"different next tokens: \['a', 'b'\]"),
        ([(None, "no such library")], {}, "this revision failed: no such library"),
        ([], {"tokens": 41}, "40 tokens; expected at least 41"),
    ]:
        monkeypatch.setattr(cpu_reading, "printed", Mock(side_effect=answers))
        with pytest.raises(InputError, match=message):
            cpu_reading.run(asked(model, **changes), lambda text: None)


def test_the_profile_counts_every_product_of_a_layer_and_half_of_all_pairs(monkeypatch):
    config, took = tiny_config(), Mock(return_value=1.0)
    monkeypatch.setattr(cpu_reading, "_product_seconds", took)
    profile = cpu_reading.profile(config, tokens=640, chunk=64, spent=10_000.0)
    *matrices, scores, values = [call.args for call in took.call_args_list]
    wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = config.model_dim * (2 * wide + 2 * narrow + 3 * config.mlp_dim)
    assert sum(math.prod(right) for _, right in matrices) == weights
    assert all(left == (64, right[0]) for left, right in matrices)
    assert profile["products_seconds"] == pytest.approx(config.num_layers * 7 * 10)
    assert profile["products_gflops"] == pytest.approx(2 * 64 * weights / 7 / 1e9)
    # Of 10 chunks against 10 blocks of keys the half below the diagonal, two products each.
    assert profile["attention_seconds"] == pytest.approx(config.num_layers * 2 * 50)
    heads, rows = config.num_kv_heads, 64 * config.num_heads // config.num_kv_heads
    assert scores[0] == (heads, rows, config.head_dim)
    assert values == ((heads, rows, 64), (heads, 64, config.head_dim))
    assert profile["attention_gflops"] == pytest.approx(4 * 64 * 64 * wide / 2 / 1e9)
