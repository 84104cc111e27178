"""A source -> a checkpoint directory, one tensor at a time.

Tensors pass in the order of the files. A tensor's bytes are read in pieces of a few rows,
dequantised, checked for NaN and cast into one array of the target type, or rounded to 8 bits. Its
parts, laid out as our parameters, are written in groups. At most a group and a tensor are in memory
at a time, and the experts of the layers that are being read.
"""

import collections
import contextlib
import dataclasses
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.files import (
    HashedFile,
    Source,
    SourceTensor,
    in_groups,
    read_array,
    read_quantised,
)
from checkpoints_convert.huggingface import fetch, open_huggingface
from checkpoints_convert.names import FileTensor, expected_tensors
from checkpoints_convert.partial import GROUP, SUFFIX, OnProgress, Partial, check_destination
from jax_longctx.errors import CheckpointError, ConfigError, InputError, LongctxError
from jax_longctx.files import (
    check_plain,
    expanded,
    file_errors,
    reading,
    reason,
    whole_path,
    write_text,
)
from jax_longctx.locks import only_writer
from jax_longctx.memory import shown_bytes
from jax_longctx.models import storage
from jax_longctx.models.for_orbax import describe
from jax_longctx.models.params import stored_paths
from jax_longctx.settings import StoredForm, check_form
from jax_longctx.sharding import ParamInfo
from jax_longctx.text import Tokenizer, check_vocabulary
from pallas_kernels.quantised_matrix import QuantisedMatrix

DTYPES = ("float32", "bfloat16", "float16")
HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@dataclasses.dataclass(frozen=True)
class Step:
    """A tensor of the source, its parameters, and how they are stored.

    Attributes:
      dtype: of the parameters; for 8 bits, of the floats that are rounded.
      eight_bits: whether they are stored in 8 bits.
    """

    tensor: SourceTensor
    wanted: FileTensor
    dtype: np.dtype
    eight_bits: bool

    @property
    def stored(self) -> dict[str, tuple[ParamInfo, np.dtype]]:
        """The arrays that are stored, by path."""
        found: dict[str, tuple[ParamInfo, np.dtype]] = {}
        for part in self.wanted.parts:
            array: Any = (part.info, self.dtype)
            if self.eight_bits:
                values = (part.info, np.dtype(np.int8))
                scales = (part.info.of_scales, np.dtype(np.float32))
                array = QuantisedMatrix(values, scales, self.dtype)
            found |= stored_paths(part.path, array)
        return found

    @property
    def nbytes(self) -> int:
        """Of the arrays that are stored, or of its part of them."""
        whole = sum(math.prod(info.shape) * dtype.itemsize for info, dtype in self.stored.values())
        first = self.wanted.parts[0]
        return whole if first.expert is None else whole // first.info.shape[0]

    def read(self, file: HashedFile) -> Iterator[tuple[str, int | None, np.ndarray]]:
        """The arrays that are stored: views of one tensor, or of its numbers and its scales.

        Each has its place along the first axis of what is stored (`Part.expert`).
        """
        if not self.eight_bits:
            # Numbers near 1 lose in 16 bits what they keep once the 1 is taken off.
            shifts = any(part.shift for part in self.wanted.parts)
            array = read_array(file, self.tensor, np.dtype(np.float32) if shifts else self.dtype)
            array = self.wanted.turned(array)
            for part in self.wanted.parts:
                yield part.path, part.expert, part.from_file(array).astype(self.dtype, copy=False)
            return
        values, scales = read_quantised(file, self.tensor, self.dtype, self.wanted.swapped)
        for part in self.wanted.parts:
            views = QuantisedMatrix(part.from_file(values), part.from_file(scales), self.dtype)
            for path, array in stored_paths(part.path, views).items():
                yield path, part.expert, array


