#!/usr/bin/env python3
"""Makes the micro models of test/fixtures: random weights, and what transformers computes with them.

Each directory NAME holds a checkpoint (config.json, *.safetensors) and expected.safetensors: ids, embeddings,
per_layer_inputs, layers.N.output, norm, logits (float32, eager, CPU), greedy (16 new ids), logits_bf16 (the whole model in
bfloat16, widened). Its metadata: seed, dtype (of the stored weights), noise_f32 (how far transformers' float32 is from
float64: the largest difference of any traced tensor, relative to max(1, its largest absolute value)), noise_jittered (the worst of
that and of some runs in which each matrix product is rounded a little differently), lead (the smallest
margin that a greedy id won by), versions. Nothing here is computed by the C.

The weights are meant to bite: no norm weight, layer_scalar or expert scale is 1, both head sizes differ, prompts are longer
than two windows, softcap and eps are not the defaults, and no router choice or greedy id is close to a tie.

    python reference/make_fixtures.py [NAME ...] [--out test/fixtures]

Layouts that transformers reads but does not write (the multimodal nesting, the old spelling of the head sizes, tensors that
nothing reads) are made from its own files, and must load to the same bits. Reading order: MODELS, weights, build, main.
"""
import argparse
import json
import os
import shutil
import sys
import zlib
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import trace as reference  # noqa: E402  (reference/trace.py, not the standard library's)

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
GREEDY = 16


def pattern(n_layers, period):
    """Every period-th layer is full, the others slide."""
    return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(n_layers)]


