"""Models and states: checkpoints, and the sequences that are computed with them."""
from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import _c
from .base import Handle, Ids, Path, address, c_path, c_string, checked, error, id_array, taken_ids, whole
from .sampling import Sampling, sample

PRECISIONS = ("f32", "bf16", "q16")  # by g4_precision


@dataclass(frozen=True)
class LayerConfig:
    type: str  # "sliding_attention" or "full_attention"
    head_dim: int
    num_key_value_heads: int
    intermediate_size: int
    kv_layer: int  # the layer whose K/V this one reads: itself, or its donor


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    factor: float
    proportional: bool
    partial_rotary_factor: float


@dataclass(frozen=True)
class Config:
    """config.json and generation_config.json with every default filled in, spelled as transformers spells them (gemma4.h: g4_config)."""

    model_type: str
    vocab_size: int
    vocab_size_per_layer_input: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size_per_layer_input: int  # 0: no per-layer inputs
    sliding_window: int
    max_position_embeddings: int
    num_kv_shared_layers: int
    attention_k_eq_v: bool
    use_double_wide_mlp: bool
    tie_word_embeddings: bool
    num_experts: int  # 0: no MoE
    top_k_experts: int
    moe_intermediate_size: int
    rms_norm_eps: float
    final_logit_softcapping: float  # 0: none
    rope: dict[str, RopeConfig]  # by layer type
    layers: tuple[LayerConfig, ...]
    eos_token_id: tuple[int, ...]
    suppress_tokens: tuple[int, ...]
    do_sample: bool
    top_k: int
    temperature: float
    top_p: float


class Model:
    """A checkpoint: a directory in Hugging Face layout, or a GGUF file. Weights are mapped from the file unless no_mmap.

    backend: one of backends(); None: the fastest exact one that can run here. prefetch: what the system is asked to read ahead, "auto", "none",
    "head" or "all". What the library warns about comes as Python warnings.
    """

    def __init__(self, path: Path, *, backend: str | None = None, no_mmap: bool = False, prefetch: str = "auto") -> None:
        if prefetch not in ("auto", "none", "head", "all"):
            raise ValueError(f'prefetch: expected "auto", "none", "head" or "all", found {prefetch!r}')
        said: list[str] = []
        warn = _c.warn_fn(lambda user, text: said.append(text.decode("utf-8", "replace")))
        options = _c.g4_options(
            backend=None if backend is None else c_string(backend, "backend"),
            no_mmap=bool(no_mmap),
            prefetch=_c.CONSTANTS["G4_PREFETCH_" + prefetch.upper()],
            warn=warn,
        )
        err = _c.g4_error()
        pointer = _c.lib.g4_open(c_path(path), ctypes.byref(options), ctypes.byref(err))
        self._handle = Handle("model", checked(pointer, err), _c.lib.g4_close)
        self.path = os.fspath(path)
        self.backend: str = _c.lib.g4_model_backend(pointer).decode()
        self.config = _config(_c.lib.g4_get_config(pointer)[0])
        for text in said:
            warnings.warn(text, stacklevel=2)

    def sampling(self, **changed: Any) -> Sampling:
        """The model's own way to sample (generation_config.json), with what is given changed: model.sampling(temperature=0)."""
        with self._handle.use() as pointer:
            how = _c.lib.g4_default_sampling(pointer)
        return replace(Sampling(**{f.name: getattr(how, f.name) for f in fields(Sampling) if f.name != "logit_bias"}), **changed)

    def state_bytes(self, *, ctx: int = 0, chunk: int = 0, n_seqs: int = 0, threads: int = 0, precision: str = "f32") -> tuple[int, int]:
        """Bytes that a State of these options takes, and the K/V caches' part of them. (0, 0): more than can be addressed, or wrong options."""
        options = _state_options(ctx, chunk, n_seqs, threads, precision)
        kv = ctypes.c_size_t()
        with self._handle.use() as pointer:
            total: int = _c.lib.g4_state_bytes(pointer, ctypes.byref(options), ctypes.byref(kv))
        return total, kv.value if total else 0

    def close(self) -> None:
        """Frees the model as soon as its last state is closed; no new one can be opened."""
        self._handle.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        return f"<gemma4.Model {self.path}: {c.num_hidden_layers} layers, hidden_size {c.hidden_size}, backend {self.backend}>"