class Joined:
    """Arrays on their way from tensors to the disk; those of experts are put together."""

    def __init__(self) -> None:
        # By path: an array, and how many of its parts it lacks.
        self._begun: dict[str, tuple[np.ndarray, int]] = {}

    def whole(self, step: Step, file: HashedFile) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays that this tensor completes."""
        for path, expert, part in step.read(file):
            if expert is None:
                yield path, part
                continue
            count = step.stored[path][0].shape[0]
            begun = self._begun.pop(path, None)
            array, lacking = begun or (np.empty((count, *part.shape), part.dtype), count)
            array[expert] = part
            if lacking > 1:
                self._begun[path] = array, lacking - 1
            else:
                yield path, array


def open_source(source: str | Path) -> Source:
    """A directory, a `.gguf` file, or a hub id (`owner/name`, `owner/name@revision`).

    All checks that need no weights are made here.

    Raises:
      CheckpointError: the source is not a checkpoint, or incomplete.
      ConfigError: the architecture is not implemented.
    """
    path = expanded(source)
    if path.is_file() and path.name.endswith(".safetensors"):
        raise CheckpointError(f"{path}: name its folder, which holds the config and tokenizer")
    if path.exists() and not path.is_dir():
        with reading(path):
            check_plain(path)
        # Only GGUF files need the package `gguf`.
        from checkpoints_convert.gguf import open_gguf

        opened = open_gguf(path, str(source))
    elif path.is_dir():
        opened = open_huggingface(path, str(source))
    elif hub := HUB_ID.fullmatch(str(source)):
        opened = open_huggingface(fetch(hub["name"], hub["revision"]), str(source))
    else:
        raise CheckpointError(
            f"{source} does not exist; expected a Hugging Face directory, a GGUF file, "
            f"or a hub id such as owner/name"
        )
    _check_tokenizer(opened)
    return opened


def _check_tokenizer(source: Source) -> None:
    """The tokenizer files must be ones that the other commands can load."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            source.write_tokenizer(Path(folder))
            try:
                tokenizer = Tokenizer.load(folder, eos=source.extras.get("eos_token_id"))
                check_vocabulary(tokenizer, source.config)
                if tokenizer.has_chat:
                    _check_chat(tokenizer)
            except LongctxError as error:
                # The folder is temporary.
                said = str(error).replace(f"{folder}/", "")
                raise CheckpointError(f"{source.label}: {said}") from error
    except OSError as error:
        raise CheckpointError(
            f"{source.label}: its tokenizer cannot be copied to a temporary folder, to try it: "
            f"{reason(error)}; name another folder in TMPDIR"
        ) from error


def _check_chat(tokenizer: Tokenizer) -> None:
    """Renders the chat template once, to find damage before the first question."""
    # A valid template may refuse these messages.
    with contextlib.suppress(InputError):
        try:
            tokenizer.chat([{"role": "user", "content": "Hello"}])
        except ConfigError as error:
            # The remedy after the semicolon is for a question.
            said = str(error).rpartition(";")[0]
            raise CheckpointError(f"{said}; repair it in the source, or remove it") from error


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = "source",
    weights: str | None = None,
    progress: OnProgress | None = None,
    tell: Callable[[str], object] | None = None,
) -> storage.Manifest:
    """Converts a Hugging Face directory, a hub id or a GGUF file to a checkpoint directory.

    Of a model of text and images it is the text model.

    All is written to `DESTINATION.partial`, which is renamed at the end. It is deleted after an
    error, and kept after an interruption (Ctrl-C, a kill), from which the next conversion resumes.

    Args:
      dtype: "float32", "bfloat16", "float16", or "source" (or None) for each tensor's own, where
        quantised values count as float32.
      weights: "int8" for the layers' matrices in 8 bits, rounded from their values in
        `dtype`; from quantised blocks of a GGUF file directly.
      progress: called with (bytes done, bytes in all) of the parameters.
      tell: called with a line about what is left out, if anything is.

    Raises:
      CheckpointError: the source is incomplete or damaged, or the destination cannot be written.
      ConfigError: the model is not implemented.
      InputError: another process writes the destination.
    """
    given = dtype not in (None, "source")
    if given and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of source, {', '.join(DTYPES)}")
    if weights is not None:
        check_form(weights, "weights", ("int8",))
    if jax.process_count() > 1:
        raise ConfigError("a conversion runs in one process; start it on one host")
    destination = whole_path(destination)
    with only_writer(destination):
        check_destination(destination)
        opened = open_source(source)
        expected = expected_tensors(opened.config, opened.naming)
        steps = [
            _step(
                tensor,
                expected[tensor.name],
                np.dtype(jnp.dtype(dtype)) if given else tensor.dtype,
                weights is not None,
            )
            for tensor in opened.tensors
        ]
        if tell is not None and opened.left_out is not None:
            tell(opened.left_out)
        made_from = _made_from(opened, steps, weights)
        _check_space(destination, sum(step.nbytes for step in steps))
        with file_errors(f"{destination} cannot be written", kind=CheckpointError):
            partial = Partial(destination, made_from)
        try:
            hashes = _write_tensors(partial, steps, progress)
            _write_rest(partial, opened, steps, hashes, weights)
        except Exception as error:
            # Whatever failed (the source, the disk), what is written may be damaged.
            # KeyboardInterrupt is no Exception: an interrupted conversion stays and can resume.
            partial.discard()
            if isinstance(error, OSError):
                said = f"{destination} could not be written: {reason(error)}"
                raise CheckpointError(said) from error
            raise
    return storage.read_manifest(destination)


