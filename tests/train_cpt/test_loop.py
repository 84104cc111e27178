import dataclasses
import functools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.files import read_sealed, seal
from tests.checkpoints_convert.tiny import full_disk
from tests.chunks import wrong_chunks
from tests.patience import patience
from tests.support import swap, tiny_config
from tests.train_cpt.tiny_run import (
    FACTS,
    LENGTH,
    LOOP,
    STEPS,
    digest,
    lines_of,
    losses_of,
    prepare_tiny,
    run_tiny,
    tiny_params,
    tiny_setup,
)
from train_cpt.attention import Pattern
from train_cpt.data import open_windows
from train_cpt.loop import Best, LoopConfig, train
from train_cpt.metrics import device_peak, metrics_log, read_metrics, text_flops
from train_cpt.step import text_losses

ROOT = Path(__file__).parents[2]
no_params = functools.partial(pytest.fail, "the run is begun anew")
EVALUATED = dataclasses.replace(LOOP, evaluate_every=8)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A folder with `data` and a finished `run`, and what the run ended with."""
    folder = tmp_path_factory.mktemp("train")
    prepare_tiny(folder / "data")
    return folder, run_tiny(folder / "run", folder / "data", loop=EVALUATED)


def test_a_run_has_a_line_a_step_and_keeps_the_newest_checkpoints_and_the_best(straight):
    folder, outcome = straight
    assert (outcome.step, outcome.ended) == (STEPS, "done")
    lines = [json.loads(line) for line in lines_of(folder / "run")]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert lines[-1]["loss"] < lines[0]["loss"]
    np.testing.assert_allclose(lines[0]["learning_rate"], 0.005, rtol=1e-6)
    assert all(line["gradient_norm"] > 0 < line["tokens_per_second"] for line in lines)
    assert all(0 < line["mfu"] < 1 and line["peak_bytes"] > 2**20 for line in lines)
    assert json.loads((folder / "run" / "run.json").read_text()) == FACTS
    losses = {line["dev_loss"]: line["step"] for line in lines if "dev_loss" in line}
    assert list(losses.values()) == [8, STEPS]
    # The texts are random: the more is learnt of the training split, the worse the dev loss.
    assert outcome.best == Best(losses[min(losses)], min(losses)) == Best(8, min(losses))
    assert sorted(os.listdir(folder / "run" / "checkpoints")) == ["10", "12", "8"]
    # Evaluations read the last tokens of the dev split.
    dev = open_windows(folder / "data", "dev", length=LENGTH, tokenizer="letters")
    assert 4 <= len(dev) < 8
    expected = text_losses(tiny_setup(), outcome.state.params, dev[:4].astype(np.int32), 4)
    np.testing.assert_allclose(lines[-1]["dev_loss"], expected, rtol=1e-6)


def test_sigterm_saves_and_the_run_goes_on_the_same(straight, tmp_path, monkeypatch):
    folder, outcome = straight
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def progress(step, steps, line):
        assert (steps, line["step"]) == (STEPS, step)
        os.chdir(folder)
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    # Without checkpoints but those of its end.
    ended = {"loop": dataclasses.replace(LOOP, save_every=STEPS)}
    first = run_tiny(Path("../a run"), folder / "data", progress=progress, **ended)
    assert (first.step, first.ended) == (5, "terminated")
    assert signal.getsignal(signal.SIGTERM) is before
    run = shutil.move(tmp_path / "a run", tmp_path / "moved")
    # Lines of steps after the checkpoint, and one that was cut short, are dropped.
    with metrics_log(run, 5) as write:
        write({"step": 6, "loss": 0})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    again = Path(f"/{tmp_path}/here/../moved")
    second = run_tiny(again, folder / "data", make_params=no_params, **ended)
    assert digest(second.state) == digest(outcome.state)
    assert losses_of(run) == losses_of(folder / "run")
    assert sorted(os.listdir(tmp_path)) == ["here", "moved"]


@pytest.fixture
def copied(straight, tmp_path):
    """The newest checkpoint of a copy of the finished run, what reads it, and checks the error."""
    run, data = shutil.copytree(straight[0] / "run", tmp_path / "run"), straight[0] / "data"
    read = functools.partial(run_tiny, run, data, loop=EVALUATED, make_params=no_params)

    def refused(message):
        with pytest.raises(CheckpointError, match=rf"run/checkpoints/{STEPS}.*{message}") as caught:
            read()
        assert "\n" not in str(caught.value) and "learning rate" not in str(caught.value)

    return run / "checkpoints" / str(STEPS), read, refused


def test_a_damaged_checkpoint_is_refused_and_the_one_before_serves(straight, copied, capfd):
    newest, read, refused = copied
    for item in ("state", "position"):
        files = [path for path in (newest / item).rglob("*") if path.is_file()]
        path = max(files, key=lambda path: path.stat().st_size)
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:middle]):
            path.write_bytes(damaged)
            refused("; move ")
        path.unlink()
        refused("; move ")
        path.write_bytes(content)
    assert "Traceback" not in capfd.readouterr().err
    shutil.rmtree(newest)
    again = read()
    assert digest(again.state) == digest(straight[1].state) and again.best == straight[1].best
    assert sorted(os.listdir(newest.parent)) == ["10", "12", "8"]


@pytest.mark.slow
def test_chunks_of_another_step_are_refused(copied):
    newest, _, refused = copied
    for _ in wrong_chunks(newest / "state", newest.with_name("10") / "state"):
        refused(" has other chunks .*; move ")


@pytest.mark.parametrize("of", ["step", pytest.param("run", marks=pytest.mark.slow)])
def test_files_of_another_step_or_run_are_refused(straight, copied, tmp_path, of):
    newest, read, refused = copied
    source = newest.with_name("10")
    if of == "run":
        run_tiny(tmp_path / "other", straight[0] / "data", facts={"config": {"tiny": False}})
        source = tmp_path / "other/checkpoints" / str(STEPS)
    for items in (["state"], ["position"], ["state", "position"]):
        for item in items:
            swap(newest / item, source / item)
        refused(" has files of another run or anoth")
        for item in items:
            swap(newest / item, source / item)
    (newest / "state" / "arrays.json").unlink()
    refused(r"arrays\.json is missing")
    # As an earlier version wrote it.
    path = newest / "position" / "position.json"
    position = read_sealed(path, 1, "")
    path.write_text(json.dumps(seal(1, {key: position[key] for key in ("data", "best")})))
    assert digest(read().state) == digest(straight[1].state)


def test_a_loss_that_is_no_number_stops_with_its_batch(straight, tmp_path):
    broken = jax.tree.map(lambda leaf: leaf * np.nan, tiny_params())
    with pytest.raises(InputError, match=r"loss of step 1 is nan; .*newest checkpoint is none"):
        run_tiny(tmp_path / "run", straight[0] / "data", make_params=lambda: broken)
    assert np.load(tmp_path / "run" / "bad-batch-1.npy").shape == (2, 4, LENGTH)
    assert lines_of(tmp_path / "run") == []


def test_finished_runs_other_runs_and_folders_are_left_alone(straight, tmp_path):
    folder, outcome = straight
    before = lines_of(folder / "run")
    facts = {**FACTS, "versions": {"jax": "newer"}}
    again = run_tiny(folder / "run", folder / "data", facts=facts, make_params=no_params)
    assert again.ended == "done" and digest(again.state) == digest(outcome.state)
    (tmp_path / "run.json").write_text("[" * 100_000)
    for place, facts, message in (
        (folder / "run", {"config": {"tiny": False}}, "made with config.tiny True, now it is Fal"),
        (folder / "data", FACTS, "is not empty and no run"),
        (tmp_path, FACTS, r"run\.json cannot be read: maximum recursion"),
    ):
        with pytest.raises(InputError, match=message):
            run_tiny(place, folder / "data", facts=facts)
    assert lines_of(folder / "run") == before


def test_what_does_not_fit_is_refused_before_anything_is_written(straight, tmp_path):
    folder, _ = straight
    windows, dev = (
        open_windows(folder / "data", split, length=LENGTH, tokenizer="letters")
        for split in ("train", "dev")
    )
    evaluating = LoopConfig(rows=16, evaluate_every=1)
    for loop, mesh, texts, error, message in (
        (LoopConfig(rows=3), (2, 1, 1), windows, ConfigError, "rows=3 do not divide over .*data=2"),
        (evaluating, (1, 1, 1), windows, ConfigError, "rows=16 texts .*, the dev"),
        (LoopConfig(), (1, 3, 1), windows, ConfigError, "seq=3"),
        (LoopConfig(), (1, 1, 1), dev[:0], InputError, "training split has no text"),
    ):
        with pytest.raises(error, match=message):
            train(loop, tiny_setup(mesh), no_params, texts, dev, tmp_path / "run", facts=FACTS)
    with pytest.raises(ConfigError, match="save_every must be at least 1, got 0"):
        LoopConfig(save_every=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.thorough
def test_a_train_run_survives_kill_9(tmp_path):
    kills = 5
    command = [sys.executable, "-m", "tests.train_cpt.tiny_run", tmp_path, kills, kills]
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": patience(500)}
    done = subprocess.run([str(word) for word in command], **how)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"killed": kills}


def events_of(directory):
    """(step, name, value) of every scalar, and the steps that readers are told to forget."""
    scalars, forgotten = [], []
    for path in sorted((directory / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            # A record is its length, a checksum of that, the event, a checksum.
            (size,) = struct.unpack_from("<Q", data)
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[size + 16 :]
            scalars += [(event.step, item.tag, item.simple_value) for item in event.summary.value]
            if event.session_log.status == event.session_log.START:
                forgotten.append(event.step)
    return scalars, forgotten


@pytest.mark.parametrize(("size", "name"), [(20, "events.out.tfevents."), (60, "metrics.jsonl")])
def test_a_full_disk_is_named_by_its_file(tmp_path, size, name):
    line = {"step": 1, "loss": 0.5, "gradient_norm": 0.25, "learning_rate": 0.125, "mfu": 0.5}
    said = rf"{name}.* could not be "
    with full_disk(size), pytest.raises(InputError, match=said), metrics_log(tmp_path, 0) as write:
        write(line)


def test_lines_are_events_too_and_both_go_on_from_a_step(tmp_path):
    with metrics_log(tmp_path, 0) as write:
        for step in (1, 2, 3):
            write({"step": step, "loss": 1 / step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    last = {"step": 3, "loss": 7.0, "dev_loss": 8.0}
    with metrics_log(tmp_path, 2) as write:
        write(last)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, last]
    scalars, forgotten = events_of(tmp_path)
    assert [(step, name) for step, name, _ in scalars] == [
        *((step, "loss") for step in (1, 2, 3, 3)),
        (3, "dev_loss"),
    ]
    assert [value for _, _, value in scalars] == pytest.approx([1, 0.5, 1 / 3, 7, 8])
    assert forgotten == [3]


def test_damaged_and_foreign_metrics_are_named_by_file_and_line(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, facts in ((one, FACTS), (other, {"config": {"tiny": False}})):
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(facts))
        with metrics_log(folder, 0) as write:
            write({"step": 1, "loss": 2.5})
            write({"step": 2, "loss": 1.5})
    (first, second), (_, foreign) = lines_of(one), lines_of(other)
    plain, path = '{"step": 2, "loss": 1.5}', one / "metrics.jsonl"
    for number, lines in (
        (1, (first.replace("2.5", "3.5"), second)),
        *((2, (first, damaged)) for damaged in (foreign, plain, "{")),
    ):
        path.write_text("\n".join((*lines, "")))
        for read in (lambda: read_metrics(one), lambda: metrics_log(one, 2).__enter__()):
            with pytest.raises(InputError, match=rf"one/metrics\.jsonl is damaged: line {number} "):
                read()
    # Those of an earlier version have no checksums, and get them where the run goes on.
    path.write_text(f'{{"step": 1, "loss": 2.5}}\n{plain}\n')
    assert len(read_metrics(one)) == 2
    with metrics_log(one, 1) as write:
        write({"step": 2, "loss": 1.5})
    assert lines_of(one) == [first, second]


def test_flops_count_the_matmuls_and_the_pairs_that_meet():
    # Each layer: q and o 32 x 32, k and v 32 x 16, three of 32 x 48; a table of 64 x 32.
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 64 * 32
    length, heads = 10, 4 * 8
    expected = 6 * weights * length + 12 * heads * 2 * (10 * 11 // 2)
    assert text_flops(tiny_config(), Pattern(), length) == expected
    assert text_flops(tiny_config(tie_embeddings=True), Pattern(), length) == expected
    # The last 4 see 3 of the first 6 each, and their own.
    fewer = 12 * heads * 2 * (55 - (21 + 4 * 3 + 10))
    assert text_flops(tiny_config(), Pattern(tail=4, budget=3), length) == expected - fewer
    assert text_flops(tiny_config(), Pattern(tail=4, budget=99), length) == expected


def test_a_device_without_a_data_sheet_is_measured():
    assert 1e8 < device_peak(jax.devices()[0], "float32") < 1e14
    listed = SimpleNamespace(device_kind="NVIDIA H200")
    assert device_peak(listed, "bfloat16") == 989.4e12
