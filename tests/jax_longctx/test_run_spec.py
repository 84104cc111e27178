import dataclasses
import inspect

import jax
import pytest

import jax_longctx
from jax_longctx.cli import options
from jax_longctx.engine import Engine
from jax_longctx.engine.capacity import setup_of
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.config import RunOptions
from jax_longctx.methods import make_method
from jax_longctx.models.params import abstract_params
from jax_longctx.run_spec import ON_DEVICES, RunFields, RunSpec
from jax_longctx.settings import Offload, from_toml
from jax_longctx.sharding import make_mesh
from tests.small_methods import small_method
from tests.support import engine_over, tiny_config

WRONG = [
    ({"dtype": "int4"}, "unknown dtype 'int4'; known: float32, bfloat16, float16"),
    ({"chunk": 0}, "chunk must be at least 1"),
    ({"kv": "int4"}, "unknown kv 'int4'; known: bfloat16, int8"),
    ({"weights": "in8"}, "unknown weights 'in8'; known: bfloat16, int8; did you mean 'int8'"),
    ({"kv": "bfloat16", "dtype": "float32"}, "kv bfloat16: this model is loaded in float32"),
    ({"weights": "bfloat16", "dtype": "float16"}, "weights bfloat16: this model is loaded in"),
    ({"offload": "disk"}, "unknown offload 'disk'; known: host"),
    ({"working_set": 8}, "working_set is for offloaded contexts; give offload host too"),
    ({"offload": "host", "working_set": 0}, "working_set must be at least 1 token, got 0"),
    (
        {"reading": "xatention"},
        "unknown reading 'xatention'; known: dense, xattention, flex, vertical-slash; did you mean",
    ),
    ({"reading": "dense:mass=1"}, "reading 'dense' has no setting 'mass'; it has: none"),
    ({"reading": "xattention:mass=2"}, "reading: mass must be above 0 and at most 1, got 2.0"),
    ({"reading": "xattention:density=0"}, "reading: density must be above 0 and at most 1"),
    ({"reading": "flex:tau=2"}, "reading: tau must be from 0 to 1, got 2.0"),
    ({"reading": "vertical-slash:tau=1"}, "reading .vertical-slash. has no setting .tau."),
    ({"reading": "xattention:stride=12"}, "reading: stride must be a divisor of 128, got 12"),
    ({"mesh": "row=2"}, "mesh 'row=2' is not understood at 'row=2'"),
]


ALL = options.run()


def by_flags(**fields):
    """What a command makes of its flags: those that are not given have the options' defaults."""
    made = []

    @options.command
    def command(spec: RunSpec = ALL):
        made.append(spec)

    defaults = {name: each.default for name, each in inspect.signature(command).parameters.items()}
    command(**defaults | fields)
    return made[0]


@pytest.mark.parametrize(("fields", "said"), WRONG)
@pytest.mark.parametrize(
    "make",
    [
        RunSpec,
        by_flags,
        lambda **fields: from_toml(RunOptions, fields, "run"),
        lambda **fields: jax_longctx.load("nothing", **fields),
    ],
    ids=["python", "flags", "toml", "load"],
)
def test_bad_values_are_refused_alike_wherever_they_come_from(make, fields, said):
    with pytest.raises((ConfigError, InputError), match=said):
        make(**fields)


def test_flags_toml_and_python_make_the_same():
    fields = {"dtype": "bfloat16", "mesh": "seq=2", "chunk": 64, "kv": "int8", "weights": "int8"}
    fields |= {"offload": "host", "working_set": 128, "reading": "xattention:mass=0.9"}
    assert by_flags() == RunOptions().spec == RunSpec()
    assert by_flags(**fields) == from_toml(RunOptions, fields, "run").spec == RunSpec(**fields)


def test_programs_do_not_depend_on_how_a_spec_says_it():
    """What a program does not depend on makes no other key; what is left out is as if named."""
    method, config = make_method("quest"), tiny_config()
    said = RunSpec(method=method, mesh=make_mesh(), dtype="bfloat16", kv="bfloat16")
    assert setup_of(config, said) == setup_of(config, RunSpec(method=method))
    assert setup_of(config, RunSpec(reading="dense")) == setup_of(config, RunSpec())
    assert "spec" not in {field.name for field in dataclasses.fields(Setup)}
    # What editors complete.
    assert [*RunFields.__annotations__] == [field.name for field in dataclasses.fields(RunSpec)]


def test_what_a_checkpoint_says_fills_what_is_left_out():
    assert RunSpec().over("float16", "int8") == RunSpec(dtype="float16", weights="int8")
    assert RunSpec(dtype="float32").over("bfloat16").dtype == "float32"
    with pytest.raises(ConfigError, match="the checkpoint was converted with weights int8"):
        RunSpec(weights="bfloat16").over("bfloat16", "int8")
    # What fits none of two dtypes is found where the dtype is known.
    with pytest.raises(ConfigError, match="kv bfloat16: this model is loaded in float32"):
        RunSpec(kv="bfloat16").over("float32")


def test_an_engine_runs_as_its_spec_says():
    params = abstract_params(tiny_config(), RunSpec(dtype="bfloat16"))
    assert Engine(tiny_config(), params).spec.facts() == RunSpec(dtype="bfloat16").facts()
    with pytest.raises(ConfigError, match="weights are in bfloat16, the run is of dtype float32"):
        Engine(tiny_config(), params, RunSpec(dtype="float32"))
    with pytest.raises(InputError, match="in no 8-bit form, the engine was made for int8"):
        Engine(tiny_config(), params, RunSpec(weights="int8"))


def test_weights_on_other_devices_are_refused():
    params = abstract_params(tiny_config(), RunSpec(mesh="tensor=2"))
    said = r"weights lie on 2 devices, the run's mesh .*'tensor': 1} has 1"
    with pytest.raises(ConfigError, match=said):
        Engine(tiny_config(), params)
    engine = Engine(tiny_config(), params, RunSpec(mesh="tensor=2"))
    with pytest.raises(ConfigError, match=said):
        engine.under(small_method("quest"), mesh=None)
    # As many, but others.
    with pytest.raises(ConfigError, match="has 2, not all the same"):
        engine.under(small_method("quest"), mesh=make_mesh(tensor=2, devices=jax.devices()[2:4]))


def test_another_method_runs_as_the_first():
    fields = {"kv": "int8", "chunk": 16, "offload": "host", "working_set": 128}
    params = abstract_params(tiny_config(), RunSpec())
    first = engine_over(tiny_config(), params, small_method("quest"), memory_limit=10**9, **fields)
    other = first.under(small_method("infllm"))
    assert other.spec == dataclasses.replace(first.spec, method=other.method)
    assert (other.memory_limit, other.setup.by_layer) == (10**9, first.setup.by_layer)
    assert other.params is first.params
    # Another place has its own working set.
    assert first.under(small_method("infllm"), offload="host").spec.tier == Offload()
    assert first.under(make_method("full"), **ON_DEVICES).spec.tier is None


def test_a_mesh_is_made_of_its_sizes_when_devices_are_wanted():
    assert RunSpec().devices() == make_mesh()
    assert RunSpec(mesh="tensor=2").devices() == make_mesh(tensor=2)
    mesh = make_mesh(devices=jax.devices()[1:2])
    assert RunSpec(mesh=mesh).devices() is mesh
