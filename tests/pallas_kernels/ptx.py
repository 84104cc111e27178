"""Runs the PTX of a small kernel for one warpgroup in NumPy, where there is no GPU.

It takes kernels without branches. Copies by TMA, barriers and what chooses a thread for them are
passed over: the caller fills shared memory. Registers hold 64 bits of every thread.
"""

import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from tests import gpu_plugin

THREAD = np.arange(128, dtype=np.uint64)
_LANE, _WARP = THREAD % 32, THREAD - THREAD % 32
# The addresses of parameter i begin here; those of shared memory at 0.
_REGION = 40
_PASSED_OVER = ("@", ".", "elect", "fence", "bar", "mbarrier", "and.pred", "cp.", "prefetch")
_PACKED = {
    "sub.bf16x2": (np.subtract, ml_dtypes.bfloat16),
    "mul.bf16x2": (np.multiply, ml_dtypes.bfloat16),
    "sub.f16x2": (np.subtract, np.float16),
    "mul.f16x2": (np.multiply, np.float16),
}
_PLAIN: dict[str, Callable] = {
    "mov": lambda x: x,
    "cvt": lambda x: x,
    "cvta": lambda x: x,
    "add": np.add,
    "mul": np.multiply,
    "mad": lambda x, y, z: x * y + z,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "bfe": lambda x, at, size: (x >> at) & ((np.uint64(1) << size) - np.uint64(1)),
}


