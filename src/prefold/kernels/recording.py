"""Calls that are recorded once and made again without Python, as CUDA graphs do on a GPU.

A decode step makes a hundred calls of kernels, and Python needs as long to prepare one as a small kernel to
run. As long as buffers stay where they are, all that changes from step to step is what lies in them: the
calls and their arguments are the same. A `Recording` keeps them and makes them from C.

It is only good if nothing but kernels touches data. So a recording also watches torch, and remembers every
operation that reads or writes elements: `foreign`. What has to stay in Python, such as a collective, is
called through `again`, and is called again between the kernels.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prefold.kernels import library

T = TypeVar("T")

_replay = library.declare("replay", ctypes.c_void_p, ctypes.c_int64)
_note_time = library.declare("note_time", ctypes.c_void_p)


class _Slot(ctypes.Union):
    """An argument: see replay.h."""

    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_float), ("address", ctypes.c_void_p))


class _Call(ctypes.Structure):
    """A call: see replay.cpp."""

    _fields_ = (("function", ctypes.c_void_p), ("slots", ctypes.c_void_p))


class _Kernels:
    """Calls of kernels, one after the other.

    Attributes:
        calls: (address of prefold_replay_..., arguments), until they are replayed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[Any, ...]]] = []
        self._prepared: ctypes.Array[_Call] | None = None
        self._kept: list[ctypes.Array] = []

    def replay(self) -> None:
        """Call them again."""
        if self._prepared is None:
            self._prepared = self._prepare()
            self.calls = []
        _replay(None, ctypes.addressof(self._prepared), len(self._prepared))

    def _prepare(self) -> ctypes.Array[_Call]:
        """What C reads: calls, which point to what is kept."""
        calls = (_Call * len(self.calls))()
        slots = (_Slot * sum(len(arguments) for _, arguments in self.calls))()
        self._kept.append(slots)
        place = 0
        for call, (function, arguments) in zip(calls, self.calls):
            call.function, call.slots = function, ctypes.addressof(slots) + place * ctypes.sizeof(_Slot)
            for argument in arguments:
                self._fill(slots[place], argument)
                place += 1
        return calls

    def _fill(self, slot: _Slot, argument: Any) -> None:
        if isinstance(argument, bytes):
            self._kept.append(ctypes.create_string_buffer(argument, len(argument)))
            slot.address = ctypes.addressof(self._kept[-1])
        elif isinstance(argument, float):
            slot.real = argument
        else:
            slot.integer = argument or 0


class Recording:
    """What a computation did, in its order. To be compared, then replayed.

    Two recordings of the same computation are `same_as` each other if they differ in nothing but what lies in
    buffers: then either can be replayed instead of computing a third time.

    Attributes:
        foreign: names of torch's operations, and of kernels, that a replay would leave out.
    """

    def __init__(self) -> None:
        self.foreign: set[str] = set()
        self.is_paused = False
        self._parts: list[_Kernels | tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def note(self, name: str, function: int, arguments: tuple[Any, ...]) -> None:
        """A kernel was called. `function`: address of its prefold_replay_..., 0 if it has none; `arguments`:
        numbers, None, and structures by reference."""
        if not function:
            self.foreign.add(name)
            return
        if not self._parts or not isinstance(self._parts[-1], _Kernels):
            self._parts.append(_Kernels())
        kernels = self._parts[-1]
        assert isinstance(kernels, _Kernels)
        kernels.calls.append((function, tuple(_copied(argument) for argument in arguments)))

    def note_python(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """A function of Python was called by `again`."""
        self._parts.append((function, arguments))

    def same_as(self, other: Recording) -> bool:
        """Whether the same was called with the same arguments."""
        return self._facts() == other._facts()

    def _facts(self) -> list[Any]:
        return [
            part.calls if isinstance(part, _Kernels) else (part[0], [_identity(one) for one in part[1]])
            for part in self._parts
        ]

    def replay(self) -> None:
        """Call everything again."""
        for part in self._parts:
            if isinstance(part, _Kernels):
                part.replay()
            else:
                part[0](*part[1])


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what this thread does until the end of the block."""
    made = Recording()
    token = library.RECORDER.set(made)
    try:
        with _Watch(made):
            yield made
    finally:
        library.RECORDER.reset(token)


def again(function: Callable[..., T], *arguments: Any) -> T:
    """function(*arguments), which a replay calls again.

    What it returns, and tensors among its arguments, must lie in the same place each time.
    """
    recorder = library.RECORDER.get()
    if recorder is None:
        return function(*arguments)
    recorder.note_python(function, arguments)
    token = library.RECORDER.set(None)
    recorder.is_paused = True
    try:
        return function(*arguments)
    finally:
        recorder.is_paused = False
        library.RECORDER.reset(token)


def note_time(times: torch.Tensor, i: int) -> None:
    """times[i] = time.perf_counter(), in a replay as well; times [n] float64."""
    assert times.dtype == torch.float64
    assert 0 <= i < len(times), (i, len(times))
    if library.is_available():
        _note_time(None, times.data_ptr() + i * times.element_size())
    else:
        times[i] = time.perf_counter()


class _Watch(TorchDispatchMode):
    """Notes torch's operations, except views: those only say where elements are."""

    def __init__(self, noted: Recording) -> None:
        super().__init__()
        self._noted = noted

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for it, which takes 2 seconds and 70 MB in every rank."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._noted.is_paused and not (_may_view(func) and _is_view(result, args[0])):
            self._noted.foreign.add(str(func))
        return result


def _may_view(operation: Any) -> bool:
    """Whether an operation may return parts of its arguments, and writes nothing."""
    schema = operation._schema
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    return not writes and any(one.alias_info is not None for one in schema.returns)


def _is_view(result: Any, of: Any) -> bool:
    """Whether a result is made of a tensor's elements where they are: `reshape`, say, may also copy them."""
    parts = result if isinstance(result, Sequence) else (result,)
    place = of.untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == place for part in parts)


def _copied(argument: Any) -> Any:
    """An argument as it is now: a structure's contents, as it is filled anew for each call."""
    structure = getattr(argument, "_obj", None)
    return argument if structure is None else bytes(structure)


def _identity(argument: Any) -> Any:
    """By what arguments of functions of Python are compared."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), argument.shape, argument.stride(), argument.dtype
    if is_dataclass(argument):
        return type(argument), [_identity(getattr(argument, field.name)) for field in fields(argument)]
    return argument
