#!/usr/bin/env python3
"""Records what transformers' logits processors make of random logits: the other side of test/test_sampler.c.

    python reference/sampling.py                                  # the committed file: test/sampling.safetensors
    python reference/sampling.py -o FILE -n 10000 --vocab 1000 [--seed N]
    build/test_sampler ./gemma4 FILE

The processors and their order are those that generate() itself would put together (GenerationMixin._get_logits_processor). transformers has no
frequency and presence penalties; those follow OpenAI's formula and come in as a caller's own processor.

Each case is logits [V], ids so far, settings, and the probabilities [V] that transformers is left with: the softmax of its scores, -1 where it
removed the id. The scores are float32, as generate() has them; their softmax is computed in float64, because torch's own in float32 is by itself up to
1.1e-6 off on a thousand ids. Where float32's own rounding decides which ids stay (the same warpers in float64 keep others) there is no
right answer to compare with: such a case is drawn again, and their number stands in the metadata.
"""
import argparse
import os
import types

import numpy
import safetensors.torch
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

HISTORY, SUPPRESS, BIAS = 24, 4, 4
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class OpenAIPenalties(LogitsProcessor):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c[j] being how often j was generated."""

    def __init__(self, frequency, presence, n_prompt):
        self.frequency, self.presence, self.n_prompt = frequency, presence, n_prompt

    def __call__(self, input_ids, scores):
        c = torch.bincount(input_ids[0, self.n_prompt:], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - c * self.frequency - (c > 0).to(scores.dtype) * self.presence


def processors(case):
    """transformers' list for one case: what comes before top-k, top-p and min-p, and those."""
    config = GenerationConfig(do_sample=True, temperature=case["temperature"], top_k=case["top_k"], top_p=case["top_p"],
                              min_p=case["min_p"] or None, repetition_penalty=case["repeat_penalty"],
                              suppress_tokens=case["suppress"] or None,
                              sequence_bias=[[[i], b] for i, b in case["bias"].items()] or None)
    own = []
    if case["frequency_penalty"] or case["presence_penalty"]:
        own.append(OpenAIPenalties(case["frequency_penalty"], case["presence_penalty"], case["n_prompt"]))
    model = types.SimpleNamespace(config=types.SimpleNamespace(is_encoder_decoder=False))
    model._merge_criteria_processor_list = types.MethodType(GenerationMixin._merge_criteria_processor_list, model)
    made = GenerationMixin._get_logits_processor(model, config, input_ids_seq_length=case["n_prompt"], logits_processor=LogitsProcessorList(own),
                                                 device="cpu")
    warpers = [p for p in made if type(p).__name__ in ("TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")]
    assert made[len(made) - len(warpers):] == warpers
    return LogitsProcessorList(made[:len(made) - len(warpers)]), LogitsProcessorList(warpers)


def f32(x):
    """The nearest float32: C gets the parameter that transformers gets."""
    return float(numpy.float32(x))


def random_case(rng, V):
    kind = rng.integers(5)
    logits = rng.normal(0, [1, 3, 8, 0.1, 4][kind], V)
    ties = kind == 4
    if ties:
        logits = numpy.round(logits)
    n = int(rng.integers(1, HISTORY + 1))
    few = rng.choice(V, min(V, 8), replace=False)  # a history repeats itself
    ids = numpy.where(rng.random(n) < 0.7, rng.choice(few, n), rng.integers(0, V, n))
    chance = lambda p: rng.random() < p
    return {
        "logits": logits.astype(numpy.float32), "ids": ids.astype(numpy.int32), "n_prompt": int(rng.integers(1, n + 1)),
        "temperature": f32(rng.uniform(0.2, 2)) if chance(0.8) else 1.0,
        "top_k": int(rng.integers(1, V + 20)) if chance(0.5) else 0,
        # among equal logits transformers' sort decides which stay, and it promises no order
        "top_p": f32(rng.random()) if chance(0.6) and not ties else 1.0,
        "min_p": f32(rng.random() ** 3) if chance(0.4) else 0.0,
        "repeat_penalty": f32(rng.uniform(0.7, 2)) if chance(0.4) else 1.0,
        "frequency_penalty": f32(rng.uniform(-2, 2)) if chance(0.4) else 0.0,
        "presence_penalty": f32(rng.uniform(-2, 2)) if chance(0.4) else 0.0,
        "suppress": [int(i) for i in rng.choice(V, rng.integers(1, SUPPRESS + 1), replace=False)] if chance(0.3) else [],
        "bias": {int(i): f32(rng.uniform(-10, 10)) for i in rng.choice(V, rng.integers(1, BIAS + 1), replace=False)} if chance(0.3) else {},
    }


def transformers_probabilities(case):
    """[V] float32, -1 for removed ids; None where float32 and float64 remove others."""
    before, warpers = processors(case)
    ids = torch.from_numpy(case["ids"].astype(numpy.int64))[None]
    scores = before(ids, torch.from_numpy(case["logits"].copy())[None])
    exact = warpers(ids, scores.double())
    scores = warpers(ids, scores)
    removed = torch.isneginf(scores)
    if not torch.equal(removed, torch.isneginf(exact)):
        return None
    return torch.where(removed, -1, torch.softmax(scores.double(), -1).float())[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default=os.path.join(ROOT, "test", "sampling.safetensors"))
    parser.add_argument("-n", type=int, default=250)
    parser.add_argument("--vocab", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = numpy.random.default_rng(args.seed)
    cases, undecided = [], 0
    while len(cases) < args.n:
        case = random_case(rng, args.vocab)
        case["probabilities"] = transformers_probabilities(case)
        if case["probabilities"] is None:
            undecided += 1
        else:
            cases.append(case)

    def padded(rows, width, dtype):
        out = numpy.full((len(rows), width), -1, dtype)
        for i, row in enumerate(rows):
            out[i, :len(row)] = row
        return torch.from_numpy(out)

    settings = ("temperature", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
    tensors = {
        "logits": torch.from_numpy(numpy.stack([c["logits"] for c in cases])),
        "history": padded([c["ids"] for c in cases], HISTORY, numpy.int32),
        "n_prompt": torch.tensor([c["n_prompt"] for c in cases], dtype=torch.int32),
        "top_k": torch.tensor([c["top_k"] for c in cases], dtype=torch.int32),
        "settings": torch.tensor([[c[s] for s in settings] for c in cases], dtype=torch.float32),
        "suppress": padded([c["suppress"] for c in cases], SUPPRESS, numpy.int32),
        "bias_id": padded([list(c["bias"]) for c in cases], BIAS, numpy.int32),
        "bias": padded([list(c["bias"].values()) for c in cases], BIAS, numpy.float32),
        "probabilities": torch.stack([c["probabilities"] for c in cases]),
    }
    metadata = {"transformers": transformers.__version__, "torch": torch.__version__, "seed": str(args.seed), "undecided": str(undecided),
                "settings": " ".join(settings)}
    safetensors.torch.save_file(tensors, args.output, metadata)
    kept = (tensors["probabilities"] >= 0).sum(-1).float()
    print(f"{args.output}: {args.n} cases, {undecided} drawn again, ids kept {kept.min():.0f} to {kept.max():.0f}, median {kept.median():.0f}")


if __name__ == "__main__":
    main()
