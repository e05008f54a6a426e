#!/usr/bin/env python3
"""Trains the small Gemma 4 that ships in models/austen, with transformers, from scratch.

It is E2B's architecture in little: per-layer embeddings, both RoPE kinds, a sliding window, shared K/V with one donor
of each kind, the double-wide MLP of the sharing layers, a layer_scalar that is learnt, soft-capped tied logits. The text is
Jane Austen's six novels as Debian's package r-cran-janeaustenr holds them, and, so that so small a shelf is not learnt by heart, Herman
Melville's Moby-Dick from r-cran-tokenizers; both in the public domain. What is held out is Austen alone. Nothing is downloaded by this script: give it
the packages' data files.

    apt-get download r-cran-janeaustenr r-cran-tokenizers
    dpkg -x r-cran-janeaustenr_*.deb deb && dpkg -x r-cran-tokenizers_*.deb deb
    R=deb/usr/lib/R/site-library
    python reference/train.py --rdb $R/janeaustenr/data/Rdata.rdb --more $R/tokenizers/data/Rdata.rdb --out models/austen

Reading order: read_novels, make_tokenizer, model_config, main.
"""
import argparse
import json
import math
import os
import random
import struct
import time
import zlib

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

BLOCK = 20_000  # bytes of one block of text
HELD_OUT = 25   # every 25th block is never trained on

# Gemma 4's added tokens, in its order; only the ids differ from the real vocabulary's.
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
           "<|tool_response>", "<tool_response|>", "<|\"|>", "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>",
           "<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def read_novels(rdb):
    """The novels as [(title, text)], lines of a paragraph joined, a blank line between paragraphs.

    An R lazy-load file is a row of blobs: a 4-byte big-endian length, then a zlib stream; each blob here is a serialised
    character vector, whose elements are (flags, length, bytes)."""
    data, pos, novels = open(rdb, "rb").read(), 0, []
    while pos < len(data):
        unzip = zlib.decompressobj()
        raw = unzip.decompress(data[pos + 4:])
        pos = len(data) - len(unzip.unused_data)
        at = 2 + 3 * 4
        at += 4 + struct.unpack_from(">i", raw, at)[0]  # the encoding's name
        kind, n = struct.unpack_from(">ii", raw, at)
        assert kind & 255 == 16, "not a character vector"
        at += 8
        lines = []
        for _ in range(n):
            _, size = struct.unpack_from(">ii", raw, at)
            lines += raw[at + 8:at + 8 + size].decode("utf-8").split("\n")
            at += 8 + size
        marks = [i for i, line in enumerate(lines) if line.startswith(("*** START", "***START", "*** END", "***END"))]
        if marks:  # a Project Gutenberg file: only what lies between its marks is the book
            lines = lines[marks[0] + 1:marks[1]]
        paragraphs, now = [], []
        for line in lines + [""]:
            line = " ".join(line.replace("_", "").split())
            if line:
                now.append(line)
            elif now:
                paragraphs.append(" ".join(now))
                now = []
        novels.append((paragraphs[0], "\n\n".join(paragraphs) + "\n\n"))
    return novels


def split_blocks(novels):
    """Training stretches and held-out blocks of about BLOCK bytes, cut at paragraph ends."""
    train, held, count = [], [], 0
    for _, text in novels:
        stretch, block = "", ""
        for paragraph in text.split("\n\n")[:-1]:
            block += paragraph + "\n\n"
            if len(block.encode()) >= BLOCK:
                count += 1
                if count % HELD_OUT == 0:
                    held.append(block)
                    train.append(stretch)
                    stretch = ""
                else:
                    stretch += block
                block = ""
        train.append(stretch + block)
    return [t for t in train if t], held


