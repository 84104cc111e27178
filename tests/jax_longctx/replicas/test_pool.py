import contextlib
import json

import pytest

import jax_longctx
from jax_longctx.batch import BatchOptions, run_batch
from jax_longctx.replicas import Replicas
from tests.jax_longctx.cli.tiny_model import converted

BOOK = "The pass key is 12345. Remember it. " * 3


class Here(Replicas):
    """A replica in this process."""

    @contextlib.contextmanager
    def started(self):
        yield

    def ask(self, what):
        return what(self.open())

    def spread(self, make, items, *, of, most, left):
        work = make(self.open())
        for item in items:
            for number in range(of):
                yield from work((item, number, of))
        assert not [*left()]


@pytest.mark.slow
def test_questions_of_a_row_may_be_in_several_batches(tmp_path_factory, tmp_path):
    method = jax_longctx.make_method("citrus:budget=64,chunk=32")
    model = jax_longctx.load(converted(tmp_path_factory), chunk=32, method=method)
    asked = ["Who?", "Why is it so?", "And when?"]
    rows = [{"context": f"Text {i}. {BOOK}", "questions": asked} for i in range(2)]
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, how in (("one", model), ("two", Here(2, lambda: model))):
        run_batch(how, tmp_path / "in", tmp_path / name, BatchOptions(rows=2, max_tokens=4))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
