"""The baseline of `jax-longctx train bench`: a plain training step of transformers and PyTorch.

Float32 weights, bfloat16 autocast, sdpa, fused AdamW, the model's own loss; `--checkpoint` turns
transformers' gradient checkpointing on. Needs PyTorch with CUDA and transformers; imports nothing
of this library. Prints one JSON object: seconds a step (median), peak memory, versions.
"""

import argparse
import json
import os
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="config.json of the model, as text")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpoint", action="store_true")
    arguments = parser.parse_args()
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    config = transformers.AutoConfig.for_model(**json.loads(arguments.config))
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.train()
    if arguments.checkpoint:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6, weight_decay=0.0, fused=True)
    shape = (arguments.rows, arguments.length)
    tokens = torch.randint(0, config.vocab_size, shape, device="cuda")
    times = []
    for _ in range(arguments.steps + 2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    result = {
        "seconds": statistics.median(times[2:]),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "checkpointing": arguments.checkpoint,
    }
    print(json.dumps(result), flush=True)
    # Some PyTorch and driver pairs crash while they shut down, after everything was measured.
    os._exit(0)


if __name__ == "__main__":
    main()
