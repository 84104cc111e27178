import dataclasses
import fnmatch
import sys
import tomllib
import types
from pathlib import Path

import pytest

import research
from jax_longctx.errors import ConfigError, InputError, LongctxError
from jax_longctx.evaluation import config
from jax_longctx.evaluation.config import parse_config, read_config, read_suite, suites
from jax_longctx.evaluation.runner import check_config
from jax_longctx.evaluation.specs import Spec
from jax_longctx.evaluation.tasks import TASKS
from jax_longctx.methods import METHODS, make_method
from jax_longctx.models.presets import preset
from research.published import PUBLISHED

PART = {"methods": ["full"], "tasks": ["passkey"], "lengths": [64], "trials": 2}


def test_a_file_becomes_cells_each_once(tmp_path):
    path = tmp_path / "eval.toml"
    path.write_text(
        'title = "T"\npublished = ["star"]\n[run]\ncheckpoint = "m"\nbatch = 3\nchat = true\n'
        '[[part]]\nmethods = ["full", "snapkv:budget=L/8"]\ntasks = ["passkey"]\n'
        "lengths = [64, 128]\ntrials = 2\n"
        '[[part]]\nmethods = ["full"]\ntasks = ["passkey", "passkey:depths=3"]\n'
        "lengths = [64]\ntrials = 5\n"
    )
    read = read_config(path)
    assert (read.title, read.published) == ("T", ("star",))
    assert (read.run.checkpoint, read.run.batch, read.run.chat) == ("m", 3, True)
    assert read.run.dtype is None
    found = [(c.length, c.method.label, c.task.label, c.trials) for c in read.cells()]
    assert found == [
        (64, "full", "passkey", 5),
        (64, "full", "passkey depths=3", 5),
        (64, "snapkv budget=L/8", "passkey", 2),
        (128, "full", "passkey", 2),
        (128, "snapkv budget=L/8", "passkey", 2),
    ]


def test_a_part_goes_on_from_the_one_before():
    more = {"name": "long", "lengths": [128], "trials": 1}
    first, second, third = parse_config({"part": [{**PART, "name": "short"}, more, {}]}).part
    assert (first.name, first.lengths, first.trials) == ("short", (64,), 2)
    assert (second.name, second.lengths, second.trials) == ("long", (128,), 1)
    assert (second.methods, second.tasks) == (first.methods, first.tasks)
    assert third.name == "part" and (third.lengths, third.trials) == ((128,), 1)
    # The module's own example is a configuration.
    example = (config.__doc__ or "").partition("    title")[1:]
    toml = "".join(example).partition("A part is")[0]
    parsed = parse_config(tomllib.loads(toml))
    assert len(parsed.cells()) == 8 and parsed.run.checkpoint == "smollm2"


def test_typos_are_one_clear_error():
    for fields, message in [
        ({"part": [PART], "tilte": "x"}, "unknown key 'tilte'; .*; did you mean 'title'?"),
        ({"part": [PART], "title": 3}, r"title must be a text, got 3"),
        ({"part": [PART], "run": {"bacth": 2}}, r"unknown \[run\] key 'bacth'; .*; did you mean"),
        ({"part": [PART], "run": {"batch": "2"}}, r"\[run\] batch must be a whole number, got '2'"),
        ({"part": [PART], "run": {"batch": 0}}, r"\[run\] batch must be at least 1, got 0"),
        ({"part": [PART], "run": {"dtype": 16}}, r"\[run\] dtype must be a text, got 16"),
        ({"part": [PART], "run": 3}, r"run must be a section \[run\], got 3"),
        ({}, r"expected at least one \[\[part\]\]"),
        ({"part": PART}, r"expected at least one \[\[part\]\]"),
        ({"part": [{**PART, "taks": []}]}, r"unknown \[part\] key 'taks'; .*; did you mean 'tas"),
        ({"part": [{**PART, "lengths": 64}]}, r"\[part\] lengths must be a list, got 64"),
        ({"part": [{**PART, "lengths": [1.5]}]}, r"lengths must be a whole number, got 1\.5"),
        ({"part": [{**PART, "tasks": []}]}, "part 'part' has no tasks; give at least one"),
        ({"part": [{**PART, "trials": 0}]}, "lengths and trials of at least 1, got"),
        ({"part": [{"methods": ["full"]}]}, r"\[part\] needs tasks"),
        ({"part": [{**PART, "methods": ["snapkv:budget"]}]}, "'snapkv:budget' is not understood"),
        ({"published": ["strar"], "part": [PART]}, "paper in published 'strar'; .*; did you mean"),
        ({"part": [PART], "run": {"seed": -1}}, "seed"),
    ]:
        with pytest.raises(LongctxError, match=message):
            parse_config(fields).cells()


