"""The baseline of `jax-longctx bench e2e`: transformers with sdpa, random bfloat16 weights.

Needs PyTorch with CUDA and transformers; imports nothing of this library, so that it measures what
a user would otherwise run. Prints one JSON object: per context, seconds to the first token, seconds
a decode step of plain `forward` calls over a dynamic cache, and, with `--compile`, of a step over a
static cache under `torch.compile(mode="reduce-overhead")`.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="config.json of the model, as text")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("contexts", type=int, nargs="+")
    arguments = parser.parse_args()
    model = build(json.loads(arguments.config))
    result = {}
    for context in arguments.contexts:
        result[str(context)] = measure(model, context, arguments)
    print(json.dumps(result), flush=True)
    # Some PyTorch and driver pairs crash while they shut down, after everything was measured.
    os._exit(0)


def build(settings: dict[str, Any]) -> Any:
    """A model with random bfloat16 weights, made on the GPU."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    config = transformers.AutoConfig.for_model(**settings)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


def measure(model: Any, context: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Medians over the runs, after one that is not counted."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    tokens = torch.randint(0, model.config.vocab_size, (1, context), device="cuda")
    first: list[float] = []
    steps: list[float] = []
    with torch.inference_mode():
        for _ in range(arguments.runs + 1):
            cache = transformers.DynamicCache()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            out = model(tokens, past_key_values=cache, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            first.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            for _ in range(arguments.steps):
                out = model(token, past_key_values=cache)
                token = out.logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            steps.append((time.perf_counter() - begun) / arguments.steps)
            del cache, out
        result = {
            "first_token": statistics.median(first[1:]),
            "decode_step": statistics.median(steps[1:]),
        }
        if arguments.compile:
            result["compiled_step"] = compiled_step(model, context, arguments.steps)
    return result


def compiled_step(model: Any, context: int, steps: int) -> float:
    """Seconds a decode step over a static cache, compiled with CUDA graphs."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    cache = transformers.StaticCache(
        config=model.config, max_cache_len=context + 2 * steps + 16, dtype=torch.bfloat16
    )
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    token = torch.randint(0, model.config.vocab_size, (1, 1), device="cuda")
    # Contents do not matter to the time: the cache is filled by position alone.
    times = []
    for step in range(steps + 8):
        position = torch.tensor([context + step], device="cuda")
        torch.cuda.synchronize()
        begun = time.perf_counter()
        out = forward(token, past_key_values=cache, cache_position=position)
        token = out.logits[:, -1:].argmax(-1).clone()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[8:])


if __name__ == "__main__":
    main()
