"""A configured run from beginning to end: data prepared, weights loaded, trained, written out.

The configuration is one TOML file; each key is known, typed and in its range:

    [run]                              [data]
    checkpoint = "llama3"              directory = "data-8k"
    output = "runs/first"              sources = ["docs", "more.jsonl"]
    mesh = "data=2,tensor=2"           length = 8192

and `[pattern]`, `[optimizer]`, `[loop]` with the fields of `Pattern`, `OptimizerConfig` and
`LoopConfig`. Paths are relative to the working directory.

The run's folder (see `train_cpt.loop`) also gets `loss.png` and, at the end of the run, `model/`, a
checkpoint as `jax-longctx convert` writes it. Where an earlier step had a lower dev loss than the
last one, `best/` is the checkpoint of that step.
"""

import contextlib
import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

import jax_longctx
from jax_longctx.engine.distributed import from_leader
from jax_longctx.engine.program_files import seal_cache
from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.files import file_errors, partial_of, sha256_of, whole_path, write_text
from jax_longctx.locks import only_writer
from jax_longctx.models import storage
from jax_longctx.models.config import ModelConfig
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import from_toml, parse_mesh, read_toml
from jax_longctx.sharding import make_mesh
from jax_longctx.text import Tokenizer, check_vocabulary
from train_cpt.attention import Pattern, check_attention
from train_cpt.data import (
    DataConfig,
    check_made_from,
    document_files,
    file_record,
    open_windows,
    prepare,
    read_documents,
)
from train_cpt.evaluate import tokenizer_digest
from train_cpt.loop import CHECKPOINTS, VERSIONS, Checkpoints, LoopConfig, OnStep, Outcome, train
from train_cpt.metrics import PLOT, plot_losses
from train_cpt.step import Float32OrHalf, OptimizerConfig, Remat, TrainSetup

# In the run's folder: the trained model, and the one with the lowest dev loss.
MODEL, BEST = "model", "best"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Model, data, output and computation of a run (see `train_cpt.step.TrainSetup`)."""

    checkpoint: Path
    output: Path
    mesh: str = ""
    dtype: Float32OrHalf = "bfloat16"
    remat: Remat = "full"
    loss_chunk: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The five sections."""

    run: RunOptions
    data: DataConfig
    optimizer: OptimizerConfig
    pattern: Pattern
    loop: LoopConfig

    def to_dict(self) -> dict[str, Any]:
        """As JSON, paths as text."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def read_config(path: Path) -> RunConfig:
    """Reads a TOML file.

    Raises:
      InputError: it cannot be read or is no TOML.
      ConfigError: a section or key is missing, unknown, of the wrong type or out of range.
    """
    return from_toml(RunConfig, read_toml(path))


def run_config(
    config: RunConfig, *, note: Callable[[str], None], progress: OnStep | None = None
) -> Outcome:
    """Starts or resumes the configured run; at its end, `model/` holds the result.

    Args:
      note: called with a line about the prepared data.

    Raises:
      LongctxError: the configuration, the data, the checkpoint or the run is not usable, or another
        process writes the run's folder.
    """
    run, data = config.run, config.data
    run = dataclasses.replace(
        run, checkpoint=whole_path(run.checkpoint), output=whole_path(run.output)
    )
    data = dataclasses.replace(data, directory=whole_path(data.directory))
    config = dataclasses.replace(config, run=run, data=data)
    with contextlib.ExitStack() as held:
        from_leader(lambda: held.enter_context(only_writer(config.run.output)))
        return _run(config, note, progress)


def _run(config: RunConfig, note: Callable[[str], None], progress: OnStep | None) -> Outcome:
    seal_cache()
    checkpoint = config.run.checkpoint
    manifest = storage.read_manifest(checkpoint)
    if manifest.weights is not None:
        raise ConfigError(
            f"{checkpoint} holds its matrices in {manifest.weights}, which cannot be trained; "
            f"convert the source without weights"
        )
    tokenizer = Tokenizer.load(storage.tokenizer_folder(checkpoint, manifest))
    check_vocabulary(tokenizer, manifest.config)
    sizes: dict[str, Any] = dict(parse_mesh(config.run.mesh))
    setup = setup_of(config, manifest.config, make_mesh(**sizes))
    check_attention(setup.config, setup.mesh, setup.pattern, config.data.length)
    known_as = tokenizer_digest(checkpoint)
    from_leader(lambda: _prepare(config.data, tokenizer, known_as, manifest.config, note))
    windows, dev = (
        open_windows(config.data.directory, split, length=config.data.length, tokenizer=known_as)
        for split in ("train", "dev")
    )
    facts = {
        **config.to_dict(),
        "checkpoint": sha256_of(checkpoint / storage.MANIFEST),
        "data_set": sha256_of(config.data.directory / storage.MANIFEST),
        VERSIONS: _versions(),
    }
    outcome = train(
        config.loop,
        setup,
        lambda: storage.load_params(checkpoint, RunSpec(mesh=setup.mesh, dtype="float32")),
        windows,
        dev,
        config.run.output,
        facts=facts,
        progress=progress,
    )
    output = config.run.output
    from_leader(lambda: plot_losses(output, output / PLOT))
    if outcome.ended == "done":
        params, best = outcome.state.params, outcome.best.step
        _write_model(output / MODEL, checkpoint, manifest, params, outcome.step)
        if best not in (0, outcome.step) and not from_leader((output / BEST).exists):
            with Checkpoints(output / CHECKPOINTS, config.loop.keep) as saved:
                params = saved.restore(best, setup).params
            _write_model(output / BEST, checkpoint, manifest, params, best)
    return outcome


def setup_of(config: RunConfig, model: ModelConfig, mesh: Mesh) -> TrainSetup:
    """The setup of the run's steps."""
    return TrainSetup(
        config=model,
        mesh=mesh,
        optimizer=config.optimizer,
        pattern=config.pattern,
        dtype=config.run.dtype,
        remat=config.run.remat,
        loss_chunk=config.run.loss_chunk,
    )


