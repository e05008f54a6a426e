#!/usr/bin/env python3
"""The slow comparison of `make test-all`: ./gemma4 against transformers and tokenizers, on models made for this run alone.

Each run takes a new seed (printed; --seed repeats one) and builds every kind of reference/make_fixtures.py with it, sizes
of the prompt, the window, eps and the softcap shaken too. Then, for each model:

    trace      every tensor that transformers' modules let one see; bar: max abs <= max(1e-5, 3 x noise) x max(1, largest abs)
               of the tensor, noise being how far float32 runs of transformers are from float64 on this model: noise_jittered
    run        16 greedy ids, equal
    logits     the bits of trace; hash: their FNV-1a, for every exact backend, several --threads and --chunk
    score      the log-probabilities, against log_softmax
    bf16       RMS(ours - transformers' bf16) / RMS(transformers' bf16 - its f32): median <= 0.1, none above 1;
               not judged: rows from a flipped router choice on, and models where transformers with other kernels moves as far

and once: models/austen and $SHARED/fixtures/micro-* in the same way; stop ids and suppress_tokens against generate();
tokenize and detokenize against tokenizers (models/austen, and the real vocabulary when SHARED is set). It is not a test of the
command line's messages.

Reading order: check_model, check_tokenizer, main. Last line: `live: N passed, N failed, N skipped`.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, os.path.join(ROOT, "reference"))
AUSTEN = os.path.abspath(os.path.join(ROOT, "models", "austen"))
BF16_MEDIAN, BF16_WORST, BF16_OWN = 0.1, 1.0, 0.5


class Report:
    passed = failed = skipped = 0

    def check(self, good, what):
        """Counts; says what was wrong. A NaN makes `good` false."""
        if good:
            self.passed += 1
        else:
            self.failed += 1
            print(f"FAILED {what}", flush=True)
        return bool(good)

    def skip(self, what):
        self.skipped += 1
        print(f"skipped: {what}", flush=True)

    def done(self):
        if not self.passed + self.failed + self.skipped:
            self.check(False, "live: no check was made")
        print(f"live: {self.passed} passed, {self.failed} failed, {self.skipped} skipped")
        return int(self.failed != 0)


report = Report()


class Gemma4:
    """The program under test."""

    def __init__(self, path):
        self.path = path

    def __call__(self, *args, stdin=b""):
        """stdout as bytes, or None after a failed check."""
        args = [self.path, *map(str, args), "-q"]
        env = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # on a busy machine, threads that spin wait for those that do not run
        try:
            done = subprocess.run(args, input=stdin, capture_output=True, timeout=600, env=env)
        except (OSError, subprocess.TimeoutExpired) as e:
            report.check(False, f"{' '.join(args)}: {e}")
            return None
        said = done.stderr.decode(errors="replace").strip()
        return done.stdout if report.check(done.returncode == 0, f"{' '.join(args)}: status {done.returncode}: {said}") else None

    def exact_backends(self):
        """The compiled-in ones that can run here and must give the oracle's bits."""
        listed = self("run", "--backend", "list")
        names = [line.split() for line in (listed or b"").decode().splitlines()]
        return [n[0] for n in names if n and n[0] in ("scalar", "cpu") and "cannot" not in n] or ["scalar"]


def comma(ids):
    return ",".join(map(str, ids))


def stored_order(path):
    """Names of a safetensors file in the order of their data."""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    header.pop("__metadata__", None)
    return sorted(header, key=lambda n: (header[n]["data_offsets"], n))


def fnv1a(data):
    h = 0xcbf29ce484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return f"{h:016x}"


def compare_traces(label, ours, theirs, noise):
    """Every tensor of theirs is in ours, within the bar."""
    factor = max(1e-5, 3 * noise)
    for name, b in theirs.items():
        what = f"{label}: {name}"
        if not report.check(name in ours, f"{what}: gemma4 trace does not write it"):
            continue
        a = ours[name]
        if not report.check(a.shape == b.shape, f"{what}: shape {list(a.shape)}, expected {list(b.shape)}"):
            continue
        if name == "ids" or name.endswith("router_index"):
            report.check(bool((a == b).all()), f"{what}: other integers, {int((a != b).sum())} of {a.numel()}")
            continue
        worst, bar = (a - b).abs().max().item(), factor * max(1.0, b.abs().max().item())
        report.check(worst <= bar, f"{what}: max abs {worst:.3g}, bar {bar:.3g} (noise {noise:.3g})")


