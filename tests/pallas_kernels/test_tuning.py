"""The tables of configurations: what is found, what is not, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.attention_mass import gpu as mass_gpu
from pallas_kernels.decode_attention import gpu as decode_gpu
from pallas_kernels.select_large_k import gpu as select_gpu
from pallas_kernels.sparse_decode_attention import gpu as sparse_gpu
from pallas_kernels.topk_scores import gpu as topk_gpu


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 1
    fast: bool = False


CHOICES = Config(), Config(width=4), Config(width=4, fast=True)
SHAPES = "slots 1024"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this device's table."""
    monkeypatch.setenv(tuning.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path / "cpu.json"


def _configured(operation: str = "scan", shapes: str = SHAPES) -> Config:
    return tuning.configured(operation, shapes, CHOICES)


def test_shapes_of_a_class_share_a_configuration_and_others_have_the_default(table: Path) -> None:
    assert tuning.path_of(jax.devices()[0].device_kind) == table
    assert _configured() == Config()  # there is no file
    entry = tuning.Entry(dict(width=4, fast=True), 1e-5, 2e-5)
    tuning.write(table, "cpu", {"scan": {tuning.shape_class(slots=1000): entry}})
    assert _configured() == Config(width=4, fast=True)
    assert _configured(shapes=tuning.shape_class(slots=1024)) == Config(width=4, fast=True)
    assert _configured(shapes=tuning.shape_class(slots=1025)) == Config()
    assert _configured("sort") == Config()
    record = json.loads(table.read_text())
    assert (record["device"], record["jax"]) == ("cpu", jax.__version__)
    assert list(table.parent.iterdir()) == [table]


def test_a_table_written_again_is_read_again(table: Path) -> None:
    for width in (4, 1):
        entry = tuning.Entry(dict(width=width, fast=False), 1e-5, 1e-5)
        tuning.write(table, "cpu", {"scan": {SHAPES: entry}})
        assert _configured().width == width
    assert tuning.read(table) == {"scan": {SHAPES: entry}}


def test_files_are_named_after_devices_and_lie_in_the_package() -> None:
    path = tuning.path_of("NVIDIA H100 80GB HBM3")
    assert path.name == "nvidia-h100-80gb-hbm3.json"
    assert path.parent == Path(tuning.__file__).parent
    assert tuning.shape_class(head_dim=128, rows=5, none=0) == "head_dim 128, rows 8, none 1"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'entries'"),
        ('{"entries": {"scan": []}}', "AttributeError"),
        ('{"entries": {"scan": {"slots 1024": {"config": {}}}}}', "KeyError: 'seconds'"),
        (
            '{"entries": {"scan": {"slots 1024": '
            '{"config": 4, "seconds": 1, "default_seconds": 1}}}}',
            "config 4 is not an object",
        ),
        (
            '{"entries": {"scan": {"slots 1024": '
            '{"config": {"width": 3}, "seconds": 1, "default_seconds": 1}}}}',
            r"scan, slots 1024: {'width': 3}; expected one of Config\(width=1, fast=False\), C",
        ),
    ],
)
def test_a_table_that_is_none_is_one_clear_error(table: Path, text: str, what: str) -> None:
    table.write_text(text)
    with pytest.raises(tuning.TuningError, match=what) as raised:
        _configured()
    message = str(raised.value)
    assert str(table) in message and "bench kernels --tune" in message and "\n" not in message


def test_a_forced_configuration_goes_before_the_table(table: Path) -> None:
    table.write_text("{")
    with tuning.forced("scan", CHOICES[1]) as seen:
        assert _configured() == CHOICES[1]
        with pytest.raises(tuning.TuningError):
            _configured("sort")
    assert seen == {SHAPES}
    with pytest.raises(tuning.TuningError):
        _configured()


@pytest.mark.parametrize("kernel", [decode_gpu, topk_gpu, mass_gpu, sparse_gpu, select_gpu])
def test_a_kernels_first_configuration_is_its_default(kernel) -> None:
    assert kernel.CONFIGS[0] == kernel.Config()
    assert len(set(kernel.CONFIGS)) == len(kernel.CONFIGS) > 1


def test_every_kernel_takes_its_configuration_from_the_table() -> None:
    """Traced for a GPU: each asks for a class of its shapes, and the program differs."""
    q = jax.ShapeDtypeStruct((1, 200, 4, 128), jnp.bfloat16)
    one = jax.ShapeDtypeStruct((1, 1, 4, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 2, 1024, 128), jnp.bfloat16)
    row, pages = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), (1, 2, 40)))
    lse, scores = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, 200, 4), (1, 5000)))

    def mass(q, k, lse, n):
        how = dict(scale=0.1, valid=n, causal_start=None, over_group="sum", over_queries="sum")
        return mass_gpu.attention_mass(q, k, lse, n, **how)[0]

    def sparse(q, k, v, pages, start, stop):
        return sparse_gpu.sparse_decode_attention(
            q, k, v, pages, start, stop, page_size=16, scale=0.1
        )

    calls = {
        "decode_attention": (
            decode_gpu,
            lambda *args: decode_gpu.decode_attention(*args, scale=0.1),
            (one, k, k, row),
        ),
        "topk_scores": (
            topk_gpu,
            lambda *args: topk_gpu.topk_scores(*args, count=2),
            (q, k, row, row, lse),
        ),
        "attention_mass": (mass_gpu, mass, (q, k, lse, row)),
        "sparse_decode_attention": (sparse_gpu, sparse, (one, k, k, pages, row, row)),
        "select_large_k": (
            select_gpu,
            lambda s, k: select_gpu.select_large_k(s, k, size=9),
            (scores, row),
        ),
    }
    for operation, (kernel, run, args) in calls.items():
        programs = []
        for config in (kernel.CONFIGS[0], kernel.CONFIGS[-1]):
            with tuning.forced(operation, config) as seen:
                # A function of its own each time: traces are kept.
                programs.append(str(jax.make_jaxpr(lambda *args, run=run: run(*args))(*args)))
            assert len(seen) == 1, operation
        assert programs[0] != programs[1], operation
