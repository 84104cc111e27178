import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.contract import REGISTERED, method
from jax_longctx.errors import InputError
from jax_longctx.methods import Citrus, CitrusStandard, Full
from jax_longctx.parts.appending import Appending
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import check_rows, full_logits
from tests.support import joined, random_rows, score, tiny_engine

LENGTHS = [37, 1, 20]


@pytest.fixture(
    params=[pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 2)], ids=["one", "2x2x2"]
)
def engine(request):
    return tiny_engine(mesh=make_mesh(*request.param), chunk=8)


def test_full_equals_numpy(engine):
    rows = random_rows(LENGTHS)
    check_rows(score(engine, rows), full_logits(engine, [rows]), atol=2e-5)


def test_empty_context_is_legal(engine):
    contexts, questions = [[], *random_rows([9])], random_rows([4, 4], seed=1)
    context = engine.prefill(contexts, reserve=16)
    answers = joined(engine.stream(context, questions, max_tokens=5))
    for logits, answer in zip(
        full_logits(engine, (contexts, questions, answers)), answers, strict=True
    ):
        assert logits[-6:-1].argmax(-1).tolist() == answer


@pytest.mark.slow
def test_a_budgets_growth_is_judged_by_what_it_keeps():
    """50 KB hold neither a second cache of the context nor full attention's growth."""
    engine = tiny_engine(CitrusStandard(budget=12, chunk=8), chunk=8)
    context = engine.prefill(random_rows([600]), reserve=2)
    engine.memory_limit = 50_000
    list(engine.stream(context, random_rows([3]), max_tokens=100))


def test_a_method_that_needs_the_question_gets_no_other():
    engine = tiny_engine(Citrus(budget=24, chunk=8), chunk=8)
    contexts, questions = random_rows(LENGTHS), random_rows([3, 2, 5], seed=1)
    context = engine.prefill(contexts, reserve=16, questions=questions)
    with pytest.raises(InputError, match="read the context for other questions"):
        next(engine.stream(context, random_rows([3, 2, 5], seed=2)))
    for given, said in [(None, "needs the question"), (questions[:2], "as many questions")]:
        with pytest.raises(InputError, match=said):
            engine.prefill(contexts, reserve=16, questions=given)
    with pytest.raises(InputError, match="question 1 is empty"):
        engine.prefill(contexts, reserve=16, questions=[[1], [], [2]])


def test_shards_of_a_row_agree():
    """What one shard of heads and slots decides holds on all of them, and for no other row."""
    mesh = make_mesh(2, 2, 2)
    setup = tiny_engine(mesh=mesh).setup
    ctx = setup.layer_context(setup.layer(0), jnp.zeros(1, jnp.int32))

    def decide():
        shard = [jax.lax.axis_index(name) for name in ("data", "seq", "tensor")]
        first = (shard[0] == 0) & (shard[1] == 1) & (shard[2] == 0)
        return ctx.agree(jnp.stack([first, shard[0] == 1, jnp.array(False)]))[None, None, :, None]

    specs = {"in_specs": (), "out_specs": PartitionSpec("seq", "tensor", "data")}
    got = jax.jit(jax.shard_map(decide, mesh=mesh, check_vma=False, **specs))()
    # Rows 0, 1, 2 of either data shard, as each of 2 x 2 shards has it.
    assert got[..., 0].astype(int).tolist() == [[[1, 0, 0, 0, 1, 0]] * 2] * 2


@pytest.mark.parametrize(
    ("written", "meant"),
    [("own_token", "own_tokens"), ("stripe", "stripes"), ("step_variants", "step_variant")],
)
def test_a_misspelt_name_is_an_error(written, meant):
    """Else its default would hold."""
    kind = type("Mine", (Appending,), {written: 4})
    with pytest.raises(TypeError, match=f"Mine.{written}: did you mean {meant}"):
        method(source="here")(kind)
    assert "mine" not in REGISTERED
    with pytest.raises(AttributeError):
        getattr(Full(), written)
