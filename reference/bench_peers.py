"""gemma4 bench beside llama.cpp and transformers on the same weights: one table of tokens/s, and how many times theirs ours is.

    python reference/bench_peers.py DIR --threads 2                                                 with transformers only
    python reference/bench_peers.py DIR --llama-bench PATH/llama-bench --gguf BF16.gguf             llama.cpp's side of DIR too
    python reference/bench_peers.py DIR --llama-bench PATH/llama-bench --gguf BF16.gguf --quantised Q8_0.gguf Q4_0.gguf

DIR is a checkpoint and BF16.gguf what llama.cpp's converter made of it; of a quantised file both programs read the same bytes. The sides take turns
cell by cell, ROUNDS times, and each figure is the median of its rounds with the lowest and the highest: other work on a machine comes and goes.

    prefill20, 128, 512   a prompt of so many tokens, of which the last one's logits are wanted; ttft is the time that the first of them takes
    logits128             the logits of all 128 tokens are wanted
    decode0, decode8192   single tokens, without sampling, after a context of (nearly) nothing and of 8192
    batch8                8 sequences at once, a token each; tokens/s of all

The programs beside llama-bench are used too: llama-batched-bench for batch8. logits128 of llama.cpp goes through the Python package llama_cpp, where there is one
(LLAMA_CPP_LIB_PATH names the folder of libllama); decode8192 of it is measured in one go, since each start would compute the context again. transformers'
context of 8192 is random keys and values: the time does not depend on them. The sides need not compute in the same type: ours has the weights as they are and
computes as --precision says, llama.cpp rounds activations to what its kernels take, transformers converts all to --dtype.
"""
import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time

CELLS = {"prefill20": 20, "prefill128": 128, "prefill512": 512, "logits128": 128, "decode0": 0, "decode8192": 8192, "batch8": 8}
STEPS, DEEP_STEPS = 16, 8


class Gemma4:
    name = "gemma4"

    def __init__(self, args, model):
        self.args, self.model, self.read = args, model, []

    def measure(self, cell):
        a = self.args
        command = [a.gemma4, "bench", self.model, "--json", "--only", cell, "--seconds", str(a.seconds), "--threads", str(a.threads), "--backend", a.backend, "--precision", a.precision]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        self.read.append(report["read_bytes_per_second"]["best"])
        return [report["cells"][0]["tokens_per_second"]]


class Llama:
    name = "llama.cpp"

    def __init__(self, args, gguf):
        self.args, self.gguf, self.deep, self.context = args, gguf, None, None

    def bench(self, *options):
        command = [self.args.llama_bench, "-m", self.gguf, "-t", str(self.args.threads), "-ngl", "0", "-o", "json", *options]
        row, = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
        return row["samples_ts"]

    def measure(self, cell):
        n = CELLS[cell]
        if cell.startswith("prefill"):
            return self.bench("-p", str(n), "-n", "0", "-r", "1")
        if cell == "decode0":
            return self.bench("-p", "0", "-n", str(STEPS), "-r", "1")
        if cell == "decode8192":
            first, self.deep = self.deep is None, self.deep or self.bench("-p", "0", "-n", str(DEEP_STEPS), "-d", str(n), "-r", str(self.args.rounds))
            return self.deep if first else []
        if cell == "batch8":
            program = os.path.join(os.path.dirname(self.args.llama_bench), "llama-batched-bench")
            command = [program, "-m", self.gguf, "-t", str(self.args.threads), "-ngl", "0", "-c", "512", "-npp", "1", "-ntg", str(STEPS), "-npl", str(n), "--output-format", "jsonl"]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout.decode()  # its log goes to either
            return [json.loads(next(line for line in out.splitlines() if line.startswith("{")))["speed_tg"]]
        return self.all_logits(n)

    def all_logits(self, n):
        try:
            import llama_cpp
        except ImportError as error:
            print("llama.cpp, logits128: %s" % error, file=sys.stderr)
            return []
        if not self.context:
            self.quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
            llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
            llama_cpp.llama_backend_init()
            self.model = llama_cpp.llama_model_load_from_file(self.gguf.encode(), llama_cpp.llama_model_default_params())
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = params.n_batch = params.n_ubatch = n
            params.n_threads = params.n_threads_batch = self.args.threads
            self.context = llama_cpp.llama_init_from_model(self.model, params)
            self.all_logits(n)  # the first run fetches weights
        vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i in range(n):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 7919 * (i + 1) % vocab, i, 1, 0, 1
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        begin = time.perf_counter()
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_get_logits(self.context)  # waits
        speed = n / (time.perf_counter() - begin)
        llama_cpp.llama_batch_free(batch)
        return [speed]

    def close(self):
        if self.context:
            import llama_cpp
            llama_cpp.llama_free(self.context)
            llama_cpp.llama_model_free(self.model)
            self.context = None


