import numpy as np

from jax_longctx.settings import Reading
from research.read_blocks import counted
from tests.support import tiny_engine


def test_what_is_read_and_kept_by_layer_and_head():
    engine = tiny_engine(chunk=256)
    text = np.random.default_rng(1).integers(1, 60, 2000).tolist()
    density, kept = counted(engine, text, [Reading(mass=mass) for mass in (0.5, 0.8, 1.0)])
    layers, heads = engine.config.num_layers, engine.config.num_heads
    assert density.shape == kept.shape == (3, layers, heads)
    assert np.all(np.diff(density, axis=0) > 0) and np.all(np.diff(kept, axis=0) > 0)
    np.testing.assert_array_equal(density[2], 1)
    np.testing.assert_allclose(kept[2], 1, rtol=1e-6)
    # Random attention is almost even: what is left out is what the blocks' number says.
    assert np.all(kept[0] > 0.5) and np.all(density[0] < 0.7)
