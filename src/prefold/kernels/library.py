"""The shared library of native kernels: compiled when the package is installed, if there is a C++ compiler.

Each kernel has a module that describes its contract and calls it. Where the library is missing,
`is_available` says so and callers take torch. Kernels split their work over the calling thread's number of
threads (parallel.h): the library takes the OpenMP that torch has loaded, so both have one pool, and
torch.set_num_threads holds for both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

INSTRUCTION_SETS = ("portable", "avx2", "avx512")


def _load_library() -> ctypes.CDLL | None:
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # built for another machine
            continue
    return None


_LIBRARY = _load_library()
_BEST = -1 if _LIBRARY is None else _LIBRARY.prefold_instruction_set()


def instruction_sets() -> tuple[str, ...]:
    """What this processor can run, best last; nothing if the library was not built."""
    return INSTRUCTION_SETS[: _BEST + 1]


def is_available() -> bool:
    """Whether callers may take native kernels: the library was built."""
    return _LIBRARY is not None


def num_threads() -> int:
    """Threads that a kernel takes when it is called from this thread."""
    return 1 if _LIBRARY is None else _LIBRARY.prefold_num_threads()


def has_one_thread() -> bool:
    """The condition of kernels that are not split over threads yet."""
    return torch.get_num_threads() == 1


def declare(function: str, *argument_types: Any) -> Callable[..., None]:
    """The C function prefold_`function`(int instruction_set, ...), whose other arguments have ctypes'
    `argument_types`. It is called with one of `instruction_sets()`, or None: the best, and these."""
    if _LIBRARY is None:
        return _not_built
    found = getattr(_LIBRARY, f"prefold_{function}")
    found.argtypes, found.restype = (ctypes.c_int, *argument_types), None

    def call(instruction_set: str | None, *arguments: Any) -> None:
        number = _BEST if instruction_set is None else INSTRUCTION_SETS.index(instruction_set)
        assert number <= _BEST, instruction_set
        found(number, *arguments)

    return call


def _not_built(*_: Any) -> None:
    raise AssertionError("callers ask is_available() first")


def structure(name: str, sizes: Sequence[str], pointers: Sequence[str]) -> type[ctypes.Structure]:
    """A C struct of int64_t `sizes`, then `pointers`."""
    fields = [(size, ctypes.c_int64) for size in sizes] + [(at, ctypes.c_void_p) for at in pointers]
    return type(name, (ctypes.Structure,), {"_fields_": fields})