def test_specs_and_files_that_are_no_toml(tmp_path):
    spec = Spec.parse("star:block=L/4,decode=quest,decode.budget=64")
    assert spec.label == "star block=L/4 decode=quest decode.budget=64"
    assert spec.at(4096) == {"block": "1024", "decode": "quest", "decode.budget": "64"}
    assert Spec.parse("x:a=L,b=L8").at(100) == {"a": "100", "b": "L8"}
    assert Spec.parse("full") == Spec("full")
    for text in ("a:b", "a:=1", "a:b=", "a:b=1,b=2"):
        with pytest.raises(InputError):
            Spec.parse(text)
    with pytest.raises(InputError, match=r"eval\.toml cannot be read"):
        read_config(tmp_path / "eval.toml")
    (tmp_path / "eval.toml").write_text("[run")
    with pytest.raises(InputError, match=r"eval\.toml is not TOML"):
        read_config(tmp_path / "eval.toml")


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", suites())
def test_every_method_and_task_of_a_suite_is_made(name):
    config = read_suite(name)
    check_config(config)
    assert config.title and config.about
    assert set(config.published) <= {table.paper for table in PUBLISHED}
    # Paired differences need full attention on every task and length.
    cells = {(cell.task, cell.length, cell.method.label) for cell in config.cells()}
    assert all((task, length, "full") in cells for task, length, _ in cells)


def test_suites_are_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]
    found = {
        path.relative_to(ROOT / "jax_longctx").as_posix()
        for pattern in data["jax_longctx.evaluation"]
        for path in (ROOT / "jax_longctx/evaluation").glob(pattern)
    }
    own = [name for name in suites() if not name.startswith("paper:")]
    assert sum(name.endswith(".toml") for name in found) == len(own)
    assert "evaluation/templates/report.html" in found
    with pytest.raises(ConfigError, match="unknown suite 'smoek'"):
        read_suite("smoek")


