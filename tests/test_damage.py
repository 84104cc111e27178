"""Random damage to everything that is written and read back: refused in one line, or harmless.

A byte is changed, an end is lost, or a file is. Two files or stored chunks change places, a file
comes from another checkpoint, context or run of the same shapes, or lies there beside the others.
What an unfinished run was asked changes. The environment's DAMAGE_SEED makes other draws.
"""

import dataclasses
import functools
import json
import os
import random
import resource
import shutil
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import jax_longctx
from checkpoints_convert import convert
from jax_longctx.batch import BatchOptions, run_batch
from jax_longctx.engine.compiling import forget
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.errors import LongctxError
from jax_longctx.evaluation.rows import read_rows
from jax_longctx.jobs import lines
from jax_longctx.models import storage
from jax_longctx.models.params import init_params
from jax_longctx.settings import Sampling
from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint
from tests.chunks import exchange, pairs_in
from tests.jax_longctx.cli.conftest import tiny, tokenizer_folder
from tests.jax_longctx.engine.test_ahead import answers
from tests.jax_longctx.engine.test_stored import compiled
from tests.jax_longctx.evaluation.conftest import small
from tests.jax_longctx.evaluation.test_runner import config, evaluate, without_times
from tests.jax_longctx.serving.conftest import serving
from tests.jax_longctx.serving.tiny import BOOK, complete
from tests.jax_longctx.serving.tiny import read as post
from tests.stored_programs import storing
from tests.support import random_rows, tiny_config, tiny_engine
from tests.train_cpt.tiny_run import LOOP, STEPS, digest, prepare_tiny, run_tiny, tiny_setup
from train_cpt.loop import Checkpoints

__all__ = ["small", "tiny", "tokenizer_folder"]

pytestmark = pytest.mark.thorough

SEED = int(os.environ.get("DAMAGE_SEED", "18"))
FAULTS = 36


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Of floats, and of matrices in 8 bits; two of each, which differ in all weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    described = hf_config("llama", num_hidden_layers=2)
    for twin in (0, 1):
        source = folder / f"hf{twin}"
        write_checkpoint(source, described, random_state(described, seed=twin))
        convert(source, folder / f"floats{twin}")
        convert(source, folder / f"int8{twin}", weights="int8")
    return folder


# Each of these makes what is read in an empty folder, and returns the files' folder with a function
# that reads it: what must be the same after a fault. Of twin 1 only the files are taken.


def answering(asked, root, twin, name="floats"):
    """A checkpoint, and what is answered by it: weights, tokens and text."""
    source = asked.getfixturevalue("checkpoints") / f"{name}{twin}"
    folder = shutil.copytree(source, root / "checkpoint")

    def read():
        model = jax_longctx.load(folder, chunk=16)
        (answer,) = model.generate("abc", max_tokens=3)
        weights = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model.engine.params)]
        return answer.tokens, answer.text, model.tokenizer.chat_template, weights

    return folder, read


def saved_context(asked, root, twin):
    engine, folder = tiny_engine(chunk=16), root / "context"
    context = engine.prefill(random_rows([45, 9], seed=twin), reserve=16)
    with pytest.MonkeyPatch.context() as patch:
        # So that chunks of one shape are of one size.
        patch.setattr(storage, "SMALLER", ())
        save_context(engine, context, folder)
    questions = random_rows([4, 2], seed=5)

    def read():
        loaded = load_context(engine, folder)
        return loaded.rows, list(engine.stream(loaded, questions, max_tokens=3))

    return folder, read


PROMPTS = ("ab", "abc" * 12, "b", "cab" * 9)
ASKED = BatchOptions(rows=1, max_tokens=3, chat=False)


