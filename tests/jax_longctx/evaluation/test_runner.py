import functools
import hashlib
import json

import jax
import pytest

from jax_longctx.api import LongContext
from jax_longctx.engine.compiling import CompileClock, forget
from jax_longctx.errors import ConfigError, InputError, LongctxError, OriginError
from jax_longctx.evaluation import compute, runner
from jax_longctx.evaluation.config import parse_config
from jax_longctx.evaluation.prompts import draw
from jax_longctx.evaluation.rows import open_rows, read_rows
from jax_longctx.evaluation.tasks.task import Sample
from jax_longctx.methods.full import Full
from jax_longctx.models.params import init_params
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import Offload
from jax_longctx.sharding import make_mesh
from jax_longctx.text import PromptLayout
from tests.jax_longctx.evaluation.conftest import SmallTask
from tests.small_methods import small_method
from tests.stored_programs import storing
from tests.support import engine_over

STREAMING = "streaming-llm:budget=32,chunk=16"


def config(methods=("full",), tasks=("small",), lengths=(64,), trials=3, **run):
    part = {"methods": list(methods), "tasks": list(tasks), "lengths": list(lengths)}
    return parse_config({"run": {"batch": 2, **run}, "part": [{**part, "trials": trials}]})


def evaluate(model, folder, chosen, **options):
    return runner.run_eval(model, chosen, folder, facts=lambda model: {"device": "here"}, **options)


def by_key(rows):
    return {(r["label"], r["task_label"], r["length"], r["index"]): r for r in rows}


def without_times(rows):
    kept = [{k: v for k, v in row.items() if k not in ("seconds", "compiled")} for row in rows]
    return by_key(kept)


@pytest.fixture
def watched(monkeypatch):
    """Lets a test see each batch before it is answered, or answer it by what it returns."""

    def watch(see):
        answer = compute.answer_batch

        def answered(*given):
            found = see(*given)
            return answer(*given) if found is None else found

        monkeypatch.setattr(runner, "answer_batch", answered)

    return watch


@pytest.fixture
def compiled(monkeypatch, watched):
    """Programs that each batch has compiled, from when the list is called on."""
    numbers, answer = [], compute.answer_batch

    def counted(*given):
        with CompileClock() as clock:
            found = answer(*given)
        numbers.append(clock.programs)
        return found

    monkeypatch.setattr(LongContext, "compiles_ahead", True)
    watched(counted)
    return numbers


@pytest.fixture
def failing(monkeypatch):
    answers = compute._answers

    def fail(error_of):
        def answered(model, work):
            if error := error_of(work):
                raise error
            return answers(model, work)

        monkeypatch.setattr(compute, "_answers", answered)

    return fail


SHORT = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"


def short(where):
    return lambda work: jax.errors.JaxRuntimeError(SHORT) if where(work) else None


def test_every_row_is_what_its_prompt_gives_alone(small, tiny, tmp_path, computed):
    rows = evaluate(tiny, tmp_path, config(trials=5))
    assert computed == [2, 2, 1]
    assert sorted(row["index"] for row in rows) == [0, 1, 2, 3, 4]
    task, count = SmallTask(), lambda text: len(tiny.tokenizer.encode(text))
    samples = list(task.samples(count, tokens=64, trials=5, seed=0))
    for sample in samples:
        (row,) = (row for row in rows if row["index"] == sample.index)
        asked = sample.query + sample.answer_prefix
        context = tiny.tokenizer.encode(sample.context, bos=True)
        read = tiny.engine.prefill([context], reserve=128)
        (answer,) = tiny.ask(read, asked, max_tokens=4, keep=False)
        assert row["answer"] == answer.text
        score = 100.0 * ((len(answer.text) + sample.index) % 2)
        assert row["measures"] == {"score": score, "length": len(answer.text)}
        text = f"{sample.context}\0{asked}".encode()
        assert row["prompt_sha256"] == hashlib.sha256(text).hexdigest()
        tokens = [row["tokens"][part] for part in ("context", "question", "answer")]
        assert tokens == [len(context), count(asked), len(answer.tokens)]
    row = rows[0]
    assert row["method"] == {"name": "full", "settings": {}} and row["device"] == "here"
    settings = {"graded": False, "stored": 0, "asks": 1, "max_new": 4}
    assert row["task"] == {"name": "small", "settings": settings, "files": {}}
    assert (row["seed"], row["length"], row["outputs"]) == (0, 64, [str(row["index"])])
    assert row["seconds"]["first_token"] > 0 and row["seconds"]["token"] > 0
    # Two layers of keys and values of two heads, eight wide, in float32, in 256 slots and lengths.
    assert 0 <= row["bytes"]["resident"] - 2 * 2 * 2 * 8 * 4 * 256 < 64
    assert row["bytes"]["read"] <= row["bytes"]["resident"]
    # Nothing is compiled for a shape that was there before.
    assert not rows[-1]["compiled"]


