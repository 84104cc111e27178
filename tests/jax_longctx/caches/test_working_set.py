import jax.numpy as jnp
import numpy as np

from jax_longctx.caches.working_set import empty_working_set
from tests.jax_longctx.methods.selecting import plain_context

# Three rows, four query heads of two kv heads, two pages each; -1 is none.
PAGES = np.array(
    [
        [[0, 1], [1, 2], [3, -1], [3, 4]],
        [[7, 6], [7, 5], [0, 7], [1, 2]],
        [[2, 4], [4, 2], [-1, -1], [5, -1]],
    ]
)


def test_each_row_and_kv_head_finds_its_pages_in_frames_of_its_own():
    pages, valid = jnp.asarray(PAGES), jnp.ones(3, jnp.int32)
    empty = empty_working_set(3, 2, 8, 4, "kv_heads")
    after, fetches = empty.taken(pages, valid, plain_context(), step=False)
    frames = np.asarray(after.frames_of(pages))
    assert frames.shape == PAGES.shape
    assert np.array_equal(frames < 0, PAGES < 0)
    for row, head, entry in np.argwhere(PAGES >= 0):
        at = row, head // 2, frames[row, head, entry]
        assert after.page_in[at] == PAGES[row, head, entry]
    # A page that two heads of a group want is fetched once.
    wanted = PAGES.reshape(3, 2, 4)
    once = [[len(set(group[group >= 0])) for group in row] for row in wanted]
    assert np.array_equal(fetches.new.sum(axis=2), once)
    _, again = after.taken(pages, valid, plain_context(), step=False)
    assert not again.new.any()
