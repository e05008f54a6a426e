#!/usr/bin/env python3
"""Runs transformers on a checkpoint and writes every intermediate tensor, under the names that `gemma4 trace` uses.

It is the other side of `gemma4 diff`, not a port: forward hooks look at transformers' own modules while they run, and no
line of the model is computed here. Reading order: load, trace, main.

    python reference/trace.py models/austen -p "It is a truth" -o theirs.safetensors
    ./gemma4 trace models/austen -p "It is a truth" -o ours.safetensors
    ./gemma4 diff ours.safetensors theirs.safetensors

All tensors are float32 without the batch dimension ([T] first); `ids` is int32. safetensors' Python writer sorts the names;
the dictionary that trace() returns is in the order of the forward pass.
"""
import argparse
import fnmatch
import os
import sys
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file

# Where checkpoints keep the text model, and where the text-only classes look for it.
PREFIXES = {r"^model\.language_model\.": "model.", r"^language_model\.model\.": "model.", r"^language_model\.lm_head\.": "lm_head."}


def load_config(path):
    """The text model's config of a checkpoint, multimodal or not."""
    return transformers.AutoConfig.from_pretrained(path).get_text_config()


def load(path, dtype=torch.float32):
    """The text model of a checkpoint directory, eager everywhere. Raises when a weight of it is not in the files."""
    config = load_config(path)
    unified = config.model_type.startswith("gemma4_unified")
    which = transformers.Gemma4UnifiedForCausalLM if unified else transformers.Gemma4ForCausalLM
    model, info = which.from_pretrained(path, config=config, dtype=dtype, key_mapping=PREFIXES, attn_implementation="eager",
                                        experts_implementation="eager", output_loading_info=True)
    wrong = {k: sorted(info[k]) for k in ("missing_keys", "mismatched_keys", "error_msgs") if info.get(k)}
    if wrong:
        raise ValueError(f"{path}: {wrong}")
    return model.eval()


def rows(x):
    """[1][T][...] -> float32 [T][...], a copy: transformers scales the residual stream in place."""
    return x.detach().reshape(x.shape[1:]).to(torch.float32).clone()


def heads(x):
    """[1][heads][T][dh] -> float32 [T][heads][dh]"""
    return x.detach()[0].transpose(0, 1).to(torch.float32).contiguous().clone()


