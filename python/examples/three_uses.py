# %% [markdown]
# Three uses of gemma4 beside transformers: read a layer's tensors, compare them all with transformers', take one of Gemma 4's peculiarities out
# and see what it did. Runs on the model that lies in the repository, in seconds, and downloads nothing: `make`, then cell by cell in an editor that knows
# "# %%", or `python python/examples/three_uses.py`. Another model: its directory as argument.

# %%
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2] if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "reference")]  # not needed for what pip installed
import gemma4

MODEL = Path(sys.argv[1]) if sys.argv[1:] and not hasattr(sys, "ps1") else ROOT / "models" / "austen"
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. However little known the "
    "feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well fixed in the minds of the surrounding families, "
    "that he is considered as the rightful property of some one or other of their daughters."
)
model = gemma4.Model(MODEL)
tokenizer = gemma4.Tokenizer(MODEL)
ids = tokenizer.encode(TEXT, bos=True)
print(model, f"{len(ids)} tokens", sep="\n")

# %% [markdown]
# 1. A layer's tensors, by name. The first full-attention layer: its keys and values are its own, all positions are seen. Attention has no factor
# 1 / sqrt(head_dim), since q and k are normed: the weights are softmax(q k), and they times v must be the layer's `attention`.

# %%
tensors = gemma4.State(model).trace(ids)
layer = next(i for i, l in enumerate(model.config.layers) if l.type == "full_attention" and l.kv_layer == i)
for name, x in tensors.items():
    if name.startswith(f"layers.{layer}."):
        print(f"{name:25} {str(list(x.shape)):15} rms {np.sqrt(np.mean(x.astype(float) ** 2)):.4f}")

q, k, v = (tensors[f"layers.{layer}.{name}"] for name in "qkv")  # [T][H][dh], [T][G][dh], [T][G][dh]
group = q.shape[1] // k.shape[1]  # heads that share a key
scores = np.einsum("hd,thd->ht", q[-1], np.repeat(k, group, axis=1))
weights = np.exp(scores - scores.max(axis=1, keepdims=True))
weights /= weights.sum(axis=1, keepdims=True)
ours = np.einsum("ht,thd->hd", weights, np.repeat(v, group, axis=1)).ravel()
print(f"softmax(q k) v of the last token against layers.{layer}.attention: max abs {np.abs(ours - tensors[f'layers.{layer}.attention'][-1]).max():.1e}")
for h in range(len(weights)):
    best = np.argsort(-weights[h])[:4]
    print(f"head {h} looks at", ", ".join(f"{tokenizer.piece(ids[t])!r} ({t}) {weights[h, t]:.2f}" for t in best))

# %% [markdown]
# 2. The same tensors from transformers (float32, eager). reference/trace.py hangs hooks on transformers' modules and gives them the same names. The bar is
# that of `gemma4 diff`: max abs <= 1e-5 * max(1, largest abs).

# %%
try:
    import trace as reference  # reference/trace.py
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
except ImportError as e:
    print(f"transformers: not compared ({e}); pip install -r reference/requirements.txt")
else:
    theirs = reference.trace(reference.load(str(MODEL)), ids.tolist())
    worst = {}
    for name, x in theirs.items():
        x = x.numpy()
        worst[name] = np.abs(tensors[name].astype(float) - x).max() / max(1, np.abs(x).max())
    for i in range(model.config.num_hidden_layers):
        print(f"layer {i}: " + ", ".join(f"{name.split('.')[2]} {w:.0e}" for name, w in worst.items() if name.startswith(f"layers.{i}.")))
    beyond = [name for name, w in worst.items() if not w <= 1e-5]
    print(f"transformers {transformers.__version__}: {len(worst)} tensors, the farthest {max(worst, key=worst.get)} {max(worst.values()):.1e}; beyond 1e-5: {beyond or 'none'}")

# %% [markdown]
# 3. One peculiarity less. Each changes a copy of the model's folder, config.json or a weight, and what opens it knows nothing of that. Perplexity of the
# text says how much the model misses it, the first position whose logits changed says where it acts.


# %%
def set_weight(folder, wanted, value):
    """All elements of the bfloat16 tensors whose names end so become value, in the file itself."""
    bits = (np.array([value], np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        size = int.from_bytes(data[:8], "little")
        for name, tensor in json.loads(data[8 : 8 + size]).items():
            if name.endswith(wanted):
                assert tensor["dtype"] == "BF16"
                begin, end = (8 + size + offset for offset in tensor["data_offsets"])
                data[begin:end] = bits * ((end - begin) // 2)
        path.write_bytes(data)


def logits_without(change):
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(MODEL, Path(scratch, "model")))
        config = json.loads((folder / "config.json").read_text())
        change(folder, config.get("text_config", config))
        (folder / "config.json").write_text(json.dumps(config))
        with gemma4.Model(folder, no_mmap=True) as changed, gemma4.State(changed) as state:
            return state.forward(ids)


def perplexity(logits):
    x = logits.astype(float)
    log_sum = np.log(np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1)) + x.max(axis=1)
    return np.exp(np.mean(log_sum[:-1] - x[np.arange(len(ids) - 1), ids[1:]]))


WINDOW = 8
ABLATIONS = {
    "no softcap": lambda folder, config: config.update(final_logit_softcapping=None),
    f"a window of {WINDOW} tokens": lambda folder, config: config.update(sliding_window=WINDOW),
    "full layers rotate every pair": lambda folder, config: config["rope_parameters"]["full_attention"].update(partial_rotary_factor=1.0),
    "one RoPE theta": lambda folder, config: config["rope_parameters"]["full_attention"].update(rope_theta=config["rope_parameters"]["sliding_attention"]["rope_theta"]),
    "layer_scalar is 1": lambda folder, config: set_weight(folder, ".layer_scalar", 1.0),
    "no per-layer inputs": lambda folder, config: set_weight(folder, ".per_layer_projection.weight", 0.0),
}
logits = tensors["logits"]
print(f"{'':30} perplexity   logits differ from position   best token changes")
print(f"{'as it is':30} {perplexity(logits):10.4f}")
results = {}
for name, change in ABLATIONS.items():
    results[name] = other = logits_without(change)
    rows = np.flatnonzero((other != logits).any(axis=1))
    moved = (other.argmax(axis=1) != logits.argmax(axis=1)).sum()
    print(f"{name:30} {perplexity(other):10.4f}   {rows[0] if len(rows) else 'none':>27}   {moved:>9} of {len(ids)}")

cap = model.config.final_logit_softcapping
if cap:
    capped = cap * np.tanh(results["no softcap"] / cap)
    print(f"the softcap is {cap:g} tanh(x / {cap:g}), after all else: max abs {np.abs(capped - logits).max():.1e}; without it the largest logit is "
          f"{results['no softcap'].max():.2f}, not {logits.max():.2f}")
