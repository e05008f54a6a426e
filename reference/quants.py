#!/usr/bin/env python3
"""Blocks of quantised weights and the floats that gguf-py makes of them: the other side of test/test_quants.c.

    python reference/quants.py            the committed test/quants.safetensors

For each type NAME of quants.c a file holds

    NAME.blocks  U8 [n][bytes]    random bytes, most with the scales below in the place of their random ones
    NAME.values  F32 [n][block]   gguf.quants.dequantize of them, every NaN as 7fc00000: which one it is depends on the processor
    NAME.hash    U8 [16]          (committed file) hex digits: FNV-1a 64 over the values of 512 more blocks, little-endian. The bytes of those
                                  blocks are s >> 24 of s = s * 1664525 + 1013904223 mod 2^32, s = 1 before the first byte of a type

Reading order: TYPES, blocks_of, main.
"""
import os
import sys
from importlib.metadata import version

import gguf
import numpy as np
from gguf.quants import dequantize
from safetensors.numpy import save_file

# where the halves of a block lie; the rest is integers
TYPES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2],
         "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": []}
# zeros, subnormals, the largest, infinities, NaNs that signal and that do not
SCALES = np.array([0x0000, 0x8000, 0x0001, 0x83ff, 0x7bff, 0xfc00, 0x7e00, 0x8001, 0x03ff, 0x0400, 0xfbff, 0x7c00, 0x7c01, 0xffff], dtype="<u2")
HASHED = 512


def size_of(name):
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def values_of(name, blocks):
    """[n][block] float32 for blocks [n][bytes]."""
    with np.errstate(all="ignore"):
        # gguf-py takes its rows in sixteens: few and long ones are quicker
        rows = np.array_split(blocks, max(1, len(blocks) // 4096))
        values = np.concatenate([dequantize(r.reshape(1, -1), gguf.GGMLQuantizationType[name]).reshape(len(r), -1) for r in rows])
    values.view(np.uint32)[np.isnan(values)] = 0x7fc00000
    return values


def blocks_of(name, n, rng):
    """n blocks: a half of them with scales of the size that weights have, a quarter with those of SCALES, a quarter with any."""
    blocks = rng.integers(0, 256, (n, size_of(name)[1]), dtype=np.uint8)
    for k, at in enumerate(TYPES[name]):
        kind, chosen = np.arange(n) % 4, SCALES[(np.arange(n) // 4 * (4 * k + 1)) % len(SCALES)]
        scales = np.where(kind < 2, (rng.standard_normal(n) * 0.01).astype("<f2").view("<u2"), chosen)
        blocks[kind < 3, at:at + 2] = scales.astype("<u2").view(np.uint8).reshape(n, 2)[kind < 3]
    return blocks


def hash_of(name):
    block, size = size_of(name)
    s, data = 1, bytearray()
    for _ in range(HASHED * size):
        s = (s * 1664525 + 1013904223) & 0xffffffff
        data.append(s >> 24)
    values = values_of(name, np.frombuffer(bytes(data), dtype=np.uint8).reshape(HASHED, size))
    h = 0xcbf29ce484222325
    for byte in values.astype("<f4").tobytes():
        h = (h ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return np.frombuffer(b"%016x" % h, dtype=np.uint8)


def write(path, names, n, seed, hashes=False):
    """n(block) tells how many blocks a type gets."""
    tensors = {}
    for name in names:
        blocks = blocks_of(name, n(size_of(name)[0]), np.random.default_rng([seed, *name.encode()]))
        tensors[name + ".blocks"], tensors[name + ".values"] = blocks, values_of(name, blocks)
        if hashes:
            tensors[name + ".hash"] = hash_of(name)
    save_file(tensors, path, {"made": f"gguf {version('gguf')}, numpy {np.__version__}, seed {seed}"})


def main():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "test", "quants.safetensors")
    write(path, TYPES, lambda block: 56 if block == 32 else 16, seed=1, hashes=True)
    print(f"{os.path.normpath(path)}: {os.path.getsize(path)} bytes")


if __name__ == "__main__":
    sys.exit(main())
