"""The server answers as the library does, amid others and from known texts."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_longctx.contract import own_tokens
from jax_longctx.engine.capacity import stores_of
from jax_longctx.methods import make_method
from jax_longctx.settings import Sampling
from tests.jax_longctx.serving.tiny import LENGTHS
from tests.small_methods import KINDS, small_method
from tests.support import joined, random_rows

BOOK = "The pass key is 12345. Remember it. " * 8
TAILS = [" What?", " Which key?", " Why?"]
QUICK = ("full", "quest", "refreshkv")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.thorough)
        for name in KINDS
    ],
)
def test_answers_are_those_of_the_library(serve, tiny, name):
    model = tiny.with_method(small_method(name))
    running = serve(model)
    cases = [(tail, *how) for tail, how in itertools.product(TAILS, ((1, 12), (2, 30)))]
    expected = {}
    for tail, seed, tokens in cases:
        sampling = Sampling(temperature=1.0, seed=seed)
        (answer,) = model.generate(BOOK + tail, sampling=sampling, max_tokens=tokens)
        expected[tail, seed, tokens] = answer.text
    with running.client() as client:

        def ask(case):
            tail, seed, tokens = case
            found = client.completions.create(
                model="tiny", prompt=BOOK + tail, seed=seed, max_tokens=tokens
            )
            return found.choices[0].text

        # The second time every text is known. Rows share it where the method can.
        for _ in range(2):
            with ThreadPoolExecutor(len(cases)) as pool:
                assert list(pool.map(ask, cases)) == [expected[case] for case in cases]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.thorough)
        for name in KINDS
        if not small_method(name).info.needs_question
    ],
)
def test_answers_about_a_saved_context_are_those_of_ask(serve, tiny, tmp_path, name):
    model = tiny.with_method(small_method(name))
    layout = model.layout()
    context = model.prefill(layout.context(BOOK))
    expected = []
    for seed in range(3):
        sampling = Sampling(temperature=1.0, seed=seed)
        question = layout.question(TAILS[seed])
        expected.append(model.ask(context, question, sampling=sampling, max_tokens=20)[0].text)
    first = serve(model, contexts=tmp_path / "kept")
    with first.http() as http:
        record = http.post("/v1/contexts", json={"text": BOOK, "save": True}).json()
    first.stop()
    second = serve(model, contexts=tmp_path / "kept")
    with second.client() as client:

        def ask(seed):
            found = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": TAILS[seed]}],
                seed=seed,
                max_tokens=20,
                extra_body={"context": record["id"]},
            )
            return found.choices[0].message.content

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(ask, range(3))) == expected
        executor = second.served.team.executor
        assert bool(executor._shared) == (own_tokens(model.engine.method) is not None)


@pytest.mark.slow
def test_a_rotary_base_that_grows_is_that_of_the_whole_prompt(serve, tiny):
    # One token beyond the trained length changes this base by four fifths.
    model = tiny.with_method(make_method("dynamic-ntk", {"factor": "400"}))
    trained = model.config.trained_length
    (row,) = random_rows([trained + 1], seed=5, vocab=model.config.vocab_size)
    sampling = Sampling(temperature=1.0, seed=3)
    (tokens,) = joined(model.engine.generate([row], sampling=sampling, max_tokens=30))
    with serve(model, lengths=dataclasses.replace(LENGTHS, whole=2 * trained)).client() as client:
        found = client.completions.create(model="tiny", prompt=row, seed=3, max_tokens=30)
    text = found.choices[0].text
    # The server ends at a token that ends the text.
    assert len(text) > 10 and model.tokenizer.decode(tokens).startswith(text)


@pytest.mark.parametrize("name", ["infllm", pytest.param("quest", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_answers_from_the_hosts_memory_are_those_from_the_devices(serve, tiny, tmp_path, name):
    """Several rows at a time, of a prompt and of a context that was saved."""
    here = tiny.with_method(small_method(name))
    there = here.with_method(here.engine.method, offload="host")
    expected = [here.generate(BOOK + tail, max_tokens=12)[0].text for tail in TAILS]
    layout = here.layout()
    context = here.prefill(layout.context(BOOK))
    about = [here.ask(context, layout.question(tail), max_tokens=12)[0].text for tail in TAILS]
    first = serve(there, contexts=tmp_path / "kept")
    with first.http() as http:
        record = http.post("/v1/contexts", json={"text": BOOK, "save": True}).json()
    with first.client() as client, ThreadPoolExecutor(len(TAILS)) as pool:

        def complete(tail):
            found = client.completions.create(
                model="tiny", prompt=BOOK + tail, temperature=0, max_tokens=12
            )
            return found.choices[0].text

        assert list(pool.map(complete, TAILS)) == expected
        executor = first.served.team.executor
        assert stores_of(executor._short._caches.held) and not executor._shared
    first.stop()
    second = serve(there, contexts=tmp_path / "kept")
    with second.client() as client, ThreadPoolExecutor(len(TAILS)) as pool:

        def ask(tail):
            found = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": tail}],
                temperature=0,
                max_tokens=12,
                extra_body={"context": record["id"]},
            )
            return found.choices[0].message.content

        assert list(pool.map(ask, TAILS)) == about
