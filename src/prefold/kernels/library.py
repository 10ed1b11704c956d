"""The shared library of native kernels: compiled when the package is installed, if there is a C++ compiler.

Each kernel has a module that describes its contract and calls it. Where the library is missing, or older than
its sources, `is_available` says so and callers take torch. Kernels split their work over the calling thread's
number of threads (parallel.h): the library takes the OpenMP that torch has loaded, so both have one pool, and
torch.set_num_threads holds for both. If it has another OpenMP than torch, kernels are serial.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import torch

from prefold.kernels.sources import digest

INSTRUCTION_SETS = ("portable", "avx2", "avx512")


_BUILD = "build it with `pip install -e .` or `python setup.py build_ext --inplace`"
_COST = "torch does its work, and a decode step takes two to three times as long"


def _load_library(folder: Path) -> tuple[ctypes.CDLL | None, str]:
    """The library in the folder, or why there is none, and what to do."""
    sources = digest(folder)
    problem = f"The library of native kernels was not built: {_COST}. With a C++ compiler, {_BUILD}."
    for path in sorted(folder.glob("_native*.so")):
        try:
            found = ctypes.CDLL(str(path))
        except OSError as error:  # built for another machine
            problem = f"The library of native kernels cannot be loaded ({error}): {_COST}; {_BUILD}."
            continue
        if not sources or _digest_of(found) == sources:
            ctypes.c_int.in_dll(found, "prefold_is_serial").value = not _has_torchs_openmp(found)
            return found, ""
        problem = f"The library of native kernels is older than its sources: {_COST}; {_BUILD}."
    return None, problem


def _digest_of(library: ctypes.CDLL) -> str:
    """Of the sources it was built from."""
    try:
        function = library.prefold_sources
    except AttributeError:  # older than this function
        return ""
    function.restype = ctypes.c_char_p
    return function().decode()


def _has_torchs_openmp(library: ctypes.CDLL) -> bool:
    """Whether it calls the same functions as torch: another compiler may bring another OpenMP."""
    addresses = set()
    of_torch = Path(torch.__file__).parent.glob("lib/libtorch_cpu.*")
    for owner in (library, *[ctypes.CDLL(str(path)) for path in of_torch]):
        try:
            addresses.add(ctypes.cast(owner.omp_get_max_threads, ctypes.c_void_p).value)
        except AttributeError:  # built without
            return False
    return len(addresses) == 1


_LIBRARY, _PROBLEM = _load_library(Path(__file__).parent)
_BEST = -1 if _LIBRARY is None else _LIBRARY.prefold_instruction_set()
# Asked once, and before ranks are forked: Linux grants tiles to a process and to those that it forks.
_HAS_TILES = _LIBRARY is not None and bool(_LIBRARY.prefold_has_tiles())


def problem() -> str:
    """Why there are no native kernels, what that costs, and what to do; empty if there are."""
    return _PROBLEM


def instruction_sets() -> tuple[str, ...]:
    """What this processor can run, best last; nothing if the library was not built."""
    return INSTRUCTION_SETS[: _BEST + 1]


def has_pairs() -> bool:
    """Whether kernels can multiply pairs of bfloat16 (AVX-512 BF16)."""
    return _LIBRARY is not None and bool(_LIBRARY.prefold_has_pairs())


def has_fast_pairs() -> bool:
    """Whether that is faster than to widen them: by the processor's vendor, never by a measurement, so that
    a machine gives the same tokens every time."""
    return _LIBRARY is not None and bool(_LIBRARY.prefold_has_fast_pairs())


def has_tiles() -> bool:
    """Whether kernels can multiply tiles of bfloat16 (AMX-BF16): the processor and the compiler know them,
    and the system grants them."""
    return has_pairs() and _HAS_TILES


def is_available() -> bool:
    """Whether callers may take native kernels; if not, `problem` says why."""
    return _LIBRARY is not None


def num_threads() -> int:
    """Threads that a kernel takes when it is called from this thread."""
    return 1 if _LIBRARY is None else _LIBRARY.prefold_num_threads()


class Recorder(Protocol):
    """Is told of every kernel that its thread calls (recording.py)."""

    is_paused: bool

    def note(self, name: str, function: int, arguments: tuple[Any, ...]) -> None: ...

    def note_python(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None: ...


RECORDER: ContextVar[Recorder | None] = ContextVar("RECORDER", default=None)


def declare(function: str, *argument_types: Any) -> Callable[..., None]:
    """The C function prefold_`function`(int instruction_set, ...), whose other arguments have ctypes'
    `argument_types`. It is called with one of `instruction_sets()`, or None: the best, and these."""
    if _LIBRARY is None:
        return _not_built
    found = getattr(_LIBRARY, f"prefold_{function}")
    found.argtypes, found.restype = (ctypes.c_int, *argument_types), None
    replayed = _address(f"prefold_replay_{function}")

    def call(instruction_set: str | None, *arguments: Any) -> None:
        number = _BEST if instruction_set is None else INSTRUCTION_SETS.index(instruction_set)
        assert number <= _BEST, instruction_set
        found(number, *arguments)
        recorder = RECORDER.get()
        if recorder is not None:
            recorder.note(function, replayed, (number, *arguments))

    return call


def _address(function: str) -> int:
    """Of a function of the library; 0 if there is none."""
    found = getattr(_LIBRARY, function, None)
    return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value or 0


def _not_built(*_: Any) -> None:
    raise AssertionError("callers ask is_available() first")


def structure(name: str, sizes: Sequence[str], pointers: Sequence[str]) -> type[ctypes.Structure]:
    """A C struct of int64_t `sizes`, then `pointers`."""
    fields = [(size, ctypes.c_int64) for size in sizes] + [(at, ctypes.c_void_p) for at in pointers]
    return type(name, (ctypes.Structure,), {"_fields_": fields})
