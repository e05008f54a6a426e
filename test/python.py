#!/usr/bin/env python3
"""The Python module: its structs are those of gemma4.h, and its numbers those of transformers and of ./gemma4, bit for bit.

    header      every struct, field, constant and function of part 1 of gemma4.h is in gemma4/_c.py, of the same kind at the same place: the C compiler is asked
    numbers     trace() against transformers live, on fixtures and on models/austen (bar as in live.py); against `gemma4 trace`, equal bits
    text        encode, decode, generate against `gemma4 tokenize`, `detokenize`, `run`
    states      batches, truncation, copies, files and threads give the bits of one sequence alone
    engine      many requests at once give what each gives alone; stop strings, log-probabilities, drafts, prefixes
    chat        prompts against `gemma4 template` and transformers' renderings in test/chats.jsonl; answers
    errors      what is refused, by which exception, and that nothing has changed then
    memory      nothing is left of what was closed or dropped; closing in the midst of another thread's call is harmless
    packages    the wheel and the source distribution, installed into fresh environments, give the same bits far from the repository
    example     python/examples/three_uses.py runs, and what it prints is so

    python test/python.py [GEMMA4] [--only NAME,...]     after `make`; needs reference/requirements.txt. Last line: `python: N passed, N failed, N skipped`.
"""
import argparse
import contextlib
import ctypes
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "python"), os.path.join(ROOT, "reference")]
# On a busy machine threads that wait for each other take most of the time. Where several are wanted, it is said.
os.environ.update(OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="1", GEMMA4_THREADS="1")

import numpy as np  # noqa: E402
from live import AUSTEN, Gemma4, comma, compare_traces, report, stored_order  # noqa: E402

import gemma4  # noqa: E402
from gemma4 import _c  # noqa: E402

check = report.check
FIXTURES = os.path.join(ROOT, "test", "fixtures")
CC = os.environ.get("CC", "cc").split()
PATIENCE = 300  # seconds, for what comes in its own time: this machine may be slow, or busy


def same(a, b):
    """Equal bits: a NaN equals itself, and -0 is not 0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def raises(kind, part, call, what):
    """call() raises exactly that, with a one-line text that holds part."""
    try:
        call()
    except Exception as e:
        return check(type(e) is kind and part in str(e) and "\n" not in str(e), f"{what}: {type(e).__name__}: {e}; expected {kind.__name__} that says {part!r}")
    return check(False, f"{what}: nothing was raised; expected {kind.__name__}")


# ---- header --------------------------------------------------------------------------------------------------------------------------------------


def declared_names(body):
    """Names that the declarations of a struct's body declare, in order."""
    names = []
    for declaration in body.split(";"):
        pointer = re.search(r"\(\*(\w+)\)\(", declaration)  # to a function
        if pointer:
            names.append(pointer.group(1))
        else:
            names += [re.sub(r"\[.*", "", part).split()[-1].lstrip("*") for part in re.sub(r"\[[^]]*\]", "[]", declaration).split(",") if part.strip()]
    return names


def expected_types(c):
    """The ctypes that a C type of a parameter or result may have."""
    c = re.sub(r"\bconst\b", "", c)
    c = re.sub(r"\s+", " ", re.sub(r"\s*\*\s*", "*", c)).strip()
    plain = {"void": None, "int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "size_t": ctypes.c_size_t, "uint64_t": ctypes.c_uint64,
             "float": ctypes.c_float, "double": ctypes.c_double, "void*": ctypes.c_void_p, "g4_sampling": _c.g4_sampling, "g4_chat_family": ctypes.c_int,
             "g4_trace_fn*": _c.trace_fn, "g4_answer_fn*": _c.answer_fn}
    if c in plain:
        return [plain[c]]
    if c in ("char*", "char**"):
        kinds = [ctypes.c_char_p, ctypes.c_void_p]
        return kinds if c == "char*" else [ctypes.POINTER(k) for k in kinds]
    if c.endswith("*") and re.fullmatch(r"g4_(model|state|tokenizer|decoder|engine|answer)\*", c):
        return [ctypes.c_void_p]
    structs = {s.__name__: s for s in _c.STRUCTS}
    if c.endswith("*"):
        return [ctypes.POINTER(t) for t in expected_types(c[:-1])]
    return [structs[c]] if c in structs else []


def parameter_types(text):
    """"int n, const char *name" -> ["int ", "const char *"]"""
    return [] if text.strip() == "void" else [re.sub(r"\w+\s*$", "", part) for part in text.split(",")]


