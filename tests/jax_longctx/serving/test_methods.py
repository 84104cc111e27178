import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_longctx.api import LongContext
from jax_longctx.engine.capacity import stores_of
from jax_longctx.methods import make_method
from jax_longctx.settings import Sampling
from tests.jax_longctx.serving.tiny import BOOK, LENGTHS, asked, chat, complete, generated, read
from tests.small_methods import small_method
from tests.support import joined, random_rows, word_tokenizer

TAILS = [" What?", " Which key?", " Why?"]


# Each keeps its rows in a way of its own; `test_running` joins rows of every method.
@pytest.mark.parametrize(
    ("kind", "offload"),
    [
        *(pytest.param(kind, None, marks=pytest.mark.slow) for kind in ("full", "quest")),
        pytest.param("refreshkv", None, marks=pytest.mark.slow),
        pytest.param("infllm", "host", marks=pytest.mark.slow),
        pytest.param("kvzip > quest", None, marks=pytest.mark.slow),
        *(pytest.param(kind, None, marks=pytest.mark.thorough) for kind in ("star", "citrus")),
        pytest.param("infllm", None, marks=pytest.mark.thorough),
    ],
)
def test_answers_are_those_of_the_library(serve, tiny, tmp_path, kind, offload):
    model = tiny.with_method(small_method(kind))
    served = model if offload is None else model.with_method(model.engine.method, offload=offload)
    ways = [{"seed": 1, "max_tokens": 12}, {"seed": 2, "max_tokens": 30}]
    cases = [(BOOK + tail, how) for tail, how in itertools.product(TAILS, ways)]
    expected = [generated(model, prompt, **how).text for prompt, how in cases]
    first = serve(served, contexts=tmp_path / "kept")
    with first.http() as http, first.client() as client:
        # The second time every text is known. Rows share it where the method can.
        for _ in range(2):
            with ThreadPoolExecutor(len(cases)) as pool:
                answers = [pool.submit(complete, client, prompt, **how) for prompt, how in cases]
            assert [each.result().choices[0].text for each in answers] == expected
        if model.engine.method.info.needs_question:
            return
        name = read(http, text=BOOK, save=True)["id"]
        held = first.served.executor._short._caches.held
        assert offload is None or stores_of(held)
    first.stop()
    second = serve(served, contexts=tmp_path / "kept")
    with second.client() as client, ThreadPoolExecutor(len(TAILS)) as pool:
        answers = [
            pool.submit(chat, client, tail, name, seed=seed, max_tokens=20)
            for seed, tail in enumerate(TAILS)
        ]
        for seed, (tail, each) in enumerate(zip(TAILS, answers, strict=True)):
            expected = asked(model, BOOK, tail, seed=seed, max_tokens=20)
            assert each.result().choices[0].message.content == expected
        shares = model.engine.method.own_tokens is not None and offload is None
        assert bool(second.served.executor._shared) == shares


@pytest.mark.slow
def test_an_answer_may_be_many_times_the_budget(serve, tiny):
    """And the batch's caches stay as they are. No token of this tokenizer ends an answer."""
    engine = tiny.with_method(small_method("r-kv")).engine
    model = LongContext(engine, word_tokenizer(engine.config.vocab_size))
    length = 6 * engine.method.budget
    server = serve(model, lengths=dataclasses.replace(LENGTHS, whole=1024, answer=length))
    text = " ".join(f"t{token}" for token in random_rows([90])[0])
    with server.client() as client:
        complete(client, "t1 t2 t3", max_tokens=2)
        batch = server.served.executor._short
        held = batch.resident_bytes
        found = complete(client, text, seed=4, max_tokens=length)
    assert found.usage.completion_tokens == length
    assert found.choices[0].text == generated(model, text, seed=4, max_tokens=length).text
    assert batch is server.served.executor._short and batch.resident_bytes == held


@pytest.mark.slow
def test_a_rotary_base_that_grows_is_that_of_the_whole_prompt(serve, tiny):
    # One token beyond the trained length changes this base by four fifths.
    model = tiny.with_method(make_method("dynamic-ntk", {"factor": "400"}))
    trained = model.config.trained_length
    (row,) = random_rows([trained + 1], seed=5, vocab=model.config.vocab_size)
    sampling = Sampling(temperature=1.0, seed=3)
    (tokens,) = joined(model.engine.generate([row], sampling=sampling, max_tokens=30))
    with serve(model, lengths=dataclasses.replace(LENGTHS, whole=2 * trained)).client() as client:
        found = complete(client, row, seed=3, max_tokens=30)
    text = found.choices[0].text
    # The server ends at a token that ends the text.
    assert len(text) > 10 and model.tokenizer.decode(tokens).startswith(text)
