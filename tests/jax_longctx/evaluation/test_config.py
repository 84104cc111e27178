"""What an evaluation's TOML becomes, what it must not say, and the suites that come with us."""

import tomllib

import pytest

from jax_longctx.errors import ConfigError, InputError, LongctxError
from jax_longctx.evaluation import config
from jax_longctx.evaluation.config import parse_config, read_config
from jax_longctx.evaluation.specs import Spec

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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
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
    ],
)
def test_typos_are_one_clear_error(fields, message):
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


def test_the_modules_own_example_is_a_configuration():
    example = (config.__doc__ or "").partition("    title")[1:]
    toml = "".join(example).partition("A part is")[0]
    parsed = parse_config(tomllib.loads(toml))
    assert len(parsed.cells()) == 8 and parsed.run.checkpoint == "smollm2"
    with pytest.raises(ConfigError):
        parse_config({"part": [PART], "run": {"seed": -1}})
