"""Our forward against transformers': logits, and tokens chosen greedily.

The goldens hold what transformers computed in float32 (see tests/goldens/README.md); the weights
are filled in anew on this side.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jax_longctx
from checkpoints_convert import convert
from checkpoints_convert.config import model_config
from jax_longctx.api import LongContext
from jax_longctx.cli.demo import find_model
from jax_longctx.engine.decode import start_answer
from jax_longctx.methods import DynamicNTK
from tests.checkpoints_convert.test_names import internlm2_state
from tests.goldens.cases import MODELS
from tests.goldens.weights import as_in_files, random_state
from tests.support import engine_from_hf, score, word_tokenizer

DATA = Path(__file__).parents[2] / "goldens" / "data"
# A chunk that does not divide the prompts, so that logits come from more than one.
CHUNK = 24


class Golden:
    """One tiny model: its config and weights, and what transformers made of them."""

    def __init__(self, name):
        stored = np.load(DATA / f"{name}.npz")
        self.config: dict[str, Any] = json.loads(str(stored["config"]))
        state = random_state(json.loads(str(stored["shapes"])), int(stored["seed"]))
        self.state = as_in_files(state, self.config["architectures"][0])
        self.tokens: list[int] = stored["tokens"].tolist()
        self.greedy: list[int] = stored["greedy"].tolist()
        self.logits, self.gap = stored["logits"], float(stored["gap"])


def largest_error(ours, theirs):
    assert ours.shape == theirs.shape
    return float(np.max(np.abs(ours - theirs)))


def continued(golden, engine, monkeypatch, tokens):
    """The answer to the golden's prompt, as text, and the logits of its first token."""
    logits = []

    def started(setup, state, last, *rest):
        logits.append(np.asarray(last[0]))
        return start_answer(setup, state, last, *rest)

    monkeypatch.setattr("jax_longctx.engine.engine.start_answer", started)
    model = LongContext(engine, word_tokenizer(golden.config["vocab_size"]))
    prompt = model.tokenizer.decode(golden.tokens)
    assert model.tokenizer.encode(prompt) == golden.tokens
    (answer,) = model.generate(prompt, max_tokens=tokens, stop_at_eos=False)
    return answer.tokens, logits[0]


# Other cases have what these have, and more.
SLOW = (
    *("llama_mha", "llama_mqa", "llama_head_dim", "mistral", "qwen2", "qwen3", "rope_yarn"),
    "gpt_oss_plain",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]
)
@pytest.mark.quick("tied", "mlp_bias", "llama3", "layer_types", "moe", "mixtral")
def test_logits_and_greedy_continuation_are_those_of_transformers(name, monkeypatch):
    golden = Golden(name)
    assert golden.config == MODELS[name], "cases.py changed: make the goldens anew"
    engine = engine_from_hf(golden.config, golden.state, chunk=CHUNK)
    # An error in the logits could only change a choice if it were half the smallest gap.
    assert golden.gap > 1e-3
    (ours,) = score(engine, [golden.tokens])
    assert ours.dtype == np.float32
    assert largest_error(ours, golden.logits) <= 1e-4
    # Dynamic frequencies follow the length of the row, which differs from token to token.
    dynamic = name == "rope_dynamic"
    known = 1 if dynamic else len(golden.greedy)
    tokens, first = continued(golden, engine, monkeypatch, known)
    assert largest_error(first, golden.logits[-1]) <= 1e-4
    assert tokens == golden.greedy[:known]
    if dynamic:
        whole = golden.tokens + golden.greedy
        rows = [whole[:end] for end in range(len(golden.tokens), len(whole))]
        assert [int(np.argmax(logits[-1])) for logits in score(engine, rows)] == golden.greedy


def test_dynamic_ntk_over_a_plain_model_is_the_dynamic_rope_of_transformers(monkeypatch):
    golden = Golden("rope_dynamic")
    trained, factor = 32, golden.config["rope_scaling"]["factor"]
    assert len(golden.tokens) > trained
    plain = {**golden.config, "rope_scaling": None}
    method = DynamicNTK(factor=factor)
    engine = engine_from_hf(plain, golden.state, method, chunk=CHUNK)
    (ours,) = score(engine, [golden.tokens])
    assert largest_error(ours, golden.logits) <= 1e-4
    _, first = continued(golden, engine, monkeypatch, 1)
    assert largest_error(first, golden.logits[-1]) <= 1e-4
    # The trained length matters, and up to it the method is full attention.
    unscaled = engine_from_hf(plain, golden.state, chunk=CHUNK)
    assert largest_error(score(unscaled, [golden.tokens])[0], golden.logits) > 0.1
    short = golden.tokens[:trained]
    np.testing.assert_array_equal(score(engine, [short])[0], score(unscaled, [short])[0])


def test_internlm2_is_the_llama_whose_projections_it_fuses():
    golden = Golden("llama_attention_bias")
    flags = {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": True}
    config = {key: value for key, value in golden.config.items() if key != "attention_bias"}
    state = internlm2_state(golden.state, model_config(golden.config))
    engine = engine_from_hf(config | flags, state, chunk=CHUNK)
    (ours,) = score(engine, [golden.tokens])
    assert largest_error(ours, golden.logits) <= 1e-4


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2 through our reading of the GGUF file, in float32."""
    folder = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    convert(find_model(), folder, dtype="float32")
    # Layer by layer: thirty layers alike are compiled as one.
    return jax_longctx.load(folder)


@pytest.mark.slow
def test_smollm2_from_gguf_is_transformers_reading_of_it(smollm2):
    stored = np.load(DATA / "smollm2.npz")
    text = (DATA / "smollm2_prompt.txt").read_text(encoding="utf-8")
    tokens = stored["tokens"].tolist()
    assert smollm2.tokenizer.encode(text, bos=False) == tokens
    (ours,) = score(smollm2.engine, [tokens])
    assert largest_error(ours[-1], stored["last_logits"]) <= 1e-3
    columns = stored["row_logits"].shape[1]
    assert largest_error(ours[stored["rows"], :columns], stored["row_logits"]) <= 1e-3
    (new,) = smollm2.generate(text, max_tokens=len(stored["greedy"]), stop_at_eos=False)
    assert new.tokens == stored["greedy"].tolist()
    assert smollm2.tokenizer.decode(new.tokens) == str(stored["greedy_text"])
