import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from jax_longctx.api import LongContext
from jax_longctx.engine.scoring import TextScores, loglikelihoods
from jax_longctx.serving.prompts import Prompts
from jax_longctx.settings import Sampling
from tests.jax_longctx.serving.tiny import complete, generated, read, refused, wait_until
from tests.small_methods import small_method

PROMPT = "The pass key is 12345. Remember it. The p\u00e4ss key"
RENDERED = "<|turn|>user\nRemember it.<|end|>\n"


def echoed(client, prompt, **how):
    """The choices of an answer with the prompt and the three best tokens at each of its own."""
    how = {"max_tokens": 0, "logprobs": 3, "temperature": 0, **how}
    return complete(client, prompt, extra_body={"echo": True}, **how).choices


def check_scores(model, choice, row):
    (expected,) = loglikelihoods(model.engine, [row[:1]], [row[1:]], through="context")
    found, count = choice.logprobs, len(row)
    own, best = found.token_logprobs[:count], found.top_logprobs[:count]
    assert own == pytest.approx([None, *expected.logprobs.tolist()], abs=1e-4)
    assert best[0] is None
    greedy = [
        mine == max(likely.values()) for mine, likely in zip(own, best, strict=True) if likely
    ]
    assert greedy == expected.greedy.tolist()
    assert all(len(likely) == 3 for likely in best if likely)
    for name, at in zip(found.tokens, found.text_offset, strict=True):
        assert name.startswith("bytes:") or choice.text[at:].startswith(name)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_goes_on_from_its_echoed_prompt(client, tiny, stream):
    expected = generated(tiny, PROMPT, seed=7)
    how = {"seed": 7, "max_tokens": 12, "stream": stream, "extra_body": {"echo": True}}
    for prompt in (PROMPT, tiny.tokenizer.encode(PROMPT)):
        for logprobs in (None, 2):
            found = complete(client, prompt, logprobs=logprobs, **how)
            chunks = list(found) if stream else [found]
            assert chunks[0].choices[0].text.startswith(PROMPT)
            text = "".join(each.choices[0].text for each in chunks)
            # The ids are without the token that begins a text.
            assert prompt is not PROMPT or text == PROMPT + expected.text
            names = [
                name
                for each in chunks
                if each.choices[0].logprobs
                for name in each.choices[0].logprobs.tokens
            ]
            assert bool(names) == (logprobs is not None)


def test_log_probabilities_of_a_prompt_are_the_engines(client, tiny):
    for text in (PROMPT, RENDERED):
        row = tiny.tokenizer.encode(text, bos=True, parse_special=True)
        for prompt in (text, row):
            (choice,) = echoed(client, prompt)
            assert (choice.text, choice.finish_reason) == (text, "length")
            check_scores(tiny, choice, row)
    # Longer than a chunk, with an answer.
    (choice,) = echoed(client, row * 4, max_tokens=2)
    check_scores(tiny, choice, row * 4)
    assert len(choice.logprobs.tokens) == len(row) * 4 + 2
    (choice,) = echoed(client, row[:1], max_tokens=1)
    assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == 2


def test_the_token_that_ends_an_answer_is_there(client, tiny, monkeypatch):
    """Who counts tokens from the end, as lm-evaluation-harness does, finds the prompt's."""
    row = tiny.tokenizer.encode(PROMPT, bos=True)
    (choice,) = echoed(client, row, max_tokens=1)
    (answer,) = tiny.generate(PROMPT, max_tokens=1)
    monkeypatch.setattr(LongContext, "end_ids", lambda *_: answer.tokens)
    (ended,) = echoed(client, row, max_tokens=1)
    assert (ended.finish_reason, ended.text) == ("stop", PROMPT)
    assert ended.logprobs.token_logprobs == choice.logprobs.token_logprobs


