"""Reading one text on a CPU: this library, another revision of it, transformers and llama.cpp.

    python -m jax_longctx.bench.cpu_reading CHECKPOINT MODEL.gguf TEXT... --peers PYTHON \
      --revision NAME=FOLDER=CHECKPOINT --out cpu-reading.json

CHECKPOINT is what `jax-longctx convert MODEL.gguf --dtype float32` writes. PYTHON has transformers,
gguf, accelerate and llama-cpp-python; FOLDER holds a revision of this repository, CHECKPOINT what
its own `convert` wrote. All read the same tokens with the weights of the same file in float32;
llama.cpp reads the file's own blocks too. Each reader is a process of its own (`cpu_reader`). The
readers take turns, `--rounds` times, so that other work on the machine disturbs them alike.
Processor seconds are the measure where other work runs: seconds count its share of the processors
too.

The profile of this library sets its processor seconds against those of the products alone: FLOPs of
the layers' products and of causal attention, over the rates that XLA's matmul of these shapes
reaches in the same run.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_longctx.bench.timing import printed
from jax_longctx.errors import InputError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.storage import read_manifest, tokenizer_folder
from jax_longctx.text import Tokenizer

READER = Path(__file__).with_name("cpu_reader.py")
ROOT = Path(__file__).resolve().parents[2]
# Products that are timed at once, so that starting them counts little.
_REPEATED = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("texts", type=Path, nargs="+", help="one after another")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--peers", help="a Python with the peers; none are run without it")
    parser.add_argument("--revision", action="append", default=[], metavar="NAME=FOLDER=CHECKPOINT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--runs", type=int, default=1, help="reads of a process, after one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = run(given, say=lambda text: print(text, file=sys.stderr, flush=True))
    text = json.dumps(found, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


def run(given: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Times of all readers and the profile of this library; JSON-able.

    Raises:
      InputError: the texts are shorter than the tokens, a reader failed, or not all found the same
        next token with the weights in float32.
    """
    config = read_manifest(given.checkpoint).config
    tokens = _tokens(given.checkpoint, given.texts, given.tokens)
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "tokens.json")
        listed.write_text(json.dumps(tokens))
        readers = _readers(given, Path(folder))
        found: dict[str, list[Any]] = {name: [] for name in readers}
        for number in range(given.rounds):
            for name, (python, source, reader, model) in readers.items():
                say(f"round {number + 1}: {name} ...")
                command = [python, "-P", str(READER), reader, str(model), str(listed)]
                for option in ("threads", "runs", "chunk"):
                    command += [f"--{option}", str(getattr(given, option))]
                environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=source)
                one, failed = printed(command, environment)
                if failed:
                    raise InputError(f"{name} failed: {failed}")
                say(f"  {one['reads']}")
                found[name].append(one)
    exact = {one["token"] for name in found if not name.endswith("blocks") for one in found[name]}
    if len(exact) > 1:
        raise InputError(f"the readers found different next tokens: {sorted(exact)}")
    rows = [_row(name, given.tokens, every) for name, every in found.items()]
    least = min(row["processor"] for row in rows if row["reader"] == "this revision")
    return {
        "tokens": given.tokens,
        "threads": given.threads,
        "jax": jax.__version__,
        "rows": rows,
        "profile": profile(config, given.tokens, given.chunk, least),
    }


def _tokens(checkpoint: Path, texts: Sequence[Path], number: int) -> list[int]:
    tokenizer = Tokenizer.load(tokenizer_folder(checkpoint, read_manifest(checkpoint)))
    every = tokenizer.encode("\n\n".join(text.read_text() for text in texts))
    if len(every) < number:
        raise InputError(f"the texts have {len(every):,} tokens; expected at least {number:,}")
    return [int(token) for token in every[:number]]