@pytest.mark.slow
def test_programs_of_all_tasks_compile_first(small, tiny, tmp_path, monkeypatch, compiled):
    monkeypatch.setattr(runner, "TOGETHER", 2)
    order, compile_ = [], runner.compile_batch

    def compiling(model, engine, work, **how):
        order.append((work.method, work.rows, len(compiled)))
        return compile_(model, engine, work, **how)

    # More rows of the others fit than of the first.
    monkeypatch.setattr(
        runner, "rows_that_fit", lambda engine, rows, *_: 1 if engine.method == Full() else rows
    )
    # Questions and answers of the tasks differ, which other programs read.
    tasks = ("small:asks=12", "small", "small:asks=40,max_new=70")
    size = dict(lengths=(768,), trials=2)
    evaluate(tiny, tmp_path, config(("snapkv:budget=64",), tasks, **size))
    compiled.clear()
    monkeypatch.setattr(runner, "compile_batch", compiling)
    methods = ("full", STREAMING, "tova:budget=32,chunk=16", "snapkv:budget=64")
    rows = evaluate(tiny, tmp_path, config(methods, tasks, **size))
    assert {row["tokens"]["question"] for row in rows} == {12, 100, 324}
    # The two tasks with equal answers share texts. The third method waits for six batches.
    assert order == [("full", 1, 0), ("streaming-llm", 2, 0), ("tova", 2, 6)]
    assert compiled == [0] * 8
    # The first use of programs is slower than the next.
    first = [row["task_label"] for row in rows if row["label"] == "full" and row["compiled"]]
    assert len(first) == len(set(first)) == 3


@pytest.mark.slow
def test_programs_that_methods_share_are_compiled_once(small, tiny, tmp_path, compiled):
    engine = tiny.engine
    looped = engine_over(
        engine.config, engine.params, Full(), engine.mesh, chunk=64, by_layer=False
    )
    model = LongContext(looped, tiny.tokenizer, tiny.manifest)
    with storing(tmp_path / "programs") as folder:
        folder.mkdir()
        chosen = config(("full", STREAMING), lengths=(768,), trials=2)
        expected = evaluate(model, tmp_path / "alone", chosen)
        assert any(folder.iterdir())
        forget()
        for each in folder.iterdir():
            each.unlink()
        compiled.clear()
        rows = evaluate(model, tmp_path / "out", chosen)
    assert without_times(rows) == without_times(expected)
    assert compiled == [0, 0]


@pytest.mark.slow
def test_contexts_in_the_hosts_memory_give_the_same_rows(small, tiny, tmp_path, watched):
    quest, engines = "quest:budget=16,sink=2,local=16", []
    watched(lambda model, engine, work: engines.append(engine.setup))
    chosen = {"methods": ("full", quest), "trials": 2, "batch": 1}
    here = evaluate(tiny, tmp_path / "here", config(**chosen))
    assert all(setup.offload is None for setup in engines)
    evaluate(tiny, tmp_path / "there", config(**chosen | {"trials": 1}))
    engines.clear()
    tier = {"offload": "host", "working_set": 64}
    there = evaluate(tiny, tmp_path / "there", config(**chosen, **tier))
    assert [setup.offload for setup in engines] == [None, Offload(64)]
    there, here = (by_key(rows) for rows in (there, here))
    assert len(there) == 4
    assert all(row["answer"] == here[key]["answer"] for key, row in there.items())
    (row,) = evaluate(tiny, tmp_path / "no", config((STREAMING,), trials=1, **tier))
    assert row["refused"].startswith("streaming-llm cannot be offloaded")
    with pytest.raises(ConfigError, match="give offload host too"):
        config(working_set=64)