def rope(sliding=None, full=None):
    return {"sliding_attention": sliding or {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": full or {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}}


# ---- layouts: edits of a saved checkpoint, config (dict) and tensors (dict), in place -------------------------------------


def old_spelling(config, tensors):
    """head_dim, global_head_dim and num_global_key_value_heads in place of per_layer_config."""
    full = next(iter(config.pop("per_layer_config").values()))
    config["global_head_dim"] = full["head_dim"]
    # without k_eq_v the key must be ignored: a value that would break the shapes says whether it is
    config["num_global_key_value_heads"] = full.get("num_key_value_heads") if config["attention_k_eq_v"] else 3


def dead_tensors(config, tensors):
    """k_proj, v_proj and k_norm of the layers that read another layer's K/V, as the official files carry them."""
    first = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    for i in range(first, config["num_hidden_layers"]):
        donor = max(j for j in range(first) if config["layer_types"][j] == config["layer_types"][i])
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            like = tensors[f"model.layers.{donor}.self_attn.{name}"]
            tensors[f"model.layers.{i}.self_attn.{name}"] = torch.full_like(like, 0.75)


def rename(prefix):
    def edit(config, tensors):
        for name in list(tensors):
            if name.startswith("model."):
                tensors[prefix + name[len("model."):]] = tensors.pop(name)
    return edit


def multimodal(config, tensors):
    """The text model under text_config, beside a vision tower whose keys and tensors have nothing to do with the text."""
    old_spelling(config, tensors)
    dead_tensors(config, tensors)
    rename("model.language_model.")(config, tensors)
    tensors["model.vision_tower.patch_embedder.input_proj.weight"] = torch.full((8, 12), 0.5, dtype=torch.bfloat16)
    tensors["model.embed_vision.embedding_projection.weight"] = torch.full((config["hidden_size"], 8), 0.5, dtype=torch.bfloat16)
    text = dict(config)
    text.pop("architectures"), text.pop("transformers_version")
    config.clear()
    config.update(
        architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4", text_config=text, audio_config=None,
        vision_config={"model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8,
                       "num_attention_heads": 1, "num_key_value_heads": 1, "position_embedding_size": 16, "patch_size": 2},
        dtype="bfloat16", eos_token_id=[1, 106], tie_word_embeddings=True, transformers_version=transformers.__version__)


def bare(config, tensors):
    """A config that says only what is not a default, with a last layer that is not full (which it then becomes)."""
    for key in list(config):
        if key not in ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                       "num_attention_heads", "num_key_value_heads", "hidden_size_per_layer_input"):
            del config[key]
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    config["rope_parameters"] = None


def no_partial_factor(config, tensors):
    """An absent partial_rotary_factor means 1; transformers writes what it was given."""
    config["rope_parameters"]["full_attention"].pop("partial_rotary_factor", None)


def other_head(config, tensors):
    """Tied by the config, and yet a head of its own in the file: the stored one is used."""
    embed = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embed.flip(0).contiguous()


# ---- the models ------------------------------------------------------------------------------------------------------------
#
# config: arguments of Gemma4TextConfig (global_head_dim: head_dim of the full layers). T: length of the prompt. The rest is
# optional: unified (the 12B's classes), dtype of the stored weights, shard (bytes), edits (of the layout, above).

SMALL = dict(vocab_size=150, vocab_size_per_layer_input=150, hidden_size=32, intermediate_size=40, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, global_head_dim=16, sliding_window=5, num_hidden_layers=4, layer_types=pattern(4, 2),
             hidden_size_per_layer_input=0, rms_norm_eps=2e-3, final_logit_softcapping=6.0, max_position_embeddings=4096,
             rope_parameters=rope())
PLE = dict(SMALL, hidden_size_per_layer_input=8, num_hidden_layers=6, layer_types=pattern(6, 2), num_kv_shared_layers=3,
           num_key_value_heads=1)
MOE = dict(SMALL, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=12, attention_k_eq_v=True,
           num_global_key_value_heads=1)

MODELS = {
    # the five real models in little
    "e2b": dict(T=20, config=dict(
        SMALL, vocab_size=160, vocab_size_per_layer_input=160, hidden_size=36, intermediate_size=32, num_hidden_layers=10,
        layer_types=pattern(10, 5), num_kv_shared_layers=5, hidden_size_per_layer_input=8, num_key_value_heads=1, head_dim=16,
        global_head_dim=32, use_double_wide_mlp=True, sliding_window=6)),
    "e4b": dict(T=18, config=dict(  # more than ten layers: transformers pads the keys of per_layer_config
        SMALL, vocab_size=160, vocab_size_per_layer_input=160, hidden_size=32, intermediate_size=44, num_hidden_layers=12,
        layer_types=pattern(12, 6), num_kv_shared_layers=5, hidden_size_per_layer_input=12, head_dim=8, global_head_dim=24,
        sliding_window=5, final_logit_softcapping=4.0, rms_norm_eps=5e-4)),
    "12b": dict(T=20, unified=True, config=dict(
        SMALL, vocab_size=160, hidden_size=40, intermediate_size=56, num_hidden_layers=6, layer_types=pattern(6, 6),
        num_attention_heads=8, num_key_value_heads=4, num_global_key_value_heads=1, head_dim=8, global_head_dim=24,
        attention_k_eq_v=True, sliding_window=6)),
    "31b": dict(T=24, config=dict(
        SMALL, vocab_size=160, hidden_size=36, intermediate_size=64, num_hidden_layers=6, layer_types=pattern(6, 6),
        num_attention_heads=8, num_key_value_heads=4, num_global_key_value_heads=2, head_dim=8, global_head_dim=32,
        attention_k_eq_v=True, sliding_window=7, final_logit_softcapping=5.0)),
    "26b-a4b": dict(T=20, config=dict(
        MOE, vocab_size=160, hidden_size=36, num_hidden_layers=6, layer_types=pattern(6, 6), num_attention_heads=8,
        num_key_value_heads=4, num_global_key_value_heads=2, head_dim=8, global_head_dim=24, num_experts=8, top_k_experts=3,
        moe_intermediate_size=10, sliding_window=6)),
    # layouts of the files
    "multimodal": dict(T=16, edits=[multimodal], config=PLE),
    "old-spelling": dict(T=16, edits=[old_spelling, rename("language_model.model.")], shard=40_000, config=dict(
        SMALL, attention_k_eq_v=True, num_global_key_value_heads=1)),
    "sharded": dict(T=16, shard=60_000, config=dict(PLE, use_double_wide_mlp=True)),
    "bare": dict(T=12, edits=[bare], config=dict(
        vocab_size=150, hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=1, num_key_value_heads=1,
        hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention", "full_attention"])),
    "other-head": dict(T=16, edits=[other_head], config=SMALL),
    "untied-f32": dict(T=16, dtype="float32", config=dict(
        SMALL, hidden_size=28, num_hidden_layers=2, layer_types=pattern(2, 2), tie_word_embeddings=False, final_logit_softcapping=None)),
    "f16": dict(T=16, dtype="float16", config=dict(PLE, num_key_value_heads=2)),
    # sizes and settings at the edges
    "odd": dict(T=17, config=dict(
        PLE, vocab_size=151, vocab_size_per_layer_input=143, hidden_size=36, intermediate_size=44, num_attention_heads=6,
        num_hidden_layers=4, layer_types=pattern(4, 2), num_kv_shared_layers=2, num_key_value_heads=3, head_dim=12,
        global_head_dim=20, hidden_size_per_layer_input=10, sliding_window=7, use_double_wide_mlp=True)),
    "one-token": dict(T=1, config=dict(PLE, hidden_size=30)),
    "rope": dict(T=24, edits=[no_partial_factor], config=dict(
        SMALL, num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "full_attention"], rope_parameters=rope(
            {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.6, "factor": 2.0},
            {"rope_type": "proportional", "rope_theta": 20000.0, "factor": 8.0}))),
    "rope-default": dict(T=24, config=dict(  # transformers' default type reads neither factor: nor may we
        SMALL, num_hidden_layers=2, layer_types=pattern(2, 2), rope_parameters=rope(
            {"rope_type": "default", "rope_theta": 300.0, "factor": 4.0},
            {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}))),
    "same-heads": dict(T=16, config=dict(PLE, global_head_dim=8, layer_types=["full_attention"] * 6)),
    "window-1-top-1": dict(T=16, config=dict(MOE, sliding_window=1, top_k_experts=1)),
    "window-all-top-all": dict(T=16, config=dict(
        MOE, num_hidden_layers=2, layer_types=pattern(2, 2), sliding_window=512, num_experts=5, top_k_experts=5)),
    "everything": dict(T=16, config=dict(
        MOE, num_experts=4, hidden_size_per_layer_input=8, num_hidden_layers=6, layer_types=pattern(6, 2), num_kv_shared_layers=3,
        use_double_wide_mlp=True)),
}

NOISE = 2e-5  # a model whose float32 strays further from its float64 than this is not kept: its bar would be too wide to bite
JITTERED = 4  # float32 runs beside the plain one: one run alone may be lucky
LEAD = 2e-3   # of a greedy choice, in logits
TIE = 2e-4    # of a router's last choice, as a share of its probability


# The range of the vectors and scalars, by the end of their names, the first match. What matches none is a matrix and gets
# normal values that keep outputs at the size of the inputs.
RANGES = {
    "router.scale": (1.0, 5.0), "per_expert_scale": (0.3, 1.7), "layer_scalar": (0.3, 0.9), "q_norm.weight": (0.3, 0.8),
    "k_norm.weight": (0.3, 0.8), "post_attention_layernorm.weight": (0.2, 1.0), "post_feedforward_layernorm.weight": (0.2, 1.0),
    "post_feedforward_layernorm_1.weight": (0.2, 1.0), "post_feedforward_layernorm_2.weight": (0.2, 1.0),
    "post_per_layer_input_norm.weight": (0.2, 1.0), "norm.weight": (0.4, 1.6), "layernorm.weight": (0.4, 1.6),
    "layernorm_2.weight": (0.4, 1.6),
}


def vector_range(name):
    return next((RANGES[end] for end in RANGES if name.endswith(end)), None)


def stream(name, seed):
    """The random numbers of one tensor: its own, so that they do not depend on the tensors before it."""
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))