def check_model(gemma4, label, path, ids, greedy, noise, scratch, ratios):
    """All that is compared on one checkpoint directory."""
    import torch
    from safetensors.torch import load_file

    import trace as reference
    theirs = reference.trace(reference.load(path), ids)
    file, again = os.path.join(scratch, "trace.safetensors"), os.path.join(scratch, "logits.safetensors")
    if gemma4("trace", path, "--ids", comma(ids), "-o", file) is None:
        return
    ours = load_file(file)
    compare_traces(label, ours, theirs, noise)
    order = [n for n in stored_order(file) if n in theirs]
    report.check(order == list(theirs), f"{label}: trace is not written in the order of the forward pass: {order[:20]}")

    if greedy is not None:
        out = gemma4("run", path, "--ids", comma(ids), "-n", len(greedy), "--temp", 0, "--ignore-eos")
        report.check(out is not None and out.split() == [b"%d" % i for i in greedy],
                     f"{label}: run --temp 0 gives {out!r}, expected {greedy}")

    if gemma4("logits", path, "--ids", comma(ids), "-o", again) is not None:
        logits = load_file(again)["logits"]
        report.check(torch.equal(logits, ours["logits"]), f"{label}: logits and trace give other bits")
        expected = fnv1a(logits.numpy().astype("<f4").tobytes()).encode()
        for backend in gemma4.exact_backends():
            for threads, chunk in ((1, 128), (1, 1), (2, 3), (3, 7), (2, 128)):
                out = gemma4("hash", path, "--ids", comma(ids), "--backend", backend, "--threads", threads, "--chunk", chunk)
                report.check(out is not None and out.strip() == expected, f"{label}: hash {out!r} with --backend {backend} "
                             f"--threads {threads} --chunk {chunk}, expected {expected!r}")

    if len(ids) > 1:
        out = gemma4("score", path, "--ids", comma(ids), "--json")
        if out is not None:
            found = json.loads(out)
            logprobs = theirs["logits"].double().log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            worst = max(abs(t["logprob"] - p) for t, p in zip(found["tokens"][1:], logprobs.tolist(), strict=True))
            bar = max(1e-5, 3 * noise) * 2 * max(1.0, theirs["logits"].abs().max().item())
            report.check(worst <= bar, f"{label}: score: log-probabilities differ by {worst:.3g}, bar {bar:.3g}")
            difference = abs(found["sum"] - logprobs.sum().item())
            report.check(difference <= bar * len(ids), f"{label}: score: the sum differs by {difference:.3g}")

    # In models of more than micro size one flipped rounding spreads everywhere: there only single operations can be compared.
    if path != AUSTEN and gemma4("trace", path, "--ids", comma(ids), "--precision", "bf16", "-o", again) is not None:
        model = reference.load(path, torch.bfloat16)
        half = reference.trace(model, ids)
        with torch.backends.mkldnn.flags(enabled=False):  # the same model by torch's other kernels
            other = reference.trace(model, ids)["logits"]
        check_bf16(label, load_file(again), half, other, theirs["logits"], ratios)


def check_bf16(label, ours, half, other, single, ratios):
    """ours against half, both bfloat16; other: half's logits by other kernels; single: float32 logits."""
    def rms(x):
        return x.double().pow(2).mean().sqrt().item()

    # A near tie of a router may go either way after one flipped rounding; rows before the first such row are not touched by it.
    flipped = [(ours[n] != half[n]).any(1).nonzero()[0].item() for n in half if n.endswith("router_index") and (ours[n] != half[n]).any()]
    rows = slice(0, min(flipped, default=len(single)))
    if not rows.stop:
        print(f"{label}: bf16 is not judged: a router's choice differs in the first row")
        return
    half, single = half["logits"][rows], single[rows]
    ratio, own = rms(ours["logits"][rows] - half) / rms(half - single), rms(other[rows] - half) / rms(half - single)
    if own > BF16_OWN:
        print(f"{label}: bf16 ratio {ratio:.3g} is not judged: transformers' own, between two sets of kernels, is {own:.3g}")
    else:
        ratios[label] = ratio
        report.check(ratio <= BF16_WORST, f"{label}: --precision bf16: ratio {ratio:.3g}, bar {BF16_WORST}")


