import functools

import jax
import numpy as np
import pytest

from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.errors import InputError
from jax_longctx.evaluation import perplexity
from jax_longctx.evaluation.perplexity import cut_texts, markdown, score_texts
from jax_longctx.evaluation.specs import PROTOCOLS
from jax_longctx.methods import Citrus, Full, ReAttention, SnapKV, Star, StreamingLLM
from tests.jax_longctx.methods.oracles.evictors import Evicting, StreamingRule
from tests.jax_longctx.methods.oracles.star import read_blocks, tail_logits
from tests.oracle import causal_attend, forward, to_numpy
from tests.support import random_rows, tiny_config, tiny_engine

LENGTH, SCORE = 70, 9
TEXTS = np.array(random_rows([LENGTH] * 3, seed=3), np.int32)
CONFIG = tiny_config(num_layers=1)


@functools.cache
def engine_of(method):
    return tiny_engine(method, config=CONFIG, chunk=16)


@functools.cache
def params():
    return to_numpy(jax.device_get(engine_of(Full()).params))


def losses_of(logits, scored):
    top = logits.max(-1)
    chosen = logits[np.arange(len(logits)), scored]
    return np.log(np.exp(logits - top[:, None]).sum(-1)) + top - chosen


def dense_losses(text, first):
    """Under full attention, of the text's tokens from `first` on."""
    logits = forward(CONFIG, params(), text[:-1].tolist(), causal_attend(1e4))
    return losses_of(logits[first - 1 :], text[first:])


def test_full_attention_by_every_protocol_is_the_dense_loss():
    said = {name: (p.through, p.length, p.score, p.window) for name, p in PROTOCOLS.items()}
    decoded = {"P1": ("decode", 16384, 256, 16), "P2": ("decode", 16384, 50, 10)}
    streams = {"P3": ("context", 65536, None, 8192), "P4": ("context", 65536, None, 4096)}
    assert said == decoded | streams | {"P5": ("question", 16384, 256, 16)}
    for name, protocol in PROTOCOLS.items():
        assert protocol.stream == (name in streams)
        score, first = (None, 1) if protocol.score is None else (SCORE, LENGTH - SCORE)
        # The last batch of two is not full.
        how = {"through": protocol.through, "score": score, "batch": 2}
        found = score_texts(engine_of(Full()), TEXTS, **how)
        expected = [dense_losses(text, first) for text in TEXTS]
        np.testing.assert_allclose(found.losses, expected, atol=1e-4)
        assert len(found.read_seconds) == len(found.score_seconds) == 2
        assert found.through == protocol.through


def test_p1_is_what_a_method_decodes_from_what_it_kept():
    """SnapKV keeps by the prompt, whose last token predicts the first scored one."""
    engine, prompt = engine_of(SnapKV(budget=20, window=4, kernel=3)), LENGTH - SCORE
    found = score_texts(engine, TEXTS, through="decode", score=SCORE, batch=3).losses
    context, asked, scored = (part.tolist() for part in np.split(TEXTS, (prompt - 1, prompt), 1))
    expected = loglikelihoods(engine, context, scored, questions=asked)
    np.testing.assert_allclose(found, [-row.logprobs for row in expected], atol=1e-5)
    dense = [dense_losses(text, prompt) for text in TEXTS]
    assert np.abs(found - dense).max() > 1e-2


def test_a_stream_is_scored_chunk_by_chunk_under_eviction():
    method = StreamingLLM(budget=24, chunk=8)
    found = score_texts(engine_of(method), TEXTS, through="context", batch=3).losses
    for text, losses in zip(TEXTS, found, strict=True):
        row = Evicting(CONFIG, params(), StreamingRule(method))
        chunks = np.split(text[:-1], range(8, LENGTH - 1, 8))
        logits = np.concatenate([row.feed(chunk, "context") for chunk in chunks])
        np.testing.assert_allclose(losses, losses_of(logits, text[1:]), atol=1e-4)


def test_star_reads_the_question_after_blocks_that_saw_their_own_alone():
    method, prompt = Star(block=16), LENGTH - SCORE
    found = score_texts(engine_of(method), TEXTS, through="question", score=SCORE).losses
    for text, losses in zip(TEXTS, found, strict=True):
        # The last context token goes with the question.
        kept = read_blocks(method, CONFIG, params(), text[: prompt - 1].tolist())
        logits = tail_logits(CONFIG, params(), kept, text[prompt - 1 : -1])
        np.testing.assert_allclose(losses, losses_of(logits, text[prompt:]), atol=1e-4)