def test_all_methods_get_the_same_prompts_and_the_whole_question(small, tiny, tmp_path, watched):
    works = []

    def recorded(model, engine, work):
        works.append((type(engine.method).__name__, work))
        return [{"refused": "not asked"}] * len(work.contexts)

    watched(recorded)
    evaluate(tiny, tmp_path, config(("full", "citrus:budget=32,chunk=16"), trials=2, batch=4))
    (one, full), (other, citrus) = works
    assert (one, other) == ("Full", "Citrus")
    assert (full.contexts, full.questions) == (citrus.contexts, citrus.questions)
    assert full.questions == [[tiny.tokenizer.encode("\nWhich key?\nIt is")]] * 2
    # Two prompts need no batch of four; 128 is for the question and four tokens, rounded up.
    assert (full.rows, full.max_new, full.reserve) == (2, 4, 128)
    assert full.slots == max(map(len, full.contexts)) + full.reserve + 1


@pytest.mark.parametrize(
    "method", ["full", "snapkv:budget=16,window=4", "citrus:budget=128,chunk=16"]
)
def test_questions_over_one_text_read_it_once(tiny, tmp_path, watched, method, failing):
    texts, read = ["Rain falls. It is day.", "The wind turns."], []
    asked = [(0, "Who?"), (1, "What falls?"), (0, "When does the rain fall?"), (0, "Why?")]
    path = tmp_path / "my.jsonl"
    lines = [{"text": texts[i], "question": words, "answers": "x"} for i, words in asked]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    watched(lambda model, engine, work: read.extend(map(tuple, work.contexts)))
    chosen = config((method,), (f"questions:file={path},answer_tokens=4",), (256,), trials=9)
    rows = evaluate(tiny, tmp_path / "out", chosen)
    again = method.startswith("citrus")
    assert len(read) == (4 if again else 2) and len(set(read)) == 2
    assert sorted(row["index"] for row in rows) == [0, 1, 2, 3]
    assert all(row["prompt"]["context"] in texts and "answer" in row for row in rows), rows
    # Where the text's copy for each question does not fit, each is asked alone.
    failing(short(lambda work: max(map(len, work.questions)) > 1))
    alone = without_times(evaluate(tiny, tmp_path / "alone", chosen))
    apart = {key: row | {"rows": 1} for key, row in without_times(rows).items()}
    assert {key: row | {"rows": 1} for key, row in alone.items()} == apart


def test_special_tokens_in_a_sample_are_text(tiny, monkeypatch):
    layout = PromptLayout("<|turn|>user\n", "", "<|end|>\n<|turn|>assistant\n", templated=True)
    sample = Sample(0, "a<|end|>", "<|turn|>?", "<|end|>", ("",), 60, {})
    monkeypatch.setattr(SmallTask, "samples", lambda *_, **how: [sample])
    (prompt,) = draw(SmallTask(), tiny.tokenizer, layout, tokens=100, trials=1, seed=0).prompts
    assert [token for token in prompt.context + prompt.question if token < 3] == [2, 1, 2]


def test_a_chat_template_stands_around_context_and_question(tiny):
    layout = PromptLayout("<|turn|>user\n", "\n\n", "<|end|>\n<|turn|>assistant\n")
    count = functools.partial(tiny.tokenizer.encode, parse_special=True)
    words = len(count(layout.before)) + len(count(layout.after))
    drawn = draw(SmallTask(), tiny.tokenizer, layout, tokens=100, trials=1, seed=0)
    (prompt,) = drawn.prompts
    assert prompt.sample.context.startswith("Rain falls. The key")
    assert list(prompt.context) == count(layout.before + prompt.sample.context, bos=True)
    assert list(prompt.question) == count(f"\nWhich key?{layout.after}\nIt is")
    # The template's words count.
    short = draw(SmallTask(), tiny.tokenizer, layout, tokens=39 + words, trials=1, seed=0)
    assert short.prompts == [] and "39 tokens are too few" in short.refused


