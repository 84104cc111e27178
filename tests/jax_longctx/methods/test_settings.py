import dataclasses
import json
import pkgutil
import re
from pathlib import Path
from typing import Literal

import pytest

from jax_longctx import methods
from jax_longctx.contract import Method, method
from jax_longctx.errors import ConfigError
from jax_longctx.gone import SETTINGS, current
from jax_longctx.methods import METHODS, DynamicNTK, Full, describe, make_method, settings_of
from jax_longctx.origin import check_same
from jax_longctx.parts.appending import Appending


@method(source="these tests", name="sparse")
class Sparse(Appending):
    budget: int = 64
    alpha: float = 0.5
    pooled: bool = False
    norm: Literal["l1", "l2"] = "l1"
    rank: Literal[1, 2] = 1
    window: int | None = None
    label: str = ""


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(METHODS, "sparse", Sparse)


def as_text(settings):
    return {name: str(value) for name, value in settings.items()}


def test_values_get_their_types_and_what_is_left_out_its_default():
    text = {"budget": "128", "alpha": "1e-3", "pooled": "True", "norm": "l2", "rank": "2"}
    made = make_method("sparse", {**text, "window": "16", "label": "7"})
    assert made == Sparse(
        budget=128, alpha=1e-3, pooled=True, norm="l2", rank=2, window=16, label="7"
    )
    kinds = [type(getattr(made, field.name)) for field in dataclasses.fields(made)]
    assert kinds == [int, float, bool, str, int, int, str]
    made = make_method("sparse", {"pooled": "false", "window": "none", "alpha": "2"})
    assert (made.pooled, made.window, made.alpha) == (False, None, 2.0)
    assert isinstance(made.alpha, float)
    assert make_method("sparse", {}) == Sparse()
    assert make_method("dynamic-ntk") == DynamicNTK(factor=4.0)
    assert make_method("full") == Full()


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("budget", "1.5", "a whole number"),
        ("budget", "many", "a whole number"),
        ("budget", "none", "a whole number"),
        ("alpha", "half", "a number"),
        ("pooled", "1", "true or false"),
        ("norm", "l3", "one of l1, l2"),
        ("rank", "3", "one of 1, 2"),
        ("window", "wide", "a whole number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(setting, value, expected):
    words = f"sparse: setting {setting}={value}: expected {expected}"
    with pytest.raises(ConfigError) as error:
        make_method("sparse", {setting: value})
    assert str(error.value) == words


@pytest.mark.parametrize(("name", "near"), [("ful", "full"), ("dynamic_ntk", "dynamic-ntk")])
def test_an_unknown_method_is_refused_with_a_suggestion(name, near):
    for ask in (make_method, describe):
        with pytest.raises(ConfigError, match=f"unknown method '{name}'.*did you mean '{near}'"):
            ask(name)


def test_an_unknown_method_lists_them_and_an_unknown_setting_is_refused():
    with pytest.raises(ConfigError) as error:
        make_method("quantum")
    assert str(error.value) == f"unknown method 'quantum'; known: {', '.join(METHODS)}"
    with pytest.raises(ConfigError, match="'dynamic-ntk' has no setting 'base'; it has: factor"):
        make_method("dynamic-ntk", {"base": "2"})
    with pytest.raises(ConfigError, match="'full' has no setting 'window'; it has: none"):
        make_method("full", {"window": "2"})


@pytest.mark.parametrize("method", [Full(), DynamicNTK(factor=2.5)], ids=str)
def test_a_method_comes_back_from_its_settings(method):
    described = json.loads(json.dumps(settings_of(method)))
    assert make_method(described["name"], described["settings"]) == method


def test_every_type_comes_back_from_its_settings_and_nothing_else(
    monkeypatch,
):
    method = Sparse(budget=3, alpha=0.1, pooled=True, norm="l2", rank=2, label="a b")
    described = json.loads(json.dumps(settings_of(method)))
    assert make_method(described["name"], as_text(described["settings"])) == method
    monkeypatch.delitem(METHODS, "sparse")
    with pytest.raises(ConfigError, match="Sparse is not one of the methods full, arkvale"):
        settings_of(Sparse())


def test_every_file_of_the_folder_is_a_method():
    files = [module.name for module in pkgutil.iter_modules(methods.__path__)]
    names = [name.replace("_", "-") for name in files]
    assert sorted(METHODS) == sorted([*names, "sparse"])
    for name, kind in METHODS.items():
        assert kind.name == name
        assert kind.source and kind.summary
        assert name == "sparse" or getattr(methods, kind.__name__) is kind
    with pytest.raises(AttributeError, match="has no attribute 'Quantum'"):
        methods.Quantum  # noqa: B018


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_described(name):
    described = describe(name)
    assert json.loads(json.dumps(described)) == described
    assert described["name"] == name
    assert described["summary"] == METHODS[name].summary
    assert isinstance(make_method(name), Method)


def test_settings_are_described_with_type_and_default():
    assert describe("dynamic-ntk")["settings"] == {"factor": {"type": "float", "default": 4.0}}
    described = describe("sparse")["settings"]
    assert json.loads(json.dumps(described)) == described
    assert described["budget"] == {"type": "int", "default": 64}
    assert described["window"] == {"type": "int | None", "default": None}
    assert described["norm"] == {"type": "Literal['l1', 'l2']", "default": "l1"}


GONE = [(name, key, now) for name, gone in SETTINGS.items() for key, now in gone.items()]


@pytest.mark.parametrize(("name", "key", "now"), GONE)
def test_a_setting_that_is_gone_is_taken_at_its_old_default_alone(name, key, now):
    assert key not in describe(name)["settings"]
    plain = make_method(name)
    assert make_method(name, {key: now}) == make_method(name, {key: str(now).lower()}) == plain
    with pytest.raises(ConfigError, match=f"{name}: setting {key} is gone.*{key}=other") as error:
        make_method(name, {key: "other"})
    assert "\n" not in str(error.value)


def test_what_was_saved_equals_what_is_made_now():
    settings = {"budget": 64, "count_fixed": False, "min_pages": 1}
    star = {"decode": "quest", "decode.count_fixed": False}
    assert make_method("star", star) == make_method("star", {"decode": "quest"})
    rows = [
        {"method": {"name": "quest", "settings": settings}},
        {"method": "ring", "settings": {"hops": 1}},
    ]
    decoding = {"name": "star", "settings": {**star, "block": 8}}
    assert current(decoding)["settings"] == {"decode": "quest", "block": 8}
    assert current(rows) == [{"method": {"name": "quest", "settings": {"budget": 64}}}, rows[1]]
    check_same(
        Path("f"), {"method": "ring", "settings": {"hops": -1}}, {"method": "ring", "settings": {}}
    )
    for whole in (1, "1", "1.00"):
        assert make_method("h2o-shared", {"alpha": whole}) == make_method("h2o-shared")
    told = "type, in a checkout of the repository: python -m research ... -m star-anchors:seed=3"
    with pytest.raises(ConfigError, match=re.escape(told)):
        make_method("star", {"seed": 3})