@torch.no_grad()
def trace(model, ids):
    """{name: tensor} of one pass over ids, in the order of the forward pass."""
    text, config = model.model, model.config
    n_layers, ple = config.num_hidden_layers, bool(getattr(config, "hidden_size_per_layer_input", 0))
    seen, handles, per_layer_inputs = {}, [], []

    def keep(name, module, before=False, shape=rows):
        """Records what module returns, or, with before, what it is given."""
        if before:
            handles.append(module.register_forward_pre_hook(lambda m, args: seen.__setitem__(name, shape(args[0]))))
        else:
            handles.append(module.register_forward_hook(lambda m, args, out: seen.__setitem__(name, shape(out))))

    def keep_router(name):
        def hook(module, args, out):
            _, weight, index = out  # [T][K], by falling probability
            index, order = index.sort(dim=-1)
            seen[f"{name}.router_index"] = index.to(torch.float32)
            seen[f"{name}.router_weight"] = weight.gather(1, order).to(torch.float32)
        return hook

    def keep_ple_input(module, args, kwargs):
        per_layer_inputs.append(rows(args[1] if len(args) > 1 else kwargs["per_layer_input"]))

    keep("embeddings", text.embed_tokens)
    for i, layer in enumerate(text.layers):
        name = f"layers.{i}"
        if ple:
            handles.append(layer.register_forward_pre_hook(keep_ple_input, with_kwargs=True))
        keep(f"{name}.attention", layer.self_attn.o_proj, before=True)
        keep(f"{name}.o_proj", layer.self_attn.o_proj)
        keep(f"{name}.attn_residual", layer.pre_feedforward_layernorm, before=True)
        keep(f"{name}.mlp", layer.mlp)
        if getattr(config, "enable_moe_block", False):
            handles.append(layer.router.register_forward_hook(keep_router(name)))
            keep(f"{name}.experts", layer.experts, shape=lambda x: x.detach().to(torch.float32).clone())
        if ple:
            keep(f"{name}.ffn_residual", layer.per_layer_input_gate, before=True)
            keep(f"{name}.ple_gate", layer.per_layer_projection, before=True)
            keep(f"{name}.ple", layer.per_layer_projection)
        else:  # no module is given the sum: the same addition of the same two tensors, in their own type
            def hook(module, args, out, name=name):
                residual = seen[f"{name}.attn_residual"].to(out.dtype)
                seen[f"{name}.ffn_residual"] = rows(residual[None] + out)
            handles.append(layer.post_feedforward_layernorm.register_forward_hook(hook))
        keep(f"{name}.output", layer)
    keep("norm", text.norm)

    # q, k and v meet only in the attention function, which is not a module: it is wrapped, not replaced.
    package = sys.modules[type(text).__module__]
    eager = package.eager_attention_forward

    def attention(module, query, key, value, *args, **kwargs):
        name = f"layers.{module.layer_idx}"
        if not module.is_kv_shared_layer:
            seen[f"{name}.k"], seen[f"{name}.v"] = heads(key), heads(value)
        seen[f"{name}.q"] = heads(query)
        return eager(module, query, key, value, *args, **kwargs)

    try:
        with mock.patch.object(package, "eager_attention_forward", attention):
            seen["logits"] = rows(model(torch.tensor([ids]), use_cache=False).logits)
    finally:
        for handle in handles:
            handle.remove()

    if ple:
        seen["per_layer_inputs"] = torch.stack(per_layer_inputs, dim=1)
    inner = ("k", "v", "q", "attention", "o_proj", "attn_residual", "mlp", "router_index", "router_weight", "experts",
             "ffn_residual", "ple_gate", "ple", "output")
    order = ["embeddings", "per_layer_inputs"] + [f"layers.{i}.{n}" for i in range(n_layers) for n in inner] + ["norm", "logits"]
    assert not set(seen) - set(order)
    return {"ids": torch.tensor(ids, dtype=torch.int32), **{name: seen[name].contiguous() for name in order if name in seen}}


@torch.no_grad()
def greedy(model, ids, n):
    """n new ids, each the best after a full pass over all before it (no cache), and the smallest lead that one won by."""
    ids, lead = list(ids), float("inf")
    for _ in range(n):
        top = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float().topk(2)
        lead = min(lead, (top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    return ids[-n:], lead


def parse_ids(text):
    if not all(item.isdecimal() for item in text.split(",")):
        raise argparse.ArgumentTypeError("expected decimal integers separated by single commas")
    return [int(item) for item in text.split(",")]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model", help="directory in Hugging Face layout")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--ids", type=parse_ids, help="A,B,...: used as given, no BOS is added")
    what.add_argument("-p", metavar="TEXT", help="text; one BOS is put before it")
    p.add_argument("-o", metavar="OUT.safetensors", required=True)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--tensors", metavar="GLOB", default="*", help="only the tensors whose names match")
    args = p.parse_args()
    transformers.logging.set_verbosity_error()

    ids = args.ids
    if ids is None:
        import tokenizers
        tokenizer = tokenizers.Tokenizer.from_file(os.path.join(args.model, "tokenizer.json"))
        bos = tokenizer.token_to_id("<bos>")
        ids = tokenizer.encode(args.p, add_special_tokens=False).ids
        ids = ids if ids[:1] == [bos] else [bos] + ids
    config = load_config(args.model)
    vocab = config.vocab_size
    if getattr(config, "hidden_size_per_layer_input", 0):
        vocab = min(vocab, config.vocab_size_per_layer_input)
    if any(i >= vocab for i in ids):
        sys.exit(f"trace.py: id {max(ids)} is outside the vocabulary of {vocab}")

    tensors = trace(load(args.model, getattr(torch, args.dtype)), ids)
    tensors = {name: x for name, x in tensors.items() if fnmatch.fnmatchcase(name, args.tensors)}
    save_file(tensors, args.o, {"dtype": args.dtype, "torch": torch.__version__, "transformers": transformers.__version__})


if __name__ == "__main__":
    main()
