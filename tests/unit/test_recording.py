"""Recordings of kernels: a replay does what was done, with what lies in the same buffers then."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from prefold.kernels import dense, fp8, fused, native, recording, rows
from prefold.kernels.fp8 import FP8Rows
from prefold.kernels.recording import Recording, again, note_time
from prefold.kernels.rows import BlockRows
from prefold.workspace import Workspace

torch.set_num_threads(1)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def record(function: Callable[[], object]) -> Recording:
    with recording.recording() as made:
        function()
    return made


IDS, BF16 = torch.tensor([[1, 0], [2, 1], [0, 2]]), torch.bfloat16
ROWS = torch.tensor([2, 0, 1])
TABLES, LENGTHS = torch.tensor([0, 1, 1]), torch.tensor([3, 8, 0])

KERNELS: dict[str, tuple[Callable[..., object], list[torch.Tensor]]] = {
    "normalise": (lambda x, w, out: fused.rms_norm(x, w, 1e-6, out), [random(3, 9), random(9), random(3, 9)]),
    "rotate": (
        lambda x, angles, out: fused.rotate(x, angles, out, True),
        [random(3, 2, 8), random(3, 8), random(3, 2, 8)],
    ),
    "gate": (fused.gate_, [random(3, 20)]),
    "copy_rows": (
        lambda x, out: fused.copy_rows(x, out, ROWS),
        [random(3, 9), random(3, 9, dtype=BF16)],
    ),
    "scale_add": (lambda x, bias: fused.scale_add_(x, 0.75, bias), [random(3, 9), random(9)]),
    "score": (fused.score, [random(3, 9), random(5, 9), random(3, 5)]),
    "route": (
        lambda logits, weights, ids: fused.route(logits, None, weights, ids, True, (1, 1, False), True, 1.5),
        [random(3, 5), random(3, 2), IDS.clone()],
    ),
    "experts": (
        lambda out, x, w, gate_up, down: fused.experts_(out, x, w, IDS, 0, gate_up, down),
        [random(3, 8), random(3, 8), random(3, 2), random(3, 12, 8, dtype=BF16), random(3, 8, 6, dtype=BF16)],
    ),
    "gated_mlp": (
        fused.gated_mlp,
        [random(3, 8), random(12, 8, dtype=BF16), random(8, 6, dtype=BF16), random(3, 8)],
    ),
    "linear": (native.linear, [random(2, 3, 8), random(2, 5, 8, dtype=BF16), random(2, 3, 5)]),
    "combine": (native.combine, [random(2, 3, 8), random(2, 8, 5, dtype=BF16), random(2, 3, 5)]),
    "multiply": (native.multiply, [random(30, 8), random(5, 8, dtype=BF16), random(30, 5)]),
    "attend_rows": (
        lambda q, cache, blocks, out, lse: rows.attend(
            q, BlockRows(blocks, TABLES, LENGTHS, 4), cache, 0.5, out, lse
        ),
        [random(3, 2, 8), random(16, 8), torch.tensor([[2, 0], [1, 3]]), random(3, 2, 8), random(3, 2)],
    ),
    "fp8_encode": (
        lambda x, out: fp8.encode(FP8Rows(1, 8, 4), x, out),
        [random(3, 12), torch.zeros(3, 32, dtype=torch.uint8)],
    ),
}
"""A call of each kernel that decode steps need, and its tensors."""


def changed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Other contents: rows and columns the other way round, so that indices stay in their limits."""
    return [tensor.flip(list(range(tensor.ndim))) for tensor in tensors]


@pytest.mark.parametrize("name", KERNELS)
def test_a_replay_computes_what_the_call_would(name: str) -> None:
    call, tensors = KERNELS[name]
    made = record(lambda: call(*tensors))
    assert made.foreign == set()
    for _ in range(2):
        expected = changed(tensors)
        for tensor, contents in zip(tensors, expected, strict=True):
            tensor.copy_(contents)
        call(*expected)
        made.replay()
        for tensor, right in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, right)