def shaken(spec, draw):
    """A model of the same kind with other settings."""
    spec = dict(spec, config=dict(spec["config"]))
    config = spec["config"]
    if spec["T"] > 1:  # a router's choices are the more likely to hold a tie the more there are
        spec["T"] = draw.randint(2, 20 if config.get("enable_moe_block") else 48)
    if config.get("sliding_window", 0) > 1 and draw.random() < 0.8:
        config["sliding_window"] = draw.randint(2, max(2, spec["T"] // 2))
    if "rms_norm_eps" in config:
        config["rms_norm_eps"] = 10 ** draw.uniform(-6, -2.3)
    if config.get("final_logit_softcapping"):
        config["final_logit_softcapping"] = draw.uniform(3, 30)
    return spec


def austen_prompt():
    """About two windows of text that the shipped model knows the manner of."""
    import tokenizers
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.\n\n"
    tokenizer = tokenizers.Tokenizer.from_file(os.path.join(AUSTEN, "tokenizer.json"))
    return [tokenizer.token_to_id("<bos>")] + tokenizer.encode(text * 5, add_special_tokens=False).ids


def check_generation(gemma4, path, ids):
    """Stop ids and suppressed tokens of generation_config.json, against generate()."""
    import torch
    import transformers

    import trace as reference
    model = reference.load(path)
    config = {"do_sample": False, "bos_token_id": 2, "pad_token_id": 0, "eos_token_id": 1}
    free, _ = reference.greedy(model, ids, 12)
    for stops, suppressed in (([1, 106], [free[0]]), ([1, free[-1]], []), ([106], [free[0], free[1], free[-1]])):
        config.update(eos_token_id=stops, suppress_tokens=suppressed)
        with open(os.path.join(path, "generation_config.json"), "w") as f:
            json.dump(config, f)
        settings, prompt = transformers.GenerationConfig.from_pretrained(path), torch.tensor([ids])
        with torch.no_grad():  # a mask of its own, or generate() takes the id 0 in the prompt for padding
            new = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, use_cache=False,
                                 generation_config=settings)[0, len(ids):].tolist()
        new = new[:-1] if new[-1] in stops else new
        out = gemma4("run", path, "--ids", comma(ids), "-n", 12, "--temp", 0)
        report.check(out is not None and out.split() == [b"%d" % i for i in new],
                     f"generate with eos_token_id {stops}, suppress_tokens {suppressed}: {out!r}, expected {new}")


def check_tokenizer(gemma4, path, rows, draw):
    """rows: {"text", "ids"} or {"ids"}, and perhaps "decoded", "decoded_skip", of the tokenizer.json at path."""
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(path)
    folder = os.path.dirname(path)

    def batch(command, key, values, answer, expected, *options):
        lines = "".join(json.dumps({key: v}) + "\n" for v in values).encode()
        out = gemma4(command, folder, "--jsonl", *options, stdin=lines)
        if out is None:
            return
        report.check(all(b < 128 for b in out), f"{path}: {command} --jsonl writes bytes outside ASCII")
        found = [json.loads(line)[answer] for line in out.splitlines()]
        report.check(len(found) == len(values), f"{path}: {command} --jsonl: {len(found)} lines for {len(values)}")
        for value, a, b in zip(values, found, expected):
            report.check(a == b, f"{path}: {command} {str(value)[:200]!r}: {str(a)[:200]!r}, expected {str(b)[:200]!r}")

    texts = [r for r in rows if "text" in r]
    batch("tokenize", "text", [r["text"] for r in texts], "ids", [r["ids"] for r in texts])
    n = tokenizer.get_vocab_size()
    byte = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in range(256)]
    sequences = [r["ids"] for r in rows] + [
        [draw.choice(byte) if draw.random() < share else draw.randrange(n) for _ in range(draw.randint(1, 12))]
        for share in (0, 0.5, 0.9, 1) for _ in range(100)]
    for skip, option, key in ((False, [], "decoded"), (True, ["--skip-special"], "decoded_skip")):
        expected = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in sequences]
        for row, text in zip(rows, expected):
            report.check(row.get(key, text) == text, f"{path}: {key} of {row['ids'][:40]} is not what tokenizers says now")
        batch("detokenize", "ids", sequences, "text", expected, *option)