def test_a_run_goes_on_with_the_same_model_and_options_alone(
    small, tiny, tmp_path, computed, monkeypatch
):
    base = tiny.engine

    def run(weight=0.0, tokenizer=None, overwrite=False, **options):
        # The last value of an array: the fingerprint is of the first ones.
        scale = base.params["final_norm"]["scale"].at[-1].add(weight)
        params = {**base.params, "final_norm": {"scale": scale}}
        engine = engine_over(base.config, params, base.method, base.mesh, chunk=base.chunk)
        monkeypatch.setattr(LongContext, "tokenizer_digest", tokenizer)
        model = LongContext(engine, tiny.tokenizer)
        return evaluate(model, tmp_path, config(trials=1, **options), overwrite=overwrite)

    run()
    # Converted again, say, and in other batches.
    run(batch=1)
    for change, named in (
        ({"seed": 1}, "seed 0, now it is 1"),
        ({"chat": True}, "chat False, now it is True"),
        ({"weight": 1.0}, "all_weights '"),
        ({"tokenizer": "other"}, "tokenizer None, now it is 'other'"),
    ):
        with pytest.raises(OriginError, match=rf"rows\.jsonl was made with .*{named}.*--overwrite"):
            run(**change)
    assert computed == [1]
    for _ in range(2):
        assert [row["seed"] for row in run(seed=1, overwrite=True)] == [1] and computed == [1, 1]


@pytest.mark.slow
def test_a_run_goes_on_with_more_of_everything(small, tiny, tmp_path, computed):
    evaluate(tiny, tmp_path, config(trials=2))
    first = without_times(read_rows(tmp_path))
    computed.clear()
    evaluate(tiny, tmp_path, config(trials=2))
    assert computed == []
    seen = []
    # A setting may be a share of the length.
    share = "streaming-llm:budget=L/2,chunk=16"
    more = config(("full", share), ("small", "small:graded=true"), trials=3)
    evaluate(tiny, tmp_path, more, progress=seen.append)
    rows = without_times(read_rows(tmp_path))
    assert len(rows) == 12 and sum(computed) == 10
    assert {key: rows[key] for key in first} == first
    assert (seen[-1].total, seen[-1].before, seen[-1].done) == (12, 2, 10)
    assert {row["task_label"] for row in rows.values()} == {"small", "small graded=true"}
    settings = {r["label"]: r["method"]["settings"] for r in rows.values()}
    assert settings["streaming-llm budget=L/2 chunk=16"]["budget"] == 32
    # Both tasks end alike and have the same texts: full's four questions, streaming's six.
    assert computed == [3, 1, 4, 2]


def test_rows_of_another_run_are_left_alone_and_two_never_write_one_file(small, tiny, tmp_path):
    one, rows = config(trials=1), tmp_path / "rows.jsonl"
    rows.write_text('{"format": 9}\n')
    with pytest.raises(InputError, match="has format 9, expected 2: another version"):
        evaluate(tiny, tmp_path, one)
    said = r"another process is writing .*rows\.jsonl"
    with open_rows(tmp_path / "other", {"seed": 0}, {}), pytest.raises(InputError, match=said):
        evaluate(tiny, tmp_path / "other", one)
    with open_rows(tmp_path / "other", {"seed": 0}, {}):
        pass
    # Of two folders the one that had the memory counts.
    row = {"label": "full", "task_label": "small", "length": 64, "index": 0, "prompt_sha256": "a"}
    short, found = row | {"refused": "no", "short_of_memory": True}, row | {"answer": "7"}
    for name, kept in (("short", short), ("found", found)):
        with open_rows(tmp_path / name, {}, {}) as store:
            store.add([kept])
    for order in (("short", "found"), ("found", "short")):
        assert read_rows(*(tmp_path / name for name in order)) == [found]


def test_damaged_and_foreign_rows_are_named_by_file_and_line(small, tiny, tmp_path, computed):
    one, other = tmp_path / "one", tmp_path / "other"
    evaluate(tiny, one, config(trials=2))
    evaluate(tiny, other, config(trials=2, seed=1))
    path = one / "rows.jsonl"
    lines, foreign = (
        (folder / "rows.jsonl").read_text().splitlines(keepends=True) for folder in (one, other)
    )
    # Others read it as JSON lines.
    assert sorted(json.loads(line)["index"] for line in lines[1:]) == [0, 1]
    path.write_text("".join([lines[0], foreign[1], *lines[2:]]))
    for read in (lambda: read_rows(one), lambda: evaluate(tiny, one, config(trials=2))):
        with pytest.raises(OriginError, match=r"one/rows\.jsonl is damaged: line 2 is"):
            read()
    # Without that line its row is computed again.
    computed.clear()
    path.write_text("".join(lines[:2]))
    assert len(evaluate(tiny, one, config(trials=2))) == 2 and computed == [1]