def _versions() -> dict[str, str]:
    """Versions of the main packages, and the git revision of a checkout."""
    packages = ("jax", "flax", "optax", "tensorstore", "grain")
    found = {"jax-longctx": jax_longctx.__version__}
    found |= {name: metadata.version(name) for name in packages}
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            found["git"] = asked.stdout.strip()
    return found


def _prepare(
    data: DataConfig,
    tokenizer: Tokenizer,
    known_as: str,
    model: ModelConfig,
    note: Callable[[str], None],
) -> None:
    """Makes the data set if it does not exist, or checks that it was made from these sources."""
    if data.directory.exists():
        check_made_from(data)
        return
    if not data.sources:
        raise InputError(
            f"{data.directory} does not exist; name what to make it of: [data] sources"
        )
    files = document_files(data.sources)
    with only_writer(data.directory):
        made = prepare(
            read_documents(files, data.field),
            lambda text: tokenizer.encode(text, bos=True),
            data.directory,
            length=data.length,
            vocab_size=model.vocab_size,
            tokenizer=known_as,
            shares=data.shares,
            field=data.field,
            sources=map(file_record, files),
        )
    counts = made.documents
    texts = ", ".join(f"{count:,} {split}" for split, count in made.windows.items())
    note(
        f"{data.directory}: {texts} texts of {made.length:,} tokens from {counts['used']:,} "
        f"documents; {counts['short']:,} too short, {counts['repeated']:,} repeated"
    )


def _write_model(
    destination: Path, checkpoint: Path, manifest: storage.Manifest, params: Any, step: int
) -> None:
    """Writes the weights after a step as a checkpoint, in the dtype of the initial one."""
    # As the leader sees it, so that all processes do the same.
    if from_leader(destination.exists):
        return
    building = partial_of(destination)

    def begin() -> None:
        shutil.rmtree(building, ignore_errors=True)
        with file_errors(f"{destination} could not be written", kind=CheckpointError):
            tokenizer = building / storage.TOKENIZER
            tokenizer.mkdir(parents=True)
            for name in manifest.tokenizer_files:
                shutil.copyfile(checkpoint / storage.TOKENIZER / name, tokenizer / name)

    from_leader(begin)
    params = jax.tree.map(lambda leaf: leaf.astype(manifest.dtype), params)
    with storage.writing(destination):
        arrays: dict[str, Any] = dict(traverse_util.flatten_dict(params, sep="."))
        storage.save_arrays(building / storage.PARAMS, arrays)
    written = dataclasses.replace(
        manifest,
        source=f"{manifest.source}, after {step} steps of continued pretraining",
    )

    def finish() -> None:
        with storage.writing(destination):
            files, digests = storage.join_arrays(building / storage.PARAMS)
        tensors = {
            path: dataclasses.replace(entry, dtype=manifest.dtype, digest=digests[path])
            for path, entry in manifest.tensors.items()
        }
        whole = dataclasses.replace(written, tensors=tensors, files=files)
        with file_errors(f"{destination} could not be written", kind=CheckpointError):
            write_text(building / storage.MANIFEST, whole.to_json())
            building.replace(destination)

    from_leader(finish)
