"""What the threads of a block compute together on Hopper, with instructions for whole warps.

- `over_block`, `at_least`: the sum or the largest of all numbers, and how many are large enough. A
  warp adds up in one instruction (`redux`).
- `chosen`: which keys are chosen, as one number of 32 bits a thread.
- `write_list`: the slots of masks as a list. A thread's place in it is found by sums over the
  threads before it, of eight numbers at once, a byte each.

A block here is one warpgroup of 128 threads. Arrays [64,64] are strided over them: thread t has the
numbers 512 r + 4 t + e of r < 8 and e < 4.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector
from jaxtyping import Float, Int

from pallas_kernels import hopper_bits
from pallas_kernels.hopper_bits import add, at, constant, times

THREADS, WARPS, SHAPE = 128, 4, (64, 64)
# Numbers of a thread of an array, in runs of `VECTOR` that follow each other.
VECTOR, RUNS = 4, 8
LAYOUT = plgpu.Layout.WG_STRIDED(SHAPE, vec_size=VECTOR)
PACKED = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
_NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
# One piece of assembly: the compiler would compute parts of it earlier, for all keys at once.
_CHOSEN = """{ .reg .pred q;
    setp.eq.s32 q, $2, $4;
    setp.lt.and.s32 q, $6, $5, q;
    setp.ge.or.s32 q, $2, $3, q;
    @q or.b32 $0, $0, $7; }"""
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {"add": arith.addi, "max": arith.maxsi}
# Runs of all arrays that the lanes of a warp count at once.
_LANES = 32


def scratch(arrays: int) -> dict[str, Any]:
    """The shared memory of `over_block`, and of `write_list` for `arrays` arrays."""
    runs = -(-arrays * RUNS // _LANES) * _LANES
    return across() | dict(
        # Of each warp the slots in each run, a byte each: those of even runs, then of odd ones.
        runs=plgpu.SMEM((WARPS * runs // 4,), jnp.int32),
    )


def across() -> dict[str, Any]:
    """The shared memory of sums over a block."""
    return dict(across=plgpu.SMEM((WARPS,), jnp.int32))


def over_block(
    x: Int[Array, "..."], across: Any, op: str, interpreted: bool, layout: Any = LAYOUT
) -> Array:
    """The "add" or the "max" of all numbers, a scalar of all threads."""
    if interpreted:
        return x.max() if op == "max" else x.sum()

    def reduced(_: Any, x: Any, across: Any) -> Any:
        return _scalar(_over_block(x, op, across))

    run: Any = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=_NUMBER)
    return run(reduced)(x, across)


def largest(x: Float[Array, "..."], across: Any, interpreted: bool, layout: Any) -> Array:
    """The largest of all numbers, a scalar of all threads; no number is NaN; 0.0 for -0.0."""
    if interpreted:
        return x.max()

    def reduced(_: Any, x: Any, across: Any) -> Any:
        found = _over_block(x, "max", across)
        below = arith.cmpi(arith.CmpIPredicate.slt, found, constant(0))
        negative = arith.ori(arith.subi(constant(0), found), constant(-(2**31)))
        bits = arith.select(below, negative, found)
        return _scalar(arith.bitcast(ir.F32Type.get(), bits))

    kind = plgpu.ShapeDtypeStruct((), jnp.float32, layout=_SCALAR)
    run: Any = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=kind)
    return run(reduced)(ordered(x), across)


def ordered(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Signed integers in the order of x; -0.0 equals 0.0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def at_least(
    keys: Sequence[Int[Array, "64 64"]], border: Array, across: Any, interpreted: bool
) -> Array:
    """How many keys of all arrays are `border` or more, a scalar of all threads."""
    if interpreted:
        return jnp.sum(jnp.stack([x >= border for x in keys]))

    def counted(_: Any, border: Any, across: Any, *keys: Any) -> Any:
        border = border.registers.item()
        # Several counts, so that one need not wait for the other.
        counts = [constant(0) for _ in range(VECTOR)]
        text = "{ .reg .pred q; setp.ge.s32 q, $2, $3; @q add.s32 $0, $0, 1; }"
        for register in (x for each in keys for x in each.registers.flat):
            for i, count in enumerate(counts):
                key = vector.extract(register, [], [i])
                given = [count, key, border]
                counts[i] = llvm.inline_asm(_i32(), given, text, "=r,0,r,r")
        return _scalar(_over_warps(_tree(counts, arith.addi)[0], "add", across))

    takes = (_SCALAR, plgpu.RefType(), *(LAYOUT,) * len(keys))
    run: Any = plgpu.inline_mgpu(arg_types=takes, return_type=_NUMBER)
    return run(counted)(border, across, *keys)


def chosen(
    keys: Int[Array, "64 64"], strict: Array, border: Array, stop: Array, interpreted: bool
) -> Int[Array, " 128"]:
    """Which keys are `strict` or more, or `border` and before number `stop`: a thread's as bits.

    Thread t has bit 4 r + e of number 512 r + 4 t + e.
    """
    if interpreted:
        number = jnp.arange(keys.size).reshape(keys.shape)
        mask = (keys >= strict) | ((keys == border) & (number < stop))
        each = mask.astype(jnp.int32).reshape(RUNS, THREADS, VECTOR) << _bit_of(RUNS)
        return each.sum(axis=(0, 2))

    def bits(_: Any, keys: Any, *given_limits: Any) -> Any:
        limits = [x.registers.item() for x in given_limits]
        warp, lane = hopper_bits.warp_and_lane()
        first = times(add(times(warp, _LANES), lane), VECTOR)
        # Several, so that one need not wait for the other.
        words = [constant(0) for _ in range(VECTOR)]
        for run, register in enumerate(keys.registers.flat):
            for i in range(VECTOR):
                key, number = vector.extract(register, [], [i]), add(first, 512 * run + i)
                given = [words[i], key, *limits, number, constant(1 << run * VECTOR + i)]
                words[i] = llvm.inline_asm(_i32(), given, _CHOSEN, "=r,0,r,r,r,r,r,r")
        one = vector.from_elements(ir.VectorType.get((1,), _i32()), _tree(words, arith.ori))
        return hopper_bits.array(np.array([one], dtype=object), (THREADS,), PACKED, signed=True)

    kind = plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=PACKED)
    takes = (LAYOUT, *(_SCALAR,) * 3)
    run: Any = plgpu.inline_mgpu(arg_types=takes, return_type=kind)
    return run(bits)(keys, strict, border, stop)


def write_list(
    bits: Sequence[Int[Array, " 128"]],
    list_ref: Any,
    runs: Any,
    gap: tuple[Any, Any] | None,
    interpreted: bool,
) -> None:
    """Write the slots of all masks to `list_ref` [C] in global memory: ascending, then -1.

    All warps must have met since the last call with the same `runs`.

    Args:
      bits: `chosen`, each of the next 4096 slots, with at most C bits set in all of them.
      runs: of `scratch`.
      gap: (end, size): from slot `end` on, slots are listed less `size`.
    """
    places = list_ref.shape[0]
    if interpreted:
        each = jnp.stack([x[None, :, None] >> _bit_of(RUNS) & 1 for x in bits])
        slots = jnp.arange(each.size)
        if gap is not None:
            slots = jnp.where(slots >= gap[0], slots - gap[1], slots)
        listed = jnp.sort(jnp.where(each.reshape(-1) > 0, slots, each.size))[:places]
        list_ref[...] = jnp.where(listed < each.size, listed, -1)
        return

    def write(_: Any, list_ref: Any, runs: Any, *given: Any) -> None:
        registers = [x.registers.item() for x in given]
        masks = [vector.extract(x, [], [0]) for x in registers[: len(bits)]]
        shift = registers[len(bits) :]
        warp, lane = hopper_bits.warp_and_lane()
        counted = [_runs_before(mask, lane) for mask in masks]
        base = utils.memref_ptr(runs)
        words = 2 * -(-len(masks) * RUNS // _LANES) * _LANES // RUNS
        for i, pairs in enumerate(counted):
            for half, (_, upto) in enumerate(pairs):
                # The last lane's count is the warp's; all lanes store it.
                all_of_warp = _shuffle("idx", upto, constant(_LANES - 1))
                word = add(times(warp, words), 2 * i + half)
                llvm.store(all_of_warp, at(base, times(word, 4)))
        utils.warpgroup_barrier()
        bases, total = _bases(base, words, len(masks) * RUNS, warp, lane)
        target = utils.memref_ptr(list_ref)
        for i, (mask, pairs) in enumerate(zip(masks, counted, strict=True)):
            before = [earlier for earlier, _ in pairs]
            where = bases[i * RUNS // _LANES], lane
            _write_mask(i, mask, before, where, _List(target, places, shift))
        thread = add(times(warp, _LANES), lane)
        for first in range(0, places, THREADS):
            place = add(thread, first)
            absent = arith.cmpi(arith.CmpIPredicate.sge, place, total)
            absent = arith.andi(absent, _less(place, places))
            _store_if(absent, at(target, times(place, 4)), constant(-1))

    shift = () if gap is None else tuple(jnp.asarray(x, jnp.int32) for x in gap)
    scalars = (_SCALAR,) * len(shift)
    takes = (plgpu.RefType(), plgpu.RefType(), *(PACKED,) * len(bits), *scalars)
    run: Any = plgpu.inline_mgpu(arg_types=takes)
    run(write)(list_ref, runs, *bits, *shift)


def _over_block(x: Any, op: str, across: Any) -> Any:
    """Of all numbers of an array one."""
    (together,) = _tree(list(x.registers.flat), _COMBINE[op])
    (count,) = ir.VectorType(together.type).shape
    values = [vector.extract(together, [], [i]) for i in range(count)]
    return _over_warps(_tree(values, _COMBINE[op])[0], op, across)


def _over_warps(value: Any, op: str, across: Any) -> Any:
    """Of all threads' values one."""
    value = _asm(f"redux.sync.{op}.s32 $0, $1, 0xffffffff;", value)
    (warp, _), base = hopper_bits.warp_and_lane(), utils.memref_ptr(across)
    # All warps have read what the last call left.
    utils.warpgroup_barrier()
    llvm.store(value, at(base, times(warp, 4)))
    utils.warpgroup_barrier()
    each = llvm.load(ir.VectorType.get((WARPS,), _i32()), base)
    return _tree([vector.extract(each, [], [i]) for i in range(WARPS)], _COMBINE[op])[0]


