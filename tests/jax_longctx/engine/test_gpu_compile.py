"""Programs that loop over the layers, compiled for GPUs that need not be there.

They hold no copy of a cache or of the weights. A decode step launches as many kernels, and takes as
many bytes beside its arguments, as a table says. `LONGCTX_GPU_PLUGIN` names a folder with JAX's
CUDA plugin:

    pip install --no-deps --target FOLDER --requirement .ci/gpu-plugin.txt
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jax_longctx.engine import gpu_programs
from tests.patience import patience

REPOSITORY = Path(__file__).parents[3]
PLUGIN = os.environ.get("LONGCTX_GPU_PLUGIN")
needs_plugin = pytest.mark.skipif(
    PLUGIN is None or not (Path(PLUGIN) / "jax_plugins").is_dir(),
    reason="needs JAX's CUDA plugin: LONGCTX_GPU_PLUGIN names no folder that holds it",
)

# Kernels of a turn of the loop over the layers in a decode step, and its temporaries in bytes. A
# turn has as many layers as a GPU's where it is said, else two. A process compiles the programs of
# an entry.
STEPS: list[dict[str, tuple[int, int]]] = [
    # A new token in 8 bits is quantised, key and value apart. Weights in 8 bits are converted
    # inside the kernel that multiplies. Any number of rows that share a context take as many.
    {
        "full:turn=4": (60, 8_391_424),
        "full:kv=int8:only=decode": (42, 8_375_808),
        # Its keys have a bias, and so units, which take no kernel.
        "full:model=qwen2-7b:kv=int8:only=decode": (42, 9_129_216),
        "full:weights=int8": (33, 8_386_048),
        "full:rows=16": (45, 14_256_128),
        "quest": (48, 8_404_480),
        "quest:kv=int8:only=decode": (63, 8_427_776),
        # Over what SnapKV keeps: as Quest alone.
        "snapkv > quest:only=decode": (48, 8_404_480),
        "quest:rows=16": (55, 13_339_392),
        "quest:kv=int8:rows=16": (71, 14_529_536),
        # They read a text as others do.
        "resa:only=decode": (65, 8_445_440),
        "resa:kv=int8:only=decode": (75, 8_475_136),
        "arkvale:only=decode": (54, 8_470_272),
        "arkvale:rows=16": (61, 13_034_752),
        "citrus:only=decode": (33, 8_386_048),
        "citrus:kv=int8:only=decode": (42, 8_375_552),
        "refreshkv:only=decode": (36, 73_320_192),
        "refreshkv:kv=int8:only=decode": (50, 39_641_600),
        "streaming-llm:only=decode": (39, 9_184_000),
        "r-kv:only=decode": (37, 14_837_504),
        "infllm": (73, 31_246_336),
        "infllm:kv=int8:only=decode": (88, 30_468_352),
        # In a loop of two turns of two layers XLA copies these pages once. So long a context has
        # as many pages as one launch ranks (`gpu_ties`).
        "free-pages:only=decode:turn=4:context=131072": (117, 42_078_720),
    },
    # The loops that fetch pages count once each, with 21 pages of keys and of values.
    {
        "infllm:offload=host": (294, 28_337_664),
        "reattention": (58, 34_742_528),
        "reattention:offload=host:only=decode": (203, 35_653_376),
        "quest:offload=host:only=decode": (292, 9_934_336),
        "quest:kv=int8:offload=host:only=decode": (392, 9_218_304),
        "arkvale:offload=host:only=decode": (292, 10_824_960),
        "free-pages:offload=host:only=decode": (290, 43_265_792),
    },
    # Without kernels: XLA's forms take layers' weights and caches where they lie.
    {
        "full:gpu=a100:only=decode": (43, 10_943_488),
        "full:weights=int8:gpu=a100:only=decode": (46, 10_974_976),
        "full:kv=int8:gpu=a100:context=131072:turn=4:only=decode": (151, 148_714_752),
        "quest:gpu=a100:only=decode": (142, 17_658_368),
        "quest:kv=int8:gpu=a100:only=decode": (151, 17_846_272),
        "reattention:gpu=a100:only=decode": (101, 40_604_160),
        # So many rows' pages are gathered in several blocks; their keys are scored at once.
        "quest:gpu=a100:context=131072:batch=9:only=decode": (174, 52_249_600),
        "infllm:gpu=a100:context=131072:batch=9:only=decode": (120, 293_575_936),
        "reattention:gpu=a100:context=131072:batch=9:only=decode": (103, 482_324_224),
    },
]

# The same on a mesh of "seq" x "tensor" GPUs, and what they exchange in two layers. XLA has no
# collective there.
MESHES: list[dict[str, tuple[int, int, dict[str, int]]]] = [
    {
        "full:mesh=1x2:only=decode": (37, 6_338_048, {"peer_sum": 4}),
        "full:mesh=2x1:only=decode": (51, 6_354_432, {"peer_gather": 4, "peer_sum": 4}),
        "quest:mesh=1x2:only=decode": (52, 6_821_376, {"peer_sum": 4}),
        "reattention:mesh=2x1:only=decode": (113, 40_928_000, {"peer_gather": 8, "peer_sum": 6}),
    },
    {
        "full:mesh=1x8:only=decode": (44, 11_636_672, {"peer_sum": 4}),
        "full:mesh=2x4:only=decode": (58, 14_206_144, {"peer_gather": 4, "peer_sum": 4}),
        "quest:mesh=8x1:only=decode": (113, 48_629_760, {"peer_gather": 8, "peer_sum": 4}),
    },
]

# A loop over four layers: it copies one layer's part of a stack, hands on the address of another's,
# and writes a third one in place.
LOOP = """
%copied (p: f32[4,64], i: s32[]) -> f32[1,64] {
  ROOT %s = f32[1,64]{1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,64}
}

