"""The tensors of a checkpoint as a model names them: a quantised weight and its scales are one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefold.checkpoint_files import TensorEntry
from prefold.quantization.formats import SCALE_DTYPES, Format
from prefold.quantization.scheme import ACTIVATION_SCALES, Scheme

PLAIN_DTYPES = ("F32", "BF16", "F16")
"""What a tensor that is not quantised may be stored as."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        shape: the logical one: [out, in] whatever the codes are packed in.
        parts: names of the tensors it is stored in: itself, or codes, scales and the global scale, if any.
        format: None if it is stored plain.
        problem: what keeps it from being read.
        is_quantized: whether it may stay in quantised form in memory.
        file: where its values are, for messages.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    format: Format | None = None
    problem: str | None = None
    is_quantized: bool = False
    file: str = field(default="", compare=False)


def catalog(entries: Mapping[str, TensorEntry], scheme: Scheme | None) -> dict[str, StoredTensor]:
    """All tensors by logical name. Scales of activations and of the KV cache are left out.

    A tensor that is stored plain is plain, whatever the scheme says: its dtype leaves no doubt, and
    published lists of exceptions are not complete. One that is stored quantised must follow the scheme.
    """
    quantised: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        module, _, last = name.rpartition(".")
        if scheme and last in ("weight", "weight_packed") and entry.dtype not in PLAIN_DTYPES:
            quantised[name] = _quantised(module, name, entries, scheme)
    taken = {part for tensor in quantised.values() for part in tensor.parts}
    found = {tensor.name: tensor for tensor in quantised.values()}
    for name, entry in entries.items():
        if name in taken or (scheme and name.rpartition(".")[2] in ACTIVATION_SCALES):
            continue
        known = entry.dtype in PLAIN_DTYPES
        found[name] = StoredTensor(
            name,
            entry.shape,
            (name,),
            problem=None if known else _foreign(name, entry),
            file=entry.file.name,
        )
    return found


def _foreign(name: str, entry: TensorEntry) -> str:
    return f"{name} is {entry.dtype}, not {', '.join(PLAIN_DTYPES)} or quantised in a supported format"


def _quantised(module: str, name: str, entries: Mapping[str, TensorEntry], scheme: Scheme) -> StoredTensor:
    """The tensor whose codes are in `name`."""
    entry, logical = entries[name], f"{module}.weight"
    format = scheme.format_of(module)
    if format is None:
        return StoredTensor(
            logical,
            entry.shape,
            (name,),
            problem=f"{name} is {entry.dtype}, but {scheme.method} targets do not include {module}",
            file=entry.file.name,
        )
    suffixes = [format.scales, *([format.global_scale] if format.global_scale else [])]
    scales = [f"{module}.{suffix}" for suffix in suffixes]
    parts = (name, *(scale for scale in scales if scale in entries))
    shape = format.logical_shape(entry.shape)
    problems = []
    if pattern := scheme.ignored_by(module):
        problems.append(f"{name} is {entry.dtype}, though {scheme.method} says {pattern!r} is not quantised")
    if entry.dtype != format.dtype or name != f"{module}.{format.values}" or len(shape) != 2:
        problems.append(
            f"{name} is {entry.dtype} {list(entry.shape)}, {format.name} needs {format.values} as "
            f"{format.dtype} of two dims"
        )
    else:
        wanted = (format.scale_shapes(shape), ((), (1,)))
        for scale, shapes in zip(scales, wanted, strict=False):
            problems += _scale_problems(scale, entries.get(scale), shapes, logical)
    problem = "; ".join(problems) or None
    return StoredTensor(logical, shape, parts, format, problem, True, entry.file.name)


def _scale_problems(
    name: str, entry: TensorEntry | None, shapes: tuple[tuple[int, ...], ...], weight: str
) -> list[str]:
    if entry is None:
        return [f"{weight} lacks {name}"]
    problems = []
    if entry.shape not in shapes:
        problems.append(f"{name} is {list(entry.shape)}, needs {' or '.join(str(list(s)) for s in shapes)}")
    if entry.dtype not in SCALE_DTYPES:
        problems.append(f"{name} is {entry.dtype}, not {', '.join(SCALE_DTYPES)}")
    return problems
