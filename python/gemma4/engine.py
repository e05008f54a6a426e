"""Many texts at once: requests that share one state. What an option means stands in gemma4.h: g4_request."""
from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from . import _c
from .base import Handle, Ids, Path, address, c_path, c_string, checked, error, id_array, text_at, whole
from .models import State
from .sampling import Logprob, Sampling, c_sampling
from .text import Tokenizer

FINISH = (None, "stop_id", "stop_string", "length", "cancelled", "error")  # by g4_finish
clock = _c.clock_fn(time.monotonic)


@dataclass(frozen=True)
class Event:
    """One new token of a request, or its end, or both."""

    request: int  # what add() gave
    token: int | None  # None: the event only ends the request
    finish: str | None  # in a request's last event "stop_id", "stop_string", "length", "cancelled" or "error"
    stop: int | None  # "stop_id": the id, which is not part of the text; "stop_string": its number in the request
    text: str  # what is certain now and was not before, in whole characters; never a part of a stop string
    logprob: float | None  # of token, if asked for
    top: tuple[Logprob, ...]  # the best first
    n_prompt: int  # tokens of the prompt
    n_cached: int  # those of them that were not computed again
    n_new: int  # tokens given so far
    error: str | None


@dataclass(frozen=True)
class EngineStats:
    """gemma4.h: g4_engine_stats. Times are in seconds."""

    waiting: int
    active: int
    forwards: int
    rows: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    proposed: int
    accepted: int
    prompt_seconds: float
    decode_seconds: float
    sampling_seconds: float


