"""gemma4 bench beside transformers, and llama.cpp's llama-bench where there is one, on one checkpoint: tokens/s, and how many times theirs ours is.

    python reference/bench_peers.py DIR [--gemma4 ./gemma4] [--threads 2] [--dtype bfloat16] [--rounds 3]
    python reference/bench_peers.py DIR --llama-bench PATH/llama-bench --gguf FILE.gguf

They take turns, ROUNDS times, and each figure is the median of its rounds with the lowest and the highest: other work on a machine comes and goes. What is
measured: a prompt of 128 tokens of which the last one's logits are wanted, and 16 tokens decoded one by one after a context of (nearly) nothing, without
sampling. llama.cpp computes what it is given as GGUF, and all layers of every token of the prompt.

The two sides need not compute in the same type: ours has the checkpoint's weights and computes in float32, transformers converts all to --dtype.
"""
import argparse
import json
import os
import statistics
import subprocess
import time

import torch
import transformers

import trace

PROMPT, STEPS = 128, 16


def gemma4(args):
    command = [args.gemma4, "bench", args.model, "--json", "--only", "prefill%d,decode0" % PROMPT, "--seconds", str(args.seconds)]
    command += ["--threads", str(args.threads), "--backend", args.backend]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    prefill, decode = (cell["tokens_per_second"] for cell in report["cells"])
    return prefill, decode, report["read_bytes_per_second"]["best"]


def llama(args):
    command = [args.llama_bench, "-m", args.gguf, "-p", str(PROMPT), "-n", str(STEPS), "-r", "1", "-t", str(args.threads), "-ngl", "0", "-o", "json"]
    rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
    return next(r["avg_ts"] for r in rows if r["n_prompt"]), next(r["avg_ts"] for r in rows if r["n_gen"])


class Transformers:
    def __init__(self, args):
        torch.set_num_threads(args.threads)
        self.model = trace.load(args.model, getattr(torch, args.dtype))
        self.name = "transformers %s, torch %s, %s, eager" % (transformers.__version__, torch.__version__, args.dtype)
        self.ids = torch.randint(0, self.model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(1))
        self.measure()  # the first run fetches weights and builds what is kept

    def measure(self):
        with torch.inference_mode():
            begin = time.perf_counter()
            self.model(input_ids=self.ids, use_cache=True, logits_to_keep=1)
            prefill = PROMPT / (time.perf_counter() - begin)
            out = self.model(input_ids=self.ids[:, :1], use_cache=True, logits_to_keep=1)
            begin = time.perf_counter()
            for _ in range(STEPS):
                out = self.model(input_ids=out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            return prefill, STEPS / (time.perf_counter() - begin)


def spread(values):
    return "%9.2f (%.2f .. %.2f)" % (statistics.median(values), min(values), max(values))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gemma4", default="./gemma4")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=2, help="for each of our cells, each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="transformers': bfloat16 or float32")
    parser.add_argument("--llama-bench", help="the program")
    parser.add_argument("--gguf", help="what it is to run")
    args = parser.parse_args()
    if bool(args.llama_bench) != bool(args.gguf):
        parser.error("--llama-bench and --gguf belong together")

    theirs = Transformers(args)
    ours, read, peers = [], [], {theirs.name: []}
    if args.llama_bench:
        peers["llama-bench " + os.path.basename(args.gguf)] = []
    for _ in range(args.rounds):
        prefill, decode, bandwidth = gemma4(args)
        ours.append((prefill, decode))
        read.append(bandwidth)
        peers[theirs.name].append(theirs.measure())
        if args.llama_bench:
            peers["llama-bench " + os.path.basename(args.gguf)].append(llama(args))

    print("%s, threads %d, %d rounds; this machine read %.2f GB/s" % (args.model, args.threads, args.rounds, 1e-9 * statistics.median(read)))
    for i, cell in enumerate(["prefill%d" % PROMPT, "decode"]):
        mine = [row[i] for row in ours]
        print("\n%-12s %-60s %s tokens/s" % (cell, "gemma4, backend " + args.backend, spread(mine)))
        for name, rows in peers.items():
            values = [row[i] for row in rows]
            print("%-12s %-60s %s tokens/s; ours is %.2f times that" % ("", name, spread(values), statistics.median(mine) / statistics.median(values)))


if __name__ == "__main__":
    main()
