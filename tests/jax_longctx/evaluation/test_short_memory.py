"""Memory that is short: batches are halved, a row alone is refused and tried again another day."""

import jax
import pytest

from jax_longctx.evaluation import compute
from jax_longctx.evaluation.rows import RowStore, read_rows
from tests.jax_longctx.evaluation.test_runner import by_key, config, evaluate, without_times

FEW = "small stored=2"
SHORT = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"


@pytest.fixture
def short(monkeypatch):
    """Lets batches be short of memory: those of which the function says so."""
    answers = compute._answers

    def fail(where):
        def short_of_memory(model, work):
            if where(work):
                raise jax.errors.JaxRuntimeError(SHORT)
            return answers(model, work)

        monkeypatch.setattr(compute, "_answers", short_of_memory)

    return fail


def test_rows_of_a_batch_are_planned_for_the_memory(tiny):
    engine = tiny.engine
    row = 2 * 2 * 2 * 8 * 4 * 256
    # Three quarters of the memory; a row has its length beside keys and values.
    for memory, rows in ((None, 8), (8 * row * 3, 8), (4 * row * 3 // 2, 4), (row // 2, 1)):
        assert compute.rows_that_fit(engine, 8, 256, 128, memory) == rows


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_halved(small, tiny, tmp_path, short):
    shapes = []

    def where(work):
        shapes.append(work.rows)
        return work.rows > 1 or len(work.contexts[0]) > 40

    whole = without_times(evaluate(tiny, tmp_path / "whole", config(trials=3, batch=3)))
    short(where)
    rows = by_key(evaluate(tiny, tmp_path / "halves", config(trials=3, batch=3)))
    assert shapes == [3, 2, 1, 1, 1]
    refused = {key for key, row in rows.items() if "refused" in row}
    assert {rows[key]["refused"] for key in refused} == {f"out of memory: {SHORT}"}
    long = {key for key, row in whole.items() if row["tokens"]["context"] > 40}
    assert refused == long and 0 < len(long) < 3
    for key in whole.keys() - refused:
        assert rows[key]["answer"] == whole[key]["answer"]


def test_what_was_short_of_memory_is_tried_again_by_the_next_run(
    small, tiny, tmp_path, monkeypatch, computed, short
):
    chosen = config(("full", "infllm"), tasks=("small", "small:stored=2"), trials=2)
    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine, "memory_limit", 1000)
        rows = by_key(evaluate(tiny, tmp_path, chosen))
    assert all("refused" in row for row in rows.values())
    left = {key for key, row in rows.items() if row.get("short_of_memory")}
    # What no memory helps: a model too small for the method, a prompt too long.
    assert left == {("full", "small", 64, 0), ("full", "small", 64, 1), ("full", FEW, 64, 0)}
    computed.clear()
    seen, exhausted = [], True
    short(lambda work: exhausted)
    rows = by_key(evaluate(tiny, tmp_path, chosen, progress=seen.append))
    assert sum(computed) == 3 and (seen[-1].before, seen[-1].done) == (len(rows) - 3, 3)
    assert {key for key, row in rows.items() if "out of memory" in row["refused"]} == left
    computed.clear()
    exhausted = False
    rows = by_key(evaluate(tiny, tmp_path, chosen))
    assert sum(computed) == 3
    assert {key for key, row in rows.items() if "measures" in row} == left
    assert not any("refused" in rows[key] for key in left)
    assert by_key(read_rows(tmp_path)) == rows
    computed.clear()
    assert by_key(evaluate(tiny, tmp_path, chosen)) == rows and computed == []


def test_of_two_folders_the_one_that_had_the_memory_counts(tmp_path):
    row = {"label": "full", "task_label": "small", "length": 64, "index": 0, "prompt_sha256": "a"}
    short, found = row | {"refused": "no", "short_of_memory": True}, row | {"answer": "7"}
    for name, kept in (("short", short), ("found", found)):
        store = RowStore(tmp_path / name, {})
        store.add([kept])
        store.close()
    for order in (("short", "found"), ("found", "short")):
        assert read_rows(*(tmp_path / name for name in order)) == [found]


def test_a_row_in_the_shape_of_a_batch_is_tried_alone(small, tiny, tmp_path, short):
    short(lambda work: work.rows > 1)
    # The third row of three is left for a batch of two.
    rows = evaluate(tiny, tmp_path, config(trials=3, batch=2))
    assert len(rows) == 3 and not any("refused" in row for row in rows)


def test_of_several_processes_one_short_of_memory_does_not_go_its_own_way(
    small, tiny, tmp_path, monkeypatch, short
):
    """The others may be in the middle of the same batch: the job ends."""

    def where(work):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        return True

    short(where)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        evaluate(tiny, tmp_path, config(trials=2, batch=2))
