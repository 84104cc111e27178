"""Cold start: time to the first and the last token of a process's first answer.

Each case runs in two processes of its own. The first begins with an empty folder for the persistent
compilation cache, the second with what the first has left there. So neither finds compiled programs
in memory. Each process makes or loads the weights. Then it measures its first answer, from the
text's tokens on, and the same answer again: the warm time.

The parent process touches no device, whose memory the children need.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_longctx.bench.asked import Cold
from jax_longctx.bench.timing import device_facts, printed
from jax_longctx.engine import Engine, Lengths, compile_ahead
from jax_longctx.engine.compiling import CompileClock
from jax_longctx.errors import LongctxError
from jax_longctx.methods import make_method
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.params import init_params
from jax_longctx.models.presets import PRESETS
from jax_longctx.models.storage import load_params, read_manifest
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import parse_mesh

# Tokens of the question.
QUESTION = 32
# Answers after the first; the median is the warm time.
WARM = 2
STATES = ("empty", "full")


def run(
    asked: Cold, spec: RunSpec, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Every method with an empty and with a full cache; JSON-able."""
    spec, checkpoint, answer = spec.over("bfloat16"), asked.checkpoint, asked.answer
    run = {"chunk": spec.chunk, "dtype": spec.dtype, "mesh": spec.mesh}
    rows, facts = [], {}
    for name, settings in asked.named():
        case = {
            "model": None if checkpoint is not None else PRESETS[asked.model],
            "checkpoint": None if checkpoint is None else str(checkpoint.absolute()),
            "method": name,
            "settings": settings,
            "length": asked.length,
            "answer": answer,
            "run": run,
        }
        row: dict[str, Any] = {"method": name, "settings": settings}
        with tempfile.TemporaryDirectory(prefix="jax-longctx-cold-") as folder:
            for state in STATES:
                say(f"{name}, {state} cache ...")
                found = _in_process(case, Path(folder))
                if "failed" in found:
                    row["failed"] = found["failed"]
                    break
                facts = found.pop("facts")
                row[state] = found
                say(
                    f"  first token {found['first_token']:.2f} s, {answer} tokens "
                    f"{found['last_token']:.2f} s; warm {found['warm_first_token']:.2f} s and "
                    f"{found['warm_last_token']:.2f} s"
                )
        rows.append(row)
    return {
        "model": asked.model if checkpoint is None else checkpoint.name,
        **facts,
        "context": asked.length,
        "answer": answer,
        "question": QUESTION,
        **run,
        "mesh": parse_mesh(spec.mesh or ""),
        "rows": rows,
    }


def _in_process(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `measure` finds in a process of its own whose compiled programs are in `folder`."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # The GPU driver's own cache of kernels.
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }
    command = [sys.executable, "-m", "jax_longctx.bench.cold", json.dumps(case)]
    found, failed = printed(command, environment)
    return {"failed": failed} if failed else found


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """The first answer of this process and later ones; seconds from the text's tokens on.

    Beside them are the seconds that this thread spent on compilation before the last token, the
    programs that were asked for, and how many the persistent cache held.
    """
    spec = RunSpec(method=make_method(case["method"], case["settings"]), **case["run"])
    if case["checkpoint"] is None:
        config = ModelConfig.from_hf(case["model"])
        params = init_params(config, spec)
    else:
        config = read_manifest(case["checkpoint"]).config
        params = load_params(case["checkpoint"], spec)
    engine = Engine(config, params, spec, consume=True)
    jax.block_until_ready(engine.params)
    draw = np.random.default_rng(0).integers(0, config.vocab_size, case["length"] + QUESTION)
    tokens = [int(token) for token in draw]
    # As the commands do.
    ahead = engine.setup.platform != "cpu"
    with CompileClock() as clock:
        begun = time.perf_counter()
        first, last = _answer(engine, tokens, case["answer"], clock, ahead=ahead)
        compiled = clock.seconds(begun, begun + last)
        programs, hits = clock.programs, clock.hits
    warm = [_answer(engine, tokens, case["answer"], clock, ahead=False) for _ in range(WARM)]
    return {
        "facts": device_facts(),
        "first_token": first,
        "last_token": last,
        "warm_first_token": statistics.median(first for first, _ in warm),
        "warm_last_token": statistics.median(last for _, last in warm),
        "compile": compiled,
        "programs": programs,
        "from_cache": hits,
    }


def _answer(
    engine: Engine, tokens: list[int], answer: int, clock: CompileClock, *, ahead: bool
) -> tuple[float, float]:
    """Seconds to the first and to the last token."""
    context, question = tokens[:-QUESTION], tokens[-QUESTION:]
    begun = time.perf_counter()
    if ahead:
        lengths = Lengths([len(context)], [(QUESTION, answer)])
        compilation = compile_ahead(engine, lengths, keep=False)
        with clock.waiting():
            compilation.wait(prefill=True)
    prefilled = engine.prefill([context], reserve=QUESTION + answer, questions=[question])
    stream = engine.stream(prefilled, [question], max_tokens=answer, keep=False)
    next(stream)
    first = time.perf_counter() - begun
    for _ in stream:
        pass
    return first, time.perf_counter() - begun


def main() -> None:
    """Runs one case, given as JSON; prints its measurements as one line of JSON."""
    try:
        found = measure(json.loads(sys.argv[1]))
    except LongctxError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
