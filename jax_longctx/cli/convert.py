"""`jax-longctx convert`: checkpoints in and out."""

from pathlib import Path
from typing import get_args

from jax_longctx.cli import options
from jax_longctx.cli.options import argument, option
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.settings import StoredForm


def _check_weights(name: str) -> None:
    if name not in get_args(StoredForm):
        known = ", ".join(get_args(StoredForm))
        raise ConfigError(f"--weights {name!r} is not one of {known}; for floats give --dtype")


@options.command
def convert(
    source: str = argument(
        "A Hugging Face directory or hub id, or a GGUF file; with --to-hf a converted checkpoint.",
        default=...,
        show_default=False,
    ),
    destination: Path = argument("The folder to write.", default=..., show_default=False),
    dtype: str | None = options.dtype(
        "float32, bfloat16 or float16; the source's unless given. Two bytes halve disk and "
        "memory; on a CPU float32 is the fastest."
    ),
    weights: str | None = option(
        "int8 or fp8, for the matrices of the layers; --dtype unless given. 8 bits nearly halve "
        "the checkpoint, and every command then loads them as they are.",
        metavar="FORM",
        callback=options.checked(_check_weights),
    ),
    to_hf: bool = option(
        "The other way: Hugging Face safetensors, bit for bit.", "--to-hf", default=False
    ),
) -> None:
    """Convert a checkpoint, once, to what the other commands load.

    Tensors pass one at a time: a model larger than the memory converts too.
    An interrupted conversion resumes; nothing is left half-written.

    [bold]Examples[/bold]

        jax-longctx convert ./Llama-3.1-8B-Instruct ./llama3 --dtype bfloat16

        jax-longctx convert model.Q8_0.gguf ./model --dtype bfloat16 --weights int8

        jax-longctx convert ./llama3 ./back-to-hf --to-hf
    """
    for name, given in (("--dtype", dtype), ("--weights", weights)):
        if to_hf and given is not None:
            raise InputError(f"--to-hf writes the checkpoint's own dtype; leave out {name}")
    if to_hf:
        options.check_checkpoint(Path(source))
    elif not (Path(source).expanduser().exists() or _is_hub_id(source)):
        raise CheckpointError(
            f"{source} does not exist; expected a Hugging Face directory, a GGUF file, "
            f"or a hub id such as owner/name"
        )
    terminal = Terminal()
    with terminal.starting():
        import checkpoints_convert

    with terminal.progress("exporting" if to_hf else "converting", "bytes") as update:
        if to_hf:
            checkpoints_convert.export(source, destination, progress=update)
        else:
            checkpoints_convert.convert(
                source, destination, dtype=dtype, weights=weights, progress=update
            )
    terminal.note(f"written to {destination}")


def _is_hub_id(source: str) -> bool:
    """Whether it may be `owner/name` or `owner/name@revision`."""
    owner, slash, name = source.partition("@")[0].partition("/")
    return bool(owner.strip(".~") and slash and name) and "/" not in name
