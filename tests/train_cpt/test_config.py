"""A run's TOML: what it becomes, and one clear line for what it must not say."""

import json
import tomllib
from pathlib import Path

import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.settings import from_toml
from train_cpt.run import RunConfig, read_config

LEAST = {
    "run": {"checkpoint": "model", "output": "out"},
    "data": {"directory": "data", "length": 64},
    "optimizer": {"steps": 100},
}


def changed(section, **fields):
    return {**LEAST, section: {**LEAST.get(section, {}), **fields}}


def test_a_file_becomes_five_sections(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\ncheckpoint = "model"\noutput = "out"\nremat = "dots"\n'
        '[data]\ndirectory = "data"\nlength = 64\nsources = ["a", "b"]\nshares = [1, 0, 0]\n'
        "[optimizer]\nsteps = 100\nlearning_rate = 1\n"
        "[pattern]\ntail = 8\nforce_self = false\n[loop]\nrows = 2\n"
    )
    config = read_config(path)
    assert config.run.checkpoint == Path("model") and config.run.remat == "dots"
    assert config.data.sources == (Path("a"), Path("b"))
    assert config.data.shares == (1.0, 0.0, 0.0)
    assert repr(config.optimizer.learning_rate) == "1.0" and config.optimizer.warmup == 20
    assert (config.pattern.tail, config.pattern.force_self, config.loop.rows) == (8, False, 2)
    echoed = json.loads(json.dumps(config.to_dict()))
    assert from_toml(RunConfig, echoed) == config
    # Without its section, attention is causal.
    assert from_toml(RunConfig, LEAST).pattern.tail == 0


def test_the_guides_run_is_a_configuration():
    guide = (Path(__file__).parents[2] / "docs/guides/train.md").read_text()
    run = guide.split("<<'TOML'\n")[1].split("TOML\n")[0]
    config = from_toml(RunConfig, tomllib.loads(run))
    assert config.pattern.tail == 50 and len(config.data.sources) == 4
    assert len(config.loop.evaluate_methods) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (changed("optimiser"), "unknown section 'optimiser'; known: run, .*mean 'optimizer'?"),
        (changed("loop", rose=1), r"unknown \[loop\] key 'rose'; known: rows, .*mean 'rows'?"),
        (changed("loop", zzz=1), r"unknown \[loop\] key 'zzz'; known: rows, micro_batches"),
        ({**LEAST, "optimizer": {}}, r"\[optimizer\] needs steps"),
        ({**LEAST, "loop": 3}, r"loop must be a section \[loop\], got 3"),
        (changed("loop", evaluate_methods=["none"]), "unknown method 'none'"),
        (changed("pattern", budget=0), "budget must be at least 1, got 0"),
        (changed("data", length="8"), r"\[data\] length must be a whole number, got '8'"),
        (changed("data", length=True), "length must be a whole number, got True"),
        (changed("data", length=8.0), r"length must be a whole number, got 8\.0"),
        (changed("data", sources="a"), "sources must be a list, got 'a'"),
        (changed("data", sources=[1]), "sources must be a path, got 1"),
        (changed("data", shares=[1, 0]), "shares must be a list of 3, got"),
        (changed("data", field=3), "field must be a text, got 3"),
        (changed("optimizer", clip="1"), r"\[optimizer\] clip must be a number, got '1'"),
        (changed("optimizer", clip=True), "clip must be a number, got True"),
        (changed("pattern", force_self=1), "force_self must be true or false, got 1"),
        (changed("run", remat="some"), r"\[run\] remat must be one of none, dots, full, got"),
    ],
)
def test_wrong_configurations_and_values_of_another_type_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        from_toml(RunConfig, fields)


def test_files_that_are_no_toml_are_refused(tmp_path):
    path = tmp_path / "run.toml"
    with pytest.raises(InputError, match=r"run\.toml cannot be read: No such file"):
        read_config(path)
    path.write_text("[run")
    with pytest.raises(InputError, match=r"run\.toml is not TOML"):
        read_config(path)
