#!/usr/bin/env python3
"""`--precision bf16` against transformers with dtype=bfloat16, live: whole models, then single operations, also at full width.

    whole models    ratio = RMS(ours - transformers' bf16) / RMS(transformers' bf16 - its float32) on the logits: median <= 0.1,
                    none above 1. test/fixtures, $SHARED/fixtures/micro-* and new random models of every kind. A ratio is not
                    small or large by degrees: one sum that another order moves across a tie puts a model at 0.1 to 0.5, a
                    rounding that is forgotten puts most of them near 1.
    operations      build/test_bf16 FILE (see there) on what reference/bf16_ops.py records of new random models, of layers as
                    wide as those of E2B, 31B and 26B-A4B, of a head of 262144 rows, of attention over 700 positions, and of
                    GELU and the softcap at every finite bfloat16.

    python test/bf16.py [fixtures] [fresh] [operations] [wide] [--seed N] [--again]

--again computes the fixtures' logits_bf16 here instead of reading them: torch adds in another order on another processor.
Reading order: check_ratio, check_operations, WIDE, main. Last line: `bf16: N passed, N failed, N skipped`.
"""
import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, os.path.join(ROOT, "reference"))
MEDIAN, WORST = 0.1, 1.0
passed = failed = skipped = 0


def check(good, what):
    """Counts; says what was wrong. A NaN makes `good` false."""
    global passed, failed
    if good:
        passed += 1
    else:
        failed += 1
        print(f"FAILED {what}", flush=True)
    return bool(good)


def skip(what):
    global skipped
    skipped += 1
    print(f"skipped: {what}", flush=True)


def done():
    if not passed + failed + skipped:
        check(False, "bf16: no check was made")
    print(f"bf16: {passed} passed, {failed} failed, {skipped} skipped")
    return int(failed != 0)


# ---- whole models ---------------------------------------------------------------------------------------------------------


def check_ratio(args, label, path, ids, half, single, ratios):
    """half, single: transformers' logits in bfloat16 and float32, widened, [T][V]."""
    from safetensors.torch import load_file
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.join(scratch, "logits.safetensors")
        command = [args.gemma4, "logits", path, "--ids", ",".join(map(str, ids)), "--precision", "bf16", "-o", out, "-q"]
        run = subprocess.run(command, capture_output=True)
        if not check(run.returncode == 0, f"{label}: {' '.join(command)}: {run.stderr.decode(errors='replace').strip()}"):
            return
        ours = load_file(out)["logits"].double()

    def rms(x):
        return x.pow(2).mean().sqrt().item()

    if not check(ours.shape == half.shape and rms(half.double() - single.double()) > 0, f"{label}: nothing to compare"):
        return
    ratio = ratios[label] = rms(ours - half.double()) / rms(half.double() - single.double())
    print(f"{label}: ratio {ratio:.4f}, {100 * (ours == half.double()).double().mean().item():.2f} % of the logits equal", flush=True)
    check(ratio <= WORST, f"{label}: ratio {ratio:.3g}, bar {WORST}")


def fresh(fixtures, reference, name, spec, seed, out):
    """A new random model and prompt of a kind of make_fixtures.py, without a router choice that is close to a tie: model's bf16, f32, ids."""
    import torch
    for attempt in range(seed, seed + 100):
        fixtures.write_checkpoint(spec, attempt, out)
        half, single = reference.load(out, torch.bfloat16), reference.load(out)
        ids = fixtures.prompt(single.config, attempt, spec["T"])
        if not getattr(single.config, "enable_moe_block", False) or \
                min(fixtures.router_gap(single, ids), fixtures.router_gap(half, ids)) >= fixtures.TIE:
            return half, single, ids
    raise RuntimeError(f"{name}: every seed from {seed} to {seed + 99} has a router's choice close to a tie")


# ---- operations ------------------------------------------------------------------------------------------------------------


def check_operations(args, label, watches, scratch):
    """The operations that some Recorders saw, counted together by build/test_bf16: one result on the other side of a tie is no news
    among many thousand outputs, but would miss the bar among a few hundred."""
    import bf16_ops
    paths, lines, ties = [], 0, 0
    for watch in watches:
        paths.append(os.path.join(scratch, f"ops-{len(paths)}.safetensors"))
        bf16_ops.save(watch, paths[-1])
        lines, ties = lines + len(watch.lines), ties + watch.ties
    print(f"{label}: {lines} operations" + (f", {ties} rows left out where a router's choice was a tie" if ties else ""), flush=True)
    run = subprocess.run([args.test, args.gemma4, *paths], capture_output=True, text=True)
    for path in paths:
        os.remove(path)
    print("".join(f"    {line}\n" for line in run.stdout.splitlines()[:-1]), end="", flush=True)
    check(run.returncode == 0, f"{label}: {run.stdout.splitlines()[-1:]} {run.stderr.strip()}")