def make_tokenizer(train, size):
    """A BPE tokenizer of Gemma 4's kind: spaces become U+2581, byte fallback, no pre-splitting when it is used.

    Only the training of the merges looks at words: without that, pieces would run across them."""
    trainer_side = Tokenizer(models.BPE())
    trainer_side.normalizer = normalizers.Replace(" ", "\u2581")
    trainer_side.pre_tokenizer = pre_tokenizers.Split(
        Regex("\u2581?[A-Za-z']+|\u2581?[^A-Za-z\u2581\n]+|\n+|\u2581+"), "isolated")
    alphabet = sorted({chr(c) for c in range(33, 127)} | {"\n", "\t", "\u2581"})
    trainer_side.train_from_iterator(train, trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL + BYTES, initial_alphabet=alphabet, show_progress=False))
    made = json.loads(trainer_side.to_str())["model"]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for i, t in enumerate(SPECIAL)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": made["vocab"], "merges": made["merges"]},
    }


def model_config(vocab):
    return Gemma4TextConfig(
        vocab_size=vocab, vocab_size_per_layer_input=vocab, hidden_size=160, intermediate_size=256,
        num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=1, head_dim=32, global_head_dim=64,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=128, num_kv_shared_layers=4, use_double_wide_mlp=True, hidden_size_per_layer_input=32,
        final_logit_softcapping=30.0, max_position_embeddings=131072, rms_norm_eps=1e-6, tie_word_embeddings=True,
        bos_token_id=2, pad_token_id=0, eos_token_id=1)