def test_each_prompt_of_a_list_has_its_answer(client, tiny):
    prompts = [PROMPT, "Remember it.", PROMPT, "Key"]
    how = {"max_tokens": 20}
    sampling = Sampling(temperature=1.0, seed=5)
    expected = [each.text for each in tiny.generate(prompts, sampling=sampling, **how)]
    found = complete(client, prompts, seed=5, **how)
    assert [each.text for each in found.choices] == expected
    assert [each.index for each in found.choices] == [0, 1, 2, 3]
    rows = [tiny.tokenizer.encode(prompt, bos=True) for prompt in prompts]
    assert found.usage.prompt_tokens == sum(map(len, rows))
    texts, ends = [""] * 4, 0
    how |= {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in complete(client, rows, seed=5, **how):
        for each in chunk.choices:
            texts[each.index] += each.text
            ends += each.finish_reason is not None
    assert (texts, ends) == (expected, 4)
    assert chunk.usage.total_tokens == found.usage.total_tokens


def test_a_prompt_that_is_refused_is_named_and_none_is_read(client, server, tiny):
    cases = {
        "prompt.1 holds token id 99999, the model's": ["Key", [99999]],
        "longer than the 512 tokens that this server takes": ["Key", "Key " * 9999],
        "a prompt of 600 tokens": [[5], [5] * 600],
    }
    for said, prompts in cases.items():
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            complete(client, prompts)
        assert caught.value.param == "prompt.1"
    with pytest.raises(openai.BadRequestError, match="prompt holds token id 284"):
        complete(client, [tiny.config.vocab_size])
    assert not any(text.tickets for text in server.served.contexts._texts.values())


def test_rows_do_not_wait_for_a_prompts_numbers(client, monkeypatch):
    """The scheduler's thread does not read them out, which takes a second of a long text."""
    threads, chosen = [], TextScores.chosen

    def told(scores):
        threads.append(threading.current_thread().name)
        return chosen(scores)

    monkeypatch.setattr(TextScores, "chosen", told)
    echoed(client, [PROMPT, "Key"])
    assert len(threads) == 2 and "scheduler" not in threads


def test_scored_prompts_wait_among_other_requests(serve, tiny, monkeypatch):
    expected = [generated(tiny, PROMPT, seed=seed, max_tokens=24).text for seed in range(4)]
    row = tiny.tokenizer.encode(PROMPT, bos=True)
    running = serve(tiny, rows=2, queue=8)
    with running.client() as client, ThreadPoolExecutor(6) as pool:
        lists = [pool.submit(echoed, client, [row * n for n in (3, 1)]) for _ in range(2)]
        answers = [
            pool.submit(complete, client, PROMPT, seed=seed, max_tokens=24) for seed in range(4)
        ]
        assert [each.result().choices[0].text for each in answers] == expected
        for each in lists:
            for choice, size in zip(each.result(), (3, 1), strict=True):
                check_scores(tiny, choice, row * size)
        assert not running.served.executor.scores
        # They take a place each, and more are refused before any is looked at.
        monkeypatch.setattr(Prompts, "_row", None)
        with pytest.raises(openai.BadRequestError, match="has 11 prompts, this server takes 10"):
            echoed(client, [row] * 11)


@pytest.mark.parametrize(
    ("method", "why"), [("quest", None), ("citrus", "tokens of a text"), ("star", "side by side")]
)
def test_a_method_scores_a_prompt_or_says_why_not(serve, tiny, method, why):
    model = tiny.with_method(small_method(method))
    row = tiny.tokenizer.encode(PROMPT * 3, bos=True)
    running = serve(model)
    with running.client() as client:
        if why is None:
            check_scores(model, *echoed(client, row), row)
            with running.http() as http:
                name = read(http, text=PROMPT)["id"]
            body = {"echo": True, "context": name}
            with pytest.raises(openai.BadRequestError, match="for whole prompts"):
                complete(client, PROMPT, logprobs=1, extra_body=body)
        else:
            with pytest.raises(openai.BadRequestError, match=why):
                echoed(client, row)
            # The prompt alone needs no scores.
            for _ in range(2):
                found = complete(client, row, max_tokens=1, extra_body={"echo": True})
                assert found.choices[0].text.startswith(PROMPT)
        if method == "citrus":
            # It reads a text for each question, and keeps none.
            assert found.usage.prompt_tokens_details.cached_tokens == 0
            with running.http() as http:
                refused(http, 400, "reads a text for each question", text=PROMPT)
            wait_until(lambda: not running.served.contexts.texts)