def test_what_torch_does_is_noted_except_views() -> None:
    x, out = random(4, 6), random(4, 6)
    with torch.inference_mode():
        assert record(lambda: x[1:3].view(3, 4).t().transpose(0, 1).unflatten(0, (1, 3))).foreign == set()
        assert (
            record(lambda: [x.flatten(), x.reshape(-1), x.contiguous(), x.float(), x.split(2)]).foreign
            == set()
        )
        assert record(lambda: fused.convert(x[:, 2:], out[:, 2:])).foreign == set()
        for operation, name in (
            (lambda: x + 1, "aten.add.Tensor"),
            (lambda: x.add_(1), "aten.add_.Tensor"),
            (lambda: x.copy_(out), "aten.copy_.default"),
            (lambda: torch.mm(x, out.t()), "aten.mm.default"),
            (lambda: x.sum().item(), "aten.sum.default"),
            (lambda: out[0, 0].item(), "aten.item.default"),
            (lambda: x.t().reshape(-1), "aten.reshape.default"),
            (lambda: x.t().flatten(), "aten.flatten.using_ints"),
            (lambda: x.bfloat16(), "aten.to.dtype"),
            (lambda: Workspace().get("new", (2,), torch.float32), "aten.empty.memory_format"),
            (lambda: x.t().contiguous(), "aten.contiguous.default"),
        ):
            assert name in record(operation).foreign


def test_kernels_without_a_replay_are_noted() -> None:
    q = random(1, 2, 4, 8)
    with_names = record(lambda: dense.select_(IDS, 0, torch.zeros(3, 1, dtype=torch.int64))).foreign
    assert "select_keys" in with_names, q.shape


def test_python_between_kernels_is_called_again_in_its_place() -> None:
    """By itself: kernels and torch within it are not part of the recording."""
    x, total, calls = random(3, 9), torch.zeros(3, 9), []

    def add(part: torch.Tensor) -> torch.Tensor:
        calls.append(part.sum().item())
        fused.scale_add_(part, 1.0)
        return total.add_(part)

    def compute() -> None:
        fused.scale_add_(x, 2.0)
        assert again(add, x) is total
        fused.scale_add_(x, 0.5)
        again(add, x)

    made = record(compute)
    assert made.foreign == set()
    before, sums = total.clone(), list(calls)
    x.copy_(random(3, 9))
    made.replay()
    torch.testing.assert_close(total, before + 3 * x)
    assert calls == [*sums, pytest.approx(2 * x.sum().item()), pytest.approx(x.sum().item())]
    assert again(add, x) is total, "and without a recording just called"


def test_recordings_differ_by_whatever_a_replay_would_repeat() -> None:
    x, other, cache = random(4, 8), random(4, 8), random(32, 8)
    out, lse, blocks = random(4, 1, 8), random(4, 1), torch.tensor([[2, 0], [1, 3]])
    tables, lengths = torch.tensor([0, 1, 0, 1]), torch.tensor([3, 8, 1, 2])

    def attend(block_size: int) -> Recording:
        keys = BlockRows(blocks, tables, lengths, block_size)
        return record(lambda: rows.attend(x[:, None], keys, cache, 0.5, out, lse))

    def scale(x: torch.Tensor, factor: float) -> Recording:
        return record(lambda: fused.scale_add_(x, factor))

    def summed(x: torch.Tensor) -> Recording:
        return record(lambda: again(torch.Tensor.zero_, x))

    assert scale(x, 2.0).same_as(scale(x, 2.0))
    assert not scale(x, 2.0).same_as(scale(x, 3.0))
    assert not scale(x, 2.0).same_as(scale(other, 2.0))
    assert not scale(x, 2.0).same_as(scale(x[:3], 2.0))
    assert attend(4).same_as(attend(4)), "structures are compared by contents"
    assert not attend(4).same_as(attend(8))
    assert summed(x).same_as(summed(x))
    assert not summed(x).same_as(summed(other))
    assert not summed(x).same_as(summed(x[:2]))
    assert not summed(x).same_as(record(lambda: again(torch.Tensor.sigmoid_, x)))
    assert not summed(x).same_as(record(lambda: None))


def test_a_recording_is_its_threads_own_and_ends_with_an_error() -> None:
    x = random(3, 9)
    with recording.recording() as made:
        other = threading.Thread(target=lambda: fused.scale_add_(x, 2.0))
        other.start()
        other.join()
    assert made.same_as(Recording())
    with pytest.raises(ZeroDivisionError), recording.recording() as made:
        again(lambda: 1 // 0)
    assert not made.is_paused
    fused.scale_add_(x, 2.0)
    x.add_(1)
    assert made.foreign == set()


def test_the_first_recording_does_not_import_torchs_compiler() -> None:
    program = (
        "import sys, torch; from prefold.kernels import recording\n"
        "with recording.recording() as made: torch.ones(2) + 1\n"
        "assert made.foreign; print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False False\n"


def test_times_are_those_of_the_replay() -> None:
    times = torch.zeros(3, dtype=torch.float64)
    made = record(lambda: [note_time(times, i) for i in range(3)])
    first = times.tolist()
    made.replay()
    second = times.tolist()
    assert first == sorted(first)
    assert second == sorted(second)
    assert 0 <= second[0] - first[2] < 10
