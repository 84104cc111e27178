"""Matrices in int8 as the first operand of a wgmma: from shared memory to registers, as 16 bits.

wgmma takes its first operand from registers too. So numbers in 8 bits become 16 bits, exactly, on
their way from shared memory to the tensor cores, and nothing is written back. A wgmma has its 64
rows and 16 columns spread over 128 threads: thread 32 w + 4 g + t has the columns 2 t, 2 t + 1,
2 t + 8 and 2 t + 9 of the rows 16 w + g and 16 w + g + 8. A thread loads 4 bytes that follow each
other and takes them for the numbers that it must have:

- `rows_of` takes the 4 bytes for its columns of one row. So the columns come in another order, in
  which `in_column_order` puts those of the other operand.
- `columns_of` makes the transpose. It takes the 4 bytes for one column of 4 rows. So the rows come
  in another order, and with them the product's, which `in_row_order` undoes.

A pair of numbers takes 4 instructions: a prmt brings both bytes into one register, two lop3 make
them the mantissas of two differences, and a subtraction gives those. Loads have no bank conflicts.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Float, Shaped

from pallas_kernels import hopper

# PTX for two numbers in $1 and $2, whose bytes `{bytes}` picks twice each; the result is $0.
_CONVERSIONS = {
    # With m of 7 bits and the sign s: (128 + m) - (128 + 128 s).
    "bfloat16": """
        lop3.b32 x, p, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 y, p, 0x00800080, 0x43004300, 0xea;
        sub.bf16x2 $0, x, y;""",
    # (1024 + 128 + x) - (1024 + 128)
    "float16": """
        lop3.b32 x, p, 0x00ff00ff, 0x64806480, 0x6a;
        mov.b32 y, 0x64806480;
        sub.f16x2 $0, x, y;""",
}


def rows_of(ref: Any, dtype: Any, interpreted: bool) -> Float[Array, "R C"]:
    """The matrix in shared memory (`hopper.tiled`) with its columns `in_column_order`.

    Args:
      ref: [R,C], int8: rows a multiple of 64, 64 or 128 columns.
    """
    if interpreted:
        return in_column_order(ref[...]).astype(dtype)
    rows, columns = ref.shape

    def words(read: Any, warp: Any, group: Any, lane: Any) -> np.ndarray:
        found = np.empty((rows // 64, columns // 8, 2), dtype=object)
        row = add(times(warp, 16), group)
        for part in range(columns // 16):
            for block, half in np.ndindex(rows // 64, 2):
                word = read(row, add(times(lane, 4), part * 16), block * 64 + half * 8)
                for upper in range(2):
                    found[block, 2 * part + upper, half] = word, word, 2 * upper, 2 * upper + 1
        return found

    return _fragments(ref, (rows, columns), dtype, 4, words)


def columns_of(ref: Any, dtype: Any, interpreted: bool) -> Float[Array, "C R"]:
    """The transpose of the matrix in shared memory, whose products are put `in_row_order`.

    Args:
      ref: [R,C], int8: rows a multiple of 16, 64 or 128 columns.
    """
    if interpreted:
        x = ref[...].T.astype(dtype)
        return (
            jnp.moveaxis(x.reshape(4, 8, -1, 2, x.shape[1]), 2, 0).swapaxes(2, 3).reshape(x.shape)
        )
    rows, columns = ref.shape
    together = columns // 32

    def words(read: Any, warp: Any, group: Any, lane: Any) -> np.ndarray:
        found = np.empty((columns // 64, rows // 8, 2), dtype=object)
        column = times(add(times(warp, 8), group), together)
        for part in range(rows // 8):
            pair = [read(add(times(lane, 2), odd), column, part * 8) for odd in range(2)]
            for block, half in np.ndindex(columns // 64, 2):
                byte = 2 * block + half
                found[block, part, half] = *pair, byte, byte
        return found

    return _fragments(ref, (columns, rows), dtype, together, words)


def in_column_order(x: Shaped[Array, "*R C"]) -> Shaped[Array, "*R C"]:
    """The columns in the order of `rows_of`: in runs of 16, pairs 0 2 4 6 1 3 5 7."""
    pairs = x.reshape(*x.shape[:-1], -1, 4, 2, 2)
    return jnp.swapaxes(pairs, -3, -2).reshape(x.shape)


def in_row_order(x: Float[Array, "C N"], interpreted: bool) -> Float[Array, "C N"]:
    """A product with `columns_of`, its rows in the order of the columns.

    A thread has 2 or 4 rows that follow each other, so that transposes are stored as they lie.
    """
    rows, columns = x.shape
    if interpreted:
        each = x.reshape(-1, 4, 2, 8, columns)  # block, warp, half, group
        return each.transpose(1, 3, 0, 2, 4).reshape(x.shape)
    together = rows // 32
    layout = plgpu.Layout.TILED(
        fragmented_array.Tiling(((rows, 8), (rows // 4, 8), (together, 2), (together, 1))),
        warp_dims=(-8,),
        lane_dims=(-6, -5),
        vector_dim=-2,
    )

    def reordered(_: Any, x: Any) -> Any:
        found = x.registers.reshape(rows // 64, columns // 8, 2)
        kind = ir.VectorType.get((together,), x.mlir_dtype)
        registers = np.empty((columns // 8, 2), dtype=object)
        for part, odd in np.ndindex(columns // 8, 2):
            each = [vector.extract(y, [], [odd]) for y in found[:, part].flat]
            registers[part, odd] = vector.from_elements(kind, each)
        return array(registers, x.shape, layout)

    kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=kind)
    return run(reordered)(x)


def over_rows(x: Float[Array, "R N"], scratch: Any, op: str, interpreted: bool) -> Array:
    """The "max" or "sum" of every column, for all threads of a warpgroup.

    JAX's own reduction over warps has one buffer for all warpgroups, which must not reduce at once.
    Between two calls with the same scratch all warps must have met.

    Args:
      scratch: [4,N] in shared memory, of this warpgroup alone.
    """
    if interpreted:
        return x.max(axis=0) if op == "max" else x.sum(axis=0)
    combine = arith.maximumf if op == "max" else arith.addf
    layout = plgpu.Layout.WGMMA.reduce(0)

    def reduced(_: Any, x: Any, scratch: Any) -> Any:
        warp, group, lane = thread()
        base, pair = utils.memref_ptr(scratch), ir.VectorType.get((2,), x.mlir_dtype)
        columns = x.shape[1]
        found = []
        for part in np.moveaxis(x.registers.reshape(-1, columns // 8, 2), 1, 0):
            value, *others = part.flat
            for other in others:
                value = combine(value, other)
            for distance in (4, 8, 16):
                value = combine(value, utils.shfl_bfly(value, distance))
            found.append(value)
        column = times(lane, 2)
        for i, value in enumerate(found):
            # Of all threads with these columns: they store the same.
            place = add(add(times(warp, columns), column), 8 * i)
            llvm.store(value, at(base, times(place, 4)))
        utils.warpgroup_barrier()
        for i in range(len(found)):
            each = []
            for one in range(4):
                place = times(add(column, one * columns + 8 * i), 4)
                each.append(llvm.load(pair, at(base, place)))
            found[i] = combine(combine(*each[:2]), combine(*each[2:]))
        del group
        return array(np.array(found, dtype=object), (columns,), layout)

    kind = plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=layout)
    takes = plgpu.Layout.WGMMA, plgpu.RefType()
    run: Any = plgpu.inline_mgpu(arg_types=takes, return_type=kind)
    return run(reduced)(x, scratch)


def _fragments(ref: Any, shape: tuple[int, int], dtype: Any, size: int, words: Any) -> Array:
    """The operand [M,K] whose pairs of numbers `words` gives: two words and a byte of each.

    Args:
      size: bytes of a word.
    """
    ptx = _CONVERSIONS[jnp.dtype(dtype).name]
    width = ref.shape[1]
    layout = plgpu.Layout.WGMMA

    def load(_: Any, ref: Any) -> Any:
        base, i32 = utils.memref_ptr(ref), ir.IntegerType.get_signless(32)
        kind = ir.IntegerType.get_signless(8 * size)

        def read(row: Any, column: Any, further: int) -> Any:
            """The word at `column` of row `row` + `further`, which is a multiple of 8."""
            place = add(times(row, width), column)
            # The swizzle of `hopper.tiled`.
            runs = arith.andi(arith.shrui(place, constant(7)), constant(width // 16 - 1))
            place = arith.xori(place, arith.shli(runs, constant(4)))
            word = llvm.load(kind, at(at(base, place), further * width))
            return word if size == 4 else arith.extui(i32, word)

        def pair(one: Any, other: Any, byte: int, its: int) -> Any:
            chosen = f"0x{4 + its:x}{4 + its:x}{byte:x}{byte:x}"
            text = f"{{ .reg .b32 p, x, y; prmt.b32 p, $1, $2, {chosen}; {ptx} }}"
            found = llvm.inline_asm(i32, [one, other], text, "=r,r,r")
            return utils.bitcast(found, ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype)))

        pairs = words(read, *thread())
        registers = np.empty(pairs.shape, dtype=object)
        for index in np.ndindex(pairs.shape):
            registers[index] = pair(*pairs[index])
        return array(registers, shape, layout)

    kind = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    transforms = hopper.transforms(width, ref.dtype)
    takes = (plgpu.RefType(transforms),)
    run: Any = plgpu.inline_mgpu(arg_types=takes, return_type=kind)
    return run(load)(ref)


def array(
    registers: np.ndarray, shape: tuple[int, ...], layout: Any, signed: bool | None = None
) -> Any:
    """The array of these registers of each thread; `signed` is for integers."""
    kind = layout.to_mgpu()
    registers = registers.reshape(kind.registers_shape(shape))
    return mosaic.FragmentedArray(_registers=registers, _layout=kind, _is_signed=signed)


def thread() -> tuple[Any, Any, Any]:
    """The thread's warp of its warpgroup, group of four threads, and place in that."""
    inside = arith.andi(utils.thread_idx(), constant(127))
    lane = arith.andi(inside, constant(31))
    return (
        arith.shrui(inside, constant(5)),
        arith.shrui(lane, constant(2)),
        arith.andi(lane, constant(3)),
    )


def warp_and_lane() -> tuple[Any, Any]:
    """The thread's warp of its warpgroup, and lane."""
    inside = arith.andi(utils.thread_idx(), constant(127))
    return arith.shrui(inside, constant(5)), arith.andi(inside, constant(31))


def constant(x: int) -> Any:
    """A number of 32 bits."""
    return utils.c(x, ir.IntegerType.get_signless(32))


def add(x: Any, y: Any) -> Any:
    """x + y; y may be an int."""
    return arith.addi(x, constant(y) if isinstance(y, int) else y)


def times(x: Any, factor: int) -> Any:
    """x times a constant."""
    return arith.muli(x, constant(factor))


def at(base: Any, place: Any) -> Any:
    """The pointer to the byte `place` behind `base`."""
    return utils.getelementptr(base, [place], ir.IntegerType.get_signless(8))
