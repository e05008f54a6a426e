#!/usr/bin/env python3
"""Writes a full-size random checkpoint of one of the five Gemma 4 shapes: for measuring speed and memory, and for seeing that
sizes of the real thing are no obstacle. It knows nothing and says nothing.

    python reference/make_random.py e2b /tmp/e2b            # 10 GB
    python reference/make_random.py 26b-a4b /tmp/moe --layers 6 --vocab 4096

Hugging Face layout as published: the text model nested under text_config, the old spelling of the head sizes, bfloat16, shards
of at most 5 GB with their index, tensors called model.language_model.*, the dead k_proj, v_proj and k_norm of layers that share
K/V, generation_config.json; no tokenizer, no vision or audio tower. Matrices are scaled pieces of one random block of a
length that is a multiple of no row, so that no two rows are equal and writing is bound by the disk.

Reading order: SHAPES, text_config, tensors, write_shards.
"""
import argparse
import functools
import json
import os
import sys

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from make_fixtures import pattern, rope, stream, vector_range  # noqa: E402

SHARD = 5_000_000_000
BLOCK = 32 * 2**20 - 1  # odd

# layers, period of the layer pattern, hidden_size, intermediate_size, heads, KV heads sliding and full, window, shared layers,
# P, k_eq_v, double wide, (experts, top k, their width), positions
SHAPES = {
    "e2b": (35, 5, 1536, 6144, 8, 1, 1, 512, 20, 256, False, True, None, 131072),
    "e4b": (42, 6, 2560, 10240, 8, 2, 2, 512, 18, 256, False, False, None, 131072),
    "12b": (48, 6, 3840, 15360, 16, 8, 1, 1024, 0, 0, True, False, None, 262144),
    "26b-a4b": (30, 6, 2816, 2112, 16, 8, 2, 1024, 0, 0, True, False, (128, 8, 704), 262144),
    "31b": (60, 6, 5376, 21504, 32, 16, 4, 1024, 0, 0, True, False, None, 262144),
}


def text_config(shape, layers, vocab):
    """config.json's text_config, cut to `layers` layers (whole periods) and `vocab` tokens."""
    L, period, D, F, H, G, G_full, window, shared, P, k_eq_v, wide, moe, positions = SHAPES[shape]
    if layers % period or not 0 < layers <= L:
        sys.exit(f"make_random.py: {shape} can have {period}, {2 * period}, ... {L} layers, not {layers}")
    experts, top_k, expert_width = moe or (None, None, None)
    return {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": k_eq_v, "bos_token_id": 2, "dtype": "bfloat16",
        "enable_moe_block": moe is not None, "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": D, "hidden_size_per_layer_input": P, "initializer_range": 0.02,
        "intermediate_size": F, "layer_types": pattern(layers, period), "max_position_embeddings": positions,
        "model_type": "gemma4_unified_text" if shape == "12b" else "gemma4_text", "moe_intermediate_size": expert_width,
        "num_attention_heads": H, "num_experts": experts, "num_global_key_value_heads": G_full if k_eq_v else None,
        "num_hidden_layers": layers, "num_key_value_heads": G, "num_kv_shared_layers": round(layers * shared / L / period) * period,
        "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_parameters": rope(), "sliding_window": window, "tie_word_embeddings": True,
        "top_k_experts": top_k, "use_bidirectional_attention": None, "use_cache": True, "use_double_wide_mlp": wide,
        "vocab_size": vocab, "vocab_size_per_layer_input": vocab,
    }


