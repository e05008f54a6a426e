"""From logits to a token. What the options mean, and in which order they are applied, stands in gemma4.h: g4_sampling."""
from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import _c
from .base import Ids, address, error, id_array, whole


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. One seed gives one text, on every machine."""

    temperature: float = 1.0  # 0 (or below 1e-5): greedy, ties to the lowest id
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repeat_penalty: float = 1.0  # 1: off; as transformers' repetition_penalty, over all of history
    seed: int = 0
    frequency_penalty: float = 0.0  # 0: off; as OpenAI's, over what was generated
    presence_penalty: float = 0.0  # the same
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # {id: what is added to its logit}


class Logprob(NamedTuple):
    id: int
    logprob: float  # natural logarithm of the probability


def c_sampling(sampling: Sampling, n_prompt: int = 0) -> _c.g4_sampling:
    how = _c.g4_sampling(n_prompt=n_prompt)
    for f in fields(sampling):
        value = getattr(sampling, f.name)
        if f.name == "logit_bias":
            pairs = [_c.g4_logit_bias(whole(id, "logit_bias"), bias) for id, bias in value.items()]
            how.logit_bias, how.n_logit_bias = (_c.g4_logit_bias * len(pairs))(*pairs), len(pairs)
        elif f.name == "seed":
            how.seed = whole(value, "seed", 0, 2**64 - 1)
        elif f.name == "top_k":
            how.top_k = whole(value, "top_k")
        else:
            try:
                setattr(how, f.name, value)
            except TypeError:
                raise TypeError(f"{f.name}: expected a number, found {type(value).__name__}") from None
    return how


def logits_row(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    logits = np.asarray(logits)
    if logits.dtype != np.float32:
        raise TypeError(f"logits: expected float32, found {logits.dtype}")
    if logits.ndim != 1 or not len(logits):
        raise ValueError(f"logits: expected shape [V], found {list(logits.shape)}")
    return np.ascontiguousarray(logits)


def sample(logits: npt.NDArray[np.float32], sampling: Sampling, history: Ids = (), suppress: Ids = (), *, n_prompt: int = 0) -> int:
    """The next token from logits [V], which are left as they are. history [n]: all ids so far; the draw depends on the seed and on n alone. suppress:
    ids that are never chosen. n_prompt: how many ids of history the frequency and the presence penalty do not count, for they were not generated."""
    scratch = logits_row(logits).copy()
    how = c_sampling(sampling, whole(n_prompt, "n_prompt", 0))
    past, never = id_array(history, "history"), id_array(suppress, "suppress")
    err = _c.g4_error()
    chosen: int = _c.lib.g4_sample(
        ctypes.byref(how), address(scratch), len(scratch), address(past), len(past), address(never), len(never), ctypes.byref(err)
    )
    if chosen < 0:
        raise error(err)
    return chosen


def logprob(logits: npt.NDArray[np.float32], id: int) -> float:
    """The log-probability of an id in the softmax of logits [V]."""
    row, found, err = logits_row(logits), ctypes.c_double(), _c.g4_error()
    if _c.lib.g4_logprobs(address(row), len(row), whole(id, "id"), ctypes.byref(found), None, 0, ctypes.byref(err)):
        raise error(err)
    return found.value


def top_logprobs(logits: npt.NDArray[np.float32], n: int = 5) -> list[Logprob]:
    """The n best ids of logits [V] and their log-probabilities, the best first, ties to the lowest id."""
    row, err = logits_row(logits), _c.g4_error()
    found = (_c.g4_logprob * whole(n, "n", 0, len(row)))()
    if _c.lib.g4_logprobs(address(row), len(row), 0, None, found, len(found), ctypes.byref(err)):
        raise error(err)
    return [Logprob(x.id, x.logprob) for x in found]