def _scalar(x: Any) -> Any:
    signed = True if isinstance(x.type, ir.IntegerType) else None
    return mosaic.FragmentedArray.splat(x, (), _SCALAR.to_mgpu(), is_signed=signed)


def _bit_of(runs: int) -> Int[Array, "R 1 4"]:
    """The bit of each number of a thread."""
    return jnp.arange(runs)[:, None, None] * VECTOR + jnp.arange(VECTOR)


def _runs_before(mask: Any, lane: Any) -> list[tuple[Any, Any]]:
    """Of a thread's runs of even, then odd number: slots of the lanes before it, and up to it.

    Each count is a byte; a warp has at most 128 slots of a run.
    """
    # The bits of each run, counted in its four bits.
    pairs = arith.subi(mask, arith.andi(arith.shrui(mask, constant(1)), constant(0x55555555)))
    fours = arith.addi(
        arith.andi(pairs, constant(0x33333333)),
        arith.andi(arith.shrui(pairs, constant(2)), constant(0x33333333)),
    )
    found = []
    for half in range(2):
        own = arith.andi(arith.shrui(fours, constant(4 * half)), constant(0x0F0F0F0F))
        upto = _over_lanes(own, lane)
        found.append((arith.subi(upto, own), upto))
    return found


def _over_lanes(x: Any, lane: Any) -> Any:
    """The sums of x up to each lane."""
    for distance in (1, 2, 4, 8, 16):
        other = _shuffle("up", x, constant(distance))
        there = arith.cmpi(arith.CmpIPredicate.sge, lane, constant(distance))
        x = arith.addi(x, arith.select(there, other, constant(0)))
    return x