def loss_of(model, ids):
    """Cross-entropy of each token but the first, in nats: [B][T-1]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)


@torch.no_grad()
def bits_per_byte(model, held, context):
    """Every held-out token is scored once, after BOS and at least half a context of its own block where there is one."""
    nats = size = 0
    windows = []
    for ids, n_bytes in held:
        size += n_bytes
        start = 0
        while start < len(ids):
            first = max(0, start - context // 2)
            stop = min(len(ids), first + context)
            windows.append(([2] + ids[first:stop] + [0] * (context - (stop - first)), start - first, stop - first))
            start = stop
    for at in range(0, len(windows), 16):
        part = windows[at:at + 16]
        losses = loss_of(model, torch.tensor([w[0] for w in part]))
        for row, (_, begin, end) in zip(losses, part):
            nats += row[begin:end].double().sum().item()
    return nats / math.log(2) / size


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--rdb", required=True)
    p.add_argument("--more", action="append", default=[], help="other texts of the same form, only trained on")
    p.add_argument("--out", required=True)
    p.add_argument("--minutes", type=float, default=62)
    p.add_argument("--vocab", type=int, default=2048)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--short", type=float, default=0.7, help="share of the time spent on windows of half the context")
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--adam-lr", type=float, default=4e-3)
    p.add_argument("--weight-decay", type=float, default=0.3)
    p.add_argument("--dropout", type=float, default=0.12, help="on the embeddings and on what each block adds")
    p.add_argument("--eval-every", type=int, default=500)
    p.add_argument("--seed", type=int, default=4)
    p.add_argument("--autocast", action="store_true", help="bfloat16 matrix products")
    a = p.parse_args()
    torch.manual_seed(a.seed)
    rng = random.Random(a.seed)
    os.makedirs(a.out, exist_ok=True)

    novels = read_novels(a.rdb)
    train, held = split_blocks(novels)
    train += [text for path in a.more for _, text in read_novels(path)]
    tok_json = make_tokenizer(train, a.vocab)
    path = os.path.join(a.out, "tokenizer.json")
    with open(path, "w", encoding="utf-8") as f:
        json.dump(tok_json, f, ensure_ascii=False, separators=(",", ":"))
    tok = Tokenizer.from_file(path)
    stretches = [tok.encode(t, add_special_tokens=False).ids for t in train]
    stretches = [s for s in stretches if len(s) >= a.context]
    held_ids = [(tok.encode(t, add_special_tokens=False).ids, len(t.encode())) for t in held]
    n_train = sum(map(len, stretches))
    print(f"{len(novels)} novels, {sum(len(t.encode()) for t in train)} bytes to train on = {n_train} tokens, "
          f"{sum(n for _, n in held_ids)} bytes held out = {sum(len(i) for i, _ in held_ids)} tokens", flush=True)

    config = model_config(len(tok_json["model"]["vocab"]))
    config._attn_implementation = "eager"  # faster than sdpa once compiled, at this size
    model = Gemma4ForCausalLM(config)
    for layer in model.model.layers:  # a buffer in transformers; here it is learnt like the weights
        del layer._buffers["layer_scalar"]
        layer.layer_scalar = torch.nn.Parameter(torch.full((1,), 0.9))
    model.train()
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)

    def drop(module, args, output):
        return F.dropout(output, a.dropout, model.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "embed_tokens_per_layer", "post_attention_layernorm", "post_feedforward_layernorm",
                          "post_per_layer_input_norm")):
            module.register_forward_hook(drop)

    hidden, tables, vectors = [], [], []
    for name, w in model.named_parameters():
        (tables if "embed_tokens" in name else hidden if w.ndim == 2 else vectors).append(w)
    muon = torch.optim.Muon(hidden, lr=a.lr, weight_decay=a.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW([{"params": tables, "weight_decay": a.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                             lr=a.adam_lr, betas=(0.9, 0.98), fused=True)
    optimisers = [(muon, a.lr), (adam, a.adam_lr)]

    compiled = torch.compile(lambda ids: loss_of(model, ids).mean(), dynamic=False)
    budget, spent, step, best, last, log = a.minutes * 60, 0.0, 0, None, [], []
    weights = [len(s) for s in stretches]
    while spent < budget:
        begin = time.time()
        done = spent / budget
        # short windows first (cheaper, more of them), whole ones for the rest: the same tokens in each step
        context, rows = (a.context // 2, a.batch * 2) if done < a.short else (a.context, a.batch)
        batch = []
        for stretch in rng.choices(stretches, weights, k=rows):
            at = rng.randrange(len(stretch) - context + 1)
            batch.append([2] + stretch[at:at + context])
        with torch.autocast("cpu", torch.bfloat16, enabled=a.autocast):
            loss = compiled(torch.tensor(batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min(1.0, (step + 1) / 150) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
        for optimiser, lr in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        took = time.time() - begin
        last = (last + [took])[-21:]
        if step > 2:  # neither compiling nor a pause of the machine counts
            spent += min(took, 3 * sorted(last)[len(last) // 2])
        log.append(loss.item())
        if step % 50 == 0:
            print(f"step {step} {spent:.0f} s loss {np.mean(log[-50:]):.4f} norm {norm:.2f} lr {scale:.3f} "
                  f"{a.batch * a.context / np.median(last):.0f} tok/s", flush=True)
        if (step % a.eval_every == 0 and done > 0.2) or spent >= budget:
            state = {k: v.detach().clone() for k, v in model.state_dict().items()}
            with torch.no_grad():  # judged as it will be stored
                for w in model.parameters():
                    w.copy_(w.to(torch.bfloat16).float())
            model.eval()
            bpb = bits_per_byte(model, held_ids, a.context)
            model.train()
            print(f"step {step} {spent:.0f} s held-out {bpb:.4f} bits per byte", flush=True)
            if best is None or bpb < best["bits_per_byte"]:
                best = {"bits_per_byte": round(bpb, 4), "step": step, "tokens": step * a.batch * a.context}
                save(model, config, a, best)
            model.load_state_dict(state)


def save(model, config, a, best):
    """config.json, model.safetensors (bfloat16), generation_config.json, tokenizer_config.json, training.json."""
    plain = Gemma4ForCausalLM(config)
    plain.load_state_dict(model.state_dict())
    plain = plain.to(torch.bfloat16)
    plain.generation_config = transformers.GenerationConfig(
        bos_token_id=2, pad_token_id=0, eos_token_id=[1], do_sample=True, temperature=0.65, top_k=64, top_p=0.9)
    plain.save_pretrained(a.out)
    with open(os.path.join(a.out, "tokenizer_config.json"), "w") as f:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
                   "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
                   "clean_up_tokenization_spaces": False, "model_max_length": config.max_position_embeddings}, f, indent=1)
    with open(os.path.join(a.out, "training.json"), "w") as f:
        json.dump({**best, "arguments": {k: v for k, v in vars(a).items() if k not in ("rdb", "more", "out")},
                   "parameters": sum(p.numel() for p in plain.parameters()) + config.num_hidden_layers,
                   "torch": torch.__version__, "transformers": transformers.__version__,
                   "tokenizers": tokenizers.__version__}, f, indent=1)


if __name__ == "__main__":
    main()
