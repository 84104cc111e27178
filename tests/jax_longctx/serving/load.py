"""A load test by hand: many clients over a few contexts, for minutes.

    python -m tests.jax_longctx.serving.load CHECKPOINT --minutes 10 --clients 32 --contexts 4

It starts `jax-longctx serve`, reads the contexts, and asks every question once alone. Then the
clients ask the same questions at random, all at once, and compare each answer with the one alone.
The result is one JSON object: errors, differing answers, times to the first token and between
tokens, and the server's memory in the first and the last minute.
"""

import argparse
import itertools
import json
import random
import resource
import threading
import time
from pathlib import Path

import numpy as np
import openai

from tests.jax_longctx.serving.processes import Process
from tests.jax_longctx.serving.tiny import chat, read

QUESTIONS = [
    "What is the pass key of room 7?",
    "Which rooms are named?",
    "Summarise the text in one sentence.",
    "What is said about the garden?",
]


def book(number, sentences):
    """A text of that many sentences, each with a number of its own."""
    draw = random.Random(number)
    keys = (f"The pass key of room {room} is {draw.randrange(10**5)}." for room in range(sentences))
    return f"Book {number}. " + " ".join(keys)


def ask(client, model, case, tokens):
    """The answer of one case, seconds to its first token, and between its pieces."""
    context, question, seed = case
    began = last = time.monotonic()
    first, gaps, texts = 0.0, [], []
    how = {"seed": seed, "temperature": 0.8, "max_tokens": tokens, "stream": True}
    stream = chat(client, question, context, model=model, **how)
    for chunk in stream:
        now = time.monotonic()
        if texts:
            gaps.append(now - last)
        elif not first:
            first = now - began
        last = now
        texts.append(chunk.choices[0].delta.content or "")
    return "".join(texts), first, gaps


def percentiles(values):
    """The median, the 99th percentile and the largest, in milliseconds."""
    shares = {"p50": 50, "p99": 99, "largest": 100} if values else {}
    return {name: round(1e3 * float(np.percentile(values, it)), 1) for name, it in shares.items()}


def memory(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("checkpoint")
    numbers = {"clients": 32, "contexts": 4, "sentences": 60, "tokens": 16}
    numbers |= {"length": 2048, "rows": 8, "share-from": 8192}
    options.add_argument("--minutes", type=float, default=10)
    for name, default in numbers.items():
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--method", default="full")
    options.add_argument("--platform", default="cpu")
    given = options.parse_args()
    limits = ("--length", given.length, "--rows", given.rows, "--max-tokens", 128)
    limits += ("--max-question", 128, "-m", given.method, "--name", "model")
    limits += ("--share-from", given.share_from)
    server = Process(
        "-c",
        given.checkpoint,
        *limits,
        JAX_PLATFORMS=given.platform,
        JAX_DISABLE_MOST_OPTIMIZATIONS="false",
    )
    try:
        print(json.dumps(measured(server.wait(600), given), indent=1))
    finally:
        server.kill()


def measured(server, given):
    first, between, errors, differing, used = [], [], [], [], []
    with server.http() as http:
        http.timeout = 600
        texts = [book(number, given.sentences) for number in range(given.contexts)]
        names = [read(http, text=text, ttl=86400) for text in texts]
    cases = list(itertools.product([name["id"] for name in names], QUESTIONS, (1, 2)))
    with server.client() as client:
        alone = {case: ask(client, "model", case, given.tokens) for case in cases}
    end = time.monotonic() + 60 * given.minutes

    def work(number):
        draw = random.Random(number)
        with server.client() as client:
            while time.monotonic() < end:
                case = draw.choice(cases)
                try:
                    text, begun, gaps = ask(client, "model", case, given.tokens)
                except openai.OpenAIError as error:
                    errors.append(f"{type(error).__name__}: {error}"[:300])
                    continue
                first.append(begun)
                between.extend(gaps)
                if text != alone[case][0]:
                    differing.append({"alone": alone[case][0], "found": text})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(given.clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        used.append((time.monotonic() - began, memory(server.child.pid)))
        time.sleep(1)
    whole = time.monotonic() - began
    early = [size for at, size in used if at < 60]
    late = [size for at, size in used if at > whole - 60]
    return {
        "clients": given.clients,
        "contexts": [name["tokens"] for name in names],
        "rows": given.rows,
        "method": given.method,
        "share_from": given.share_from,
        "seconds": round(whole, 1),
        "answers": len(first),
        "errors": len(errors),
        "first_errors": errors[:3],
        "differing_answers": len(differing),
        "first_differing": differing[:2],
        "alone_first_token_ms": percentiles([begun for _, begun, _ in alone.values()]),
        "alone_between_ms": percentiles([gap for _, _, gaps in alone.values() for gap in gaps]),
        "first_token_ms": percentiles(first),
        "between_ms": percentiles(between),
        "memory_first_minute_mib": round(np.mean(early) / 2**20, 1),
        "memory_last_minute_mib": round(np.mean(late) / 2**20, 1),
    }


if __name__ == "__main__":
    main()
