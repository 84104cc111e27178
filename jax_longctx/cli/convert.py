"""`jax-longctx convert`: checkpoints in and out."""

import os
import shlex
from pathlib import Path

from jax_longctx.cli import options
from jax_longctx.cli.options import argument, option
from jax_longctx.cli.terminal import Terminal, check_checkpoint
from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.files import expanded, whole_path
from jax_longctx.memory import shown_bytes
from jax_longctx.settings import DTYPES, check_form, check_name


def _check_weights(name: str) -> None:
    if name == "bfloat16":
        raise ConfigError("--weights takes int8 alone here; for floats give --dtype")
    check_form(name, "--weights", ("int8",))


@options.command
def convert(
    source: str = argument(
        "A Hugging Face directory or hub id, or a GGUF file; with --to-hf a converted checkpoint.",
        default=...,
        show_default=False,
    ),
    destination: Path = argument("The folder to write.", default=..., show_default=False),
    dtype: str | None = option(
        "float32, bfloat16 or float16; the source's unless given. Two bytes halve disk and "
        "memory; on a CPU float32 is the fastest.",
        metavar="DTYPE",
        callback=options.checked(lambda name: check_name(DTYPES, name, "--dtype")),
    ),
    weights: str | None = option(
        "int8, for the matrices of the layers; --dtype unless given. It nearly halves the "
        "checkpoint, and every command then loads them as they are.",
        metavar="FORM",
        callback=options.checked(_check_weights),
    ),
    to_hf: bool = option(
        "The other way: Hugging Face safetensors, bit for bit (MXFP4, read as bfloat16, stays so).",
        "--to-hf",
        default=False,
    ),
) -> None:
    """Convert a model once, to a checkpoint that the other commands load.

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
        check_checkpoint(Path(source))
    elif not (os.path.exists(expanded(source)) or _is_hub_id(source)):
        raise CheckpointError(
            f"{source} does not exist; expected a Hugging Face directory, a GGUF file, "
            f"or a hub id such as owner/name"
        )
    terminal = Terminal()
    with terminal.starting():
        import checkpoints_convert

    left_out: list[str] = []
    with terminal.progress("exporting" if to_hf else "converting", "bytes") as update:
        if to_hf:
            checkpoints_convert.export(source, destination, progress=update)
        else:
            checkpoints_convert.convert(
                source,
                destination,
                dtype=dtype,
                weights=weights,
                progress=update,
                tell=left_out.append,
            )
    for line in (*left_out, f"written to {destination}"):
        terminal.note(line)
    if not to_hf:
        _tell(destination, terminal)


def _tell(destination: Path, terminal: Terminal) -> None:
    """Says what was made, and what to type next."""
    from jax_longctx.models.storage import read_manifest

    manifest, folder = read_manifest(destination), whole_path(destination)
    config, form = manifest.config, manifest.weights
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    terminal.note(
        f"{config.num_layers} layers, {manifest.dtype}{f' in {form}' if form else ''}, "
        f"{shown_bytes(size)}, trained to {config.trained_length:,} tokens"
    )
    terminal.note(f"next: jax-longctx ask FILE QUESTION -c {shlex.quote(str(destination))}")


def _is_hub_id(source: str) -> bool:
    """Whether it may be `owner/name` or `owner/name@revision`."""
    owner, slash, name = source.partition("@")[0].partition("/")
    return bool(owner.strip(".~") and slash and name) and "/" not in name
