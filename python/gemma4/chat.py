"""Chats: a request to the prompt that the model reads, and the ids that it answers with to a message."""
from __future__ import annotations

import ctypes
import json
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _c
from .base import Handle, Ids, Path, address, c_path, checked, error, id_array, taken_ids, text_at, whole
from .text import Tokenizer

FAMILIES = ("small", "large")  # by g4_chat_family
KINDS = ("reasoning", "content", "tool_call", "bad_tool_call")  # by g4_part_kind


@dataclass(frozen=True)
class ChatPrompt:
    """What a chat template made of a request."""

    text: str  # begins with <bos>
    markers: tuple[tuple[int, int], ...]  # (first byte, bytes) of each special token that the template wrote; others came with the request
    in_reasoning: bool  # the prompt ends inside the model's thoughts: the answer goes on there
    n_media: int  # images, audio, video: the text has placeholders, which this model cannot fill
    n_unknown: int  # parts of a content that the template passes over

    def encode(self, tokenizer: Tokenizer, *, parse_request: bool = False) -> npt.NDArray[np.int32]:
        """The ids, from <bos> on; nothing is to be added. parse_request: text of the request that looks like a special token is one, as in
        transformers; else it is ordinary text."""
        data = self.text.encode()
        room = ctypes.create_string_buffer(data, len(data) + 1)
        markers = (_c.g4_chat_marker * len(self.markers))(*(_c.g4_chat_marker(*m) for m in self.markers))
        prompt = _c.g4_chat_prompt(text=ctypes.addressof(room), n=len(data), markers=markers, n_markers=len(markers))
        ids, n, err = _c.ids_p(), ctypes.c_size_t(), _c.g4_error()
        flags = _c.CONSTANTS["G4_CHAT_PARSE_REQUEST"] if parse_request else 0
        with tokenizer._handle.use() as tok:
            if _c.lib.g4_chat_encode(tok, ctypes.byref(prompt), flags, ctypes.byref(ids), ctypes.byref(n), ctypes.byref(err)):
                raise error(err)
        return taken_ids(ids, n.value)


def render_chat(request: Mapping[str, Any] | str, *, family: str) -> ChatPrompt:
    """What transformers' apply_chat_template renders, to the byte. request: an object with messages, and if wanted tools, enable_thinking,
    preserve_thinking and add_generation_prompt, or its JSON. family: "small" for E2B and E4B, "large" for the larger models (chat_family tells)."""
    if family not in FAMILIES:
        raise ValueError(f'family: expected "small" or "large", found {family!r}')
    data = (request if isinstance(request, str) else json.dumps(request, allow_nan=False)).encode()
    prompt, err = _c.g4_chat_prompt(), _c.g4_error()
    if _c.lib.g4_chat_render(data, len(data), FAMILIES.index(family), ctypes.byref(prompt), ctypes.byref(err)):
        raise error(err)
    try:
        markers = tuple((m.at, m.n) for m in prompt.markers[: prompt.n_markers])
        return ChatPrompt(text_at(prompt.text, prompt.n), markers, bool(prompt.in_reasoning), prompt.n_media, prompt.n_unknown)
    finally:
        _c.lib.g4_chat_prompt_free(ctypes.byref(prompt))


def chat_family(path: Path) -> str:
    """"small" or "large": whose template a checkpoint has, by its files. One that is not known here gives a Python warning that says what is used."""
    said: list[str] = []
    options = _c.g4_options(warn=_c.warn_fn(lambda user, text: said.append(text.decode("utf-8", "replace"))))
    family, err = ctypes.c_int(), _c.g4_error()
    if _c.lib.g4_chat_family_of(c_path(path), None, ctypes.byref(options), ctypes.byref(family), ctypes.byref(err)):
        raise error(err)
    for text in said:
        warnings.warn(text, stacklevel=2)
    return FAMILIES[family.value]


def recognise_template(text: str) -> str | None:
    """"small" or "large" if a Jinja text is one of Google's two templates."""
    data, family = text.encode(), ctypes.c_int()
    return FAMILIES[family.value] if _c.lib.g4_chat_recognise(data, len(data), ctypes.byref(family)) else None


@dataclass(frozen=True)
class ToolCall:
    name: str | None  # None: the model's call is none, and fault says why
    arguments: str  # an object in strict JSON; of a bad call what the model wrote
    fault: str | None


@dataclass(frozen=True)
class Message:
    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Part:
    """A piece of an answer. kind: "reasoning" or "content", more of that text; "tool_call", a whole call; "bad_tool_call", what was to be one."""

    kind: str
    text: str  # of a call its arguments
    name: str | None
    fault: str | None


def read_answer(tokenizer: Tokenizer, ids: Ids, *, in_reasoning: bool = False) -> Message:
    """The message that the ids of an answer are. in_reasoning: the prompt's."""
    array, message, err = id_array(ids, "ids"), _c.g4_message(), _c.g4_error()
    with tokenizer._handle.use() as tok:
        if _c.lib.g4_answer_read(tok, bool(in_reasoning), address(array), len(array), ctypes.byref(message), ctypes.byref(err)):
            raise error(err)
    try:
        calls = tuple(
            ToolCall(text_at(c.name, c.n_name) if c.name else None, text_at(c.text, c.n), c.fault.decode("utf-8", "replace") if c.fault else None)
            for c in message.calls[: message.n_calls]
        )
        return Message(text_at(message.reasoning, message.n_reasoning), text_at(message.content, message.n_content), calls)
    finally:
        _c.lib.g4_message_free(ctypes.byref(message))


class Answer:
    """The ids of an answer, one by one, to its parts as soon as they are certain. For one thread at a time; a second one waits."""

    def __init__(self, tokenizer: Tokenizer, *, in_reasoning: bool = False) -> None:
        parts: list[Part] = []

        def keep(user: None, part: Any) -> None:
            p = part[0]
            name = text_at(p.name, p.n_name) if p.name else None
            parts.append(Part(KINDS[p.kind], text_at(p.text, p.n), name, p.fault.decode("utf-8", "replace") if p.fault else None))

        err, callback = _c.g4_error(), _c.answer_fn(keep)
        owner = tokenizer._handle
        use = owner.begin()
        try:
            pointer = checked(_c.lib.g4_answer_open(owner.pointer, bool(in_reasoning), callback, None, ctypes.byref(err)), err)
        except BaseException:
            owner.end(use)
            raise

        def free(pointer: int, callback: Any) -> None:
            _c.lib.g4_answer_close(pointer)
            owner.end(use)

        self._parts = parts
        self._handle = Handle("answer", pointer, free, callback)
        self._lock = threading.Lock()

    def push(self, id: int) -> list[Part]:
        return self._take(_c.lib.g4_answer_push, whole(id, "id"))

    def end(self) -> list[Part]:
        """What was held back, once."""
        return self._take(_c.lib.g4_answer_end)

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, function: Any, *ids: int) -> list[Part]:
        err = _c.g4_error()
        with self._handle.use() as pointer, self._lock:
            failed = function(pointer, *ids, ctypes.byref(err))
            found = self._parts[:]
            self._parts.clear()
        if failed:
            raise error(err)
        return found