def tensors(c):
    """(name, shape) of every tensor of a text_config."""
    D, H, P, L, V = c["hidden_size"], c["num_attention_heads"], c["hidden_size_per_layer_input"], c["num_hidden_layers"], c["vocab_size"]
    yield "embed_tokens.weight", (V, D)
    if P:
        yield "embed_tokens_per_layer.weight", (V, L * P)
        yield "per_layer_model_projection.weight", (L * P, D)
        yield "per_layer_projection_norm.weight", (P,)
    for i in range(L):
        full = c["layer_types"][i] == "full_attention"
        dh = c["global_head_dim"] if full else c["head_dim"]
        G = c["num_global_key_value_heads"] if full and c["attention_k_eq_v"] else c["num_key_value_heads"]
        F = c["intermediate_size"] * (2 if c["use_double_wide_mlp"] and i >= L - c["num_kv_shared_layers"] else 1)
        shapes = {
            "input_layernorm.weight": (D,), "self_attn.q_proj.weight": (H * dh, D), "self_attn.k_proj.weight": (G * dh, D),
            "self_attn.v_proj.weight": (G * dh, D), "self_attn.q_norm.weight": (dh,), "self_attn.k_norm.weight": (dh,),
            "self_attn.o_proj.weight": (D, H * dh), "post_attention_layernorm.weight": (D,), "pre_feedforward_layernorm.weight": (D,),
            "mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F),
            "post_feedforward_layernorm.weight": (D,), "layer_scalar": (1,),
        }
        if full and c["attention_k_eq_v"]:
            del shapes["self_attn.v_proj.weight"]
        if P:
            shapes.update({"per_layer_input_gate.weight": (P, D), "per_layer_projection.weight": (D, P),
                           "post_per_layer_input_norm.weight": (D,)})
        if c["enable_moe_block"]:
            E, Fe = c["num_experts"], c["moe_intermediate_size"]
            shapes.update({
                "router.proj.weight": (E, D), "router.scale": (D,), "router.per_expert_scale": (E,), "experts.gate_up_proj": (E, 2 * Fe, D),
                "experts.down_proj": (E, D, Fe), "post_feedforward_layernorm_1.weight": (D,), "pre_feedforward_layernorm_2.weight": (D,),
                "post_feedforward_layernorm_2.weight": (D,)})
        for name, size in shapes.items():
            yield f"layers.{i}.{name}", size
    yield "norm.weight", (D,)


def raw(x):
    """The bytes of a tensor, as bfloat16, without a copy of more than it."""
    return x.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False).data


@functools.lru_cache(maxsize=1)
def normal_block(seed):
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(BLOCK, dtype=np.float32))


@functools.lru_cache(maxsize=8)  # by width of the rows: a shape has fewer
def scaled_block(seed, width):
    return raw(normal_block(seed) / width**0.5)


def pieces(name, shape, seed):
    """The bytes of one tensor, in pieces."""
    limits, draw = vector_range(name), stream(name, seed)
    if limits:
        yield raw(torch.from_numpy(draw.uniform(*limits, shape)))
        return
    left, at, block = int(np.prod(shape)), int(draw.integers(BLOCK)), scaled_block(seed, shape[-1])
    while left:
        n = min(left, BLOCK - at)
        yield block[at:at + n]
        left -= n
        at = 0


def write_shards(out, listed, seed):
    """Shards of at most SHARD bytes, or one larger tensor, and the index."""
    shards, size = [[]], 0
    for name, shape in listed:
        n = 2 * int(np.prod(shape))
        if shards[-1] and size + n > SHARD:
            shards.append([])
            size = 0
        shards[-1].append((name, shape, n))
        size += n
    index = {"metadata": {"total_size": sum(n for shard in shards for _, _, n in shard)}, "weight_map": {}}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, shape, n in shard:
            header["model.language_model." + name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
            index["weight_map"]["model.language_model." + name] = file
            at += n
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(out, file), "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name, shape, _ in shard:
                for piece in pieces(name, shape, seed):
                    f.write(piece)
        print(f"{file}: {at} bytes, {len(shard)} tensors", file=sys.stderr)
    if len(shards) > 1:
        with open(os.path.join(out, "model.safetensors.index.json"), "w") as f:
            json.dump(index, f, indent=1)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("shape", choices=SHAPES)
    p.add_argument("out", metavar="OUT_DIR")
    p.add_argument("--layers", type=int, help="cut down to so many layers, whole periods of the pattern")
    p.add_argument("--vocab", type=int, default=262144, help="cut down to so many tokens")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    text = text_config(args.shape, args.layers or SHAPES[args.shape][0], args.vocab)
    unified = args.shape == "12b"
    config = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration" if unified else "Gemma4ForConditionalGeneration"],
        "audio_config": None, "dtype": "bfloat16", "eos_token_id": [1, 106], "initializer_range": 0.02,
        "model_type": "gemma4_unified" if unified else "gemma4", "text_config": text, "tie_word_embeddings": True, "vision_config": None,
    }
    if unified:  # keys that its classes do not have
        for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts",
                    "moe_intermediate_size"):
            del config["text_config"][key]
        text = {**text, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
    generation = {"bos_token_id": 2, "do_sample": True, "eos_token_id": [1, 106, 50], "pad_token_id": 0,
                  "suppress_tokens": [258883, 258882], "temperature": 1.0, "top_k": 64, "top_p": 0.95}
    if args.vocab <= max(generation["suppress_tokens"]):
        del generation["suppress_tokens"]
    os.makedirs(args.out, exist_ok=True)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        with open(os.path.join(args.out, name), "w") as f:
            json.dump(content, f, indent=2)
    write_shards(args.out, list(tensors(text)), args.seed)


if __name__ == "__main__":
    main()