def tokenizer_rows(path, seed, scratch):
    """Texts with their ids from reference/tokenizer_strings.py."""
    out = os.path.join(scratch, "strings.jsonl")
    script = os.path.join(ROOT, "reference", "tokenizer_strings.py")
    done = subprocess.run([sys.executable, script, path, out, "--seed", str(seed), "--count", "3000"], capture_output=True)
    if not report.check(done.returncode == 0, f"tokenizer_strings.py {path}: {done.stderr.decode()[-500:]}"):
        return []
    with open(out) as f:  # bytes that are not UTF-8 ("hex") cannot stand in JSON
        return [row for row in map(json.loads, f) if "hex" not in row]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("names", nargs="*", metavar="NAME",
                   help="kinds of model (see make_fixtures.py), austen, shared, generate, tokenizers; default: all")
    p.add_argument("--seed", type=int, help="repeat a run; default: from the clock")
    p.add_argument("--gemma4", default=os.path.join(ROOT, "gemma4"), help="the program (default: the repository's)")
    args = p.parse_args()
    seed = args.seed if args.seed is not None else int(time.time()) % 1_000_000
    print(f"live: seed {seed} (test/live.py --seed {seed} repeats this run)", flush=True)
    try:
        import make_fixtures as fixtures
        import trace as reference
        from safetensors import safe_open
        from safetensors.torch import load_file
    except ImportError as e:
        report.skip(f"everything: {e}; pip install -r reference/requirements.txt")
        return report.done()
    gemma4 = Gemma4(os.path.abspath(args.gemma4))
    if not report.check(os.path.exists(gemma4.path), f"{gemma4.path}: not there; run make"):
        return report.done()
    fixtures.quiet()
    shared, ratios = os.environ.get("SHARED", ""), {}
    if not os.path.isdir(shared):
        report.skip(f"SHARED={shared} is no directory: micro-* and the real tokenizer")
        shared = ""

    def wanted(name):
        return not args.names or name in args.names

    with tempfile.TemporaryDirectory(prefix="gemma4-live-") as scratch:
        for k, (name, spec) in enumerate(fixtures.MODELS.items()):
            if not wanted(name) and not (name == "26b-a4b" and wanted("generate")):
                continue
            path = os.path.join(scratch, name)
            spec = shaken(spec, random.Random(f"{seed} {name}"))
            used = fixtures.build(spec, path, 20_000 * (seed + 1) + 500 * k)
            label = f"{name} (seed {used}, T {spec['T']}, window {spec['config'].get('sliding_window', 'default')})"
            expected = load_file(f"{path}/expected.safetensors")
            with safe_open(f"{path}/expected.safetensors", "pt") as f:
                noise = float(f.metadata()["noise_jittered"])
            if wanted(name):
                check_model(gemma4, label, path, expected["ids"].tolist(), expected["greedy"].tolist(), noise, scratch, ratios)
            if name == "26b-a4b" and wanted("generate"):
                check_generation(gemma4, path, expected["ids"].tolist())
        folders = [("austen", AUSTEN)] if wanted("austen") else []
        if wanted("shared") and shared:
            folders += [(f"shared {n}", f"{shared}/fixtures/{n}") for n in sorted(os.listdir(f"{shared}/fixtures")) if n[:6] == "micro-"]
        for name, path in folders:
            if name == "austen":
                ids, greedy = austen_prompt(), None
            else:
                expected = load_file(f"{path}/expected.safetensors")
                ids, greedy = expected["ids"].tolist(), expected["greedy"].tolist()
            check_model(gemma4, name, path, ids, greedy, fixtures.noises(reference.load(path), ids)[1], scratch, ratios)
        if ratios:
            print("bf16 ratios: " + ", ".join(f"{label.split(' (')[0]} {r:.3g}" for label, r in ratios.items()))
        if len(ratios) >= 10:  # a median of few says little
            median = statistics.median(ratios.values())
            report.check(median <= BF16_MEDIAN, f"--precision bf16: median ratio {median:.3g} over {len(ratios)} models, bar {BF16_MEDIAN}")
        if wanted("tokenizers"):
            path = os.path.join(AUSTEN, "tokenizer.json")
            check_tokenizer(gemma4, path, tokenizer_rows(path, seed, scratch), random.Random(seed))
            if shared:
                path = os.path.join(scratch, "real", "tokenizer.json")
                os.mkdir(os.path.dirname(path))
                subprocess.run([sys.executable, f"{shared}/tools/gemma4_tokenizer.py", path], check=True)
                with open(f"{shared}/fixtures/tokens.jsonl") as f:
                    rows = [json.loads(line) for line in f]
                check_tokenizer(gemma4, path, rows + tokenizer_rows(path, seed, scratch), random.Random(seed))
    return report.done()


if __name__ == "__main__":
    sys.exit(main())
