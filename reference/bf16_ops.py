#!/usr/bin/env python3
"""Records what transformers computes in bfloat16, operation by operation: inputs, weights and outputs, bit for bit.

It is the other side of test/test_bf16.c, which feeds the same inputs to the operations of gemma4.c with precision bf16 and
counts equal bits. No line of the model is computed here: hooks and torch's own function mode look at the modules of
transformers (dtype=bfloat16, eager, CPU) while they run.

    python reference/bf16_ops.py                                      # the committed data: test/bf16/*.safetensors
    python reference/bf16_ops.py MODEL --ids 2,45,7 -o FILE [--only LAYER,...]
    build/test_bf16 ./gemma4 FILE

A file holds each tensor once (t0, t1, ..., flat), and `ops`, a text with one line per operation:

    OP NAME KEY=TENSOR ... KEY=NUMBER ...

OP is an entry of g4_backend, or `gelu` and `softmax`, which are parts of one. The numbers are the letters of gemma4.h.
Reading order: Recorder, record, MODELS, main.
"""
import argparse
import hashlib
import os
import sys
import tempfile
from unittest import mock

import torch
import transformers
from torch.overrides import TorchFunctionMode

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import make_fixtures as fixtures  # noqa: E402
import trace as reference  # noqa: E402  (reference/trace.py, not the standard library's)


class Recorder(TorchFunctionMode):
    """Sees each call of a torch function, and through hooks each module; keeps the tensors and the lines of a file."""

    def __init__(self, layers=None, parts_of_experts=True):
        super().__init__()
        self.layers = layers      # record only these; None: all
        self.parts_of_experts = parts_of_experts
        self.tensors, self.known, self.lines = {}, {}, []
        self.inside = []          # names of the modules that run now, outermost first
        self.gelu = None          # (input, output) of the last gelu: the product with it is gelu_mul
        self.products = []        # results of torch.matmul since they were last looked at
        self.linears = []         # the same of linear inside the experts, and between them the rows that index_add_ gave them to
        self.ties = 0             # rows that a router could have decided otherwise

    def tensor(self, x):
        """The name of x in the file; one name for equal contents. A copy is kept: transformers changes the residual stream in place."""
        with torch._C.DisableTorchFunction():
            x = x.detach().flatten().clone()
            x = x.to(torch.int32) if x.dtype == torch.int64 else x
            key = (x.dtype, hashlib.sha256(x.view(torch.uint8).numpy()).digest())
            if key not in self.known:
                self.known[key] = f"t{len(self.tensors)}"
                self.tensors[self.known[key]] = x
            return self.known[key]

    def op(self, kind, name, **what):
        """One line, unless its layer is not wanted."""
        parts = name.split(".")
        if self.layers is not None and parts[0] == "layers" and int(parts[1]) not in self.layers:
            return
        fields = [f"{k}={self.tensor(x) if isinstance(x, torch.Tensor) else repr(x)}" for k, x in what.items() if x is not None]
        self.lines.append(" ".join([kind, name or "head", *fields]))

    def attention(self, name, query, key, value, window, out, weights):
        """What eager_attention_forward was given and gave, and the scores: the first of the two products that it made."""
        scores, _ = self.products
        self.products.clear()
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        sizes = dict(H=q.shape[1], G=k.shape[1], dh=q.shape[2], window=window)
        self.op("attention", name, q=q, k=k, v=v, scores=scores, weights=weights, **sizes, y=out)
        self.op("softmax", name, q=q, k=k, scores=scores, **sizes, y=weights)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        with torch._C.DisableTorchFunction():
            a, b = args[0] if args else None, args[1] if len(args) > 1 else None
            tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == torch.bfloat16 == b.dtype
            before = a.detach().clone() if tensors and name in ("mul_", "__imul__") else None
            out = function(*args, **kwargs)
            where = self.inside[-1] if self.inside else ""
            if name == "matmul":
                self.products.append(out.clone())
            if ".experts" in where and name in ("linear", "index_add_"):
                self.linears.append(out.clone() if name == "linear" else args[2])
            if ".experts" in where and not self.parts_of_experts:
                pass
            elif name == "linear":
                self.op("matmul", where, w=b, x=a, y=out, rows=b.shape[0], cols=b.shape[1])
            elif name == "gelu":
                assert kwargs.get("approximate") == "tanh"
                self.gelu = (a, out)
                self.op("gelu", where, gate=a, y=out)
            elif tensors and name in ("mul", "__mul__") and self.gelu and a is self.gelu[1]:
                self.op("gelu_mul", where, gate=self.gelu[0], up=b, y=out)
            elif tensors and name in ("add", "__add__") and a.dim() == 3 and a.shape == b.shape and where.split(".")[0] == "layers":
                self.op("add", where, x=a, r=b, y=out)
            elif before is not None and b.numel() == 1:
                self.op("scale", where, x=before, s=b, y=out)
        return out