# One sliding and one full layer with the widths of the real models (few tokens in the vocabulary, few experts: they are rows,
# not widths).
WIDE = {
    "E2B": dict(vocab_size=600, vocab_size_per_layer_input=600, hidden_size=1536, intermediate_size=6144, num_hidden_layers=4,
                num_attention_heads=8, num_key_value_heads=1, head_dim=256, global_head_dim=512, hidden_size_per_layer_input=256,
                layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, use_double_wide_mlp=True),
    "31B": dict(vocab_size=600, hidden_size=5376, intermediate_size=21504, num_hidden_layers=2, num_attention_heads=32,
                num_key_value_heads=16, num_global_key_value_heads=4, head_dim=256, global_head_dim=512, attention_k_eq_v=True,
                hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"]),
    "26B-A4B": dict(vocab_size=600, hidden_size=2816, intermediate_size=2112, num_hidden_layers=2, num_attention_heads=16,
                    num_key_value_heads=8, num_global_key_value_heads=2, head_dim=256, global_head_dim=512, attention_k_eq_v=True,
                    hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"], enable_moe_block=True,
                    num_experts=16, top_k_experts=4, moe_intermediate_size=704),
}


def wide_model(settings, seed, scratch):
    """A random model, through its files, in bfloat16."""
    import make_fixtures as fixtures
    import torch
    import trace as reference
    import transformers
    config = transformers.Gemma4TextConfig(**settings, sliding_window=16, rms_norm_eps=1e-6, final_logit_softcapping=30.0,
                                           max_position_embeddings=131072, rope_parameters=fixtures.rope(), dtype="bfloat16")
    draw = torch.Generator().manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = transformers.Gemma4ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, x in model.state_dict().items():
        limits = fixtures.vector_range(name)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            limits = (0.1, 0.5)  # scores of a few units, as in the real models: the scale is 1, not 1 / sqrt(dh)
        if limits:
            x.uniform_(*limits, generator=draw)
        elif name != "lm_head.weight":
            x.normal_(0, x.shape[-1] ** -0.5, generator=draw)
    model.save_pretrained(scratch)
    del model
    return reference.load(scratch, torch.bfloat16)


def wide_head(seed):
    """Logits of 262144 rows, uncapped and capped."""
    import bf16_ops
    import torch
    draw, watch = torch.Generator().manual_seed(seed), bf16_ops.Recorder()
    for D, V in ((1536, 262144), (5376, 32768)):
        w = torch.empty(V, D, dtype=torch.bfloat16).normal_(0, D ** -0.5 * 8, generator=draw)
        x = torch.empty(1, 3, D, dtype=torch.bfloat16).normal_(generator=draw)
        y = torch.nn.functional.linear(x, w)
        watch.op("matmul", "lm_head", w=w, x=x, y=y, rows=V, cols=D)
        watch.op("softcap", "logits", x=y, c=30.0, y=torch.tanh(y / 30.0) * 30.0)
    return watch


def long_attention(seed):
    """Attention over many positions: a sliding and a full layer of E2B, one of 31B."""
    import bf16_ops
    import torch
    from transformers.models.gemma4 import modeling_gemma4
    draw, watch, T = torch.Generator().manual_seed(seed), bf16_ops.Recorder(), 700
    for H, G, dh, window in ((8, 1, 256, 512), (8, 1, 512, T), (8, 4, 512, T)):
        q, k, v = (torch.empty(1, n, T, dh, dtype=torch.bfloat16).normal_(0, size, generator=draw)
                   for n, size in ((H, 0.3), (G, 0.3), (G, 1.0)))
        at = torch.arange(T)
        visible = (at[None] <= at[:, None]) & (at[None] > at[:, None] - window)
        mask = torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min).to(torch.bfloat16)[None, None]
        module = torch.nn.Module().eval()
        module.num_key_value_groups, module.head_dim = H // G, dh
        with watch:
            out, weights = modeling_gemma4.eager_attention_forward(module, q, k, v, mask, scaling=1.0)
        watch.attention("long", q, k, v, window, out, weights)
    return watch


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("parts", nargs="*", metavar="PART", help="of fixtures, fresh, operations, wide; default: all")
    p.add_argument("--seed", type=int, help="repeat a run; default: from the clock")
    p.add_argument("--again", action="store_true", help="fixtures: compute logits_bf16 here")
    p.add_argument("--gemma4", default=os.path.join(ROOT, "gemma4"))
    p.add_argument("--test", default=os.path.join(ROOT, "build", "test_bf16"))
    args = p.parse_args()
    unknown = set(args.parts) - {"fixtures", "fresh", "operations", "wide"}
    if unknown:
        p.error(f"no part is called {sorted(unknown)[0]}")
    seed = args.seed if args.seed is not None else int(time.time()) % 1_000_000
    print(f"bf16: seed {seed} (test/bf16.py --seed {seed} repeats this run)", flush=True)
    try:
        import torch

        import bf16_ops
        import make_fixtures as fixtures
        import trace as reference
        from safetensors.torch import load_file
    except ImportError as e:
        skip(f"everything: {e}; pip install -r reference/requirements.txt")
        return done()
    for program in (args.gemma4, args.test):
        if not check(os.path.exists(program), f"{program}: not there; run make test"):
            return done()
    fixtures.quiet()
    shared, ratios = os.environ.get("SHARED", ""), {}

    def wanted(part):
        return not args.parts or part in args.parts

    if wanted("fixtures"):
        folders = [(name, f"{ROOT}/test/fixtures/{name}") for name in sorted(os.listdir(f"{ROOT}/test/fixtures"))]
        if os.path.isdir(f"{shared}/fixtures"):
            names = [name for name in sorted(os.listdir(f"{shared}/fixtures")) if name.startswith("micro-")]
            folders += [(f"shared {name}", f"{shared}/fixtures/{name}") for name in names]
        else:
            skip("SHARED is not set: its fixtures/micro-*")
        for name, path in folders:
            expected = load_file(f"{path}/expected.safetensors")
            ids, half = expected["ids"].tolist(), expected.get("logits_bf16")
            if half is None or args.again:
                half = reference.trace(reference.load(path, torch.bfloat16), ids)["logits"]
            check_ratio(args, name, path, ids, half, expected["logits"], ratios)

    with tempfile.TemporaryDirectory(prefix="gemma4-bf16-") as scratch:
        watches = []
        for k, (name, spec) in enumerate(fixtures.MODELS.items()):
            if not wanted("fresh") and not wanted("operations"):
                break
            path, draw = os.path.join(scratch, name), random.Random(f"{seed} {name}")
            spec = dict(spec, T=spec["T"] if spec["T"] == 1 else draw.randint(2, 40))
            half, single, ids = fresh(fixtures, reference, name, spec, 10_000 * (seed + 1) + 100 * k, path)
            if wanted("fresh"):
                check_ratio(args, f"fresh {name}", path, ids, reference.trace(half, ids)["logits"], reference.trace(single, ids)["logits"], ratios)
            if wanted("operations"):
                watches.append(bf16_ops.record(half, ids))
        if ratios:
            median = statistics.median(ratios.values())
            print(f"ratio over {len(ratios)} models: median {median:.4f}, largest {max(ratios.values()):.4f}", flush=True)
            check(median <= MEDIAN, f"median ratio {median:.3g} over {len(ratios)} models, bar {MEDIAN}")
        if wanted("operations"):
            check_operations(args, f"{len(watches)} fresh models", watches, scratch)
            check_operations(args, "GELU and softcap at every finite bfloat16", [bf16_ops.functions(bf16_ops.bf16_values(0.0, 3.38e38))], scratch)
        if wanted("wide"):
            torch.set_num_threads(os.cpu_count() or 1)
            for name, settings in WIDE.items():
                model = wide_model(settings, seed, os.path.join(scratch, "wide"))
                watch = bf16_ops.record(model, fixtures.prompt(model.config, seed, 24))
                del model
                check_operations(args, f"layers as wide as {name}'s", [watch], scratch)
                del watch
            check_operations(args, "heads", [wide_head(seed)], scratch)
            check_operations(args, "attention over 700 positions", [long_attention(seed)], scratch)
    return done()


if __name__ == "__main__":
    sys.exit(main())
