import dataclasses
import threading

import httpx
import jax
import pytest

from jax_longctx.engine.compiling import forget
from jax_longctx.serving.server import LongServer, ServeOptions, listen
from tests.jax_longctx.engine.test_running import compilations
from tests.jax_longctx.serving.tiny import LENGTHS, model_of
from tests.patience import patience
from tests.stored_programs import lowerings, storing

LONG = " ".join(f"The number of item {n} is {n * n}." for n in range(7))


# `test_ahead` compiles for the runs of other methods.
@pytest.mark.parametrize(("name", "by_layer"), [("full", False), ("refreshkv", True)])
@pytest.mark.slow
def test_requests_compile_nothing(tiny, serve, name, by_layer):
    jax.clear_caches()
    told = []
    lengths = dataclasses.replace(LENGTHS, whole=256, answer=32)
    running = serve(
        model_of(tiny, name, by_layer),
        rows=3,
        lengths=lengths,
        ready_for=256,
        compiling=lambda done, total: told.append((done, total)),
    )
    assert told[-1][0] == told[-1][1] > 3
    how = {"model": "tiny", "max_tokens": 20}
    with compilations() as found, running.client() as client, running.http() as http:
        for asked in ("What is it?", "Who said so? " * 4, LONG):
            client.chat.completions.create(
                messages=[{"role": "user", "content": asked}], seed=3, stop=["xyz", "."], **how
            )
        client.completions.create(prompt="One", temperature=0.7, logprobs=3, **how)
        # Texts of all sizes, and of whole chunks of 32 tokens and more.
        for count in (1, 2, 9, 33, 34, 65, 100, 150, 200, 236):
            client.completions.create(prompt=[3 + count % 50] * count, **how)
        if not running.served.executor.engine.method.info.needs_question:
            book = http.post("/v1/contexts", json={"text": LONG, "save": True}).json()
            for asked in ("What is it?", "And who?" * 2):
                client.chat.completions.create(
                    messages=[{"role": "user", "content": asked}],
                    extra_body={"context": book["id"]},
                    **how,
                )
    assert not found


@pytest.mark.slow
def test_a_second_start_finds_stored_programs(tiny, serve, tmp_path):
    lengths = dataclasses.replace(LENGTHS, whole=256, share_from=300)
    how = {"model": "tiny", "prompt": [7] * 90, "max_tokens": 12, "seed": 3}
    answers, found = [], []
    (tmp_path / "programs").mkdir()
    with storing(tmp_path / "programs") as folder:
        for start in range(2):
            with lowerings() as lowered:
                running = serve(
                    model_of(tiny, "full", False),
                    contexts=tmp_path / str(start),
                    lengths=lengths,
                    ready_for=100,
                    compiling=lambda done, total: found.append(total),
                )
            assert bool(lowered) == (start == 0)
            with compilations() as compiled, running.client() as client:
                answers.append(client.completions.create(**how).choices[0])
            assert not compiled
            running.stop()
            assert len(list(folder.glob("longctx-*"))) == found[-1] > 3
            forget()
    assert answers[0] == answers[1]


def test_requests_are_taken_when_the_programs_are_compiled(tiny, tmp_path):
    held, came = threading.Event(), threading.Event()

    def compiling(done, total):
        came.set()
        assert held.wait(patience(60))

    options = ServeOptions(name="tiny", contexts=tmp_path / "c", lengths=LENGTHS, ready_for=8)
    faults, ready = [], threading.Event()
    how = {"crashed": faults.append, "compiling": compiling}
    served = LongServer(model_of(tiny, "full"), options, **how)
    with listen("127.0.0.1", 0) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        thread = threading.Thread(target=served.run, args=(bound,), kwargs={"on_ready": ready.set})
        thread.start()
        body = {"model": "tiny", "prompt": "One", "max_tokens": 2}
        try:
            assert came.wait(patience(60))
            assert httpx.get(f"{url}/health", timeout=patience(60)).status_code == 200
            found = httpx.get(f"{url}/ready", timeout=patience(60))
            assert (found.status_code, found.json()["status"]) == (503, "compiling")
            refused = httpx.post(f"{url}/v1/completions", json=body, timeout=patience(60))
            assert refused.status_code == 503 and "Retry-After" in refused.headers
            assert not ready.is_set()
            held.set()
            assert ready.wait(patience(60))
            assert httpx.get(f"{url}/ready", timeout=patience(60)).status_code == 200
            answered = httpx.post(f"{url}/v1/completions", json=body, timeout=patience(60))
            assert answered.status_code == 200
        finally:
            held.set()
            served.stop()
            thread.join(patience(60))
    assert not faults


@pytest.mark.slow
def test_a_server_that_ends_while_it_compiles_gives_up(tiny, tmp_path):
    came, faults = threading.Event(), []
    options = ServeOptions(name="tiny", contexts=tmp_path / "c", lengths=LENGTHS, ready_for=400)

    def compiling(done, total):
        if not came.is_set():
            came.set()
            served.stop()

    how = {"crashed": faults.append, "compiling": compiling}
    served = LongServer(model_of(tiny, "full"), options, **how)
    with listen("127.0.0.1", 0) as bound:
        served.run(bound, on_ready=lambda: faults.append("ready"))
    assert came.is_set() and not faults
