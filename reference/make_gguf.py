#!/usr/bin/env python3
"""Makes the GGUF files of test/gguf: micro models of quantised weights, and what transformers computes with them.

    python reference/make_gguf.py [--out test/gguf]

NAME.gguf is written by gguf-py, which also gives keys and tensors their names. Its matrices are random blocks, of every type that quants.c has,
with scales that make ordinary weights of them. NAME.expected.safetensors holds ids [T] and logits [T][V]: transformers, float32, eager, CPU, on
the weights as gguf.quants.dequantize has them. tiny.gguf has no expected logits: it is what fuzzing begins with.

Reading order: MODELS, random_blocks, write_gguf, main.
"""
import argparse
import os
import sys

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import make_fixtures as fixtures  # noqa: E402
import quants  # noqa: E402  (reference/quants.py: where the halves of a block lie)
import trace as reference  # noqa: E402

# config: arguments of Gemma4TextConfig. types: for matrices of rows that are a multiple of 256 long, of 32, and others, taken in turns.
# apart: experts in two tensors. fused: q, k and v in one on layers that have all three, then of one type.
MODELS = {
    "ple": dict(T=14, types=[["Q6_K", "Q4_K", "Q5_K", "Q2_K", "Q3_K", "IQ4_XS"], ["Q8_0", "Q4_0", "Q5_0", "Q4_1"], ["F16"]], config=dict(
        vocab_size=130, vocab_size_per_layer_input=130, hidden_size=256, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, global_head_dim=32, sliding_window=5, num_hidden_layers=4, layer_types=fixtures.pattern(4, 2),
        num_kv_shared_layers=2, hidden_size_per_layer_input=32, use_double_wide_mlp=True, rms_norm_eps=1e-4, final_logit_softcapping=6.0,
        max_position_embeddings=512, rope_parameters=fixtures.rope())),
    "moe": dict(T=14, apart=True, fused="Q5_1", types=[[], ["MXFP4", "IQ4_NL", "Q5_1", "Q8_0", "Q4_0", "Q5_0", "Q4_1"], ["BF16"]], config=dict(
        vocab_size=140, vocab_size_per_layer_input=140, hidden_size=96, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_global_key_value_heads=1, head_dim=8, global_head_dim=16, attention_k_eq_v=True, sliding_window=4, num_hidden_layers=4,
        layer_types=fixtures.pattern(4, 2), hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=5, top_k_experts=2,
        moe_intermediate_size=32, rms_norm_eps=2e-3, final_logit_softcapping=None, max_position_embeddings=512, rope_parameters=fixtures.rope())),
    "tiny": dict(T=0, types=[[], [], ["F16", "F32", "BF16"]], config=dict(
        vocab_size=3, vocab_size_per_layer_input=3, hidden_size=2, intermediate_size=3, num_attention_heads=1, num_key_value_heads=1, head_dim=2,
        global_head_dim=4, sliding_window=2, num_hidden_layers=2, layer_types=fixtures.pattern(2, 2), hidden_size_per_layer_input=0,
        rms_norm_eps=1e-3, final_logit_softcapping=6.0, max_position_embeddings=16, rope_parameters=fixtures.rope())),
}


def random_blocks(name, shape, rng):
    """bytes [..][row bytes] of random blocks whose values have mean 0 and standard deviation 1 / sqrt(columns), as near as a block allows."""
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
    halves = quants.TYPES[name]

    def values(*scales):
        for at, x in zip(halves, scales):
            blocks[:, at:at + 2] = np.full((len(blocks), 1), x, dtype="<f2").view(np.uint8)
        return dequantize(blocks, kind)

    wanted = 1 / np.sqrt(shape[-1])
    if not halves:  # MXFP4: its scale is the exponent in the first byte, and its integers have a standard deviation of about 5.4
        blocks[:, 0] = rng.integers(-1, 2, len(blocks)) + int(np.log2(wanted / 5.4)) + 128
    elif len(halves) == 1:
        values(wanted / values(1).std())
    else:  # the second scale's part cancels the mean of the first one's
        second = -values(1, 0).mean() / values(0, 1).mean()
        d = wanted / values(1, second).std()
        values(d, d * second)
    return blocks.reshape(*shape[:-1], -1)


class Weights:
    """Gives each matrix its type, the bytes that the file holds and the floats that the model gets."""

    def __init__(self, spec, seed):
        self.types, self.turn, self.seed = spec["types"], [0, 0, 0], seed

    def make(self, name, x, kind=None):
        """x: the tensor of transformers' model. Returns bytes (or floats) for the file, gguf's type, float32 values."""
        rng = fixtures.stream(name, self.seed)
        if x.dim() == 1 or name.endswith("router.proj.weight"):
            return x.numpy(), None, x.numpy()
        if not kind:
            which = next(i for i, (step, types) in enumerate(zip((256, 32, 1), self.types)) if x.shape[-1] % step == 0 and types)
            kind = self.types[which][self.turn[which] % len(self.types[which])]
            self.turn[which] += 1
        if kind in quants.TYPES:
            data = random_blocks(kind, tuple(x.shape), rng)
        else:
            data = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType[kind])
        return data, gguf.GGMLQuantizationType[kind], dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(tuple(x.shape))


