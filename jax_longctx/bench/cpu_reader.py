"""One reader of `jax_longctx.bench.cpu_reading`: reads a text and prints its times as JSON.

    python cpu_reader.py ours|transformers|llama.cpp MODEL TOKENS.json --threads 2 --runs 2

It imports what it is asked to measure and nothing else, so that it runs in another library's
environment too, and with another revision of this library. MODEL is a checkpoint's folder for
`ours`, else a GGUF file. The process may use so many processors as it has threads.

A read is one prefill of the text to the logits of its last token. The first read compiles or warms
up and does not count. Printed are seconds and processor seconds of each other read (those of all
threads, user and system), and the token of the largest logit, which must be the same everywhere.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=("ours", "transformers", "llama.cpp"))
    parser.add_argument("model")
    parser.add_argument("tokens", help="JSON file: a list of token ids")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a pass, where it has one")
    given = parser.parse_args()
    # Before a library looks at the processors.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
    with open(given.tokens) as file:
        tokens = json.load(file)
    make = {"ours": ours, "transformers": transformers, "llama.cpp": llama_cpp}[given.reader]
    read, version = make(given, len(tokens))
    token, reads = read(tokens), []
    for _ in range(given.runs):
        begun, spent = time.perf_counter(), time.process_time()
        again = read(tokens)
        reads.append([time.perf_counter() - begun, time.process_time() - spent])
        assert again == token, f"one read gave token {token}, another {again}"
    print(json.dumps({"version": version, "token": token, "reads": reads}), flush=True)
    # Some libraries crash while they shut down, after everything was measured.
    os._exit(0)


Read = Callable[[list[int]], int]


def ours(given: Any, length: int) -> tuple[Read, str]:
    """This library under full attention: all but the last token are the context."""
    import jax

    import jax_longctx

    del length
    engine = jax_longctx.load(given.model, dtype="float32", chunk=given.chunk).engine

    def read(tokens: list[int]) -> int:
        context = engine.prefill([tokens[:-1]], reserve=16)
        return int(next(engine.stream(context, [tokens[-1:]], max_tokens=1, keep=False))[0][0])

    return read, f"JAX {jax.__version__}"


def transformers(given: Any, length: int) -> tuple[Read, str]:
    """transformers with sdpa in float32, the whole text in one pass."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers
    from transformers import AutoModelForCausalLM

    del length
    torch.set_num_threads(given.threads)
    folder, name = os.path.split(os.path.abspath(given.model))
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

    def read(tokens: list[int]) -> int:
        with torch.inference_mode():
            out = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
            return int(out.logits[0, -1].argmax())

    return read, f"transformers {transformers.__version__}, torch {torch.__version__}"


def llama_cpp(given: Any, length: int) -> tuple[Read, str]:
    """llama.cpp through its Python binding, flash attention, keys and values in float32."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    model = llama_cpp.Llama(
        given.model,
        n_ctx=length + 16,
        n_batch=given.chunk,
        n_ubatch=given.chunk,
        n_threads=given.threads,
        n_threads_batch=given.threads,
        flash_attn=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )

    def read(tokens: list[int]) -> int:
        model.reset()
        model.eval(tokens)
        return int(model.sample(temp=0.0))

    return read, f"llama-cpp-python {llama_cpp.__version__}"


if __name__ == "__main__":
    main()