%written (p: f32[4,64], x: f32[1,64], i: s32[]) -> f32[4,64] {
  ROOT %u = f32[4,64]{1,0} dynamic-update-slice(%p, %x, %i)
}

%body (c: (f32[4,64], s32[])) -> (f32[4,64], s32[]) {
  %a = f32[1,64]{1,0} fusion(%p, %i), kind=kLoop, calls=%copied, metadata={op_name="here"}
  %b = f32[1,64]{1,0} fusion(%p, %i), kind=kCustom, calls=%copied, backend_config={"dynamic_slice_fusion"}
  %loop_dynamic_slice_fusion = f32[1,64]{1,0} fusion(%p, %i), kind=kLoop, calls=%copied
  %c = f32[4,64]{1,0} fusion(%p, %b, %i), kind=kLoop, calls=%written
  ROOT %t = (f32[4,64]{1,0}, s32[]) tuple(%c, %i)
}

ENTRY %main (p: f32[4,64]) -> f32[4,64] {
  %w = (f32[4,64]{1,0}, s32[]) while(%t), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %r = f32[4,64]{1,0} copy(%w)
}
"""  # noqa: E501


def test_kernels_are_counted_and_copies_found():
    program = gpu_programs.computations(LOOP)
    assert gpu_programs.layer_loops(program, 4) == ["body"]
    assert gpu_programs.layer_loops(program, 8) == []
    assert gpu_programs.kernels(program, "body") == 4
    found = list(gpu_programs.copies(program, {64: "a layer's", 256: "all layers'"}))
    assert [what for _, what in found] == ["a layer's", "a layer's", "all layers'"]
    assert found[0][0].endswith("... here")


def compiled(methods):
    """As users compile, in a process of its own: JAX looks for plugins once, when it begins."""
    # Without the flags and the cache of the tests.
    left_out = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{PLUGIN}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax_longctx.engine.gpu_programs", *methods],
        **dict(cwd=REPOSITORY, env=environment, capture_output=True, text=True),
        timeout=patience(1800),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for line in done.stdout.splitlines():
        each = json.loads(line)
        found[each["method"]].append(each)
    for method, programs in found.items():
        alone = any(option in method for option in (":rows=", ":only="))
        every = {"decode"} if alone else gpu_programs.kinds(method)
        assert {each["kind"] for each in programs} == every
    return found


# One test for copies and numbers: two would compile twice.
@pytest.mark.long
@pytest.mark.slow
@needs_plugin
@pytest.mark.parametrize("methods", STEPS, ids=lambda methods: next(iter(methods)))
def test_no_copies_of_weights_or_caches_and_as_many_kernels_and_bytes_as_known(methods):
    steps = {}
    for method, found in compiled(methods).items():
        check_copies(method, found)
        (step,) = [each for each in found if each["kind"] == "decode"]
        (number,) = step["kernels"]
        steps[method] = number, step["temporaries"]
    # Fewer are better: then lower the number. Raise it only with a measurement.
    assert steps == methods


@pytest.mark.long
@pytest.mark.slow
@needs_plugin
@pytest.mark.parametrize("methods", MESHES, ids=["two", "eight"])
def test_a_step_on_several_gpus_exchanges_few_numbers_in_kernels(methods):
    steps = {}
    for method, (step,) in compiled(methods).items():
        check_copies(method, [step])
        (number,), (exchanged,) = step["kernels"], step["collectives"]
        # Such run in an order of each GPU's own, while the others wait for them.
        assert step["side by side"] == [[]]
        steps[method] = number, step["temporaries"], exchanged
    assert steps == methods


@pytest.mark.long
@pytest.mark.slow
@needs_plugin
def test_a_step_reads_the_chosen_experts_where_they_lie():
    """All experts of a layer of Qwen3-30B-A3B take 1.2 GB in bfloat16, of gpt-oss 1.6 GB."""
    model = "full:model=qwen3-30b-a3b"
    kernels = {
        f"{model}:only=decode": 54,
        f"{model}:weights=int8:only=decode": 57,
        f"{model}:rows=4": 74,
        "full:model=gpt-oss-20b:only=decode": 55,
    }
    for method, (found,) in compiled([*kernels]).items():
        assert found["temporaries"] < 12e6
        assert not found["copies"] and not found["gathers"]
        assert found["kernels"] == [kernels[method]]


def check_copies(method, found):
    for each in found:
        # Without cuDNN, which is not there to compile with, a chunk's attention reads slices.
        chunk = each["kind"] in ("context", "question")
        copies = [text for text, what in each["copies"] if not chunk or "weights" in what]
        if chunk and ":weights=" in method:
            # Before a product of many rows XLA makes the numbers that it multiplies.
            copies = [text for text in copies if not text.endswith("/convert_element_type")]
        if method.startswith("infllm"):
            # Each step makes all of the ring anew, and the context's end remembers it.
            rings = (",32,4735]{2,1,0} fusion(", "copy(%caches_0__cache_received")
            copies = [text for text in copies if not any(ring in text for ring in rings)]
        if ":offload=" in method:
            # At the end of the context the tail makes room for question and answer.
            copies = [] if each["kind"] == "finish" else copies
            # A chunk may have a layer's keys and values for itself, and no more.
            copies += [text for text, what in each["copies"] if chunk and "all layers" in what]
        if method.startswith("refreshkv"):
            # A full step gathers the new partial cache from a slice of the layer's keys.
            copies = [text for text in copies if "/attention/while/body/" not in text]
        if method.startswith("r-kv"):
            # A step after which tokens leave ranks a layer's small cache, and writes it anew.
            copies = [text for text, what in each["copies"] if what != "a layer's cache"]
        assert not copies, (method, each["name"])