def weights(model, seed, dtype):
    """Fills model with random values that dtype holds exactly."""
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            shape, limits = tuple(x.shape), vector_range(name)
            if limits:
                values = stream(name, seed).uniform(*limits, shape)
            else:
                values = stream(name, seed).standard_normal(shape) / np.sqrt(shape[-1])
            x.copy_(torch.from_numpy(values.astype(np.float32)).to(dtype))


def prompt(config, seed, T):
    vocab = min(config.vocab_size, getattr(config, "vocab_size_per_layer_input", config.vocab_size))
    ids = np.random.Generator(np.random.PCG64([seed, T])).integers(3, vocab, T)
    ids[0] = 2
    if T > 4:
        ids[3], ids[4] = vocab - 1, 0
    return ids.tolist()


@torch.no_grad()
def router_gap(model, ids):
    """The smallest lead, as a share of it, of the probability of the last chosen expert over the first one left out."""
    gaps, handles, k = [float("inf")], [], model.config.top_k_experts
    for layer in model.model.layers:
        def hook(module, args, out):
            p = out[0].sort(dim=-1, descending=True).values
            if k < p.shape[1]:
                gaps.append((1 - p[:, k] / p[:, k - 1]).min().item())
        handles.append(layer.router.register_forward_hook(hook))
    model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return min(gaps)