def test_papers_suites_need_a_checkout_and_bring_their_methods(monkeypatch, tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert not any(fnmatch.fnmatch("research", pattern) for pattern in packages)
    monkeypatch.setattr(METHODS, "data", dict(METHODS.data))
    with pytest.raises(ConfigError, match=r"type, in a checkout .* research ... -m star-rel"):
        make_method("star-released-mask")
    with pytest.raises(ConfigError, match=r"is gone; type: -m arkvale --offload host"):
        make_method("arkvale-paged")
    read_suite("paper:star")
    for name in research.STUDIES:
        assert make_method(name).name == name and METHODS[name].__module__.startswith("research.")
    another = tmp_path / "research" / "__init__.py"
    monkeypatch.setitem(sys.modules, "research", types.ModuleType("research"))
    monkeypatch.setattr(sys.modules["research"], "__file__", str(another), raising=False)
    with pytest.raises(InputError, match=f"another package is called research, {another}, and"):
        read_suite("paper:star")
    # As an installed package is.
    monkeypatch.setattr(config, "RESEARCH", ROOT / "nowhere")
    assert not any(name.startswith("paper:") for name in suites())
    for asked in (
        lambda: read_suite("paper:star"),
        lambda: parse_config({"part": [PART], "published": ["star"]}),
    ):
        with pytest.raises(InputError, match=r"in research/ of the repository.*in a checkout"):
            asked()


def methods(part, name, length=16384):
    """The part's methods of that name, as prompts of `length` tokens get them."""
    specs = [spec for spec in map(Spec.parse, part.methods) if spec.name == name]
    assert specs
    return [make_method(spec.name, spec.at(length)) for spec in specs]


def parts(name):
    """A paper's suite and its parts, by the words before the first comma."""
    config = read_suite(f"paper:{name}")
    return config.run, {part.name.partition(",")[0]: part for part in config.part}


def test_reattentions_baselines_see_as_many_tokens_as_it():
    """Section 3.1: the scope is Llama-3-8B's 8,192 positions; InfLLM has the same selection."""
    llama3 = dataclasses.replace(preset("llama-3.1-8b"), max_position=8192)
    _, found = parts("reattention")
    names = ("reattention", "infllm", "streaming-llm")
    (own,), (infllm,), (streaming,) = (methods(found["RULER"], name) for name in names)
    assert own.scope_size == streaming.budget + streaming.chunk == 8192
    assert (infllm.n_init, infllm.n_local) == (own.global_size, own.local_size)
    selected = infllm.topk * infllm.block_size
    assert abs(selected - own.kept * own.span) < infllm.block_size
    for method in (own, infllm, streaming):
        method.validate(llama3)
    # Table 3: chunks, spans, keys and local parts, each alone, with the scope kept.
    sizes = methods(found["sizes"], "reattention")
    assert {each.chunk for each in sizes} == {512, 1024, 2048}
    assert {each.span for each in sizes} == {8, 16, 32, 64, 128}
    assert {each.local_size for each in sizes} == {1024, 2048, 4096}
    assert {1, 4, 8} <= {each.count for each in sizes}
    assert {each.scope_size for each in sizes} == {8192}


def test_refreshkvs_baselines_rank_a_group_by_its_maximum():
    """Appendix A.1, and tables 3, 4 and 8; ablations step every 10 tokens."""
    _, found = parts("refreshkv")
    for part in found.values():
        snapkv = methods(part, "snapkv")
        assert {(each.over_group, each.window) for each in snapkv} == {("max", 1)}
    for name in ("RULER", "chains of keys"):
        assert {each.over_group for each in methods(found[name], "h2o")} == {"max"}
    own = methods(found["strides and ablations"], "refreshkv")
    ablated = methods(found["strides and ablations"], "refreshkv-ablated")
    assert {each.ablation for each in ablated} == {"no_refresh", "no_full"}
    changed = [each for each in [*own, *ablated] if each in ablated or each.over_group != "max"]
    assert {each.over_group for each in changed} == {"max", "mean", "first"}
    assert {(each.schedule, each.stride) for each in changed} == {("fixed", 10)}
    # Table 3.
    plain = [each for each in own if each not in changed]
    assert {each.stride for each in plain if each.schedule == "fixed"} == {10, 15}
    assert {each.qc_stride for each in plain if each.schedule == "adaptive"} == {5, 10}


def test_citrus_baseline_evicts_as_citrus_does():
    """Section 5.3: the setting is applied to all baselines, with shifted positions."""
    _, found = parts("citrus")
    for name in ("passkeys", "needles"):
        (streaming,) = methods(found[name], "streaming-llm", 8192)
        (own,) = methods(found[name], "citrus-standard", 8192)
        assert (streaming.protocol, streaming.positions) == ("citrus", "shifted")
        assert (streaming.budget, streaming.chunk) == (own.budget, own.chunk) == (1024, 256)


def test_stars_ablations_are_of_blocks_of_a_quarter_on_four_tasks():
    """Sections 3.3 and 4, appendices B and C.3."""
    run, found = parts("star")
    assert run.chat
    tasks = {"niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery"}
    sizes, anchors = found["block sizes"], found["anchors"]
    assert set(sizes.tasks) == set(anchors.tasks) == tasks
    assert sizes.lengths == anchors.lengths == (65536,)
    of_size = methods(sizes, "star", 65536)
    assert [65536 // each.block for each in of_size] == [4, 8, 16, 32]
    assert all(each.anchor_size == each.block for each in of_size)
    of_anchor, varied = methods(anchors, "star", 65536), methods(anchors, "star-anchors", 65536)
    assert {each.block for each in [*of_anchor, *varied]} == {16384}
    assert all(each.anchor_size == each.block for each in varied)
    contents = {(content, "first") for content in ("constant", "random", "shuffled")}
    positions = {("first", "previous"), ("first", "random"), ("previous", "previous")}
    assert {(each.content, each.positions) for each in varied} == contents | positions
    assert {each.anchor_size for each in of_anchor} == {0, 2048, 4096, 8192, 16384}


def test_published_methods_are_those_of_the_papers_suite():
    _, found = parts("resa")
    tables = [table for table in PUBLISHED if table.paper == "resa"]
    assert [tuple(table.tasks) for table in tables] == [found["Table 1"].tasks] * 2
    assert tables[0].tasks[-1] == "qa_1"
    # Llama-3.1-8B with Quest, without and with RESA.
    quest, resa = (tables[0].rows[name]["values"] for name in ("Quest", "Quest + RESA"))
    assert (quest[-1], resa[-1]) == (86, 87)
    # With the very same settings, so that the suite's rows stand below the paper's.
    for table in PUBLISHED:
        _, found = parts(table.paper)
        assert set(table.tasks) <= set(TASKS)
        for row in table.rows.values():
            assert len(row["values"]) == len(table.tasks)
            assert all(0 <= value <= 100 for value in row["values"])
            spec = Spec.parse(row["method"])
            assert any(
                spec in map(Spec.parse, part.methods) and set(part.tasks) & set(table.tasks)
                for part in found.values()
            ), spec
