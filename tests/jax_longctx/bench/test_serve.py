import json
from unittest.mock import create_autospec

import pytest

from jax_longctx.bench import serve
from jax_longctx.bench.steps import QUESTION, random_context
from jax_longctx.engine import Ask, RunningBatch, engine, running
from jax_longctx.methods import Quest
from pallas_kernels.quantised import Quantised, dequantised
from tests.jax_longctx.bench.conftest import LAYER, bench
from tests.support import tiny_engine

# Bytes of the weights that a step of the tiny shape reads.
WEIGHTS = 2 * (2 * LAYER + 32 + 128 * 32)


@pytest.fixture
def tiny_preset(tiny_shape, monkeypatch):
    monkeypatch.setattr(serve, "copy_bandwidth", lambda: 1e11)
    # Chunks of this model take a millisecond.
    monkeypatch.setattr(serve, "READ_SECONDS", 0.001)


def asked(*args):
    given = ["serve", "--model", "tiny", "--context", 600, "--rows", 3, "--blocks", 1]
    return bench(*given, "--chunk", 64, *args)


@pytest.mark.slow
def test_rows_share_a_context_and_decode_while_a_text_is_read(tiny_preset, monkeypatch, tmp_path):
    batches, joins = [], []
    monkeypatch.setattr(serve, "ANSWER", 1)
    monkeypatch.setattr(serve, "Ask", lambda *args: joins.append(args) or Ask(*args))

    def made(model, **given):
        batches.append(given)
        return RunningBatch(model, **given)

    monkeypatch.setattr(serve, "RunningBatch", create_autospec(RunningBatch, side_effect=made))
    asks = create_autospec(engine.prefill_question, side_effect=engine.prefill_question)
    for module in (serve, running, engine):
        monkeypatch.setattr(module, "prefill_question", asks)
    # Of full attention all rows share the context; of SnapKV each has its own.
    args, out = ["-m", "full", "-m", "snapkv:budget=64", "--read", 1200], tmp_path / "serve.json"
    record = json.loads(asked(*args, "--json", "--out", out).stdout)
    assert record == json.loads(out.read_text())
    full, snapkv = record["rows"]
    # Of each method the first row's question, alone, beside what joins read.
    joined = [args[0] for args in joins]
    questions = [call.args[3] for call in asks.call_args_list]
    assert len(questions) == len(joined) + 2 * (serve.ASKED + 1)
    assert all(len(question) == 32 for (question,) in questions if question != list(QUESTION))
    assert (full["shared"], snapkv["shared"]) == (True, False)
    assert [("context" in given, given["places"]) for given in batches] == [(True, 3), (False, 3)]
    for row in (full, snapkv):
        assert row["tokens_per_second"] == pytest.approx(3 / row["seconds"])
        assert 0 < row["question_seconds"]
        assert row["speedup"] == pytest.approx(3 * row["alone_seconds"] / row["seconds"])
        assert row["limit_seconds"] == pytest.approx(row["bytes"] / 1e11)
        assert row["share"] == pytest.approx(row["limit_seconds"] / row["seconds"])
        assert 0 < row["gap_p50"] <= row["gap_p99"] <= row["gap_most"]
        # A turn is a slice of reading and a block: at most so many as there are chunks.
        assert 1 <= row["gaps"] <= 3 * (1200 // 64 + 1)
        assert row["read_share"] == pytest.approx(row["read_beside"] / row["read_alone"])
    # Weights, and one row's keys and values: 2 layers x 2 heads x 8 x 2 x 2 bytes a token.
    assert 600 <= (full["bytes"] - WEIGHTS) / (2 * 2 * 8 * 2 * 2) <= 1024
    # Answers of 97 tokens were full before the text was read: rows joined anew.
    assert len(joins) > 2 * 3


@pytest.fixture
def stubbed(tiny_preset, monkeypatch):
    found = {"alone_seconds": 0.25, "seconds": 0.5, "tokens_per_second": 6.0, "speedup": 1.5}
    found |= {"shared": True, "first_token": 0.75, "question_seconds": 0.125}
    made = create_autospec(serve._Measured.steps, side_effect=lambda *given: dict(found))
    monkeypatch.setattr(serve._Measured, "steps", made)
    return made.call_args_list


def test_full_and_quest_unless_named_and_a_table(stubbed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = asked("--read", "0")
    lines = [line.split() for line in result.stdout.splitlines()]
    times = "yes 250.00 ms 500.00 ms 6 1.5x 0% 0.12 s 0.75 s".split()
    for name in ("full", "quest"):
        assert [line[1:] for line in lines if line[:1] == [name]] == [times]
    assert "is read" not in result.stdout
    stubbed.clear()
    record = json.loads(asked("-m", "full", "--read", 0, "--json", "--kv", "int8").stdout)
    assert record["kv"] == "int8" == stubbed[0].args[0].engine.setup.kv
    # Of a token of a head 8 numbers in 8 bits beside a scale; twice.
    tokens = (record["rows"][0]["bytes"] - WEIGHTS) / (2 * 2 * 2 * (8 + 2))
    assert 600 <= tokens <= 1024
    # Refusals are rows.
    (row,) = json.loads(asked("-m", "dynamic-ntk", "--read", 0, "--json").stdout)["rows"]
    assert "rope" in row["failed"]


@pytest.mark.parametrize("kv", [None, "int8"])
def test_random_keys_and_digests_differ(kv):
    """Rows with other queries then choose other pages."""
    engine = tiny_engine(Quest(budget=64, page_size=16, local=16), kv=kv)
    context = random_context(engine, 1, 300, 64)
    for cache in context.usable_caches():
        digests, keys = cache.digests, dequantised(cache.store.k)
        assert isinstance(cache.store.k, Quantised) == (kv is not None)
        assert 0.9 < float(keys.std()) < 1.1
        assert float(digests.high.std()) > 0.5
        assert not (digests.high == digests.low).any()