def trace_double(model, ids):
    """The trace of a float64 model; where transformers asks for float32 inside (norms, softmax, RoPE) it gets float64 too."""
    softmax = torch.nn.functional.softmax
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double), \
            mock.patch.object(torch.nn.functional, "softmax", lambda x, dim=None, dtype=None: softmax(x, dim=dim)):
        return reference.trace(model, ids)


def trace_jittered(model, ids, seed):
    """A float32 trace in which every result of a Linear is moved by at most half a unit in its last place."""
    draw = torch.Generator().manual_seed(seed)
    handles = [m.register_forward_hook(lambda m, args, out: out * (1 + (torch.rand(out.shape, generator=draw) - 0.5) * 2**-23))
               for m in model.modules() if isinstance(m, torch.nn.Linear)]
    found = reference.trace(model, ids)
    for handle in handles:
        handle.remove()
    return found


def distance(a, b):
    """The largest difference of two traces, each tensor's relative to max(1, its largest absolute value in b)."""
    return max(((a[n] - b[n]).abs().max() / max(1.0, b[n].abs().max())).item()
               for n in b if n != "ids" and not n.endswith("router_index"))


def noises(model, ids):
    """How far a float32 run is from float64: the plain one, and the worst of it and some jittered ones. Leaves model in float64."""
    several = [reference.trace(model, ids)] + [trace_jittered(model, ids, i) for i in range(JITTERED)]
    double = trace_double(model.double(), ids)
    each = [distance(x, double) for x in several]
    return each[0], max(each)


def save_sorted(tensors, path, metadata):
    """save_file writes the metadata in an order that changes from run to run: the header is written again, sorted."""
    save_file(tensors, path, metadata)
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text + data)


def save_tensors(out, tensors, shard):
    """model.safetensors, or shards of at most `shard` bytes with their index."""
    meta = {"format": "pt"}
    if not shard:
        save_file(tensors, f"{out}/model.safetensors", meta)
        return
    parts, size = [{}], 0
    for name in sorted(tensors):
        bytes_ = tensors[name].numel() * tensors[name].element_size()
        if parts[-1] and size + bytes_ > shard:
            parts.append({})
            size = 0
        parts[-1][name] = tensors[name]
        size += bytes_
    index = {"metadata": {"total_size": sum(x.numel() * x.element_size() for x in tensors.values())}, "weight_map": {}}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, f"{out}/{file}", meta)
        index["weight_map"].update(dict.fromkeys(part, file))
    with open(f"{out}/model.safetensors.index.json", "w") as f:
        json.dump(index, f, indent=1)