@pytest.mark.slow
def test_what_chunks_choose_together_is_decoded():
    method = ReAttention(global_size=4, local_size=16, span=4, count=2, kept=2, chunk=8)
    engine, texts = engine_of(method), TEXTS[:1]
    found = score_texts(engine, texts, through="context")
    assert found.through == "decode"
    decoded = score_texts(engine, texts, through="decode")
    np.testing.assert_array_equal(found.losses, decoded.losses)
    # A stream may be read for a question.
    engine = engine_of(Citrus(budget=24, chunk=8))
    one, other = (
        score_texts(engine, texts, through="context", question=asked).losses
        for asked in ([1, 2], [9, 8, 7])
    )
    # What the question keeps shows only once something had to leave.
    np.testing.assert_allclose(one[0, :23], other[0, :23], atol=1e-4)
    assert np.abs(one - other).max() > 1e-3


def test_progress_counts_scored_tokens_and_nothing_to_score_is_refused():
    seen = []
    how = {"through": "decode", "score": SCORE, "batch": 2}
    score_texts(engine_of(Full()), TEXTS, **how, progress=lambda *at: seen.append(at))
    assert seen == [(2, 27), (18, 27), (19, 27), (27, 27)]
    for texts, score, batch, said in [
        (TEXTS, LENGTH, 1, "leave nothing to score"),
        (TEXTS[:0], 1, 1, "0 texts"),
        (TEXTS, 1, 0, "at least one text, got 0"),
    ]:
        with pytest.raises(InputError, match=said):
            score_texts(engine_of(Full()), texts, through="decode", score=score, batch=batch)


def test_windows_are_means_over_positions_of_texts_that_lie_apart():
    losses = np.arange(10, dtype=np.float32).reshape(2, 5)
    found = perplexity.windows(losses, first=7, window=2)
    assert found == [(7, 8, [0.5, 5.5]), (9, 10, [2.5, 7.5]), (11, 11, [4.0, 9.0])]
    assert perplexity.perplexity([1.0, 3.0]) == pytest.approx(np.exp(2))
    documents = [range(100, 107), range(0, 31), range(200, 203)]
    # Of 5 tokens: one in the first, six in the second, none in the third.
    every = cut_texts(documents, count=7, length=6, lead=[-1])
    assert every[:, 0].tolist() == [-1] * 7
    assert every[:, 1].tolist() == [100, 0, 5, 10, 15, 20, 25]
    assert np.all(np.diff(every[:, 1:]) == 1)
    assert cut_texts(documents, count=3, length=5)[:, 0].tolist() == [100, 5, 15]
    for count, length, said in [(8, 6, "hold 7"), (0, 6, "at least one"), (1, 1, "no room")]:
        with pytest.raises(InputError, match=said):
            cut_texts(documents, count=count, length=length, lead=[-1])


def a_run(method, means, **changes):
    halves = [(90, 94, [mean - 1 for mean in means]), (95, 99, [mean + 1 for mean in means])]
    record = {"method": method, "given": {}, "question": "", "protocol": "P1"}
    record |= {"length": 100, "score": 10, "batch": 2, "means": means, "windows": halves}
    times = {"read_seconds": [9.0, 1.5, 2.5], "score_seconds": [9.0, 0.1, 0.3]}
    return {**record, **times, **changes}


def test_a_table_has_perplexities_paired_differences_and_times():
    full = a_run("full", [1.0, 3.0])
    other = a_run("quest", [1.5, 3.5], given={"budget": "4"}, question="Why?")
    lines = markdown([other, full]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]]
    # exp(2.5), exp(1.5) and exp(3.5); the mean of the two; 20 tokens in 0.2 s.
    assert cells[0][0] == "`quest budget=4 (Why?)`"
    assert cells[0][1] == "12.182 [4.482, 33.115]" and cells[0][2] == "18.799"
    assert cells[0][3] == "1.6487 [1.6487, 1.6487]"
    assert cells[0][4] == "+0.5000 [+0.5000, +0.5000]"
    assert cells[0][5:] == ["2.0", "10.00"]
    assert cells[1][0] == "`full`" and cells[1][3:5] == ["-", "-"]
    assert "P1: 10 of 100 tokens scored, n = 2 texts" in lines[-1]
    alone = markdown([a_run("quest", [1.0])])
    assert "2.718 | 2.718 | - | - |" in alone and "one text has no interval" in alone
    unused = a_run("arkvale", [1.0], fetched={"hit_rate": None})
    offloaded = markdown([a_run("quest", [1.0], fetched={"hit_rate": 0.6125}), full, unused])
    ends = [line.strip("| ").split("|")[-1].strip() for line in offloaded.splitlines()]
    assert ends[:1] + ends[2:5] == ["chosen pages on the device", "61.3%", "-", "-"]