def killed_batch(asked, root, twin):
    model = jax_longctx.load(asked.getfixturevalue("checkpoints") / "floats0", chunk=16)
    folder, left, append = root / "batch", [5], lines.append
    folder.mkdir()
    source, out = root / "in.jsonl", folder / "out.jsonl"

    def read(prompts=PROMPTS, model=model, **changed):
        source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        run_batch(model, source, out, dataclasses.replace(ASKED, **changed))
        return out.read_bytes()

    def dying(file, rows):
        left[0] -= 1
        if not left[0]:
            raise SystemError("killed")
        return append(file, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "append", dying)
        with pytest.raises(SystemError):
            read([f"{'c' * twin}{text}" for text in PROMPTS])
    return folder, read


def evaluation(asked, root, twin):
    model, folder = asked.getfixturevalue("tiny"), root / "rows"
    asked.getfixturevalue("small")

    def read():
        evaluate(model, folder, config(trials=3, seed=twin))
        return without_times(read_rows(folder))

    read()
    return folder, read


def training(asked, root, twin):
    prepare_tiny(root / "data")
    params = init_params(tiny_config(num_layers=1), seed=twin)
    run_tiny(root / "run", root / "data", make_params=lambda: params)
    folder, setup = root / "run" / "checkpoints", tiny_setup()

    def read():
        # The manager deletes what its own run would; here each fault meets the same files.
        with Checkpoints(folder, LOOP.keep) as saved:
            data, step = Mock(), saved.newest
            state = saved.restore(step, setup, data)
            return step, digest(state), data.set_state.call_args, saved.best

    assert read()[0] == STEPS
    return folder, read


def server(asked, root, twin):
    """Contexts that a server saved, and what another answers about those that it finds."""
    model, folder = asked.getfixturevalue("tiny"), root / "contexts"
    with serving(model, folder) as running, running.http() as http:
        for number in range(2):
            post(http, text=f"{number}{'ab'[twin]} {BOOK}", chat=bool(number), save=True)

    def read():
        found = {}
        with serving(model, folder) as running, running.http() as http, running.client() as client:
            for each in http.get("/v1/contexts").json()["data"]:
                how = {"extra_body": {"context": each["id"], "seed": 3}, "max_tokens": 4}
                choice = complete(client, "What?", **how).choices[0]
                found[each["id"]] = each["chat"], each["tokens"], choice.text
        return found

    return folder, read


def programs(asked, root, twin):
    folder, name = root / "programs", ("full", "streaming-llm")[twin]
    folder.mkdir()

    def read():
        with storing(folder):
            forget()
            engine, _ = compiled(name)
            return answers(engine)

    read()
    return folder, read


