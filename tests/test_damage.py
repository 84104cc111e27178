"""Random damage to everything that is written and read back: refused in one line, or harmless.

A byte is changed, an end is lost, or a file is; stored chunks or files change places, or come from
another run of the same shapes. The environment's DAMAGE_SEED makes other draws.
"""

import functools
import json
import os
import random
import resource
import shutil

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import jax_longctx
from checkpoints_convert import convert
from jax_longctx.batch import BatchOptions, lines, run_batch
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.errors import LongctxError
from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint
from tests.chunks import exchange, pairs_in
from tests.support import random_rows, tiny_engine
from tests.train_cpt.tiny_run import LOOP, STEPS, digest, prepare_tiny, run_tiny, tiny_setup
from train_cpt.loop import Checkpoints

pytestmark = pytest.mark.thorough

SEED = int(os.environ.get("DAMAGE_SEED", "0"))
FAULTS = 60


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Of floats, and of matrices in 8 bits, each beside others of the same shapes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    described = hf_config("llama", num_hidden_layers=2)
    for seed, more in enumerate(("", " other")):
        write_checkpoint(folder / f"hf{more}", described, random_state(described, seed=seed))
        convert(folder / f"hf{more}", folder / f"floats{more}")
        convert(folder / f"hf{more}", folder / f"int8{more}", weights="int8")
    return folder


def answering(checkpoints, tmp_path, monkeypatch, name="floats"):
    """A checkpoint, and what is answered by it: weights, tokens and text."""
    folder = shutil.copytree(checkpoints / name, tmp_path / "checkpoint")

    def read():
        model = jax_longctx.load(folder, chunk=16)
        (answer,) = model.generate("abc", max_tokens=3)
        weights = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model.engine.params)]
        return answer.tokens, answer.text, model.tokenizer.chat_template, weights

    return folder, read, checkpoints / f"{name} other"


def saved_context(checkpoints, tmp_path, monkeypatch):
    engine, folder, other = tiny_engine(chunk=16), tmp_path / "context", tmp_path / "other"
    plain = ocp.Context()
    # So that chunks of one shape are of one size.
    plain.array.saving.use_compression = False
    for seed, place in enumerate((folder, other)):
        context = engine.prefill(random_rows([45, 9], seed=seed), reserve=16)
        with plain:
            save_context(engine, context, place)
    asked = random_rows([4, 2], seed=5)

    def read():
        loaded = load_context(engine, folder)
        return loaded.rows, list(engine.stream(loaded, asked, max_tokens=3))

    return folder, read, other


def killed_batch(checkpoints, tmp_path, monkeypatch):
    """The files of a run of `batch` that ended at its eighth write."""
    model = jax_longctx.load(checkpoints / "floats", chunk=16)
    folder, left, append = tmp_path / "batch", [8], lines.append
    folder.mkdir()
    rows = [{"prompt": text} for text in ("ab", "abc" * 12, "b", "cab" * 9)]
    source, out = tmp_path / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = BatchOptions(rows=1, max_tokens=3, chat=False)

    def read():
        run_batch(model, source, out, options)
        text = out.read_bytes()
        out.unlink()
        return text

    def dying(file, rows):
        left[0] -= 1
        if not left[0]:
            raise SystemError("killed")
        return append(file, rows)

    with monkeypatch.context() as patch:
        patch.setattr(lines, "append", dying)
        with pytest.raises(SystemError):
            read()
    return folder, read, None


def training(checkpoints, tmp_path, monkeypatch):
    prepare_tiny(tmp_path / "data")
    run_tiny(tmp_path / "run", tmp_path / "data")
    run_tiny(tmp_path / "other", tmp_path / "data", facts={"config": "another"})
    folder, setup = tmp_path / "run" / "checkpoints", tiny_setup()

    class Position:
        """Where in the data it goes on, as `grain` keeps it."""

        def set_state(self, state):
            self.state = state

    def read():
        # The manager deletes what its own run would; here each fault meets the same files.
        with Checkpoints(folder, LOOP.keep) as saved:
            data, step = Position(), saved.newest
            state = saved.restore(step, setup, data)
            return step, digest(state), data.state, saved.best

    assert read()[0] == STEPS
    return folder, read, tmp_path / "other" / "checkpoints"


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def put_back(folder, files):
    shutil.rmtree(folder)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def places(folder, other):
    """Pairs of chunks that may change places, and of files with files that may be put there."""
    indices = [path for path in folder.rglob("manifest.ocdbt") if "process" not in path.parent.name]
    theirs = [(path, path.stat().st_size) for path in other.rglob("*") if path.is_file()]
    files = [
        (ours, path)
        for ours in sorted(folder.rglob("*"))
        for path, size in theirs
        if ours.is_file()
        and (ours.stat().st_size == size or other / ours.relative_to(folder) == path)
    ]
    return [pair for path in indices for pair in pairs_in(path.parent)], files


def damage(draw, files, found):
    """One fault, in words."""
    chunks, others = found
    if chunks and draw.random() < 0.15:
        one, another = draw.choice(chunks)
        exchange(one, another)
        return f"{one} and {another} are exchanged"
    if others and draw.random() < 0.2:
        path, theirs = draw.choice(others)
        shutil.copy(theirs, path)
        return f"{path} is {theirs}"
    # As often a small file as a place anywhere.
    sizes = [len(content) if draw.random() < 0.5 else 300 for content in files.values()]
    (path,) = draw.choices(list(files), sizes)
    content = files[path]
    kind = draw.choice(["change"] * 8 + ["cut"] * 3 + ["remove"]) if content else "remove"
    at = draw.randrange(max(len(content), 1))
    if kind == "change":
        value = draw.choice([byte for byte in range(256) if byte != content[at]])
        path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
        return f"byte {at} of {path}: {content[at]} to {value}"
    path.unlink()
    if kind == "cut":
        path.write_bytes(content[:at])
    return f"{kind} {path} at {at} of {len(content)}"


# Each makes a folder, and a function that reads it.
TARGETS = {
    "answering": answering,
    "answering_in_8_bits": functools.partial(answering, name="int8"),
    "saved_context": saved_context,
    "killed_batch": killed_batch,
    "training": training,
}


@pytest.mark.parametrize("target", TARGETS)
def test_no_damage_changes_an_answer(target, checkpoints, tmp_path, monkeypatch, capfd):
    folder, read, other = TARGETS[target](checkpoints, tmp_path, monkeypatch)
    # A string's seed is the same in every process.
    draw, files = random.Random(f"{SEED} {target}"), snapshot(folder)
    whole = read()
    put_back(folder, files)
    found = places(folder, other) if other else ([], [])
    assert other is None or all(found)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(FAULTS):
        fault = f"seed {SEED}: {damage(draw, files, found)}"
        try:
            assert read() == whole, fault
        except LongctxError as error:
            said = str(error)
            assert "\n" not in said and len(said) < 1000 and str(folder) in said, (fault, said)
            assert "learning rate" not in said, (fault, said)
            refused += 1
        except Exception as error:
            raise AssertionError(fault) from error
        printed = "".join(capfd.readouterr())
        assert "Traceback" not in printed and "rror" not in printed, (fault, printed)
        put_back(folder, files)
    assert read() == whole
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert peak < 300_000, f"{peak} KB"
    assert refused >= FAULTS / 10
    with capfd.disabled():
        print(f"\n{target}, seed {SEED}: {FAULTS} faults, {refused} refused, the others harmless")