def test_what_cannot_be_asked_is_refused_with_the_reason(small, tiny, tmp_path, monkeypatch):
    chosen = config(tasks=("small", FEW), lengths=(30, 64), trials=3)
    rows = by_key(evaluate(tiny, tmp_path / "a", chosen))
    for index in range(3):
        assert "30 tokens are too few" in rows["full", "small", 30, index]["refused"]
        assert "measures" in rows["full", "small", 64, index]
    assert "measures" in rows["full", STORED, 64, 0]
    assert "65 tokens, 64 were asked for" in rows["full", STORED, 64, 1]["refused"]
    # A file of two prompts has no third.
    assert ("full", STORED, 64, 2) not in rows
    # A method that refuses the model is a reason too.
    refused, found = evaluate(tiny, tmp_path / "b", config(("infllm", "full"), trials=1))
    assert "beyond the 512 positions that the model was trained to" in refused["refused"]
    assert "measures" in found
    monkeypatch.setattr(tiny.engine, "memory_limit", 1000)
    (row,) = evaluate(tiny, tmp_path / "c", config(trials=1))
    assert "a cache of 256 tokens needs" in row["refused"] and "answer" not in row
    assert len(row["prompt_sha256"]) == 64


def test_a_row_that_cannot_be_asked_takes_no_other_with_it(small, tiny, tmp_path, failing):
    error = InputError("this text is too long for me")
    failing(lambda work: error if max(map(len, work.contexts)) > 40 else None)
    rows = evaluate(tiny, tmp_path, config(trials=3, batch=3))
    # Of three rows the third alone has more than forty tokens.
    assert {row["index"]: row.get("refused") for row in rows} == {0: None, 1: None, 2: str(error)}


@pytest.mark.slow
def test_two_devices_share_the_rows_and_give_the_same(small, tiny, tmp_path):
    one = without_times(evaluate(tiny, tmp_path / "one", config(trials=3)))
    mesh = make_mesh(data=2)
    params = init_params(tiny.engine.config, RunSpec(mesh=mesh), seed=1)
    engine = engine_over(tiny.engine.config, params, tiny.engine.method, mesh, chunk=64)
    model = LongContext(engine, tiny.tokenizer)
    two = without_times(evaluate(model, tmp_path / "two", config(trials=3, batch=3)))
    # Three rows are four on two devices.
    assert {row["rows"] for row in two.values()} == {4}
    assert two == {key: row | {"rows": 4} for key, row in one.items()}


def test_a_text_that_is_gone_or_another_ends_the_run_and_leaves_the_rows(small, tiny, tmp_path):
    book, folder = tmp_path / "book.txt", tmp_path / "out"
    one, two = (
        config(tasks=(f"passkey:haystack={book},max_new=4",), lengths=(256,), trials=trials)
        for trials in (1, 2)
    )
    with pytest.raises(InputError, match=r"book\.txt cannot be read"):
        evaluate(tiny, folder, one)
    book.write_text("Rain falls. The wind turns. Night comes.\n")
    (row,) = evaluate(tiny, folder, one)
    assert "measures" in row
    before = (folder / "rows.jsonl").read_bytes()
    book.write_text("Snow falls. The wind turns. Night comes.\n")
    with pytest.raises(InputError, match=r"with passkey@book max_new=4\.haystack"):
        evaluate(tiny, folder, two)
    assert (folder / "rows.jsonl").read_bytes() == before