def backends() -> dict[str, str]:
    """The backends compiled in, the default first among those that can run here: "" for one that can, else why not."""
    found: dict[str, str] = {}
    why = ctypes.c_char_p()
    while name := _c.lib.g4_backend_name(len(found), ctypes.byref(why)):
        found[name.decode()] = (why.value or b"").decode()
    return found


class State:
    """The tokens and K/V caches of some sequences, which are numbered from 0.

    ctx: positions of a sequence (0: min(max_position_embeddings, 4096)); chunk: rows computed at once (0: 128); n_seqs: sequences (0: 1);
    threads (0: one per processor); precision: "f32"; "bf16", which rounds where transformers with dtype=bfloat16 does; "q16", faster with quantised weights. None of them but precision
    changes a bit of any result.
    """

    def __init__(self, model: Model, *, ctx: int = 0, chunk: int = 0, n_seqs: int = 0, threads: int = 0, precision: str = "f32") -> None:
        options = _state_options(ctx, chunk, n_seqs, threads, precision)
        err = _c.g4_error()
        owner = model._handle
        use = owner.begin()  # until the state is freed
        try:
            pointer = checked(_c.lib.g4_state_open(owner.pointer, ctypes.byref(options), ctypes.byref(err)), err)
        except BaseException:
            owner.end(use)
            raise

        def free(pointer: int) -> None:
            _c.lib.g4_state_close(pointer)
            owner.end(use)

        self._handle = Handle("state", pointer, free)
        self._lock = threading.Lock()
        self.model = model
        got = _c.lib.g4_state_get_options(pointer)[0]
        self.ctx: int = got.ctx
        self.chunk: int = got.chunk
        self.n_seqs: int = got.n_seqs
        self.threads: int = got.threads
        self.precision = PRECISIONS[got.precision]
        self._ids: list[list[int]] = [[] for _ in range(self.n_seqs)]
        self._engine: weakref.ref[Handle] | None = None  # what the sequences belong to until it is closed or gone

    def forward(self, ids: Ids, *, seq: int = 0, logits: Literal["all", "last", "none"] = "all") -> npt.NDArray[np.float32]:
        """Appends ids [T] to a sequence; gives the logits [rows][V] of all of them, of the last one, or of none."""
        ids = id_array(ids, "ids")
        if logits not in ("all", "last", "none"):
            raise ValueError(f'logits: expected "all", "last" or "none", found {logits!r}')
        want = np.full(len(ids), logits == "all")
        want[-1:] |= logits == "last"
        return self.forward_rows(ids, np.full(len(ids), whole(seq, "seq"), np.int32), want)

    def forward_rows(self, ids: Ids, seqs: Ids, want_logits: Sequence[bool] | npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.float32]:
        """A batch: appends ids[t] to sequence seqs[t], t = 0, 1, ..., T - 1, in any mixture; gives the logits [rows][V] of the rows that want_logits
        [T] says, in their order (None: of all). The bits do not depend on how rows are spread over calls and sequences."""
        return self._forward(ids, seqs, want_logits, None)

    def trace(self, ids: Ids, *, seq: int = 0, tensors: str = "*") -> dict[str, npt.NDArray[Any]]:
        """Appends ids [T] to a sequence; gives every intermediate tensor of the pass by its name, in the order of the forward pass, with "ids" and
        "logits", as `gemma4 trace` writes them: float32, T the first dimension. tensors picks names by * and ?, alternatives parted by commas."""
        ids = id_array(ids, "ids")
        patterns = tensors.split(",")
        parts: dict[str, list[npt.NDArray[np.float32]]] = {}

        def picked(name: str) -> bool:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

        def keep(name: str, data: Any, shape: tuple[int, ...]) -> None:  # once per chunk
            if picked(name):
                parts.setdefault(name, []).append(np.ctypeslib.as_array(data, shape).copy())

        self._forward(ids, np.full(len(ids), whole(seq, "seq"), np.int32), None, keep)
        found: dict[str, npt.NDArray[Any]] = {"ids": ids} if picked("ids") else {}
        found.update({name: part[0] if len(part) == 1 else np.concatenate(part) for name, part in parts.items()})
        return found

    def generate(self, ids: Ids, *, n: int = 128, seq: int = 0, sampling: Sampling | None = None, ignore_eos: bool = False) -> Iterator[int]:
        """Appends ids to a sequence and gives up to n new ids, one by one. Ends early at a stop id (config.eos_token_id), which is not given, and where
        the context is full. sampling None: model.sampling(). An id becomes part of the sequence when the next one is asked for. For stop strings, or many
        texts at once: Engine."""
        ids = id_array(ids, "ids")
        how = self.model.sampling() if sampling is None else sampling
        n_prompt = len(self._sequence(seq)) + len(ids)
        return self._generate(ids, whole(n, "n", 0), whole(seq, "seq"), how, n_prompt, ignore_eos)

    def _generate(self, ids: npt.NDArray[np.int32], n: int, seq: int, how: Sampling, n_prompt: int, ignore_eos: bool) -> Iterator[int]:
        c = self.model.config
        for _ in range(n):
            logits = self.forward(ids, seq=seq, logits="last")[0]
            history = self._ids[seq]
            new = sample(logits, how, history, c.suppress_tokens, n_prompt=n_prompt)
            if new in c.eos_token_id and not ignore_eos:
                return
            yield new
            if len(history) >= self.ctx:
                return
            ids = np.array([new], np.int32)

    def length(self, seq: int = 0) -> int:
        """Tokens that a sequence holds."""
        return len(self._sequence(seq))

    def ids(self, seq: int = 0) -> npt.NDArray[np.int32]:
        """The tokens that a sequence holds."""
        return np.array(self._sequence(seq), np.int32)

    def truncate(self, length: int, *, seq: int = 0) -> None:
        """Forgets all tokens of a sequence from position length on. Raises where the sliding layers no longer hold what the next token would see;
        0 always works."""
        err = _c.g4_error()
        length, seq = whole(length, "length"), whole(seq, "seq")
        with self._mine() as pointer:
            if _c.lib.g4_truncate(pointer, seq, length, ctypes.byref(err)):
                raise error(err)
            del self._ids[seq][length:]

    def copy(self, source: int, target: int, *, length: int | None = None) -> None:
        """Sequence `target` becomes the first `length` tokens of sequence `source` (None: all), as if they had been computed there."""
        err = _c.g4_error()
        source, target = whole(source, "source"), whole(target, "target")
        with self._mine() as pointer:
            n = max(_c.lib.g4_length(pointer, source), 0) if length is None else whole(length, "length")
            if _c.lib.g4_copy(pointer, source, target, n, ctypes.byref(err)):
                raise error(err)
            self._ids[target] = self._ids[source][:n]

    def save(self, path: Path, *, seq: int = 0) -> None:
        """A sequence, its tokens and caches, to a file, which any state of the same weights and precision can load."""
        err = _c.g4_error()
        with self._mine() as pointer:
            ids = self.ids(seq)  # while nobody changes what the sequence holds
            if _c.lib.g4_sequence_save(pointer, whole(seq, "seq"), len(ids), address(ids), c_path(path), ctypes.byref(err)):
                raise error(err)

    def load(self, path: Path, *, seq: int = 0) -> npt.NDArray[np.int32]:
        """A sequence from a file, in place of what this one held; gives its tokens."""
        ids, n, err = _c.ids_p(), ctypes.c_size_t(), _c.g4_error()
        with self._mine() as pointer:
            if _c.lib.g4_sequence_load(pointer, whole(seq, "seq"), c_path(path), ctypes.byref(ids), ctypes.byref(n), ctypes.byref(err)):
                if _c.lib.g4_length(pointer, seq) == 0:  # a file that ends too early
                    self._ids[seq].clear()
                raise error(err)
            found = taken_ids(ids, n.value)
            self._ids[seq] = found.tolist()
        return found

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> State:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        held = ", ".join(str(len(ids)) for ids in self._ids[:8]) + (", ..." if self.n_seqs > 8 else "")
        return f"<gemma4.State of {self.model.path}: ctx {self.ctx}, chunk {self.chunk}, threads {self.threads}, {self.precision}, tokens {held}>"

    @contextlib.contextmanager
    def _mine(self) -> Iterator[int]:
        """The library's state, for this thread alone, and not while an engine has the sequences. What that left behind is forgotten."""
        with self._handle.use() as pointer, self._lock:
            if self._engine:
                engine = self._engine()
                if engine is not None and not engine.closed:
                    raise ValueError("the sequences of this state belong to an engine until that is closed")
                self._engine = None
                for seq in range(self.n_seqs):
                    _c.lib.g4_truncate(pointer, seq, 0, None)
            yield pointer

    def _sequence(self, seq: int) -> list[int]:
        if not 0 <= whole(seq, "seq") < self.n_seqs:
            raise ValueError(f"seq: expected 0 to {self.n_seqs - 1}, found {seq}")
        return self._ids[seq]

    def _forward(
        self,
        ids: Ids,
        seqs: Ids,
        want_logits: Sequence[bool] | npt.NDArray[np.bool_] | None,
        keep: Callable[[str, Any, tuple[int, ...]], None] | None,
    ) -> npt.NDArray[np.float32]:
        ids, seqs = id_array(ids, "ids"), id_array(seqs, "seqs")
        want = np.ones(len(ids), bool) if want_logits is None else np.asarray(want_logits)
        if want.dtype != bool:
            raise TypeError(f"want_logits: expected bool, found {want.dtype}")
        if not len(ids) == len(seqs) == len(want) or want.ndim != 1:
            raise ValueError(f"expected as many seqs and want_logits as ids, {len(ids)}; found {len(seqs)} and {list(want.shape)}")
        caught: list[BaseException] = []

        def trace(user: None, name: bytes, data: Any, rank: int, shape: Any) -> None:
            try:  # ctypes would print an exception and go on
                if keep and not caught:
                    keep(name.decode(), data, tuple(shape[:rank]))
            except BaseException as e:
                caught.append(e)

        rows = np.zeros(len(ids), np.dtype(_c.g4_row))
        rows["token"], rows["seq"], rows["want_logits"] = ids, seqs, want
        err, callback = _c.g4_error(), _c.trace_fn(trace)
        with self._mine() as pointer:
            for seq in np.unique(seqs):  # a number that is none gets positions too: the library names it
                mine = seqs == seq
                rows["pos"][mine] = _c.lib.g4_length(pointer, seq) + np.arange(mine.sum())
            logits = np.empty((int(want.sum()), self.model.config.vocab_size), np.float32)
            if keep:
                _c.lib.g4_set_trace(pointer, callback, None)
            try:
                failed = _c.lib.g4_forward(pointer, rows.ctypes.data_as(ctypes.POINTER(_c.g4_row)), len(rows), address(logits), ctypes.byref(err))
            finally:
                if keep:
                    _c.lib.g4_set_trace(pointer, _c.trace_fn(), None)
            if failed:
                raise error(err)
            for token, seq in zip(ids.tolist(), seqs.tolist()):
                self._ids[seq].append(token)
        if caught:
            raise caught[0]
        return logits


