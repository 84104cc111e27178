"""Limits that fit the tests' tiny model, a text for it, requests about it, and waiting."""

import contextlib
import threading
import time

from jax_longctx.api import LongContext
from jax_longctx.serving.prompts import Lengths
from jax_longctx.settings import Sampling
from tests.patience import patience
from tests.small_methods import small_method
from tests.support import engine_over

LENGTHS = Lengths(whole=512, question=128, answer=64, keep_from=32, share_from=64)
BOOK = "The pass key is 12345. Remember it. " * 8


def model_of(tiny, name, by_layer=None):
    """The tiny model under another method, with an engine of its own."""
    engine = tiny.engine
    how = {"chunk": 32, "by_layer": by_layer}
    made = engine_over(engine.config, engine.params, small_method(name), engine.mesh, **how)
    return LongContext(made, tiny.tokenizer)


def wait_until(holds, seconds=20):
    end = time.monotonic() + patience(seconds)
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def aside(call, *given, **how):
    """Within it the call runs in a thread, which ends soon after."""
    thread = threading.Thread(target=call, args=given, kwargs=how)
    thread.start()
    yield thread
    thread.join(patience(20))
    assert not thread.is_alive()


def generated(model, prompt, *, seed=0, max_tokens=12, stop=(), **how):
    sampling = Sampling(**{"temperature": 1.0, "seed": seed, **how})
    (answer,) = model.generate(prompt, sampling=sampling, max_tokens=max_tokens, stop=stop)
    return answer


def asked_plainly(model, text, question, *, seed=0, max_tokens=12):
    """What `ask` answers to these words as they stand."""
    sampling = Sampling(temperature=1.0, seed=seed)
    context = model.prefill(text)
    (answer,) = model.ask(context, question, sampling=sampling, max_tokens=max_tokens)
    return answer.text


def asked(model, text, question, *, chat=True, **how):
    layout = model.layout(chat)
    return asked_plainly(model, layout.context(text), layout.question(question), **how)


def complete(client, prompt, **how):
    """The server's answer to a prompt, as the official client gives it."""
    return client.completions.create(model="tiny", prompt=prompt, **how)


def chat(client, question, context=None, model="tiny", **how):
    """The server's answer to one question, about a context where one is named."""
    messages = [{"role": "user", "content": question}]
    more = {} if context is None else {"context": context}
    return client.chat.completions.create(model=model, messages=messages, extra_body=more, **how)


def read(http, **body):
    answer = http.post("/v1/contexts", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def refused(http, status, said, path="/v1/contexts", **body):
    """Posts what is refused with this status and these words; the answer."""
    answer = http.post(path, json=body)
    assert answer.status_code == status and said in answer.json()["error"]["message"], answer.text
    return answer


def shown(http, name):
    return http.get(f"/v1/contexts/{name}").json()


def needed_bytes(serve, model, text):
    """Of memory, for a text that is a context."""
    count = len(model.tokenizer.encode(model.layout(True).context(text), bos=True))
    probe = serve(model)
    found = probe.served.executor.needed_bytes(count)
    probe.stop()
    return found