def test_header(scratch):
    text = open(os.path.join(ROOT, "gemma4.h"), encoding="utf-8").read()
    part1 = re.sub(r"/\*.*?\*/", " ", text[text.index("---- Part 1"):text.index("---- Part 2")], flags=re.S)
    check(f'"{_c.VERSION}"' in re.search("#define G4_VERSION.*", text).group(0), f"VERSION {_c.VERSION} is not G4_VERSION")

    structs = dict(re.findall(r"typedef struct (g4_\w+) \{(.*?)\} \1;", part1, re.S))
    check(list(structs) == [s.__name__ for s in _c.STRUCTS], f"STRUCTS: {[s.__name__ for s in _c.STRUCTS]}, the header has {list(structs)}")
    constants = [part.split("=")[0].strip() for body in re.findall(r"enum[^{;]*\{([^}]*)\}", part1) for part in body.split(",")]
    check(constants == list(_c.CONSTANTS), f"CONSTANTS: {list(_c.CONSTANTS)}, the header has {constants}")

    # the compiler's view: a line for each struct, field and constant
    lines, expected = [], []
    for s in _c.STRUCTS:
        name = s.__name__
        check(declared_names(structs.get(name, "")) == [f[0] for f in s._fields_], f"{name}: fields {[f[0] for f in s._fields_]}, not those of the header")
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(s)}")
        for field, kind in s._fields_:
            element, at = (kind._type_, "[0]") if issubclass(kind, ctypes.Array) else (kind, "")
            word = {"f": "float", "d": "float", "c": "char"}.get(getattr(element, "_type_", None), "integer") if issubclass(element, ctypes._SimpleCData) else "other"
            if element in (ctypes.c_char_p, ctypes.c_void_p):
                word = "other"
            lines.append(f'printf("{name}.{field} %zu %zu %s\\n", offsetof({name}, {field}), sizeof(({name} *)0)->{field}, KIND((({name} *)0)->{field}{at}));')
            expected.append(f"{name}.{field} {getattr(s, field).offset} {ctypes.sizeof(kind)} {word}")
    for name, value in _c.CONSTANTS.items():
        lines.append(f'printf("{name} %d\\n", (int){name});')
        expected.append(f"{name} {value}")
    program = os.path.join(scratch, "layout")
    with open(program + ".c", "w") as f:
        f.write('#include "gemma4.h"\n#include <stdio.h>\n#define KIND(x) _Generic((x), float: "float", double: "float", char: "char", int: "integer", unsigned: "integer", '
                'long: "integer", unsigned long: "integer", long long: "integer", unsigned long long: "integer", default: "other")\n'
                "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    built = subprocess.run([*CC, "-I", ROOT, program + ".c", "-o", program], capture_output=True, text=True)
    if check(built.returncode == 0, f"a program that looks at every field does not compile: {built.stderr[:2000]}"):
        said = subprocess.run([program], capture_output=True, text=True).stdout.splitlines()
        for ours, theirs in zip(expected, said):
            check(ours == theirs, f"gemma4/_c.py has (offset, size, kind) {ours}, the compiler {theirs}")
        check(len(said) == len(expected), "not every field was looked at")

    functions = {name: (result, args) for result, name, args in re.findall(r"G4_API\s+(.*?)(g4_\w+)\((.*?)\);", part1, re.S)}
    check(list(functions) == list(_c.FUNCTIONS), f"FUNCTIONS: only one side has {set(functions) ^ set(_c.FUNCTIONS)}, or the order differs")
    for name, (result, args) in functions.items():
        if name not in _c.FUNCTIONS:
            continue
        ours, types = _c.FUNCTIONS[name], parameter_types(args)
        check(ours[0] in expected_types(result), f"{name}: result {ours[0]}, the header has {result!r}")
        check(len(types) == len(ours[1]), f"{name}: {len(ours[1])} arguments, the header has {len(types)}")
        for i, (mine, c) in enumerate(zip(ours[1], types)):
            check(mine in expected_types(c), f"{name}: argument {i + 1} is {mine}, the header has {c!r}")
    callbacks = re.findall(r"(?:typedef )?(void|double) (?:g4_|\(\*)(\w+?)(?:_fn|\))\(([^()]*)\);", part1)
    check(len(callbacks) == 5, f"the header has the callbacks {callbacks}")
    for result, name, args in callbacks:
        kind, types = getattr(_c, f"{name}_fn"), parameter_types(args)
        mine = kind._argtypes_
        check(kind._restype_ in expected_types(result) and len(mine) == len(types) and all(m in expected_types(c) for m, c in zip(mine, types)),
              f"{name}_fn: {mine}, the header has {types}")

    from dataclasses import fields
    check({f.name for f in fields(gemma4.Config)} == {f[0] for f in _c.g4_config._fields_} - {"n_eos", "n_suppress"}, "Config does not show every field of g4_config")
    check([f.name for f in fields(gemma4.LayerConfig)] == [f[0] for f in _c.g4_layer_config._fields_], "LayerConfig does not show every field of g4_layer_config")
    check({f.name for f in fields(gemma4.Sampling)} == {f[0] for f in _c.g4_sampling._fields_} - {"n_prompt", "n_logit_bias"}, "Sampling lacks a field of g4_sampling")
    check({f.name for f in fields(gemma4.Event)} == {f[0] for f in _c.g4_event._fields_} - {"user", "n_text", "n_top"}, "Event lacks a field of g4_event")
    check([f.name for f in fields(gemma4.EngineStats)] == [f[0] for f in _c.g4_engine_stats._fields_], "EngineStats lacks a field of g4_engine_stats")
    check([f.name for f in fields(gemma4.RopeConfig)] == [f[0] for f in _c.g4_rope_config._fields_], "RopeConfig does not show every field of g4_rope_config")


# ---- numbers -------------------------------------------------------------------------------------------------------------------------------------


def test_numbers(cli, scratch):
    import torch
    from safetensors import safe_open
    from safetensors.numpy import load_file
    import trace as reference
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for path in [os.path.join(FIXTURES, name) for name in ("e2b", "12b", "26b-a4b", "multimodal")] + [AUSTEN]:
        label, noise = os.path.basename(path), 1e-5
        ids = [2, 818, 1017, 5, 1149, 480, 380, 1236, 1568] * 5
        if path != AUSTEN:
            with safe_open(os.path.join(path, "expected.safetensors"), "np") as f:
                ids, noise = f.get_tensor("ids").tolist(), float(f.metadata()["noise_f32"])
        model = gemma4.Model(path)
        ours = gemma4.State(model, chunk=7).trace(ids)
        theirs = reference.trace(reference.load(path), ids)
        compare_traces(label, {name: torch.from_numpy(x) for name, x in ours.items()}, theirs, noise)
        for i in range(model.config.num_hidden_layers):
            check(f"layers.{i}.output" in theirs, f"{label}: transformers' layers.{i}.output was not compared")

        file = os.path.join(scratch, "t.safetensors")
        for precision in ("f32", "bf16", "q16"):
            if cli("trace", path, "--ids", comma(ids), "--threads", 1, "-o", file, "--precision", precision) is None:
                continue
            said = load_file(file)
            mine = ours if precision == "f32" else gemma4.State(model, precision=precision).trace(ids)
            check(list(mine) == stored_order(file), f"{label}: trace() has {list(mine)}, the program writes {stored_order(file)}")
            for name, x in said.items():
                check(name in mine and same(mine[name], x), f"{label}: {precision}: {name}: other bits than `gemma4 trace`")
        for backend in cli.exact_backends():
            other = gemma4.Model(path, backend=backend, no_mmap=True)
            check(other.backend == backend and same(gemma4.State(other, threads=2).forward(ids), ours["logits"]), f"{label}: backend {backend}: other logits")

        info = json.loads(cli("info", path, "--json", "--ctx", 77, "--threads", 2) or "{}")
        c = model.config
        for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "sliding_window", "num_kv_shared_layers",
                     "max_position_embeddings", "num_experts", "top_k_experts", "moe_intermediate_size", "attention_k_eq_v", "tie_word_embeddings"):
            check(getattr(c, name) == info.get(name), f"{label}: config.{name} is {getattr(c, name)}, info says {info.get(name)}")
        check([vars(x) for x in c.layers] == info.get("layers"), f"{label}: config.layers is not what info says")
        check(list(c.eos_token_id) == info.get("eos_token_id"), f"{label}: config.eos_token_id")
        check(model.state_bytes(ctx=77, threads=2) == (info.get("state_bytes"), info.get("kv_bytes")), f"{label}: state_bytes")
        raw = json.load(open(os.path.join(path, "config.json")))
        raw = raw.get("text_config", raw)
        check(np.float32(c.rms_norm_eps) == np.float32(raw["rms_norm_eps"]), f"{label}: rms_norm_eps {c.rms_norm_eps}")
        full = c.rope["full_attention"]
        check(full.theta == raw["rope_parameters"]["full_attention"]["rope_theta"] and full.proportional is True, f"{label}: rope {c.rope}")

    model = gemma4.Model(AUSTEN)
    some = gemma4.State(model).trace([2, 5], tensors="layers.0.?,logits")
    check(list(some) == ["layers.0.k", "layers.0.v", "layers.0.q", "logits"], f"tensors=: {list(some)}")
    check(gemma4.backends() == {name: "" for name in cli.exact_backends()}, f"backends(): {gemma4.backends()}")


# ---- text ----------------------------------------------------------------------------------------------------------------------------------------