def snapshot(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def put_back(folder, files):
    shutil.rmtree(folder)
    for name, content in files.items():
        write(folder / name, content)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def alike(name, files):
    """The others in folders of one name with one ending, if there are: arrays with arrays."""
    kind = name.parent.name, name.suffix
    found = [each for each in files if (each.parent.name, each.suffix) == kind and each != name]
    return found or list(files)


def damage(draw, folder, files, twins, chunks):
    """One fault, in words; `twins` are another's files by their paths in its folder."""
    if chunks and draw.random() < 0.15:
        one, other = draw.choice(chunks)
        exchange(one, other)
        return f"{one} and {other} are exchanged"
    # As often a small file as a place anywhere.
    sizes = [len(content) if draw.random() < 0.5 else 300 for content in files.values()]
    (name,) = draw.choices(list(files), sizes)
    path, content = folder / name, files[name]
    kind = draw.choice(["change"] * 5 + ["cut"] * 2 + ["remove"] + ["swap"] * 4 + ["twin"] * 4)
    if not content or kind == "remove":
        path.unlink()
        return f"remove {name}"
    if kind == "swap":
        other = draw.choice(alike(name, files))
        path.write_bytes(files[other])
        (folder / other).write_bytes(content)
        return f"swap {name} with {other}"
    if kind == "twin":
        other = name if name in twins else draw.choice(alike(name, twins))
        target = draw.choice([name, other])
        write(folder / target, twins[other])
        return f"another's {other} as {target}"
    at = draw.randrange(len(content))
    if kind == "cut":
        path.write_bytes(content[:at])
        return f"cut {name} at {at} of {len(content)}"
    value = draw.choice([byte for byte in range(256) if byte != content[at]])
    path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
    return f"byte {at} of {name}: {content[at]} to {value}"


TARGETS = {
    "answering": answering,
    "answering_in_8_bits": functools.partial(answering, name="int8"),
    "saved_context": saved_context,
    "killed_batch": killed_batch,
    "evaluation": evaluation,
    "training": training,
    "server": server,
    "programs": programs,
}
# These do without what is damaged: contexts are gone, programs are compiled again.
MENDED = "server", "programs"


def made(asked, root, target):
    found = []
    for twin in (1, 0):
        (root / str(twin)).mkdir(parents=True)
        folder, read = TARGETS[target](asked, root / str(twin), twin)
        found.append(snapshot(folder))
    return folder, read, found[1], found[0]


def refusal(error, folder):
    """Checks that an error says in one line what is wrong with which file."""
    said = str(error)
    assert "\n" not in said and len(said) < 1000 and str(folder) in said, said
    assert "learning rate" not in said, said


@pytest.mark.parametrize("target", TARGETS)
def test_no_damage_changes_an_answer(target, request, tmp_path, caplog):
    folder, read, files, twins = made(request, tmp_path, target)
    # uvicorn closes all handlers of logs, and absl's closes a stream of this fixture's.
    capfd = None if target == "server" else request.getfixturevalue("capfd")
    # A string's seed is the same in every process.
    draw = random.Random(f"{SEED} {target}")
    whole = read()
    put_back(folder, files)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stores = {path.parent for path in folder.rglob("manifest.ocdbt")}
    stores = sorted(store for store in stores if "process" not in store.name)
    refused, chunks = 0, [pair for store in stores for pair in pairs_in(store)]
    assert chunks or target in ("killed_batch", "evaluation", "server", "programs")
    for _ in range(FAULTS):
        fault = f"seed {SEED}: {damage(draw, folder, files, twins, chunks)}"
        try:
            found = read()
            if target == "server":
                refused += found != whole
                assert found.items() <= whole.items(), fault
            else:
                assert found == whole, fault
        except LongctxError as error:
            assert target not in MENDED, fault
            refusal(error, folder)
            refused += 1
        except Exception as error:
            raise AssertionError(fault) from error
        printed = "".join(capfd.readouterr()) if capfd else ""
        assert "rror" not in printed, (fault, printed)
        assert "Traceback" not in printed + caplog.text, (fault, caplog.text)
        caplog.clear()
        put_back(folder, files)
    assert read() == whole
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # Programs that compile take more.
    assert target == "programs" or peak < 300_000, f"{peak} KB"
    assert target in MENDED or refused >= FAULTS / 10
    print(f"{target}, seed {SEED}: {FAULTS} faults, {refused} refused, the others harmless")


def test_what_is_unfinished_answers_nothing_else(request, tmp_path):
    draw = random.Random(f"{SEED} inputs")
    folder, read, files, _ = made(request, tmp_path, "killed_batch")
    other = jax_longctx.load(request.getfixturevalue("checkpoints") / "floats1", chunk=16)
    whole = read()
    for _ in range(FAULTS // 2):
        put_back(folder, files)
        if draw.random() < 0.5:
            read()
        at = draw.randrange(len(PROMPTS))
        before, after = PROMPTS[:at], PROMPTS[at + 1 :]
        changed = draw.choice(
            [
                {"prompts": [*before, PROMPTS[at] + "c", *after]},
                {"prompts": [*before, "cc", *PROMPTS[at:]]},
                {"prompts": before + after},
                {"prompts": PROMPTS[::-1]},
                {"max_tokens": draw.choice([2, 4])},
                {"stop": ("x",)},
                {"sampling": Sampling(temperature=1.0)},
                {"model": other},
            ]
        )
        with pytest.raises(LongctxError, match=r"out\.jsonl") as refused:
            read(**changed)
        refusal(refused.value, folder)
        # What was answered is not lost.
        assert read() == whole, changed