def write_checkpoint(spec, seed, out):
    """The checkpoint directory of one model of MODELS."""
    dtype = getattr(torch, spec.get("dtype", "bfloat16"))
    unified = spec.get("unified", False)
    make_config = transformers.Gemma4UnifiedTextConfig if unified else transformers.Gemma4TextConfig
    make_model = transformers.Gemma4UnifiedForCausalLM if unified else transformers.Gemma4ForCausalLM
    settings = dict(spec["config"])
    settings["layer_types"] = list(settings["layer_types"])
    if unified:
        for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
            settings.pop(key, None)
    config = make_config(**settings)
    config._attn_implementation = "eager"
    model = make_model(config)
    weights(model, seed, dtype)

    shutil.rmtree(out, ignore_errors=True)
    model.to(dtype).save_pretrained(out)
    if os.path.exists(f"{out}/generation_config.json"):
        os.remove(f"{out}/generation_config.json")
    if not spec.get("edits") and not spec.get("shard"):
        return
    before = None
    if other_head not in spec.get("edits", []):
        before = reference.trace(reference.load(out), prompt(config, seed, spec["T"]))
    with open(f"{out}/config.json") as f:
        config = json.load(f)
    tensors = load_file(f"{out}/model.safetensors")
    for edit in spec.get("edits", []):
        edit(config, tensors)
    os.remove(f"{out}/model.safetensors")
    save_tensors(out, tensors, spec.get("shard"))
    with open(f"{out}/config.json", "w") as f:
        json.dump(config, f, indent=2)
    if before is not None:
        after = reference.trace(reference.load(out), before["ids"].tolist())
        different = [n for n in before if not torch.equal(before[n], after[n])]
        if different:
            raise AssertionError(f"{out}: the rewritten checkpoint gives another {different[0]}")
    if config["model_type"] == "gemma4":
        whole = transformers.Gemma4ForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = whole(torch.tensor([before["ids"].tolist()]), use_cache=False).logits[0]
        assert torch.equal(logits, before["logits"]), f"{out}: Gemma4ForConditionalGeneration gives other logits"


def write_expected(spec, seed, out):
    """What transformers computes with the checkpoint in out. False: too dull, too noisy or too close to a tie, take another seed."""
    model = reference.load(out)
    ids = prompt(model.config, seed, spec["T"])
    half = reference.load(out, torch.bfloat16)
    if getattr(model.config, "enable_moe_block", False) and (router_gap(model, ids) < TIE or router_gap(half, ids) <= 0):
        return False  # in bfloat16 exact ties are common, and topk() settles them as it likes
    try:
        new, lead = reference.greedy(model, ids, GREEDY)
    except IndexError:  # chose an id that has no per-layer input
        return False
    if lead < LEAD or len(set(new)) < 3 or 1 in new or 106 in new:
        return False
    single = reference.trace(model, ids)
    noise, jittered = noises(model, ids)
    if jittered > NOISE:
        return False
    keep = [n for n in single if n.count(".") == 0 or n.endswith((".output", ".router_index", ".router_weight"))]
    expected = {n: single[n] for n in keep}
    expected["greedy"] = torch.tensor(new, dtype=torch.int32)
    expected["logits_bf16"] = reference.trace(half, ids)["logits"]
    assert all(torch.isfinite(x).all() for x in expected.values())
    save_sorted(expected, f"{out}/expected.safetensors", {
        "seed": str(seed), "dtype": spec.get("dtype", "bfloat16"), "noise_f32": f"{noise:.3g}", "noise_jittered": f"{jittered:.3g}",
        "lead": f"{lead:.3g}", **VERSIONS})
    return True


def build(spec, out, seed):
    """The checkpoint of one of MODELS and what is expected of it; returns the seed used, the first from `seed` on that will do."""
    for attempt in range(seed, seed + 400):
        write_checkpoint(spec, attempt, out)
        if write_expected(spec, attempt, out):
            return attempt
    raise RuntimeError(f"{out}: no seed from {seed} to {seed + 399} will do")


def quiet():
    """One thread: the sums of a fixture do not depend on the number of cores."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)} (default: all)")
    p.add_argument("--out", default=os.path.join(here, "..", "test", "fixtures"))
    args = p.parse_args()
    unknown = [n for n in args.names if n not in MODELS]
    if unknown:
        p.error(f"no model is called {unknown[0]}")
    quiet()
    for name in args.names or MODELS:
        out = os.path.join(args.out, name)
        seed = build(MODELS[name], out, 1000 + 100 * list(MODELS).index(name))
        files = [os.path.getsize(os.path.join(out, f)) for f in os.listdir(out)]
        expected = load_file(f"{out}/expected.safetensors")
        print(f"{name}: seed {seed}, {sum(files)} bytes, greedy {expected['greedy'].tolist()}", flush=True)


if __name__ == "__main__":
    main()
