import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, hopper
from pallas_kernels.common import Window
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.plane import Plane, part_of
from pallas_kernels.prefill_attention import cache_attention, causal_attention, gpu, tpu
from pallas_kernels.select_large_k import select_large_k


def _chunk(queries=4, heads=4, kv_heads=2, head_dim=64, dtype="float32"):
    q = jnp.ones((1, queries, heads, head_dim), dtype)
    return q, jnp.ones((1, queries, kv_heads, head_dim), dtype)


def _cache(slots=256, kv_heads=2, head_dim=64, dtype="float32"):
    return jnp.ones((1, kv_heads, slots, head_dim), dtype), jnp.array([slots], jnp.int32)


def test_the_choice_is_logged_once_for_a_shape_class(caplog):
    dispatch._log_once.cache_clear()
    q, k = _chunk()
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(3):
            causal_attention(q, k, k, scale=1.0)
        causal_attention(*(x[:, :2] for x in (q, k, k)), scale=1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "causal_attention on cpu, float32 4 heads of 64 over 2 kv heads: "
        "xla (no kernel for this platform)"
    ]


def test_a_kernel_that_cannot_run_is_replaced_and_the_reason_logged(caplog, monkeypatch):
    dispatch._log_once.cache_clear()
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    q, _ = _chunk()
    k, lengths = _cache(slots=200)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        cache_attention(q, k, k, lengths, scale=1.0)
    (record,) = caplog.records
    assert record.getMessage().endswith("xla (not tpu: 200 slots are not a multiple of 128)")


def test_the_platform_is_that_of_the_mesh_traced_for():
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    assert dispatch.platform() == "cpu"
    with jax.sharding.use_abstract_mesh(mesh):
        assert dispatch.platform() == "tpu"


REFUSED, WRONG = NotImplementedError, ValueError
WINDOW = Window(8, jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize(
    ("attend", "shape", "how", "error", "message"),
    [
        (causal_attention, None, dict(implementation="gpu"), REFUSED, "needs platform gpu"),
        (causal_attention, None, dict(implementation="tpu"), REFUSED, "needs platform tpu"),
        (causal_attention, None, dict(implementation="x"), WRONG, "'x'; there are xla, gpu, tpu"),
        (cache_attention, (2, 256), dict(implementation="gpu"), REFUSED, "needs platform gpu"),
        (cache_attention, (2, 256), dict(implementation="tpu"), REFUSED, "needs platform tpu"),
        (decode_attention, (2, 256), dict(queries=17), REFUSED, "most 16: use cache_attention"),
        (cache_attention, (3, 256), {}, WRONG, "does not fit"),
        (cache_attention, (2, 0), {}, WRONG, "does not fit"),
        (cache_attention, (2, 64), dict(scale=0), WRONG, "scale is 0; expected a number above 0"),
    ],
)
def test_what_cannot_run_is_named(attend, shape, how, error, message):
    """`shape` is that of a cache: kv heads and slots."""
    how = {"scale": 1.0} | how
    q, fresh = _chunk(queries=how.pop("queries", 4))
    k = fresh if shape is None else jnp.ones((1, *shape, 64))
    lengths = [] if shape is None else [jnp.array([1], jnp.int32)]
    with pytest.raises(error, match=message):
        attend(q, k, k, *lengths, **how)


def test_lengths_outside_the_cache_are_its_ends():
    q, _ = _chunk()
    k = jax.random.normal(jax.random.key(0), (1, 2, 256, 64))
    for attend in (cache_attention, decode_attention):
        for given, taken in ((300, 256), (-5, 0)):
            beyond, within = (
                attend(q, k, k, jnp.array([n], jnp.int32), scale=1.0) for n in (given, taken)
            )
            assert all(bool(jnp.array_equal(x, y)) for x, y in zip(beyond, within, strict=True))


def test_reasons_against_cudnn_and_splash():
    large = []  # of a batch too large to make: seen by its shapes alone
    jax.eval_shape(
        lambda q, k: large.append(tpu.unsupported_cache(q, k, None)),
        jax.ShapeDtypeStruct((64, 2048, 32, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, 8, 131072, 128), jnp.bfloat16),
    )
    for expected, reason in (
        ("takes bfloat16 and float16, not float32", gpu.unsupported_causal(_chunk()[0])),
        ("head dim 32", gpu.unsupported_causal(_chunk(head_dim=32, dtype="bfloat16")[0])),
        ("cuDNN is not detected", gpu.unsupported_causal(_chunk(dtype="bfloat16")[0])),
        ("no sliding window", gpu.unsupported_cache(_chunk()[0], WINDOW)),
        ("no sliding window", tpu.unsupported_cache(_chunk()[0], _cache()[0], WINDOW)),
        ("scalar memory", large[0]),
    ):
        assert reason is not None and expected in reason


def test_a_jax_without_the_private_binding_is_a_reason(monkeypatch):
    from jax._src import cudnn

    monkeypatch.setattr(cudnn, "fused_attention_stablehlo", SimpleNamespace(MaskType=None))
    reason = gpu.unsupported_causal(_chunk(dtype="bfloat16")[0])
    assert reason is not None and "lacks ['check_cudnn_version', 'dot_product_attention']" in reason


def test_a_kernel_with_a_reason_is_passed_over_and_refused_by_name(monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    for reason, chosen in (("it fails", 2), (None, 1)):
        kernel = dispatch.Kernel(min, lambda reason=reason: reason)
        assert dispatch.select("sort", None, str(reason), xla=max, gpu=kernel)(1, 2) == chosen
    with pytest.raises(NotImplementedError, match="'gpu' cannot run numbers: it fails"):
        refused = dispatch.Kernel(min, lambda: "it fails")
        dispatch.select("sort", "gpu", "numbers", xla=max, gpu=refused)


def test_only_a_kernel_that_says_so_is_given_a_plane(monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    plane = Plane(jnp.arange(6).reshape(3, 2), jnp.int32(1))
    for planes in (False, True):
        kernel = dispatch.Kernel(lambda x: x, lambda: None, planes=planes)
        given = dispatch.select("read", None, f"planes {planes}", xla=max, gpu=kernel)(plane)
        assert (given is plane) is planes
        np.testing.assert_array_equal(part_of(given), [2, 3])


def _traced_for(kind):
    """The program of a decode step and a selection for a GPU of that name, which is not here."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
    q, _ = _chunk(queries=1, dtype="bfloat16")
    # Of more pieces of a head than a second kernel merges.
    k, lengths = _cache(slots=8192, dtype="bfloat16")

    def run(q, k, lengths):
        scores = jnp.broadcast_to(q.ravel()[0].astype(jnp.float32), (1, 65536))
        return decode_attention(q, k, k, lengths, scale=1.0), select_large_k(scores, 5, size=5)

    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return str(jax.make_jaxpr(run)(q, k, lengths))


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"])
def test_a_hopper_gpu_gets_its_kernels(kind, caplog):
    assert _traced_for(kind).count("kernel_name") == 2
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_another_gpu_gets_the_xla_forms_and_one_warning(caplog):
    hopper._warn_once.cache_clear()
    for _ in range(2):
        assert "kernel_name" not in _traced_for("NVIDIA B200")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    for word in ("decode_attention", "NVIDIA B200", "compute capability unknown", "only for 9.0"):
        assert word in warning


def test_the_gpu_at_hand_tells_its_own_capability(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    for capability, reason in (("8.0", "compute capability 8.0"), ("9.0", None)):
        gpu.compute_capability = capability
        found = hopper.unsupported_device()
        assert found is reason is None or (reason and found and reason in found)