def _step(tensor: SourceTensor, wanted: FileTensor, dtype: np.dtype, eight_bits: bool) -> Step:
    matrix = all(part.info.in_8_bits for part in wanted.parts)
    return Step(tensor, wanted, dtype, eight_bits and matrix)


def _check_space(destination: Path, needed: int) -> None:
    """Raises CheckpointError where the disk lacks the space, before hours of work."""
    parent = next(path for path in destination.parents if path.exists())
    begun = destination.with_name(destination.name + SUFFIX)
    with file_errors(f"{parent} cannot be written", kind=CheckpointError):
        # An interrupted conversion is continued or deleted, so its space counts as free.
        free = shutil.disk_usage(parent).free
        free += sum(path.stat().st_size for path in begun.rglob("*") if path.is_file())
    if needed > free:
        raise CheckpointError(
            f"{destination} needs {shown_bytes(needed)}, {shown_bytes(free)} are free on its disk; "
            f"free some, or convert to a two-byte --dtype"
        )


def _made_from(opened: Source, steps: Sequence[Step], weights: str | None) -> dict[str, Any]:
    """The facts that must not change before an interrupted conversion is continued."""
    status = {step.tensor.file: step.tensor.file.stat() for step in steps}
    files = {path.name: [found.st_size, found.st_mtime_ns] for path, found in status.items()}
    return {
        "dtype": {step.tensor.name: step.dtype.name for step in steps},
        "weights": weights,
        "source": {**files, **{path.name: digest for path, digest in opened.read_files.items()}},
        "config": opened.config.to_dict(),
    }


def _write_tensors(
    partial: Partial, steps: Sequence[Step], progress: OnProgress | None
) -> dict[Path, str]:
    """Writes the tensors that are missing; returns the checksum of each file of tensors."""
    finished, sizes = partial.finished, [step.nbytes for step in steps]
    left = [step for step in steps if not finished.issuperset(step.stored)]
    total, done = sum(sizes), sum(sizes) - sum(step.nbytes for step in left)
    joined = Joined()
    with contextlib.ExitStack() as stack:
        files = {
            path: stack.enter_context(contextlib.closing(HashedFile(path)))
            for path in dict.fromkeys(step.tensor.file for step in steps)
        }
        for group in in_groups(left, lambda step: step.nbytes, GROUP):
            arrays: dict[str, np.ndarray] = {}
            for step in group:
                arrays |= joined.whole(step, files[step.tensor.file])
                done += step.nbytes
                if progress is not None:
                    progress(done, total)
            partial.save(arrays)
        return {path: file.finish() for path, file in files.items()}


def _write_rest(
    partial: Partial,
    opened: Source,
    steps: Sequence[Step],
    hashes: Mapping[Path, str],
    weights: str | None,
) -> None:
    """Everything after the tensors; the manifest last."""
    tokenizer = partial.folder / storage.TOKENIZER
    shutil.rmtree(tokenizer, ignore_errors=True)
    tokenizer.mkdir()
    opened.write_tokenizer(tokenizer)
    bytes_of: collections.Counter[str] = collections.Counter()
    for step in steps:
        bytes_of[step.dtype.name] += step.wanted.nbytes(step.dtype)
    entries = {
        path: storage.TensorEntry(info.shape, dtype.name)
        for step in steps
        for path, (info, dtype) in step.stored.items()
    }
    tensors = partial.check(entries)
    describe(partial.params, storage.STATE, tensors)
    manifest = storage.Manifest(
        config=opened.config,
        dtype=bytes_of.most_common(1)[0][0],
        tensors=tensors,
        source=opened.label,
        sources={path.name: digest for path, digest in {**opened.read_files, **hashes}.items()},
        files=storage.describe_files(partial.params),
        tokenizer_files=storage.describe_files(tokenizer),
        extras=opened.extras,
        weights=cast(StoredForm | None, weights),
    )
    write_text(partial.folder / storage.MANIFEST, manifest.to_json())
    partial.publish()