def write_gguf(path, config, settings, tensors):
    """settings: what config was made from. tensors: {name in the file: (data, type or None)}"""
    w = gguf.GGUFWriter(path, "gemma4")
    full = [t == "full_attention" for t in config.layer_types]
    heads, global_heads = settings["num_key_value_heads"], settings.get("num_global_key_value_heads", settings["num_key_value_heads"])
    dim, global_dim = settings["head_dim"], settings["global_head_dim"]
    w.add_type("model")
    w.add_block_count(config.num_hidden_layers)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    first = config.num_hidden_layers - config.num_kv_shared_layers
    wide = 2 if config.use_double_wide_mlp else 1
    w.add_feed_forward_length([config.intermediate_size * (wide if i >= first else 1) for i in range(config.num_hidden_layers)]
                              if wide == 2 else config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    groups = [global_heads if f else heads for f in full]
    w.add_head_count_kv(groups if len(set(groups)) > 1 else groups[0])
    w.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    w.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.enable_moe_block:
        w.add_expert_count(config.num_experts)
        w.add_expert_used_count(config.top_k_experts)
        w.add_expert_feed_forward_length(config.moe_intermediate_size)
    for add in (w.add_key_length, w.add_value_length, w.add_rope_dimension_count):
        add(global_dim)
    for add in (w.add_key_length_swa, w.add_value_length_swa, w.add_rope_dimension_count_swa):
        add(dim)
    w.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    w.add_sliding_window(config.sliding_window)
    w.add_shared_kv_layers(config.num_kv_shared_layers)
    w.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    w.add_sliding_window_pattern([not f for f in full])
    for name, (data, kind) in tensors.items():
        w.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def build(name, spec, seed, out):
    """Writes one model; False: its router is too close to a tie."""
    config = transformers.Gemma4TextConfig(**spec["config"])
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.Gemma4ForCausalLM(config).eval()
    fixtures.weights(model, seed, torch.float32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    make = Weights(spec, seed)
    tensors, state = {}, {n: x for n, x in model.state_dict().items() if n != "lm_head.weight"}
    dim = spec["config"]["global_head_dim"]
    turning = int(config.rope_parameters["full_attention"]["partial_rotary_factor"] * dim / 2)
    tensors["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (dim // 2 - turning), dtype=np.float32), None

    def call(n):  # the scales of the router and of its experts are kept beside the matrices that they belong to
        stem = n.replace("router.scale", "router.proj").replace("router.per_expert_scale", "experts.down_proj").removesuffix(".weight")
        return names.get_name(stem) + (".scale" if n.endswith("scale") else ".weight")

    for n, x in state.items():
        layer = n.rsplit(".self_attn.", 1)[0] + ".self_attn."
        whole = spec.get("fused") and layer + "v_proj.weight" in state and n[len(layer):] in ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        data, kind, values = make.make(n, x, spec["fused"] if whole else None)
        with torch.no_grad():
            x.copy_(torch.from_numpy(np.array(values)))
        if whole:
            q = call(layer + "q_proj.weight").replace("attn_q", "attn_qkv")
            tensors[q] = np.concatenate([tensors[q][0], data]) if q in tensors else data, kind
        elif spec.get("apart") and n.endswith("experts.gate_up_proj"):
            down = call(n.replace("gate_up_proj", "down_proj"))
            for k, half in enumerate(np.split(data, 2, axis=1)):
                tensors[down.replace("down", ("gate", "up")[k])] = half, kind
        else:
            tensors[call(n)] = data, kind
    if not spec["T"]:
        write_gguf(f"{out}/{name}.gguf", config, spec["config"], tensors)
        return True
    ids = fixtures.prompt(config, seed, spec["T"])
    if config.enable_moe_block and fixtures.router_gap(model, ids) < fixtures.TIE:
        return False
    write_gguf(f"{out}/{name}.gguf", config, spec["config"], tensors)
    traced = reference.trace(model, ids)
    kinds = sorted({kind.name for _, kind in tensors.values() if kind is not None} | {"F32"})
    fixtures.save_sorted({"ids": traced["ids"], "logits": traced["logits"]}, f"{out}/{name}.expected.safetensors",
                         {"seed": str(seed), "types": ",".join(kinds), "gguf": quants.version("gguf"), **fixtures.VERSIONS})
    print(f"{name}: seed {seed}, {os.path.getsize(f'{out}/{name}.gguf')} bytes, {len(tensors)} tensors of {', '.join(kinds)}")
    return True


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "test", "gguf"))
    args = p.parse_args()
    os.makedirs(args.out, exist_ok=True)
    fixtures.quiet()
    for name, spec in MODELS.items():
        next(seed for seed in range(1, 100) if build(name, spec, seed, args.out))


if __name__ == "__main__":
    main()