class Engine:
    """Requests are added at any time and leave at any step. What one gives is the same to the bit as if it were alone.

        with gemma4.Engine(gemma4.State(model, n_seqs=8), tokenizer) as engine:
            for prompt in prompts:
                engine.add(prompt, max_new=100, stop=["\\n\\n"])
            for event in engine.events():
                texts[event.request] += event.text

    The sequences of the state belong to the engine until it is closed, and are empty then; n_seqs requests run at once, others wait. Without a tokenizer
    events have no text. budget: rows of a step at most (0: the state's chunk); speculate: tokens that a step may draft by look-up; prefix_reuse: what two
    prompts begin with is computed once. For one thread at a time; a second one waits.
    """

    def __init__(self, state: State, tokenizer: Tokenizer | None = None, *, budget: int = 0, speculate: int = 0, prefix_reuse: bool = True) -> None:
        options = _c.g4_engine_options(
            budget=whole(budget, "budget"), speculate=whole(speculate, "speculate"), no_prefix_reuse=not prefix_reuse, clock=clock
        )
        err = _c.g4_error()
        owners = [state._handle] + ([tokenizer._handle] if tokenizer else [])
        uses = []
        try:
            for owner in owners:
                uses.append(owner.begin())  # until the engine is freed
            with state._mine() as pointer:
                tok = tokenizer._handle.pointer if tokenizer else None
                engine = checked(_c.lib.g4_engine_open(pointer, tok, ctypes.byref(options), ctypes.byref(err)), err)

                def free(engine: int) -> None:
                    _c.lib.g4_engine_close(engine)
                    for owner, use in zip(owners, uses):
                        owner.end(use)

                self._handle = Handle("engine", engine, free)
                state._engine = weakref.ref(self._handle)
                for ids in state._ids:
                    ids.clear()
        except BaseException:
            if not hasattr(self, "_handle"):
                for owner, use in zip(owners, uses):
                    owner.end(use)
            raise
        self.state = state
        self.tokenizer = tokenizer
        self._scored: set[int] = set()  # requests with logprobs

    def add(
        self,
        prompt: Ids,
        *,
        max_new: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        stop_ids: Ids = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        top_logprobs: int = 0,
        skip_special: bool = False,
    ) -> int:
        """A request for the continuation of prompt (ids, with <bos> where it belongs); gives its number. Nothing is computed yet.

        max_new: new tokens at most; sampling None: model.sampling(); stop: texts that end the answer before them, wherever tokens begin and end;
        stop_ids: ids that do, beside the model's own; logprobs: events carry the log-probability of their token; top_logprobs: and those of so many best."""
        if isinstance(stop, str):
            raise TypeError("stop: expected a list of texts, found one text")
        ids, ends = id_array(prompt, "prompt"), id_array(stop_ids, "stop_ids")
        texts = [c_string(s, "stop") for s in stop]
        request = _c.g4_request(
            prompt=address(ids),
            n_prompt=len(ids),
            sampling=c_sampling(self.state.model.sampling() if sampling is None else sampling),
            max_new=whole(max_new, "max_new"),
            ignore_eos=bool(ignore_eos),
            stop_ids=address(ends),
            n_stop_ids=len(ends),
            stop=(ctypes.c_char_p * len(texts))(*texts),
            n_stop=len(texts),
            logprobs=bool(logprobs),
            top_logprobs=whole(top_logprobs, "top_logprobs"),
            decode_flags=_c.CONSTANTS["G4_SKIP_SPECIAL"] if skip_special else 0,
        )
        err = _c.g4_error()
        with self._handle.use() as pointer, self.state._lock:
            number: int = _c.lib.g4_engine_add(pointer, ctypes.byref(request), ctypes.byref(err))
            if number < 0:
                raise error(err)
            if logprobs:
                self._scored.add(number)
        return number

    def cancel(self, request: int) -> bool:
        """Its last event comes with the next step. False: it has ended already, or never was."""
        with self._handle.use() as pointer, self.state._lock:
            return bool(_c.lib.g4_engine_cancel(pointer, whole(request, "request", -(2**63), 2**63 - 1)) == 0)

    def pending(self) -> int:
        """Requests whose last event has not come yet."""
        with self._handle.use() as pointer, self.state._lock:
            n: int = _c.lib.g4_engine_pending(pointer)
        return n

    def step(self) -> list[Event]:
        """One forward pass with rows of all requests, and what came of it: nothing while only prompts are in progress."""
        events = ctypes.POINTER(_c.g4_event)()
        with self._handle.use() as pointer, self.state._lock:
            found = [_event(events[i], self._scored) for i in range(_c.lib.g4_engine_step(pointer, ctypes.byref(events)))]
            self._scored.difference_update(e.request for e in found if e.finish)
        return found

    def events(self) -> Iterator[Event]:
        """Steps until no request is pending; more may be added meanwhile."""
        while self.pending():
            yield from self.step()

    def stats(self) -> EngineStats:
        found = _c.g4_engine_stats()
        with self._handle.use() as pointer, self.state._lock:
            _c.lib.g4_engine_get_stats(pointer, ctypes.byref(found))
        return EngineStats(**{f.name: getattr(found, f.name) for f in fields(EngineStats)})

    def save(self, ids: Ids, path: Path) -> int:
        """The longest beginning of ids that is in the cache, to a file; gives its length."""
        array, err = id_array(ids, "ids"), _c.g4_error()
        with self._handle.use() as pointer, self.state._lock:
            n: int = _c.lib.g4_engine_save(pointer, address(array), len(array), c_path(path), ctypes.byref(err))
        if n < 0:
            raise error(err)
        return n

    def load(self, path: Path) -> int:
        """A file becomes a prefix that later prompts may begin with; gives its length."""
        err = _c.g4_error()
        with self._handle.use() as pointer, self.state._lock:
            n: int = _c.lib.g4_engine_load(pointer, c_path(path), ctypes.byref(err))
        if n < 0:
            raise error(err)
        return n

    def close(self) -> None:
        """Requests that have not ended are dropped without an event. The state and the tokenizer stay open."""
        self._handle.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _event(e: _c.g4_event, scored: set[int]) -> Event:
    """A copy: the library's is valid until the next step."""
    finish = FINISH[e.finish]
    return Event(
        request=e.request,
        token=None if e.token < 0 else e.token,
        finish=finish,
        stop=e.stop if finish in ("stop_id", "stop_string") else None,
        text=text_at(e.text, e.n_text),
        logprob=e.logprob if e.token >= 0 and e.request in scored else None,
        top=tuple(Logprob(x.id, x.logprob) for x in e.top[: e.n_top]),
        n_prompt=e.n_prompt,
        n_cached=e.n_cached,
        n_new=e.n_new,
        error=e.error.decode("utf-8", "replace") if e.error else None,
    )