def test_mistakes_show_before_anything_is_computed(small, tiny, tmp_path, computed):
    alike = ("passkey:haystack=one/book.txt", "passkey:haystack=two/book.txt")
    for methods, tasks, message in (
        (("full", "snapvk"), ("small",), "did you mean 'snapkv'"),
        (("full",), ("small", "passkey:depths=0"), "depths must be at least 1, got 0"),
        (("full",), ("small:gradde=true",), "gradde"),
        (("snapkv:budget=L/0",), ("small",), "budget=L/0 of snapkv is no share of a length"),
        (("full",), alike, "are both called passkey@book in rows and tables"),
    ):
        with pytest.raises(LongctxError, match=message):
            evaluate(tiny, tmp_path, config(methods, tasks))
    assert computed == [] and list(tmp_path.iterdir()) == []


FEW, STORED = "small:stored=2", "small stored=2"


def test_rows_of_a_batch_are_planned_for_the_memory(tiny):
    engine = tiny.engine
    row = 2 * 2 * 2 * 8 * 4 * 256
    # Three quarters of the memory; a row has its length beside keys and values.
    for memory, rows in ((None, 8), (8 * row * 3, 8), (4 * row * 3 // 2, 4), (row // 2, 1)):
        assert compute.rows_that_fit(engine, 8, 256, 128, memory) == rows
        assert compute.rows_that_fit(engine, 8, 256, 128, memory, more=True) == rows
    # Further questions are answered over a copy.
    evicting = engine_over(engine.config, engine.params, small_method("h2o"), engine.mesh)
    memory = next(
        each
        for each in range(row, 99 * row, row // 8)
        if compute.rows_that_fit(evicting, 8, 256, 128, each) == 8
    )
    assert compute.rows_that_fit(evicting, 8, 256, 128, memory, more=True) == 4


def test_a_batch_that_does_not_fit_is_halved(small, tiny, tmp_path, failing):
    shapes = []

    def where(work):
        shapes.append(work.rows)
        return work.rows > 1 or len(work.contexts[0]) > 40

    whole = by_key(evaluate(tiny, tmp_path / "whole", config(trials=3, batch=1)))
    failing(short(where))
    rows = by_key(evaluate(tiny, tmp_path / "halves", config(trials=3, batch=3)))
    assert shapes == [3, 2, 1, 1, 1]
    refused = {key for key, row in rows.items() if "refused" in row}
    assert {rows[key]["refused"] for key in refused} == {f"out of memory: {SHORT}"}
    long = {key for key, row in whole.items() if row["tokens"]["context"] > 40}
    assert refused == long and 0 < len(long) < 3
    for key in whole.keys() - refused:
        assert rows[key]["answer"] == whole[key]["answer"]
    # The third row of three is left for a batch of two: in that shape it is tried alone too.
    failing(short(lambda work: work.rows > 1))
    rows = evaluate(tiny, tmp_path / "left", config(trials=3, batch=2))
    assert len(rows) == 3 and not any("refused" in row for row in rows)


def test_short_of_memory_is_tried_again(small, tiny, tmp_path, monkeypatch, computed, failing):
    chosen = config(("full", "infllm"), tasks=("small", FEW), trials=2)
    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine, "memory_limit", 1000)
        rows = by_key(evaluate(tiny, tmp_path, chosen))
    assert all("refused" in row for row in rows.values())
    left = {key for key, row in rows.items() if row.get("short_of_memory")}
    # What no memory helps: a model too small for the method, a prompt too long.
    assert left == {("full", "small", 64, 0), ("full", "small", 64, 1), ("full", STORED, 64, 0)}
    seen, exhausted = [], True
    failing(short(lambda work: exhausted))
    for exhausted in (True, False):
        computed.clear()
        rows = by_key(evaluate(tiny, tmp_path, chosen, progress=seen.append))
        assert sum(computed) == 3 and (seen[-1].before, seen[-1].done) == (len(rows) - 3, 3)
        found = {key for key, row in rows.items() if "out of memory" in row.get("refused", "")}
        assert found == (left if exhausted else set())
    assert {key for key, row in rows.items() if "measures" in row} == left
    assert by_key(read_rows(tmp_path)) == rows
    computed.clear()
    assert by_key(evaluate(tiny, tmp_path, chosen)) == rows and computed == []


def test_a_process_short_of_memory_ends_the_job(small, tiny, tmp_path, monkeypatch, failing):
    """The others may be in the middle of the same batch: the job ends."""
    failing(short(lambda work: monkeypatch.setattr(jax, "process_count", lambda: 2) or True))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        evaluate(tiny, tmp_path, config(trials=2, batch=2))
