"""Which kind of step comes when, as the host tells the decode program."""

from jax_longctx.engine.programs import answer_variants, decode_turns
from jax_longctx.methods import Full, make_method
from tests.support import joined, random_rows, tiny_config, tiny_engine

REFRESH = make_method("refreshkv", {"schedule": "fixed", "stride": "3"})


def test_an_answers_kinds_of_steps_in_the_order_of_their_first():
    assert answer_variants(REFRESH, 20) == ("partial", "check")
    # Steps 1 and 2 are partial, and the first token of an answer takes none.
    assert answer_variants(REFRESH, 3) == ("partial",)
    assert answer_variants(make_method("refreshkv", {"schedule": "fixed", "stride": "1"}), 9) == (
        "check",
    )
    # A program is compiled for an answer of one token too.
    assert answer_variants(Full(), 1) == ("",)


def test_turns_count_from_the_blocks_first_step():
    turns = decode_turns(REFRESH, ("partial", "check"), [range(5, 11), range(3, 5)], 8)
    # Steps 6 and 9 of the first row are full; the block has room for two more.
    assert turns.tolist() == [[0, 1, 0, 0, 1, 0, -1, -1], [1, 0, *[-1] * 6]]
    assert decode_turns(Full(), ("",), [range(1, 3)], 3).tolist() == [[0, 0, -1]]


def test_an_answer_may_end_before_the_first_step_of_another_kind():
    engine = tiny_engine(REFRESH, config=tiny_config(num_layers=1), by_layer=True)
    prompts = random_rows([21])
    longer = joined(engine.generate(prompts, max_tokens=7))
    # Of the block of steps 2 to 5 step 3 would be a full one.
    assert joined(engine.generate(prompts, max_tokens=3)) == [longer[0][:3]]