class Transformers:
    name = "transformers"

    def __init__(self, args):
        import torch
        import transformers

        import trace
        self.torch, self.cache = torch, transformers.DynamicCache
        torch.set_num_threads(args.threads)
        self.model = trace.load(args.model, getattr(torch, args.dtype))
        self.versions = "transformers %s, torch %s, %s, eager, logits_to_keep=1" % (transformers.__version__, torch.__version__, args.dtype)
        self.measure("prefill20")  # the first run fetches weights and builds what is kept

    def ids(self, *shape):
        return self.torch.randint(3, 250000, shape, generator=self.torch.Generator().manual_seed(1)) % self.model.config.vocab_size

    def context(self, n):
        """A cache of n positions in every layer that has one."""
        config, cache = self.model.config, self.cache(config=self.model.config)
        for layer in self.model.model.layers[: config.num_hidden_layers - (config.num_kv_shared_layers or 0)]:
            attention = layer.self_attn
            shape = 1, attention.k_proj.out_features // attention.head_dim, n, attention.head_dim
            cache.update(self.torch.randn(shape, dtype=self.model.dtype), self.torch.randn(shape, dtype=self.model.dtype), attention.layer_idx)
        return cache

    def measure(self, cell):
        n, run = CELLS[cell], self.model
        with self.torch.inference_mode():
            if not cell.startswith(("decode", "batch")):
                ids, keep = self.ids(1, n), 0 if cell == "logits128" else 1
                begin = time.perf_counter()
                run(input_ids=ids, use_cache=True, logits_to_keep=keep)
                return [n / (time.perf_counter() - begin)]
            rows, steps = (n, STEPS) if cell == "batch8" else (1, DEEP_STEPS if n else STEPS)
            out = run(input_ids=self.ids(rows, 1), past_key_values=self.context(n) if rows == 1 and n else None, use_cache=True, logits_to_keep=1)
            begin = time.perf_counter()
            for _ in range(steps):
                out = run(input_ids=out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            return [rows * steps / (time.perf_counter() - begin)]

    def close(self):
        self.model = None
        gc.collect()


def spread(values):
    return "%6.4g (%.4g .. %.4g)" % (statistics.median(values), min(values), max(values)) if values else "%6s" % "-"


def compare(args, weights, ours, peers):
    """The lines of the table for one file of weights."""
    for cell in args.only:
        speeds = {side: [] for side in [ours, *peers]}
        for _ in range(args.rounds):
            for side in speeds:
                speeds[side] += side.measure(cell)
        mine = speeds[ours]
        line = "%-8s %-11s %-24s" % (weights, cell, spread(mine))
        for side in peers:
            ratio = "%6.2f" % (statistics.median(mine) / statistics.median(speeds[side])) if speeds[side] else "%6s" % "-"
            line += " | %-24s %s" % (spread(speeds[side]), ratio)
        print(line, flush=True)
        if cell == "prefill20":
            times = ["%s %.0f ms" % (side.name, 20e3 / statistics.median(values)) for side, values in speeds.items() if values]
            print("%-8s %-11s %s" % (weights, "ttft", ", ".join(times)), flush=True)
    for side in peers:
        side.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gemma4", default="./gemma4")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--precision", default="f32", help="ours: f32, bf16 or q16")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every side")
    parser.add_argument("--seconds", type=float, default=1, help="for each of our cells, each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CELLS), help="cells, parted by commas")
    parser.add_argument("--dtype", default="bfloat16", help="transformers': bfloat16 or float32")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--llama-bench", help="the program")
    parser.add_argument("--gguf", help="llama.cpp's file of the checkpoint's weights")
    parser.add_argument("--quantised", nargs="+", default=[], metavar="FILE", help="GGUF files that gemma4 and llama.cpp both run")
    args = parser.parse_args()
    if bool(args.llama_bench) != bool(args.gguf or args.quantised):
        parser.error("--llama-bench belongs to --gguf or --quantised")
    if set(args.only) - set(CELLS):
        parser.error("--only: the cells are %s" % ", ".join(CELLS))

    ours, peers = Gemma4(args, args.model), []
    if args.gguf:
        peers.append(Llama(args, args.gguf))
    if not args.no_transformers:
        peers.append(Transformers(args))
        print(peers[-1].versions)
    print("%s, threads %d, %d rounds, tokens/s: median (lowest .. highest), and how many times theirs ours is\n" % (args.model, args.threads, args.rounds))
    print("%-8s %-11s %-24s" % ("weights", "cell", Gemma4.name) + "".join(" | %-24s %6s" % (side.name, "ratio") for side in peers or [Llama]), flush=True)
    if peers:
        compare(args, "as DIR", ours, peers)
    read = ours.read
    for gguf in args.quantised:
        both = Gemma4(args, gguf)
        name = os.path.splitext(os.path.basename(gguf))[0]
        compare(args, name[name.find("-") + 1 :][:8], both, [Llama(args, gguf)])
        read = read + both.read
    print("\nthis machine read %.2f GB/s (median of the runs)" % (1e-9 * statistics.median(read)))


if __name__ == "__main__":
    main()
