#!/usr/bin/env python3
"""quants.c against gguf-py, live: a million random blocks of every type, most with scales that are tiny, huge, infinite or no numbers. 0 bits may be off.

    python test/quants.py [--blocks N] [--seed N] [TYPE ...]

reference/quants.py makes the blocks and gguf-py's values, build/test_quants compares. Last line: `quants: N passed, N failed, N skipped`.
"""
import argparse
import os
import random
import re
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, os.path.join(ROOT, "reference"))
import quants as reference  # noqa: E402

PIECE = 1 << 24  # values in a file


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--blocks", type=int, default=1_000_000)
    p.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    p.add_argument("types", nargs="*", metavar="TYPE")
    args = p.parse_args()
    print(f"seed {args.seed}")
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="gemma4-quants-") as scratch:
        path = os.path.join(scratch, "blocks.safetensors")
        for name in args.types or reference.TYPES:
            done = 0
            while done < args.blocks:
                n = min(args.blocks - done, PIECE // reference.size_of(name)[0])
                reference.write(path, [name], lambda block: n, seed=args.seed + done)
                run = subprocess.run([os.path.join(ROOT, "build", "test_quants"), "./gemma4", path], capture_output=True, text=True)
                counts = re.fullmatch(r"quants: (\d+) passed, (\d+) failed, 0 skipped", (run.stdout.splitlines() or [""])[-1])
                if not counts or int(counts[1]) == 0 or int(counts[2]) or run.returncode:
                    print(f"FAILED {name}, {n} blocks of seed {args.seed + done}: status {run.returncode}\n{run.stdout.strip()}", flush=True)
                    failed += 1
                    break
                done += n
            else:
                print(f"{name}: {done} blocks, 0 bits off", flush=True)
                passed += 1
    print(f"quants: {passed} passed, {failed} failed, 0 skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