@torch.no_grad()
def record(model, ids, layers=None, parts_of_experts=True):
    """The Recorder of one pass over ids."""
    text, config = model.model, model.config
    watch, handles, seen = Recorder(layers, parts_of_experts), [], {}
    text.unique_layer_types = sorted(text.unique_layer_types)  # a set: its order, and so that of the file, changes from run to run
    package = sys.modules[type(text).__module__]
    eager, rotate = package.eager_attention_forward, package.apply_rotary_pos_emb
    plain = torch._C.DisableTorchFunction

    def on(module, hook, **how):
        def quiet(m, *rest):
            with plain():
                hook(m, *rest)
        handles.append(module.register_forward_hook(quiet, **how))

    def leave(m, args, out):
        watch.inside.pop()

    def norm(name):
        def hook(m, args, y):
            watch.op("norm", name, x=args[0], w=m.weight if m.with_scale else None, dim=args[0].shape[-1], eps=m.eps, y=y)
        return hook

    def embedding(name):
        def hook(m, args, y):
            scale = float(torch.tensor(m.scalar_embed_scale, dtype=torch.float32))
            watch.op("embed", name, w=m.weight, cols=m.weight.shape[1], ids=args[0], scale=scale, y=y)
            seen[name] = y.clone()
        return hook

    def rope_table(m, args, kwargs, out):
        kind = kwargs.get("layer_type", args[-1])
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        cos, sin = out[0][0], out[1][0]
        half = cos.shape[-1] // 2
        assert torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])
        watch.op("rope_table", kind, inv_freq=getattr(m, f"{kind}_inv_freq"), pos=positions, cos=cos[:, :half], sin=sin[:, :half])

    def rope(x, cos, sin, **kwargs):
        y = rotate(x, cos, sin, **kwargs)
        half = x.shape[-1] // 2
        watch.op("rope", watch.inside[-1], x=x, cos=cos[0, :, :half], sin=sin[0, :, :half], heads=x.shape[2], dh=2 * half, y=y)
        return y

    def attention(module, query, key, value, *args, **kwargs):
        out, weights = eager(module, query, key, value, *args, **kwargs)
        watch.attention(watch.inside[-1], query, key, value, module.sliding_window or len(ids), out, weights)
        return out, weights

    def router(name):
        def hook(m, args, out):
            probability, weight, index = out
            k = m.config.top_k_experts
            best = probability.sort(dim=-1, descending=True).values
            clear = best[:, k - 1] > best[:, k] if k < best.shape[1] else torch.ones(len(best), dtype=torch.bool)
            watch.ties += int((~clear).sum())
            index, order = index[clear].sort(dim=-1)
            n, logits = (x[clear] for x in seen["router"])
            watch.op("router", name, h=args[0][clear], n=n, logits=logits, scale=m.scale, proj=m.proj.weight,
                     per_expert_scale=m.per_expert_scale, D=m.hidden_size, E=len(m.per_expert_scale), K=k, eps=m.eps, index=index,
                     weight=weight[clear].gather(1, order))
        return hook

    def experts(name):
        def hook(m, args, y):
            x, index, weight = args
            index, order = index.sort(dim=-1)
            inner = [[], []]  # results of the two Linears, a list of the experts' for each row, which are met in ascending order
            for part in inner:
                part.extend([] for _ in x)
            for gate_up, down, which in zip(*(watch.linears[i::3] for i in range(3)), strict=True):
                for part, results in zip(inner, (gate_up, down)):
                    for row, result in zip(which.tolist(), results):
                        part[row].append(result)
            watch.linears.clear()
            gate_ups, downs = (torch.stack([torch.stack(row) for row in part]) for part in inner)
            watch.op("experts", name, x=x, index=index, weight=weight.gather(1, order), gate_up=m.gate_up_proj, down=m.down_proj,
                     gate_ups=gate_ups, downs=downs, D=m.hidden_dim, E=m.num_experts, K=index.shape[1], Fe=m.intermediate_dim, y=y)
        return hook

    for name, module in model.named_modules():
        name = name.removeprefix("model.")
        handles.append(module.register_forward_pre_hook(lambda m, args, name=name: watch.inside.append(name)))
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            on(module, norm(name))
        elif kind.endswith("ScaledWordEmbedding"):
            on(module, embedding(name))
        elif kind.endswith("TextRotaryEmbedding"):
            on(module, rope_table, with_kwargs=True)
        elif kind.endswith("TextRouter"):
            on(module, router(name))
        elif kind.endswith("TextExperts"):
            on(module, experts(name))
        elif name.endswith("router.proj"):
            on(module, lambda m, args, y: seen.__setitem__("router", (args[0].clone(), y.clone())))
        elif name == "per_layer_model_projection":
            on(module, lambda m, args, y: seen.__setitem__("b", y.clone()))
        elif name == "lm_head":
            on(module, lambda m, args, y: seen.__setitem__("head", y.clone()))
        handles.append(module.register_forward_hook(leave))

    per_layer = []
    if getattr(config, "hidden_size_per_layer_input", 0):
        for layer in text.layers:
            handles.append(layer.register_forward_pre_hook(
                lambda m, args, kwargs: per_layer.append((args[1] if len(args) > 1 else kwargs["per_layer_input"])[0].clone()), with_kwargs=True))
    try:
        with mock.patch.object(package, "eager_attention_forward", attention), mock.patch.object(package, "apply_rotary_pos_emb", rope), watch:
            logits = model(torch.tensor([ids]), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()

    if per_layer:
        L, P = config.num_hidden_layers, config.hidden_size_per_layer_input
        watch.op("ple", "per_layer_inputs", a=seen["embed_tokens_per_layer"], b=seen["b"], norm=text.per_layer_projection_norm.weight, L=L, P=P,
                 D=config.hidden_size, eps=config.rms_norm_eps, y=torch.stack(per_layer, dim=1))
    if config.final_logit_softcapping:
        watch.op("softcap", "logits", x=seen["head"], c=float(config.final_logit_softcapping), y=logits)
    return watch


def save(watch, path, **metadata):
    tensors = dict(watch.tensors, ops=torch.frombuffer(bytearray(("\n".join(watch.lines) + "\n").encode()), dtype=torch.uint8))
    fixtures.save_sorted(tensors, path, {"dtype": "bfloat16", **metadata, **fixtures.VERSIONS})


def functions(values):
    """GELU and the softcap at many bfloat16 values, as torch computes them there."""
    watch = Recorder()
    watch.op("gelu", "functions", gate=values, y=torch.nn.functional.gelu(values, approximate="tanh"))
    watch.op("softcap", "functions", x=values, c=30.0, y=torch.tanh(values / 30.0) * 30.0)
    return watch


def bf16_values(smallest, largest):
    """All bfloat16 values of both signs whose bits lie between those of two positive ones."""
    low, high = (int(torch.tensor(x, dtype=torch.bfloat16).view(torch.int16)) for x in (smallest, largest))
    positive = torch.arange(low, high + 1, dtype=torch.int16).view(torch.bfloat16)
    return torch.cat([positive, -positive])


# What the committed data come from: small, with everything that the real models have.
MODELS = {
    "ple": dict(T=16, config=dict(
        fixtures.SMALL, vocab_size=70, vocab_size_per_layer_input=70, hidden_size=40, intermediate_size=20, num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], num_kv_shared_layers=1, hidden_size_per_layer_input=12,
        num_key_value_heads=1, head_dim=16, global_head_dim=24, num_attention_heads=3, use_double_wide_mlp=True, sliding_window=7)),
    "moe": dict(T=16, config=dict(
        fixtures.MOE, vocab_size=70, hidden_size=36, intermediate_size=24, num_hidden_layers=2, layer_types=fixtures.pattern(2, 2),
        num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=8, global_head_dim=20, num_experts=6,
        top_k_experts=2, moe_intermediate_size=12, sliding_window=6)),
}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model", nargs="?", help="directory in Hugging Face layout; left out: makes test/bf16")
    p.add_argument("--ids", type=reference.parse_ids, help="A,B,...: used as given, no BOS is added")
    p.add_argument("--only", type=reference.parse_ids, metavar="LAYER,...", help="of the layers, only these")
    p.add_argument("-o", metavar="FILE")
    args = p.parse_args()
    fixtures.quiet()
    if args.model:
        if not args.ids or not args.o:
            p.error("MODEL needs --ids and -o")
        watch = record(reference.load(args.model, torch.bfloat16), args.ids, args.only)
        save(watch, args.o)
        print(f"{args.o}: {len(watch.lines)} operations, {watch.ties} rows left out where a router's choice was a tie")
        return
    out = os.path.join(here, "..", "test", "bf16")
    os.makedirs(out, exist_ok=True)
    for k, (name, spec) in enumerate(MODELS.items()):
        seed = 9000 + 100 * k
        with tempfile.TemporaryDirectory() as scratch:
            fixtures.write_checkpoint(spec, seed, scratch)
            model = reference.load(scratch, torch.bfloat16)
            watch = record(model, fixtures.prompt(model.config, seed, spec["T"]), parts_of_experts=False)
        path = os.path.join(out, f"{name}.safetensors")
        save(watch, path, seed=str(seed))
        print(f"{name}: {len(watch.lines)} operations, {watch.ties} tied rows left out, {os.path.getsize(path)} bytes")
    save(functions(bf16_values(2.0**-8, 64.0)), os.path.join(out, "functions.safetensors"))


if __name__ == "__main__":
    main()