def _bases(base: Any, words: int, runs: int, warp: Any, lane: Any) -> tuple[list[Any], Any]:
    """How many slots come before this warp's part of each run, and how many there are.

    Lane l of the i-th number has run 32 i + l.

    Args:
      base: of each warp's `words` words of counts.
    """
    before, found = constant(0), []
    byte_kind = ir.IntegerType.get_signless(8)
    for first in range(0, runs, _LANES):
        run = add(lane, first)
        word = add(times(arith.shrui(run, constant(3)), 2), arith.andi(run, constant(1)))
        byte = arith.shrui(arith.andi(run, constant(RUNS - 1)), constant(1))
        place = add(times(word, 4), byte)
        every = mine = constant(0)
        there = _less(run, runs)
        for other in range(WARPS):
            count = llvm.load(byte_kind, at(base, add(place, 4 * words * other)))
            count = arith.select(there, arith.extui(_i32(), count), constant(0))
            every = arith.addi(every, count)
            earlier = arith.cmpi(arith.CmpIPredicate.sgt, warp, constant(other))
            mine = arith.addi(mine, arith.select(earlier, count, constant(0)))
        upto = _over_lanes(every, lane)
        found.append(arith.addi(arith.addi(before, mine), arith.subi(upto, every)))
        before = arith.addi(before, _shuffle("idx", upto, constant(_LANES - 1)))
    return found, before


