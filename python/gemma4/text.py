"""Text to ids and back."""
from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _c
from .base import Error, Handle, Ids, Path, c_path, c_string, checked, error, id_array, text_at, taken_ids, whole


class Tokenizer:
    """tokenizer.json: the file itself, or in a directory."""

    def __init__(self, path: Path) -> None:
        err = _c.g4_error()
        self._handle = Handle("tokenizer", checked(_c.lib.g4_tokenizer_open(c_path(path), ctypes.byref(err)), err), _c.lib.g4_tokenizer_close)
        self.path = os.fspath(path)

    def encode(self, text: str | bytes, *, bos: bool = False, plain_text: bool = False) -> npt.NDArray[np.int32]:
        """The ids of a text. bos: begin with <bos>, unless the text does. plain_text: what looks like a special token is ordinary text. In bytes, those
        that are not UTF-8 become U+FFFD each."""
        if not isinstance(text, (str, bytes)):
            raise TypeError(f"text: expected str or bytes, found {type(text).__name__}")
        data = text.encode() if isinstance(text, str) else text
        ids, n, err = _c.ids_p(), ctypes.c_size_t(), _c.g4_error()
        with self._handle.use() as pointer:
            flags = _c.CONSTANTS["G4_PLAIN_TEXT"] if plain_text else 0
            if _c.lib.g4_encode(pointer, data, len(data), flags, ctypes.byref(ids), ctypes.byref(n), ctypes.byref(err)):
                raise error(err)
        found = taken_ids(ids, n.value)
        if bos:
            first = self.token_id("<bos>")
            if first is None:
                raise Error("the tokenizer has no token <bos>, with which a text must begin")
            if not len(found) or found[0] != first:
                found = np.concatenate([np.array([first], np.int32), found])
        return found

    def decode(self, ids: Ids, *, skip_special: bool = False) -> str:
        """The text of ids."""
        return "".join(self.stream(id_array(ids, "ids").tolist(), skip_special=skip_special))

    def stream(self, ids: Iterable[int], *, skip_special: bool = False) -> Iterator[str]:
        """The text of ids in pieces, each as soon as it is certain: whole characters, and never an empty piece."""
        with Decoder(self, skip_special=skip_special) as decoder:
            for id in ids:
                if piece := decoder.push(id):
                    yield piece
            if piece := decoder.end():
                yield piece

    def token_id(self, piece: str) -> int | None:
        """The id of this very entry of the vocabulary."""
        with self._handle.use() as pointer:
            id: int = _c.lib.g4_token_id(pointer, c_string(piece, "piece"))
        return None if id < 0 else id

    def piece(self, id: int) -> str:
        """The entry of the vocabulary: spaces are still U+2581, bytes still <0xHH>."""
        n = ctypes.c_size_t()
        with self._handle.use() as pointer:
            at = _c.lib.g4_token_piece(pointer, whole(id, "id"), ctypes.byref(n))
            if not at:
                raise ValueError(f"id {id} is not in the vocabulary")
            return ctypes.string_at(at, n.value).decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        with self._handle.use() as pointer:
            return bool(_c.lib.g4_token_is_special(pointer, whole(id, "id")))

    def __len__(self) -> int:
        """The highest id + 1."""
        with self._handle.use() as pointer:
            size: int = _c.lib.g4_tokenizer_size(pointer)
        return size

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> Tokenizer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<gemma4.Tokenizer {self.path}>"


class Decoder:
    """Ids to text, one by one. For one thread at a time, like a State."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        err = _c.g4_error()
        owner = tokenizer._handle
        use = owner.begin()
        try:
            flags = _c.CONSTANTS["G4_SKIP_SPECIAL"] if skip_special else 0
            pointer = checked(_c.lib.g4_decoder_open(owner.pointer, flags, ctypes.byref(err)), err)
        except BaseException:
            owner.end(use)
            raise

        def free(pointer: int) -> None:
            _c.lib.g4_decoder_close(pointer)
            owner.end(use)

        self._handle = Handle("decoder", pointer, free)
        self._lock = threading.Lock()

    def push(self, id: int) -> str:
        """What is certain after this id and was not given yet; whole characters, often none."""
        return self._take(_c.lib.g4_decode_push, whole(id, "id"))

    def end(self) -> str:
        """What was held back. The decoder can be used again."""
        return self._take(_c.lib.g4_decode_end)

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, function: Any, *ids: int) -> str:
        text, n, err = ctypes.c_void_p(), ctypes.c_size_t(), _c.g4_error()
        with self._handle.use() as pointer, self._lock:
            if function(pointer, *ids, ctypes.byref(text), ctypes.byref(n), ctypes.byref(err)):
                raise error(err)
            return ctypes.string_at(text.value or 0, n.value).decode() if n.value else ""