def _readers(given: argparse.Namespace, folder: Path) -> dict[str, tuple[str, str, str, Path]]:
    """By name: the Python, what goes before its packages, the reader, and the model."""
    readers = {"this revision": (sys.executable, str(ROOT), "ours", given.checkpoint)}
    for revision in given.revision:
        name, source, checkpoint = revision.split("=")
        readers[name] = sys.executable, str(Path(source).resolve()), "ours", Path(checkpoint)
    if given.peers:
        whole = folder / "float32.gguf"
        unpacked(given.gguf, whole)
        readers["transformers"] = given.peers, "", "transformers", given.gguf
        readers["llama.cpp"] = given.peers, "", "llama.cpp", whole
        readers["llama.cpp, the file's blocks"] = given.peers, "", "llama.cpp", given.gguf
    return readers


def unpacked(source: Path, target: Path) -> None:
    """Writes a GGUF file with all tensors of another one in float32."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        kind = field.types[:1]
        if field.name in ("general.architecture", "general.file_type") or not kind:
            continue
        if field.name.startswith("GGUF."):
            continue
        inner = field.types[-1] if kind[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind[0], sub_type=inner)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _row(name: str, tokens: int, every: list[Any]) -> dict[str, Any]:
    """The least times over all rounds, since other work only adds, and the medians."""
    seconds, processor = zip(*(read for one in every for read in one["reads"]), strict=True)
    return {
        "reader": name,
        "version": every[0]["version"],
        "token": every[0]["token"],
        "seconds": min(seconds),
        "processor": min(processor),
        "median_seconds": statistics.median(seconds),
        "median_processor": statistics.median(processor),
        "rate": tokens / min(seconds),
        "processor_rate": tokens / min(processor),
    }


def profile(config: ModelConfig, tokens: int, chunk: int, spent: float) -> dict[str, float]:
    """Where the `spent` processor seconds of a read go.

    Returns:
      `products_seconds` and `attention_seconds`: those of the FLOPs of the layers' matmuls, and of
      causal attention, at measured rates; `rest_seconds`: what is left of `spent`, which holds the
      softmax, norms, rotary embedding, and what blocks compute beyond the causal half.
    """
    wide, heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.model_dim, config.mlp_dim
    # Of a token: queries and output, keys and values, gate and up, down.
    matrices = [(hidden, wide), (wide, hidden), (hidden, heads), (hidden, heads)]
    matrices += [(hidden, inner), (hidden, inner), (inner, hidden)]
    layers = config.num_layers
    flops = [2 * chunk * rows * columns for rows, columns in matrices]
    each = [_product_seconds((chunk, rows), (rows, columns)) for rows, columns in matrices]
    products = layers * math.fsum(each) * tokens / chunk
    # Scores of a block, and their product with the values; as the attention in XLA has them.
    block = (config.num_kv_heads, chunk * config.num_heads // config.num_kv_heads)
    pair = _product_seconds((*block, config.head_dim), (block[0], config.head_dim, chunk))
    pair += _product_seconds((*block, chunk), (block[0], chunk, config.head_dim))
    attention = layers * pair * (tokens / chunk) ** 2 / 2
    return {
        "products_seconds": products,
        "products_gflops": math.fsum(flops) / math.fsum(each) / 1e9,
        "attention_seconds": attention,
        "attention_gflops": 4 * chunk**2 * wide / pair / 1e9,
        "rest_seconds": spent - products - attention,
        "spent_seconds": spent,
    }


def _product_seconds(left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """The least processor seconds of a float32 matmul of these shapes, of ten tries."""
    x, y = jnp.ones(left, jnp.float32), jnp.ones(right, jnp.float32)
    run = jax.jit(jnp.matmul)
    result = jax.block_until_ready(run(x, y))
    times = []
    for _ in range(10):
        begun = time.process_time()
        for _ in range(_REPEATED):
            result = run(x, y)
        # One wait for all: a waiting thread's turns would count.
        jax.block_until_ready(result)
        times.append((time.process_time() - begun) / _REPEATED)
    return min(times)


if __name__ == "__main__":
    main()
