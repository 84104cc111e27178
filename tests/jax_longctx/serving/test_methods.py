import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_longctx.engine.capacity import stores_of
from jax_longctx.methods import make_method
from jax_longctx.settings import Sampling
from tests.jax_longctx.serving.tiny import BOOK, LENGTHS, asked, chat, complete, generated, read
from tests.small_methods import small_method
from tests.support import joined, random_rows

TAILS = [" What?", " Which key?", " Why?"]


# Each keeps its rows in a way of its own; `test_running` joins rows of every method.
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("full", "quest", "refreshkv")),
        *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("star", "citrus", "infllm")),
    ],
)
def test_answers_are_those_of_the_library(serve, tiny, tmp_path, kind):
    model = tiny.with_method(small_method(kind))
    ways = [{"seed": 1, "max_tokens": 12}, {"seed": 2, "max_tokens": 30}]
    cases = [(BOOK + tail, how) for tail, how in itertools.product(TAILS, ways)]
    expected = [generated(model, prompt, **how).text for prompt, how in cases]
    first = serve(model, contexts=tmp_path / "kept")
    with first.http() as http, first.client() as client:
        # The second time every text is known. Rows share it where the method can.
        for _ in range(2):
            with ThreadPoolExecutor(len(cases)) as pool:
                answers = [pool.submit(complete, client, prompt, **how) for prompt, how in cases]
            assert [each.result().choices[0].text for each in answers] == expected
        if model.engine.method.info.needs_question:
            return
        name = read(http, text=BOOK, save=True)["id"]
    first.stop()
    second = serve(model, contexts=tmp_path / "kept")
    with second.client() as client, ThreadPoolExecutor(len(TAILS)) as pool:
        answers = [
            pool.submit(chat, client, tail, name, seed=seed, max_tokens=20)
            for seed, tail in enumerate(TAILS)
        ]
        for seed, (tail, each) in enumerate(zip(TAILS, answers, strict=True)):
            expected = asked(model, BOOK, tail, seed=seed, max_tokens=20)
            assert each.result().choices[0].message.content == expected
        executor = second.served.executor
        assert bool(executor._shared) == (model.engine.method.own_tokens is not None)


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


@pytest.mark.slow
def test_answers_from_the_hosts_memory_are_those_from_the_devices(serve, tiny, tmp_path):
    here = tiny.with_method(small_method("infllm"))
    there = here.with_method(here.engine.method, offload="host")
    expected = [generated(here, BOOK + tail, seed=1).text for tail in TAILS]
    about = [asked(here, BOOK, tail, seed=1) for tail in TAILS]
    how = {"seed": 1, "max_tokens": 12}
    first = serve(there, contexts=tmp_path / "kept")
    with first.http() as http:
        name = read(http, text=BOOK, save=True)["id"]
    with first.client() as client, ThreadPoolExecutor(len(TAILS)) as pool:
        answers = [pool.submit(complete, client, BOOK + tail, **how) for tail in TAILS]
        assert [each.result().choices[0].text for each in answers] == expected
        executor = first.served.executor
        assert stores_of(executor._short._caches.held) and not executor._shared
    first.stop()
    second = serve(there, contexts=tmp_path / "kept")
    with second.client() as client, ThreadPoolExecutor(len(TAILS)) as pool:
        answers = [pool.submit(chat, client, tail, name, **how) for tail in TAILS]
        assert [each.result().choices[0].message.content for each in answers] == about