def test_text(cli, scratch):
    model, tok = gemma4.Model(AUSTEN), gemma4.Tokenizer(AUSTEN)
    texts = ["", "It is a truth", " two  spaces\n\nand lines\t", "é 日本 👩‍👩‍👧‍👦 깰", "a\0b", "<bos>It", "<eos> <unk>", "x" * 5000]
    for text in texts:
        for bos in (False, True):
            said = cli("tokenize", AUSTEN, *(["--bos"] if bos else []), stdin=text.encode())
            ids = tok.encode(text, bos=bos)
            check(said is not None and ids.dtype == np.int32 and ids.tolist() == [int(i) for i in said.split()], f"encode({text[:20]!r}, bos={bos}): {ids[:20]}")
        ids = tok.encode(text)
        for skip in (False, True):
            said = cli("detokenize", AUSTEN, *(["--skip-special"] if skip else []), stdin=" ".join(map(str, ids)).encode())
            check(said is not None and tok.decode(ids, skip_special=skip) == said.decode(), f"decode({text[:20]!r}, skip_special={skip})")
        check("".join(tok.stream(iter(ids.tolist()))) == tok.decode(ids), f"stream({text[:20]!r})")
    check(tok.encode(b"a\xff\xc3(").tolist() == tok.encode("a\ufffd\ufffd(").tolist(), "bytes that are not UTF-8 become U+FFFD")
    check(tok.encode("<bos>", plain_text=True).tolist() != [2] and tok.encode("<bos>").tolist() == [2], "plain_text")
    check(tok.decode(tok.encode("<bos>", plain_text=True)) == "<bos>", "plain_text comes back")
    check(tok.token_id("<bos>") == 2 and tok.token_id("no such piece") is None and tok.piece(2) == "<bos>" and tok.is_special(2) and not tok.is_special(100), "pieces")
    check(len(tok) == 2048 and len(gemma4.Tokenizer(os.path.join(AUSTEN, "tokenizer.json"))) == 2048, "len")

    bytes_of = [tok.token_id(f"<0x{b:02X}>") for b in "깰".encode()]
    with gemma4.Decoder(tok) as d:
        check([d.push(i) for i in bytes_of] == ["", "", ""] and d.push(tok.encode("It")[0]) == "깰It", "push gives what is certain: bytes, when their run has ended")
        check([d.push(i) for i in bytes_of[:2]] == ["", ""] and d.end() == "\ufffd\ufffd", "end gives what was held back")
        check(d.push(tok.encode("It")[0]) == "It" and d.end() == "", "a decoder goes on after end")

    prompt = tok.encode("It is a truth", bos=True)
    for seed, changed in ((10, {}), (11, {"temperature": 1.5, "top_k": 0, "top_p": 1.0}), (12, {"min_p": 0.1}), (2**64 - 1, {"repeat_penalty": 1.3}), (0, {"temperature": 0.0}),
                          (13, {"frequency_penalty": 0.7, "presence_penalty": -0.3}), (14, {"logit_bias": {5: -100, 486: 2.5}})):
        options = {"temperature": "--temp", "top_k": "--top-k", "top_p": "--top-p", "min_p": "--min-p", "repeat_penalty": "--repeat-penalty",
                   "frequency_penalty": "--frequency-penalty", "presence_penalty": "--presence-penalty", "logit_bias": "--logit-bias"}
        args = [x for name, value in changed.items() for x in (options[name], value if name != "logit_bias" else "5:-100,486:2.5")]
        said = cli("run", AUSTEN, "--ids", comma(prompt), "-n", 150, "--seed", seed, *args)
        new = list(gemma4.State(model, ctx=200).generate(prompt, n=150, sampling=model.sampling(seed=seed, **changed)))
        check(said is not None and new == [int(i) for i in said.split()] and new, f"generate, seed {seed}, {changed}: {new[:10]}, run says {said[:60]}")
    how = model.sampling(seed=10)
    check((how.temperature, how.top_k, how.top_p) == (model.config.temperature, 64, model.config.top_p), f"sampling(): {how}")

    # a sequence goes on where it was: the draws depend on all ids so far
    whole = list(gemma4.State(model).generate(prompt, n=40, sampling=how))
    with gemma4.State(model) as s:
        first = list(s.generate(prompt, n=15, sampling=how))
        check(s.length() == len(prompt) + 14 and s.ids().tolist() == prompt.tolist() + first[:14], "the last id is not part of the sequence yet")
        check(first + list(s.generate(first[-1:], n=25, sampling=how)) == whole, "two halves make the whole")
    with gemma4.State(model, ctx=10) as s:
        check(len(list(s.generate(prompt, n=100, sampling=how))) == 10 - len(prompt) + 1, "generate ends where the context is full")
    check(list(gemma4.State(model).generate(prompt, n=0)) == [], "n=0")

    # stop ids and suppressed ids are the model's
    copy = os.path.join(scratch, "stops")
    shutil.copytree(AUSTEN, copy)
    with open(os.path.join(copy, "generation_config.json"), "w") as f:
        json.dump({"eos_token_id": [1, whole[5]], "suppress_tokens": [whole[0]], "do_sample": False}, f)
    stops = gemma4.Model(copy)
    check(stops.config.eos_token_id == (1, whole[5]) and stops.config.suppress_tokens == (whole[0],) and stops.sampling().temperature == 0, f"{stops.config}")
    again = list(gemma4.State(stops).generate(prompt, n=40, sampling=how))
    check(again[0] != whole[0] and whole[5] not in again, "suppressed ids are not drawn, a stop id ends")
    unstopped = gemma4.Model(copy)
    object.__setattr__(unstopped.config, "suppress_tokens", ())
    check(list(gemma4.State(unstopped).generate(prompt, n=40, sampling=how)) == whole[:whole.index(whole[5])], "a stop id ends, and is not given")
    check(list(gemma4.State(unstopped).generate(prompt, n=40, sampling=how, ignore_eos=True)) == whole, "ignore_eos")

    logits = gemma4.State(model).forward(prompt, logits="last")[0]
    before = logits.copy()
    greedy = gemma4.Sampling(temperature=0)
    check(gemma4.sample(logits, greedy) == int(logits.argmax()) and same(logits, before), "sample leaves the logits as they are")
    check(gemma4.sample(logits[::-1], greedy) == len(logits) - 1 - int(logits.argmax()), "sample of a strided view")
    check(gemma4.sample(logits, greedy, suppress=[int(logits.argmax())]) == int(logits.argsort()[-2]), "suppress")
    raises(gemma4.Error, "nan", lambda: gemma4.sample(np.full(9, np.nan, np.float32), greedy), "NaN")
    x = logits.astype(float)
    expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
    top = gemma4.top_logprobs(logits, 7)
    check([t.id for t in top] == np.argsort(-logits, kind="stable")[:7].tolist(), f"top_logprobs: {top}")
    check(all(abs(t.logprob - expected[t.id]) < 1e-12 for t in top) and abs(gemma4.logprob(logits, 99) - expected[99]) < 1e-12, "log-probabilities against numpy")
    raises(gemma4.Error, "outside the vocabulary", lambda: gemma4.logprob(logits, 2048), "logprob of no id")
    raises(ValueError, "n: expected 0 to 2048", lambda: gemma4.top_logprobs(logits, 2049), "top_logprobs of more than there are")
    history = [7, 8, 8, 9]
    flat = np.zeros(20, np.float32)
    how = gemma4.Sampling(temperature=0, frequency_penalty=1.0)
    check(gemma4.sample(flat, how, history) == 0 and gemma4.sample(np.eye(20, dtype=np.float32)[8] * 1.5, how, history, n_prompt=2) == 8, "n_prompt: one of the two does not count")


# ---- states --------------------------------------------------------------------------------------------------------------------------------------