def compiled(module: str, folder: Path) -> dict[str, str]:
    """The PTX of every kernel that a module of this folder compiles, by the kernels' names."""
    dumped = {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1"}
    gpu_plugin.output(f"tests.pallas_kernels.{module}", **dumped)
    texts = [path.read_text() for path in folder.glob("*.ptx")]
    found = (re.search(r"\.entry (\w+)_mosaic_gpu_kernel", text) for text in texts)
    return {name[1]: text for name, text in zip(found, texts, strict=True) if name is not None}


def shared_address(ptx: str) -> int:
    """Where the kernel's first copy puts its array in shared memory."""
    found = re.search(r"add\.s32 \s*(%r\d+), %r\d+, (\d+);.*?cp\.async[^;]*\[\1\]", ptx, re.S)
    assert found is not None, "no copy into shared memory"
    return int(found[2])


def run(
    ptx: str, shared: np.ndarray, arguments: dict[int, np.ndarray]
) -> tuple[dict[str, np.ndarray], int]:
    """Run the kernel; stores change `shared`, and `arguments`: the bytes that parameters point to.

    Returns the registers at the end, and the most words of one bank that a warp loads at once.
    """
    memory = {0: shared, **{number + 1: x for number, x in arguments.items()}}
    registers: dict[str, np.ndarray] = {}
    conflicts = 0

    def value(name: str) -> np.ndarray:
        name = name.strip()
        if name == "%tid.x":
            return THREAD
        if name in registers:
            return registers[name]
        parameter = re.search(r"_param_(\d+)$", name)
        if parameter is not None:
            return np.full(128, int(parameter[1]) + 1 << _REGION, np.uint64)
        known = 0 if name.startswith("__dynamic") else int(name, 0)
        return np.full(128, known & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def address(name: str) -> np.ndarray:
        base, _, offset = name.strip("[]").partition("+")
        return value(base) + np.uint64(int(offset or 0))

    def split(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return memory[int(at[0]) >> _REGION], (at & np.uint64((1 << _REGION) - 1)).astype(int)

    def load(at: np.ndarray, size: int) -> np.ndarray:
        array, place = split(at)
        each = [array[place + i].astype(np.uint64) << np.uint64(8 * i) for i in range(size)]
        return np.bitwise_or.reduce(each)

    def store(at: np.ndarray, x: np.ndarray, size: int) -> None:
        array, place = split(at)
        for i in range(size):
            array[place + i] = (x >> np.uint64(8 * i)).astype(np.uint8)

    for line in _statements(ptx):
        operation, rest = line.split(None, 1)
        target, *given = (x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest))
        kind, *how = operation.split(".")
        if kind == "ld" and "param" not in operation:
            size, names = int(how[-1][1:]) // 8, target.strip("{}").split(",")
            at = address(given[0])
            if how[0] == "shared" and len(names) == 1:
                conflicts = max(conflicts, _conflicts(at))
            for i, name in enumerate(names):
                registers[name.strip()] = load(at + np.uint64(i * size), size)
            continue
        if kind == "st":
            size, names = int(how[-1][1:]) // 8, given[0].strip("{}").split(",")
            for i, name in enumerate(names):
                store(address(target) + np.uint64(i * size), value(name), size)
            continue
        if kind == "ld":
            found = value(given[0].strip("[]"))
        elif kind == "shfl":
            other = int(given[1])
            source = THREAD ^ np.uint64(other) if "bfly" in how else _WARP + np.uint64(other)
            found, target = value(given[0])[source.astype(int)], target.partition("|")[0]
        elif kind == "setp":
            found = value(given[0]) == value(given[1])
        elif kind == "selp":
            found = np.where(registers[given[2]], value(given[0]), value(given[1]))
        elif operation == "cvt.rn.bf16x2.f32":
            high, low = (_floats(value(x)).astype(ml_dtypes.bfloat16) for x in given)
            high, low = (x.view(np.uint16).astype(np.uint64) for x in (high, low))
            found = high << np.uint64(16) | low
        elif operation in _PACKED:
            combine, dtype = _PACKED[operation]
            each = [value(x).astype(np.uint32).view(dtype).astype(np.float32) for x in given]
            found = combine(*each).astype(dtype).view(np.uint32).astype(np.uint64)
        elif operation == "add.rn.f32":
            found = (_floats(value(given[0])) + _floats(value(given[1]))).view(np.uint32)
            found = found.astype(np.uint64)
        elif kind == "lop3":
            found = _lop3(*map(value, given[:3]), int(given[3], 0))
        elif kind == "prmt":
            found = _prmt(*map(value, given))
        else:
            found = _PLAIN[kind](*map(value, given))
        wide = found.dtype == bool or operation.endswith("64") or "wide" in how
        registers[target] = found if wide else found & np.uint64(0xFFFFFFFF)
    return registers, conflicts


def _statements(ptx: str) -> list[str]:
    body = re.sub(r"//.*", "", ptx[ptx.index("$L__func_begin") : ptx.index("ret;")])
    # Blocks of inline assembly: those of `hopper_bits`, and those that wait.
    body = re.sub(r"\{\s*\.reg \.b32 p, x, y;(.*?)\}", r"\1", body, flags=re.S)
    body = re.sub(r"\{\s*\.reg \.pred\s+P1;.*?DONE:\s*\}", "", body, flags=re.S)
    body = re.sub(r"\.loc\s[^\n]*|\$L\S+:", "", body)
    found = (" ".join(each.split()) for each in body.split(";"))
    return [each for each in found if each and not each.startswith(_PASSED_OVER)]


def _floats(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint32).view(np.float32)


def _conflicts(at: np.ndarray) -> int:
    """The most words of one bank that a warp loads at once."""
    words = [set((warp // 4).tolist()) for warp in at.reshape(4, 32)]
    return max(sum(word % 32 == bank for word in each) for each in words for bank in range(32))


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    found = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            terms = [x if row >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            found |= terms[0] & terms[1] & terms[2]
    return found


def _prmt(a: np.ndarray, b: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    both = (a & np.uint64(0xFFFFFFFF)) | b << np.uint64(32)
    found = np.zeros_like(a)
    for i in range(4):
        byte = chosen >> np.uint64(4 * i) & np.uint64(15)
        assert np.all(byte < 8), "prmt with a sign"
        found |= (both >> byte * np.uint64(8) & np.uint64(255)) << np.uint64(8 * i)
    return found