class _List(NamedTuple):
    """Where a list begins, how long it is, and the end and the size of a gap in the slots."""

    target: Any
    places: int
    shift: Sequence[Any]


def _write_mask(
    number: int, mask: Any, before: Sequence[Any], where: tuple[Any, Any], listed: _List
) -> None:
    """Write a thread's slots of one mask, lowest first; its warp goes on until all have theirs.

    Args:
      before: slots of the lanes before, of runs of even number and of odd.
      where: the slots before the warp's runs, and the lane.
    """
    (bases, lane), (target, places, shift) = where, listed
    warp, _ = hopper_bits.warp_and_lane()
    own = times(add(times(warp, _LANES), lane), VECTOR)
    loop = scf.WhileOp([_i32()], [mask])
    first = loop.before.blocks.append(_i32())
    with ir.InsertionPoint(first):
        (rest,) = first.arguments
        some = _asm(
            "{ .reg .pred q; setp.ne.b32 q, $1, 0; vote.sync.any.pred q, q, 0xffffffff; "
            "selp.b32 $0, 1, 0, q; }",
            rest,
        )
        scf.ConditionOp(arith.cmpi(arith.CmpIPredicate.ne, some, constant(0)), [rest])
    body = loop.after.blocks.append(_i32())
    with ir.InsertionPoint(body):
        (rest,) = body.arguments
        less = arith.subi(rest, constant(1))
        lowest = arith.andi(rest, arith.subi(constant(0), rest))
        # Of no bit it is -1, which nothing is stored for.
        bit = arith.subi(constant(31), _asm("clz.b32 $0, $1;", lowest))
        run = arith.andi(arith.shrui(bit, constant(2)), constant(RUNS - 1))
        odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(run, constant(1)), constant(0))
        counts = arith.select(odd, before[1], before[0])
        byte = times(arith.shrui(run, constant(1)), 8)
        lanes_before = arith.andi(arith.shrui(counts, byte), constant(0xFF))
        # The thread's own slots of this run that come before.
        of_run = arith.shli(constant(-1), times(run, VECTOR))
        earlier = arith.andi(arith.andi(mask, of_run), arith.subi(lowest, constant(1)))
        within = _asm("popc.b32 $0, $1;", earlier)
        source = arith.andi(add(run, number * RUNS), constant(_LANES - 1))
        place = _shuffle("idx", bases, source)
        place = arith.addi(arith.addi(place, lanes_before), within)
        slot = add(own, number * SHAPE[0] * SHAPE[1])
        slot = arith.addi(slot, times(run, THREADS * VECTOR))
        slot = arith.addi(slot, arith.andi(bit, constant(VECTOR - 1)))
        if shift:
            end, size = shift
            behind = arith.cmpi(arith.CmpIPredicate.sge, slot, end)
            slot = arith.select(behind, arith.subi(slot, size), slot)
        there = arith.cmpi(arith.CmpIPredicate.ne, rest, constant(0))
        there = arith.andi(there, _less(place, places))
        _store_if(there, at(target, times(place, 4)), slot)
        scf.YieldOp([arith.andi(rest, less)])


def _tree(values: list[Any], combine: Callable[[Any, Any], Any]) -> list[Any]:
    """All values as one, in a list: pairs first, so that sums do not wait for one another."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [combine(x, y) for x, y in pairs] + values[len(values) // 2 * 2 :]
    return values


def _shuffle(how: str, x: Any, by: Any) -> Any:
    """x of another lane: `by` lanes below ("up"), or lane `by` ("idx")."""
    last = "0x0" if how == "up" else "0x1f"
    return _asm(f"shfl.sync.{how}.b32 $0, $1, $2, {last}, 0xffffffff;", x, by)


def _asm(text: str, *given: Any) -> Any:
    """PTX with 32-bit operands and one 32-bit result. The order of such pieces is kept."""
    inputs = ",r" * len(given)
    return llvm.inline_asm(_i32(), list(given), text, "=r" + inputs, has_side_effects=True)


def _store_if(there: Any, pointer: Any, x: Any) -> None:
    text = "{ .reg .pred q; setp.ne.b32 q, $2, 0; @q st.global.b32 [$0], $1; }"
    flag = arith.extui(_i32(), there)
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, [pointer, x, flag], text, "l,r,r", has_side_effects=True)


def _less(x: Any, bound: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.slt, x, constant(bound))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
