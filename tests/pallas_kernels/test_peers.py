"""Sums and gathers over GPUs that reach each other's memory. They run on GPUs alone."""

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jax_longctx.contract import context
from jax_longctx.sharding import make_mesh
from pallas_kernels import peers
from pallas_kernels.peers import gather_over, row_matmul_over, sum_over
from pallas_kernels.quantised_matrix import QuantisedMatrix, floats_of, quantise_matrix
from tests.drawing import normal

AXES, TURNS = ("tensor",), 5
needs_two = pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
# Rows and numbers of a row: less than a block, several, of another size in turn.
SHAPES = [(1, 128), (1, 4096), (16, 640)]


def on_two(body, *arrays):
    """What `body(peers, *its arrays)` gives on each of two GPUs."""
    mesh = make_mesh(tensor=2)
    assert peers.unsupported(mesh) is None

    def run(*arrays):
        found = peers.meet(mesh, [AXES], 2**14, 3)
        specs = (PartitionSpec(mesh.axis_names), *[PartitionSpec("tensor")] * len(arrays))
        how: dict[str, Any] = dict(mesh=mesh, in_specs=specs, check_vma=False)
        on_each = jax.shard_map(
            lambda peers, *own: body(peers[AXES], *own)[None],
            **how,
            out_specs=PartitionSpec("tensor"),
        )
        return on_each(found, *arrays)

    return np.asarray(jax.jit(run)(*arrays))


@pytest.mark.gpu
@needs_two
def test_sums_and_gathers_again_and_again_have_the_same_bits_on_all():
    x = normal(2, 16, 4096, dtype=jnp.float32)

    def sums(peers, x):
        """Of calls of many sizes from places in turn, as a loop over layers makes them."""

        def turn(_, x):
            for place, (rows, width) in enumerate(SHAPES):
                part = sum_over(AXES, x[0, :rows, :width] / 2, {AXES: peers}, place)
                x = x.at[0, :rows, :width].set(part)
            halves = x[0, :1, :256].astype(jnp.bfloat16)
            every = gather_over(*AXES, halves, {AXES: peers}, 1)
            return x.at[0, 1, :512].set(every.reshape(-1).astype(x.dtype))

        return jax.lax.fori_loop(0, TURNS, turn, x)[0]

    found = on_two(sums, x)
    expected = np.array(x)
    for _ in range(TURNS):
        for rows, width in SHAPES:
            halves = expected[:, :rows, :width] / 2
            expected[:, :rows, :width] = halves[0] + halves[1]
        both = jnp.asarray(expected[:, 0, :256]).astype(jnp.bfloat16).reshape(-1)
        expected[:, 1, :512] = np.asarray(both.astype(jnp.float32))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_few_rows(form, rows):
    x, w = normal(2, rows, 1024, dtype=jnp.bfloat16), normal(2, 1024, 640, dtype=jnp.bfloat16)

    if form is None:
        given, expected = (w,), np.asarray(w, np.float32)
    else:
        stored = quantise_matrix(w.reshape(2048, 640), (0,))
        given = stored.values.reshape(w.shape), jnp.stack([stored.scales] * 2)
        expected = np.asarray(floats_of(stored), np.float32).reshape(w.shape)

    def product(peers, x, w, *scales):
        matrix = QuantisedMatrix(w[0], scales[0][0], x.dtype) if scales else w[0]
        return row_matmul_over(AXES, x[0], matrix, {AXES: peers}, 0)

    found = on_two(product, x, *given)
    expected = np.einsum("srd,sdn->rn", np.asarray(x, np.float32), expected)
    np.testing.assert_array_equal(found[0], found[1])
    close = 1e-4 if form is None else 0.01
    np.testing.assert_allclose(found[0], expected, atol=close * np.max(np.abs(expected)))


def test_exchanges_of_a_layer_wait_for_one_another(monkeypatch):
    made = []

    def sum_over(axes, x, peers, place, after=None):
        made.append((place, after))
        return x + 1

    monkeypatch.setattr(context, "sum_over", sum_over)
    queries = jnp.zeros(4)
    some = peers.Peers(AXES, jnp.zeros(4, jnp.int32), jnp.zeros((3, 2), jnp.int32), 512)
    exchanges = context.Exchanges({AXES: some}, queries, range(3, 9))
    assert exchanges.done(queries) is queries
    first = exchanges.sum(AXES, queries)
    # Outside of a branch nothing waits for what is made there.
    jax.lax.cond(first[0] > 0, lambda: exchanges.sum(AXES, first), lambda: first)
    second = exchanges.sum(AXES, first)
    assert [place for place, _ in made] == [3, None, 4]
    assert made[0][1] is queries and made[1][1] is None and made[2][1] is first
    # The result depends on the last, whatever it has but a NaN.
    np.testing.assert_array_equal(exchanges.done(queries), queries)
    exchanges.sum(AXES, second * jnp.nan)
    assert np.isnan(exchanges.done(queries)).all()


def test_devices_that_are_no_peers():
    mesh = make_mesh(tensor=2)
    assert "2 devices on cpu" in (peers.unsupported(mesh) or "")
    assert peers.meet(mesh, [AXES], 16, 1) == {}
    assert peers.meet(AbstractMesh((1, 1, 2), mesh.axis_names), [AXES], 16, 1) == {}


@pytest.mark.parametrize(("status", "able", "told"), [(0, 1, True), (0, 0, False), (101, 1, False)])
def test_gpus_that_do_not_reach_each_other_are_no_peers(monkeypatch, status, able, told):
    asked = []

    class Driver:
        def cuDeviceCanAccessPeer(self, found, *pair):
            asked.append(pair)
            found._obj.value = able
            return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    # Not the cached answer.
    reach = peers._reach_each_other.__wrapped__
    assert reach((0, 1)) == told
    assert asked[0] == (0, 1) and (not told or asked == [(0, 1), (1, 0)])
    assert reach((None, None))
