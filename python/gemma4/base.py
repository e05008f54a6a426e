"""What the other modules share: the exception, objects of the library that are freed once, and arguments made fit for C."""
from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from . import _c

Ids = Union[Sequence[int], npt.NDArray[np.integer[Any]]]  # one dimension: a list, an array, whatever numpy.asarray makes integers of
Path = Union[str, "os.PathLike[str]"]


class Error(Exception):
    """What the library says: what is wrong, where, what was expected and found, what to do."""

    @property
    def text(self) -> str:
        return str(self.args[0])


class Handle:
    """A pointer of the library, freed once: by close() when no call uses it any more, else when the handle goes.

    There is no lock that a finaliser, which may run between any two steps of the same thread, could find taken. Adding to and taking from a set is one
    step, and so is the end of a weakref.finalize. A use is added before `closed` is looked at, and close() sets `closed` before it looks at the uses: one
    of the two sees the other.
    """

    def __init__(self, what: str, pointer: int, free: Callable[..., None], *more: object) -> None:
        self.what, self.pointer, self.closed = what, pointer, False
        self.uses: set[object] = set()
        self.free = weakref.finalize(self, free, pointer, *more)
        self.free.atexit = False  # a thread may still be inside then

    def begin(self) -> object:
        use = object()
        self.uses.add(use)
        if self.closed:
            self.end(use)
            raise ValueError(f"this {self.what} is closed")
        return use

    def end(self, use: object) -> None:
        self.uses.discard(use)
        if self.closed and not self.uses:
            self.free()

    def close(self) -> None:
        self.closed = True
        if not self.uses:
            self.free()

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        token = self.begin()
        try:
            yield self.pointer
        finally:
            self.end(token)


def error(err: _c.g4_error) -> Error:
    return Error(err.text.decode("utf-8", "replace"))


def checked(pointer: int | None, err: _c.g4_error) -> int:
    if not pointer:
        raise error(err)
    return pointer


def taken_ids(ids: Any, n: int) -> npt.NDArray[np.int32]:
    """A copy of what the library allocated, which is freed."""
    try:
        return np.ctypeslib.as_array(ids, (n,)).copy() if n else np.zeros(0, np.int32)
    finally:
        _c.lib.g4_free(ids)


def text_at(at: int | None, n: int) -> str:
    return ctypes.string_at(at, n).decode("utf-8", "replace") if at and n else ""


def c_string(text: str, what: str) -> bytes:
    """What C reads up to the first NUL, so that there must be none."""
    if not isinstance(text, str):
        raise TypeError(f"{what}: expected str, found {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{what}: a NUL is inside {text!r}")
    return text.encode()


def c_path(path: Path) -> bytes:
    """UTF-8 on Windows, as the library wants it there; elsewhere the bytes that the system has."""
    text = os.fspath(path)
    data = c_string(text, "path") if os.name == "nt" else os.fsencode(text)
    if b"\0" in data:
        raise ValueError(f"path: a NUL is inside {text!r}")
    return data


def whole(value: Any, what: str, least: int = -(2**31), most: int = 2**31 - 1) -> int:
    """A whole number that fits: ctypes would cut it off."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what}: expected a whole number, found {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}: expected a whole number, found {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{what}: expected {least} to {most}, found {number}")
    return number


def id_array(ids: Ids, what: str) -> npt.NDArray[np.int32]:
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"{what}: expected one dimension, [T], found shape {list(array.shape)}; a batch goes to forward_rows")
    if len(array) and array.dtype.kind not in "iu":
        raise TypeError(f"{what}: expected integers, found {array.dtype}")
    if len(array) and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise ValueError(f"{what}: a number does not fit 32 bits")
    return np.ascontiguousarray(array, np.int32)


def address(array: npt.NDArray[Any]) -> Any:
    """For a function that takes float * or int32_t *."""
    return array.ctypes.data_as(_c.floats_p if array.dtype == np.float32 else _c.ids_p)