def test_states():
    model = gemma4.Model(AUSTEN)
    rng = np.random.default_rng(1)
    sequences = [rng.integers(3, 2000, n).astype(np.int32) for n in (50, 1, 130, 17)]
    alone = [gemma4.State(model).forward(ids) for ids in sequences]

    with gemma4.State(model, ctx=200, chunk=33, n_seqs=4, threads=2) as s:
        check((s.ctx, s.chunk, s.n_seqs, s.threads, s.precision) == (200, 33, 4, 2, "f32"), f"{s}")
        rows = rng.permutation(np.repeat(np.arange(4), [len(x) for x in sequences]))  # all sequences, mixed
        at = np.zeros(len(rows), np.int32)
        for q in range(4):
            at[rows == q] = np.arange(len(sequences[q]))
        ids = np.array([sequences[q][i] for q, i in zip(rows, at)])
        want = rng.random(len(rows)) < 0.5
        logits = s.forward_rows(ids, rows, want)
        check(logits.shape == (want.sum(), 2048), f"logits {logits.shape}")
        check(same(logits, np.stack([alone[q][i] for q, i, w in zip(rows, at, want) if w])), "a batch gives the bits of each sequence alone")
        check([s.length(q) for q in range(4)] == [50, 1, 130, 17] and all(same(s.ids(q), sequences[q]) for q in range(4)), "length and ids")
        s.truncate(9, seq=3)
        check(s.length(3) == 9 and same(s.forward(sequences[3][9:], seq=3), alone[3][9:]), "truncate, then the same rows again")
        s.truncate(0, seq=2)
        check(same(s.forward(sequences[2].astype(np.int64), seq=2, logits="last"), alone[2][-1:]), 'int64 ids, logits="last"')
        none = s.forward(list(map(int, sequences[1])), seq=1, logits="none")
        check(none.shape == (0, 2048) and s.length(1) == 2, 'a list, logits="none"')
        s.truncate(0)
        check(same(s.trace(np.repeat(sequences[0], 2)[::2])["logits"], alone[0]), "a strided view, traced in two chunks")

    with gemma4.State(model, ctx=300, n_seqs=3) as s, tempfile.TemporaryDirectory() as folder:
        s.forward(sequences[2], logits="none")
        s.copy(0, 1)
        s.copy(0, 2, length=100)
        check([s.length(q) for q in range(3)] == [130, 130, 100] and same(s.ids(2), sequences[2][:100]), "copy")
        check(same(s.forward(sequences[2][100:], seq=2), alone[2][100:]), "a copy goes on with the same bits")
        file = os.path.join(folder, "sequence")
        s.save(file, seq=1)
        other = gemma4.State(model, ctx=200, chunk=5)
        other.forward([2, 5])
        check(same(other.load(file), sequences[2]) and same(other.ids(), sequences[2]), "save and load")
        check(same(other.forward(sequences[3]), s.forward(sequences[3])), "what was loaded goes on with the same bits")
        raises(gemma4.Error, "sequence 5", lambda: s.copy(5, 0), "copy of no sequence")
        raises(gemma4.Error, "131", lambda: s.copy(1, 0, length=131), "copy of more than there is")
        raises(gemma4.Error, "nosuch", lambda: s.load(os.path.join(folder, "nosuch")), "load of no file")
        locked = []
        s.ids = lambda seq=0: (locked.append(s._lock.locked()), gemma4.State.ids(s, seq))[1]
        s.save(file)
        check(locked == [True], "the ids that are saved are taken while no other thread can change the sequence")
        with open(file, "r+b") as f:
            f.truncate(os.path.getsize(file) - 7)
        held = s.length()
        raises(gemma4.Error, "sequence", lambda: s.load(file), "load of a file that ends early")
        check(s.length() in (0, held) and len(s.forward([5])) == 1, "and the state goes on")

    import torch
    check(same(gemma4.State(model).forward(torch.tensor(sequences[0])), alone[0]), "a tensor of torch, whose OpenMP is in the same process")

    # the GIL is free during forward: another thread counts meanwhile
    long = np.resize(sequences[2], 1500)
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.001)

    worker = threading.Thread(target=count)
    worker.start()
    seen, deadline = 0, time.monotonic() + PATIENCE
    while seen < 3 and time.monotonic() < deadline:  # a busy machine may not let the other thread run just then
        state = gemma4.State(model)
        begin = counted[0]
        state.forward(long, logits="none")
        seen = counted[0] - begin
    done.set()
    worker.join()
    check(seen >= 3, f"another thread ran {seen} times during forward")

    # one model and one tokenizer in several threads, a state each; then one state in all of them
    tok, results = gemma4.Tokenizer(AUSTEN), {}

    def run(q):
        with gemma4.State(model) as s:
            results[q] = same(s.forward(sequences[q]), alone[q]) and tok.decode(tok.encode("It is a truth")) == "It is a truth"

    shared = gemma4.State(model, n_seqs=4)

    def share(q):
        results["shared", q] = same(np.concatenate([shared.forward(sequences[q][i:i + 5], seq=q) for i in range(0, len(sequences[q]), 5)]), alone[q])

    workers = [threading.Thread(target=f, args=(q,)) for q in range(4) for f in (run, share)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    check(len(results) == 8 and all(results.values()), f"threads: {results}")


# ---- engine and chat -----------------------------------------------------------------------------------------------------------------------------


def test_engine(scratch):
    model, tok = gemma4.Model(AUSTEN), gemma4.Tokenizer(AUSTEN)
    texts = ["It is a truth", "It is a truth universally acknowledged", "My dear Mr. Bennet", "She was", "It is a truth"]
    prompts = [tok.encode(text, bos=True) for text in texts]
    how = [model.sampling(seed=i, frequency_penalty=0.5 * (i == 2)) for i in range(5)]
    alone = [list(gemma4.State(model, ctx=256).generate(p, n=40, sampling=h)) for p, h in zip(prompts, how)]
    for options in ({}, {"speculate": 4}, {"budget": 2, "prefix_reuse": False}):
        with gemma4.State(model, ctx=256, n_seqs=3) as state, gemma4.Engine(state, tok, **options) as engine:
            numbers = [engine.add(p, max_new=40, sampling=h, logprobs=i == 1, top_logprobs=3 * (i == 1)) for i, (p, h) in enumerate(zip(prompts, how))]
            check(engine.pending() == 5 and numbers == [1, 2, 3, 4, 5], f"add: {numbers}")
            ids, said, last = {n: [] for n in numbers}, dict.fromkeys(numbers, ""), {}
            for event in engine.events():
                ids[event.request] += [] if event.token is None else [event.token]
                said[event.request] += event.text
                check(event.request not in last, "nothing comes after a request's last event")
                check((event.logprob is not None) == (event.request == 2) and len(event.top) == 3 * (event.request == 2), "log-probabilities are for who asked")
                if event.finish:
                    last[event.request] = event
            check([ids[n] for n in numbers] == alone, f"{options}: requests give what they give alone")
            check([said[n] for n in numbers] == [tok.decode(x) for x in alone], f"{options}: texts")
            check(all(last[n].finish == "length" and last[n].n_new == 40 and last[n].error is None for n in numbers), f"{options}: {last}")
            stats = engine.stats()
            check(stats.new_tokens == 200 and stats.active == 0 and stats.forwards > 0 and stats.prompt_seconds > 0 and stats.decode_seconds > 0, f"{stats}")
            check((stats.proposed > 0) == ("speculate" in options) and (stats.cached_tokens > 0) == (not options.get("budget")), f"{options}: {stats}")

    state = gemma4.State(model, ctx=256, n_seqs=2)
    with gemma4.Engine(state, tok) as engine:
        text = tok.decode(alone[0])
        stop = text[len(text) // 2:][:5]
        engine.add(prompts[0], max_new=40, sampling=how[0], stop=["no such text", stop])
        events = list(engine.events())
        check("".join(e.text for e in events) == text[:text.index(stop)] and (events[-1].finish, events[-1].stop) == ("stop_string", 1), f"stop {stop!r}: {events[-1]}")
        engine.add(prompts[0], max_new=40, sampling=how[0], stop_ids=[alone[0][7]])
        events = list(engine.events())
        new = [e.token for e in events if e.token is not None]
        check(new == alone[0][:alone[0].index(alone[0][7])] and (events[-1].finish, events[-1].stop) == ("stop_id", alone[0][7]), f"stop_ids: {events[-1]}")
        check(events[-1].n_cached > 0, "a prompt that was there is not computed again")

        # log-probabilities are those of the model's own distribution
        engine.add(prompts[0], max_new=1, sampling=how[0], logprobs=True, top_logprobs=2)
        first = list(engine.events())[0]
        logits = gemma4.State(model).forward(prompts[0], logits="last")[0]
        check(first.logprob == gemma4.logprob(logits, first.token) and list(first.top) == gemma4.top_logprobs(logits, 2), f"{first}")

        number = engine.add(prompts[0], max_new=40)
        engine.step()
        check(engine.cancel(number) and [e.finish for e in engine.events()][-1] == "cancelled" and not engine.cancel(number), "cancel")
        raises(gemma4.Error, "the prompt is empty", lambda: engine.add([]), "an empty prompt")
        raises(gemma4.Error, "2048", lambda: engine.add([2048]), "an id outside the vocabulary")
        raises(gemma4.Error, "max_new", lambda: engine.add([2], max_new=-1), "max_new -1")
        raises(TypeError, "a list of texts", lambda: engine.add([2], stop="abc"), "stop that is one text")
        raises(ValueError, "NUL", lambda: engine.add([2], stop=["a\0b"]), "stop with NUL")
        raises(ValueError, "belong to an engine", lambda: state.forward([2]), "a state that an engine has")
        raises(ValueError, "belong to an engine", lambda: gemma4.Engine(state), "a second engine")
        file = os.path.join(scratch, "prefix")
        held = list(prompts[0]) + alone[0][:7]
        check(engine.save(held, file) >= len(prompts[0]), "save")
        raises(gemma4.Error, "nothing to save", lambda: engine.save([9, 9], os.path.join(scratch, "none")), "save of what is not there")
        check(engine.pending() == 0, "what was refused is not pending")
    check(state.length() == 0 and same(state.forward(prompts[3]), gemma4.State(model).forward(prompts[3])), "a state that an engine had begins anew")
    with gemma4.Engine(gemma4.State(model, ctx=256)) as engine:
        n = engine.load(file)
        engine.add(held, max_new=5, sampling=how[0])
        events = list(engine.events())
        check([e.token for e in events if e.token is not None] == alone[0][7:12] and events[-1].n_cached == min(n, len(held) - 1) and not any(e.text for e in events),
              f"load, without a tokenizer: {events[-1]}")
    raises(ValueError, "is closed", engine.step, "an engine that is closed")

    # what belongs together goes together, in whatever order it is closed or dropped
    state, other = gemma4.State(model), gemma4.Tokenizer(AUSTEN)
    engine = gemma4.Engine(state, other)
    engine.add(prompts[0])
    engine.step()
    state.close()
    other.close()
    engine.step()
    check(state._handle.free.alive and other._handle.free.alive, "a state and a tokenizer stay as long as their engine")
    frees = state._handle.free, other._handle.free, engine._handle.free
    del engine
    gc.collect()
    check(not any(free.alive for free in frees), "and go with it")
    state = gemma4.State(model)
    engine = gemma4.Engine(state)
    del engine
    gc.collect()
    check(len(state.forward([2])) == 1, "a dropped engine gives its state back")


def test_chat(cli, scratch):
    tok = gemma4.Tokenizer(AUSTEN)
    for i, line in enumerate(open(os.path.join(ROOT, "test", "chats.jsonl"), encoding="utf-8")):
        case = json.loads(line)
        for family in ("small", "large"):
            if isinstance(case.get(family), str):
                prompt = gemma4.render_chat(case["request"], family=family)
                check(prompt.text == case[family], f"chats.jsonl:{i + 1}: {family}: {prompt.text[:200]!r}")
                data = prompt.text.encode()
                names = [data[at:at + n].decode() for at, n in prompt.markers]
                check(names[:1] == ["<bos>"] and all(tok.token_id(name) is not None for name in names), f"chats.jsonl:{i + 1}: markers {names}")
                ids = prompt.encode(tok)
                check(tok.decode(ids) == prompt.text and ids[0] == 2, f"chats.jsonl:{i + 1}: ids to text")
                check(sum(tok.is_special(j) for j in ids.tolist()) == len(names), f"chats.jsonl:{i + 1}: {len(names)} ids are special")
                check(same(prompt.encode(tok, parse_request=True), tok.encode(prompt.text)), f"chats.jsonl:{i + 1}: parse_request")
                said = cli("template", "--family", family, stdin=json.dumps(case["request"]).encode()) if i < 5 else data
                check(said == data, f"chats.jsonl:{i + 1}: gemma4 template")
    request = {"messages": [{"role": "user", "content": "Hi <turn|>"}]}
    prompt = gemma4.render_chat(request, family="small")
    check(prompt.encode(tok).tolist().count(16) == 1 and prompt.encode(tok, parse_request=True).tolist().count(16) == 2, "what the user wrote is no marker")
    check(gemma4.render_chat(json.dumps(request), family="small") == prompt, "JSON is a request too")
    raises(gemma4.Error, "messages", lambda: gemma4.render_chat({}, family="small"), "no messages")
    raises(ValueError, "family", lambda: gemma4.render_chat(request, family="medium"), "family")
    raises(ValueError, "", lambda: gemma4.render_chat({"messages": float("nan")}, family="small"), "NaN is no JSON")

    import warnings
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        family = gemma4.chat_family(AUSTEN)
    check(family == "small" and len(said) == 1 and said[0].filename == __file__, f"chat_family: {family}, {[str(w.message) for w in said]}")
    check(gemma4.recognise_template("{{ bos_token }}") is None, "another template")
    raises(gemma4.Error, "nosuch", lambda: gemma4.chat_family("nosuch"), "chat_family of nothing")

    call = tok.encode('<|tool_call>call:f{a:<|"|>x<|"|>,b:2}<tool_call|>').tolist()
    bad = tok.encode("<|tool_call>no call<tool_call|>").tolist()
    answer = tok.encode("<|channel>thought\nI think é<channel|>Hello\n").tolist() + call + bad
    message = gemma4.read_answer(tok, answer)
    check((message.reasoning, message.content) == ("I think é", "Hello\n"), f"{message}")
    check(len(message.calls) == 2 and message.calls[0].name == "f" and json.loads(message.calls[0].arguments) == {"a": "x", "b": 2} and message.calls[0].fault is None, f"{message.calls}")
    check(message.calls[1].name is None and "no call" in message.calls[1].arguments and message.calls[1].fault, f"{message.calls[1:]}")
    with gemma4.Answer(tok) as a:
        parts = [part for id in answer for part in a.push(id)] + a.end()
    check("".join(p.text for p in parts if p.kind == "reasoning") == message.reasoning and "".join(p.text for p in parts if p.kind == "content") == message.content, f"{parts}")
    calls = [(p.kind, p.name, p.text, p.fault) for p in parts if "call" in p.kind]
    check(calls == [("tool_call", "f", message.calls[0].arguments, None), ("bad_tool_call", None, message.calls[1].arguments, message.calls[1].fault)], f"{calls}")
    check(gemma4.read_answer(tok, tok.encode("Hm<channel|>Yes"), in_reasoning=True) == gemma4.Message("Hm", "Yes", ()), "in_reasoning")
    raises(gemma4.Error, "2048", lambda: gemma4.read_answer(tok, [2048]), "an id that is none")
    raises(ValueError, "is closed", lambda: a.push(5), "an answer that is closed")


# ---- errors --------------------------------------------------------------------------------------------------------------------------------------


def test_errors(scratch):
    Error, State, Model, Tokenizer = gemma4.Error, gemma4.State, gemma4.Model, gemma4.Tokenizer
    raises(Error, "nosuch", lambda: Model("nosuch"), "no such model")
    raises(Error, "it has: cpu, scalar", lambda: Model(AUSTEN, backend="abacus"), "no such backend")
    raises(TypeError, "backend", lambda: Model(AUSTEN, backend=3), "backend of another type")
    raises(ValueError, "NUL", lambda: Model("a\0b"), "NUL in a path")
    raises(Error, "nosuch", lambda: Tokenizer("nosuch"), "no such tokenizer")
    with contextlib.suppress(Error):
        Model(os.path.join(scratch, "a\udcff日"))  # a path that is not UTF-8 reaches the system
    try:
        Model("nosuch")
    except Error as e:
        check(e.text == str(e) and "nosuch" in e.text, "Error.text")

    model = Model(AUSTEN)
    raises(Error, "ctx 999999 is not", lambda: State(model, ctx=999999), "ctx")
    raises(ValueError, "ctx: expected", lambda: State(model, ctx=2**32), "ctx that int would cut off")
    raises(Error, "threads 5000", lambda: State(model, threads=5000), "threads")
    raises(Error, "n_seqs -1", lambda: State(model, n_seqs=-1), "n_seqs")
    raises(TypeError, "chunk", lambda: State(model, chunk=1.5), "chunk 1.5")
    raises(ValueError, "precision", lambda: State(model, precision="f16"), "precision")
    raises(ValueError, "prefetch", lambda: Model(AUSTEN, prefetch="some"), "prefetch")
    check(model.state_bytes(ctx=999999) == (0, 0), "state_bytes of wrong options")

    with State(model, ctx=8, n_seqs=2) as s:
        s.forward([2, 5, 6])
        before = s.forward([7])
        s.truncate(3)
        raises(TypeError, "float64", lambda: s.forward([1.0, 2.0]), "floats for ids")
        raises(TypeError, "bool", lambda: s.forward([True]), "bools for ids")
        raises(TypeError, "<U1", lambda: s.forward("a".split()), "text for ids")
        raises(ValueError, "[1, 3]", lambda: s.forward([[2, 3, 4]]), "ids with a batch dimension")
        raises(ValueError, "[]", lambda: s.forward(2), "one number for ids")
        raises(ValueError, "32 bits", lambda: s.forward([2**32 + 5]), "an id that int32 would cut off")
        raises(ValueError, "32 bits", lambda: s.forward(np.array([2**63], np.uint64)), "an id of 64 bits")
        raises(Error, "0 rows", lambda: s.forward([]), "no ids")
        raises(Error, "id 2048 is not in 0..2047", lambda: s.forward([5, 2048]), "an id outside the vocabulary")
        raises(Error, "id -1", lambda: s.forward([-1]), "a negative id")
        raises(Error, "larger ctx", lambda: s.forward([5] * 6), "more than the context")
        raises(Error, "sequence 2", lambda: s.forward([5], seq=2), "no such sequence")
        raises(TypeError, "seq", lambda: s.forward([5], seq="0"), "seq of another type")
        raises(ValueError, "logits", lambda: s.forward([5], logits="first"), "logits")
        raises(ValueError, "as many", lambda: s.forward_rows([5, 6], [0]), "seqs of another length")
        raises(ValueError, "as many", lambda: s.forward_rows([5, 6], [0, 1], [True]), "want_logits of another length")
        raises(TypeError, "bool", lambda: s.forward_rows([5, 6], [0, 1], [1, 0]), "want_logits of another type")
        raises(Error, "cannot be truncated to 4", lambda: s.truncate(4), "truncate upwards")
        raises(Error, "sequence -1", lambda: s.truncate(0, seq=-1), "truncate no sequence")
        raises(ValueError, "seq: expected 0 to 1", lambda: s.length(2), "length of no sequence")
        raises(ValueError, "seq: expected 0 to 1", lambda: s.ids(-1), "ids of no sequence")
        check(s.length() == 3 and s.length(1) == 0 and same(s.forward([7]), before), "what was refused has changed nothing")

        def interrupt(name, data, shape):
            raise KeyboardInterrupt

        try:
            s._forward([5], [1], None, interrupt)
            check(False, "an exception in the midst of a trace is lost")
        except KeyboardInterrupt:
            check(s.length(1) == 1 and len(s.forward([6], seq=1)) == 1, "the state goes on after it")

    window = model.config.sliding_window
    with State(model, chunk=1) as s:
        s.forward(np.full(window + 50, 5), logits="none")
        raises(Error, "cannot be truncated", lambda: s.truncate(20), "truncate out of the ring")
        check(s.length() == window + 50, "and nothing has changed")

    logits = np.zeros(9, np.float32)
    how = gemma4.Sampling(temperature=0)
    raises(TypeError, "float64", lambda: gemma4.sample(np.zeros(9), how), "logits of another type")
    raises(ValueError, "[3, 3]", lambda: gemma4.sample(logits.reshape(3, 3), how), "logits of another shape")
    raises(ValueError, "[0]", lambda: gemma4.sample(logits[:0], how), "no logits")
    raises(ValueError, "seed", lambda: gemma4.sample(logits, gemma4.Sampling(seed=2**64)), "seed of 65 bits")
    raises(ValueError, "seed", lambda: gemma4.sample(logits, gemma4.Sampling(seed=-1)), "negative seed")
    raises(TypeError, "top_k", lambda: gemma4.sample(logits, gemma4.Sampling(top_k=2.5)), "top_k 2.5")
    raises(TypeError, "min_p: expected a number, found str", lambda: gemma4.sample(logits, gemma4.Sampling(min_p="0")), "min_p of another type")
    raises(Error, "logit_bias", lambda: gemma4.sample(logits, gemma4.Sampling(logit_bias={9: 1.0})), "logit_bias outside the vocabulary")
    raises(Error, "top_p", lambda: gemma4.sample(logits, gemma4.Sampling(top_p=2.0)), "top_p 2")
    raises(Error, "outside the vocabulary", lambda: gemma4.sample(logits, gemma4.Sampling(repeat_penalty=2.0), history=[9]), "history outside the vocabulary")
    raises(Error, "every id is suppressed", lambda: gemma4.sample(logits, how, suppress=range(9)), "all suppressed")

    tok = Tokenizer(AUSTEN)
    raises(Error, "2048", lambda: tok.decode([2048]), "decode an id that is none")
    raises(ValueError, "id -1", lambda: tok.piece(-1), "piece of no id")
    raises(ValueError, "NUL", lambda: tok.token_id("a\0"), "NUL in a piece")
    raises(TypeError, "text: expected str or bytes, found int", lambda: tok.encode(5), "encode a number")
    raises(TypeError, "NoneType", lambda: tok.encode(None), "encode None")

    import warnings
    copy = os.path.join(scratch, "warns")
    shutil.copytree(os.path.join(FIXTURES, "e2b"), copy)
    config = json.load(open(os.path.join(copy, "config.json")))
    config["eos_token_id"] = [1, 10**6]
    json.dump(config, open(os.path.join(copy, "config.json"), "w"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Model(copy)
    check(len(said) == 1 and "1000000" in str(said[0].message) and said[0].filename == __file__, f"warnings: {[str(w.message) for w in said]}")

    for thing, call in ((Model(AUSTEN), lambda x: State(x)), (State(model), lambda x: x.forward([2])), (State(model), lambda x: x.truncate(0)), (Tokenizer(AUSTEN), lambda x: x.encode("a")),
                        (Tokenizer(AUSTEN), lambda x: x.decode([2])), (Tokenizer(AUSTEN), len), (gemma4.Decoder(tok), lambda x: x.push(2)), (Model(AUSTEN), lambda x: x.state_bytes())):
        thing.close()
        thing.close()
        raises(ValueError, "is closed", lambda: call(thing), f"{type(thing).__name__} that is closed")
        check("gemma4." in repr(thing), "repr of what is closed")

    import torch
    if torch.set_flush_denormal(True):
        raises(Error, "flush", lambda: State(model).forward([2]), "a thread that flushes subnormals")
        torch.set_flush_denormal(False)
    else:
        report.skip("this processor cannot flush subnormals")

    def module(expected, **environment):
        done = subprocess.run([sys.executable, "-c", "import gemma4; print(gemma4.__file__)"], capture_output=True, text=True, cwd=scratch,
                              env={**os.environ, "PYTHONPATH": os.path.join(ROOT, "python"), **environment})
        check(expected in done.stdout + done.stderr, f"{environment}: {done.stdout}{done.stderr}")

    module("nosuch.so cannot be loaded", GEMMA4_LIBRARY="nosuch.so")
    module("has no function g4_open", GEMMA4_LIBRARY="libm.so.6")
    module("__init__.py", GEMMA4_LIBRARY=_c.candidates()[0])
    old = os.path.join(scratch, "old.so")
    source = os.path.join(scratch, "old.c")
    with open(source, "w") as f:
        f.write("".join(f"int {name}() {{ return 0; }}\n" for name in _c.FUNCTIONS if name != "g4_version") + 'const char *g4_version(void) { return "0.0.9"; }\n')
    subprocess.run([*CC, "-shared", "-fPIC", "-w", source, "-o", old], check=True)
    module(f"is version 0.0.9, this module is for {_c.VERSION}", GEMMA4_LIBRARY=old)


# ---- memory --------------------------------------------------------------------------------------------------------------------------------------


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory():
    path = os.path.join(FIXTURES, "e2b")
    model, tok = gemma4.Model(AUSTEN), gemma4.Tokenizer(AUSTEN)
    text = "It is a truth universally acknowledged. " * 2000

    def closed():
        with gemma4.Model(path) as m, gemma4.State(m, ctx=64) as s:
            s.trace([2, 3, 4])
        gemma4.State(model).close()

    def dropped():
        gemma4.State(model).forward([2, 5])
        gemma4.State(gemma4.Model(path), ctx=64)
        gemma4.Decoder(gemma4.Tokenizer(AUSTEN)).push(5)
        next(gemma4.State(model).generate([2]))
        with contextlib.suppress(gemma4.Error):
            gemma4.State(model, ctx=10**6)

    def in_cycles():
        s = gemma4.State(model)
        s.itself = s

    def engines():
        with gemma4.State(model, ctx=64) as s, gemma4.Engine(s, tok) as e:
            e.add([2, 3], max_new=3, stop=["x"], logprobs=True, top_logprobs=5, sampling=gemma4.Sampling(logit_bias={5: 1.0}))
            list(e.events())
            e.add([2, 3])

    def chats():
        gemma4.render_chat({"messages": [{"role": "user", "content": text}]}, family="small").encode(tok)
        gemma4.read_answer(tok, tok.encode("<|channel>thought\nHm<channel|>Hello"))
        gemma4.Answer(tok).push(5)

    def encoded():
        tok.decode(tok.encode(text))

    if not os.path.exists("/proc/self/statm"):
        report.skip("memory: this system does not tell how much is used")
    else:
        for what, times in ((closed, 40), (dropped, 40), (in_cycles, 100), (encoded, 40), (engines, 40), (chats, 40)):
            for _ in range(5):
                what()
            gc.collect()
            before = resident()
            for _ in range(times):
                what()
            gc.collect()
            grown = (resident() - before) / times
            check(grown < 40000, f"memory: {what.__name__} leaves {grown:.0f} bytes each time")

    # what is closed in the midst of a call, and in the wrong order
    m = gemma4.Model(AUSTEN)
    alone = gemma4.State(m).forward(np.full(600, 7), logits="last")
    s, found = gemma4.State(m), []
    worker = threading.Thread(target=lambda: found.append(s.forward(np.full(600, 7), logits="last")))
    worker.start()
    time.sleep(0.01)
    s.close()
    m.close()
    worker.join()
    check(not found or same(found[0], alone), "closed in the midst of forward")  # none: closed before it began
    check(not s._handle.free.alive and not m._handle.free.alive, "what was closed is freed")
    m = gemma4.Model(AUSTEN)
    s = gemma4.State(m)
    m.close()
    check(m._handle.free.alive and same(s.forward(np.full(600, 7), logits="last"), alone), "a closed model stays as long as its state")
    s.close()
    check(not m._handle.free.alive, "and goes with it")
    t = gemma4.Tokenizer(AUSTEN)
    d = gemma4.Decoder(t)
    t.close()
    check(d.push(t_it := tok.encode("It")[0].item()) == "It" and t_it > 0 and t._handle.free.alive, "a closed tokenizer stays as long as its decoder")
    free = t._handle.free
    del d
    gc.collect()
    check(not free.alive, "and goes with it")

    # threads that open, use and close at random: no crash, and everything is freed at the end
    m, frees, wrong = gemma4.Model(AUSTEN), [], []

    def churn():
        for _ in range(30):
            try:
                s = gemma4.State(m, ctx=16)
                frees.append(s._handle.free)
                threading.Thread(target=s.close).start()
                s.forward([2, 5, 6])
            except ValueError as e:
                if "closed" not in str(e):
                    wrong.append(e)

    workers = [threading.Thread(target=churn) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    deadline = time.monotonic() + PATIENCE
    while any(free.alive for free in frees) and time.monotonic() < deadline:
        time.sleep(0.01)
    check(len(frees) == 120 and not any(free.alive for free in frees) and not wrong, f"{sum(free.alive for free in frees)} states of {len(frees)} are left; {wrong}")


# ---- packages ------------------------------------------------------------------------------------------------------------------------------------


def test_packages(scratch):
    model = gemma4.Model(AUSTEN)
    expected = gemma4.State(model).forward(np.arange(2, 42)).tobytes().hex()[-64:]
    program = f"""
import sys, gemma4, numpy
assert "{ROOT}/" not in gemma4._c.lib._name + gemma4.__file__, gemma4._c.lib._name
with gemma4.Model(sys.argv[1]) as model, gemma4.State(model) as state:
    print(state.forward(numpy.arange(2, 42)).tobytes().hex()[-64:], gemma4.__version__)
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GEMMA4_LIBRARY", "CC", "CFLAGS")}

    def run(*command, **more):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=scratch, env={**environment, **more}, timeout=900)
        return done.returncode, done.stdout + done.stderr

    def python_in(name):
        """A fresh environment with numpy alone, as it is here: the network is not asked."""
        folder = os.path.join(scratch, name)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = os.path.join(folder, "bin", "python")
        site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True).stdout.strip()
        for part in os.listdir(os.path.dirname(os.path.dirname(np.__file__))):
            if part.startswith("numpy"):
                os.symlink(os.path.join(os.path.dirname(os.path.dirname(np.__file__)), part), os.path.join(site, part))
        return python, site

    source = os.path.join(ROOT, "python")
    before = set(os.listdir(source))
    if os.path.exists(os.path.join(ROOT, ".git")) and shutil.which("git"):
        files = ["pyproject.toml", "build_backend.py", "README.md", *(f"gemma4/{f}" for f in os.listdir(os.path.join(source, "gemma4")) if f.endswith(".py") or f == "py.typed")]
        listed = subprocess.run(["git", "ls-files", *files], capture_output=True, text=True, cwd=source).stdout.split()
        check(sorted(listed) == sorted(files), f"git does not have {set(files) - set(listed)}")
    else:
        report.skip("not a git repository: whether it has every file of the package")
    python, site = python_in("one")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-q")
    status, said = run(*pip, "wheel", "--no-deps", "-w", "wheels", source)
    check(status == 0, f"pip wheel: {said}")
    built = os.listdir(os.path.join(scratch, "wheels")) if status == 0 else []
    check(len(built) == 1 and re.fullmatch(rf"gemma4-{re.escape(_c.VERSION)}-py3-none-\w+\.whl", built[0]), f"wheels: {built}")
    check(set(os.listdir(source)) - before <= {"__pycache__"}, "building leaves nothing in python/")
    status, said = run(*pip, "install", "--no-index", os.path.join(scratch, "wheels", *built))
    check(status == 0, f"pip install of the wheel: {said}")
    status, said = run(python, "-c", program, AUSTEN)
    check(status == 0 and said.split() == [expected, _c.VERSION], f"the wheel: {said}")
    status, said = run(python, "-m", "pip", "--disable-pip-version-check", "check")
    check(status == 0, f"pip check: {said}")
    check(os.path.exists(os.path.join(site, "gemma4", "py.typed")), "py.typed is in the wheel")
    status, said = run(python, "-c", "import importlib.metadata; print(importlib.metadata.requires('gemma4'))")
    check("numpy" in said, f"the wheel asks for numpy: {said}")
    status, said = run(*pip, "uninstall", "-y", "gemma4")
    check(status == 0 and not os.path.exists(os.path.join(site, "gemma4", _c.FILE)), f"pip uninstall: {said}")

    # source distribution: made here, built in a folder that has nothing else
    status, said = run(python, "-c", f"import sys; sys.path.insert(0, {source!r}); import build_backend as b; print(b.build_sdist('.'))")
    name = said.strip()
    check(status == 0 and name == f"gemma4-{_c.VERSION}.tar.gz", f"build_sdist: {said}")
    python, _ = python_in("two")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-q")
    status, said = run(*pip, "install", "--no-index", os.path.join(scratch, name), CFLAGS="-O1 -fno-openmp")
    check(status == 0, f"pip install of the source distribution: {said}")
    status, said = run(python, "-c", program, AUSTEN)
    check(status == 0 and said.split() == [expected, _c.VERSION], f"the source distribution: {said}")
    status, said = run(python, "-c", "import gemma4, sys; print(gemma4.State(gemma4.Model(sys.argv[1])).threads)", AUSTEN, OMP_NUM_THREADS="2")
    check(said.split() == ["1"], f"CFLAGS=-fno-openmp: {said}")
    run(*pip, "uninstall", "-y", "gemma4")

    status, said = run(*pip, "install", "--no-index", "-e", source)
    check(status == 0, f"pip install -e: {said}")
    status, said = run(python, "-c", "import gemma4; print(gemma4._c.lib._name)")
    check(said.strip() == os.path.join(ROOT, _c.FILE), f"an editable install loads what make built: {said}")

    status, said = run(*pip, "wheel", "--no-deps", "-w", "none", source, CC="no-such-compiler")
    check(status != 0 and "no-such-compiler" in said and "a C compiler" in said and not os.path.exists(os.path.join(scratch, "none", "gemma4")), f"without a compiler: {said}")
    lonely = shutil.copytree(source, os.path.join(scratch, "lonely"), ignore=shutil.ignore_patterns("__pycache__"))
    status, said = run(*pip, "wheel", "--no-deps", "-w", "none", lonely)
    check(status != 0 and "neither csrc/ nor the repository" in said, f"a folder without C files: {said}")


# ---- example -------------------------------------------------------------------------------------------------------------------------------------


def test_example(cli, scratch):
    path = os.path.join(ROOT, "python", "examples", "three_uses.py")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=scratch, timeout=600)
    said = done.stdout
    check(done.returncode == 0 and not done.stderr, f"three_uses.py: status {done.returncode}: {done.stderr[-2000:]}")

    def number(pattern):
        found = re.search(pattern, said)
        return float(found.group(1)) if found else float("nan")

    text = "".join(re.findall(r'^    "([^"]*)"$', open(path, encoding="utf-8").read(), re.M))

    def score(name, **changed):
        """The perplexity that the program gives of a copy with a changed config.json."""
        folder = shutil.copytree(AUSTEN, os.path.join(scratch, name))
        config = json.load(open(os.path.join(folder, "config.json")))
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump({**config, **changed}, f)
        return json.loads(cli("score", folder, "-p", text, "--json") or '{"perplexity": 0}')["perplexity"]

    check(number(r"softmax\(q k\) v of the last token against layers.3.attention: max abs (\S+)\n") < 1e-5, "attention from q, k and v")
    check(said.count("head ") >= 4 and said.count("\nlayer ") == 8, "a line for each head and each layer")
    tensors = len(gemma4.State(gemma4.Model(AUSTEN)).trace([2]))
    check(number(r"transformers [\d.]+: (\d+) tensors") == tensors and "beyond 1e-5: none\n" in said, "the comparison with transformers")
    check(abs(number(r"as it is +(\S+)\n") - score("as-it-is")) < 1e-4, "perplexity as it is")
    check(abs(number(r"no softcap +(\S+)") - score("cap", final_logit_softcapping=None)) < 1e-4, "perplexity without the softcap")
    check(abs(number(r"a window of 8 tokens +(\S+)") - score("window", sliding_window=8)) < 1e-4, "perplexity with a window of 8")
    # what position 0 sees is the same for every RoPE and every window, and what position 7 sees for a window of 8
    for name, first in (("no softcap", 0), ("a window of 8 tokens", 8), ("full layers rotate every pair", 1), ("one RoPE theta", 1), ("layer_scalar is 1", 0), ("no per-layer inputs", 0)):
        check(number(rf"{name} +\S+ +(\d+) ") == first, f"{name}: logits differ from position {first} on")
    check(number(r"no softcap +\S+ +\d+ +(\d+) of") == 0, "the softcap changes no order")
    check(number(r"layer_scalar is 1 +(\S+)") > 1.2 * number(r"as it is +(\S+)\n") and number(r"no per-layer inputs +(\S+)") > 5 * number(r"as it is +(\S+)\n"), "what is missed")
    check(number(r"the softcap is 30 tanh.* max abs (\S+);") < 1e-5, "the softcap is what it says")
    if report.failed:
        print(said)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("gemma4", nargs="?", default=os.path.join(ROOT, "gemma4"))
    p.add_argument("--only", default="header,numbers,text,states,engine,chat,errors,memory,packages,example")
    args = p.parse_args()
    cli = Gemma4(os.path.abspath(args.gemma4))
    arguments = {"header": "s", "numbers": "cs", "text": "cs", "states": "", "engine": "s", "chat": "cs", "errors": "s", "memory": "", "packages": "s", "example": "cs"}
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            before = report.passed + report.failed
            try:
                globals()[f"test_{name}"](*({"c": cli, "s": scratch}[a] for a in arguments[name]))
            except Exception as e:
                import traceback
                traceback.print_exc()
                check(False, f"{name}: ended by {type(e).__name__}: {e}")
            print(f"{name}: {report.passed + report.failed - before} checks", flush=True)
    print(f"python: {report.passed} passed, {report.failed} failed, {report.skipped} skipped")
    return int(report.failed != 0 or not report.passed)


if __name__ == "__main__":
    sys.exit(main())