def _state_options(ctx: int, chunk: int, n_seqs: int, threads: int, precision: str) -> _c.g4_state_options:
    if precision not in PRECISIONS:
        raise ValueError(f'precision: expected "f32", "bf16" or "q16", found {precision!r}')
    return _c.g4_state_options(ctx=whole(ctx, "ctx"), chunk=whole(chunk, "chunk"), n_seqs=whole(n_seqs, "n_seqs"), threads=whole(threads, "threads"),
                               precision=_c.CONSTANTS["G4_" + precision.upper()])


_LAYER_TYPES = ("sliding_attention", "full_attention")  # by g4_layer_type


def _config(c: _c.g4_config) -> Config:
    """A copy: the struct goes with the model."""
    layers = tuple(
        LayerConfig(_LAYER_TYPES[x.type], x.head_dim, x.num_key_value_heads, x.intermediate_size, x.kv_layer)
        for x in c.layers[: c.num_hidden_layers]
    )
    rope = {kind: RopeConfig(x.theta, x.factor, bool(x.proportional), x.partial_rotary_factor) for kind, x in zip(_LAYER_TYPES, c.rope)}
    special: dict[str, Any] = {
        "model_type": c.model_type.decode("utf-8", "replace"),
        "rope": rope,
        "layers": layers,
        "eos_token_id": tuple(c.eos_token_id[: c.n_eos]),
        "suppress_tokens": tuple(c.suppress_tokens[: c.n_suppress]),
    }
    plain = {f.name: getattr(c, f.name) for f in fields(Config) if f.name not in special}
    for f in fields(Config):
        if f.type == "bool":
            plain[f.name] = bool(plain[f.name])
    return Config(**plain, **special)
