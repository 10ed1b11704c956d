"""Steps of few tokens: their layers are recorded twice, and replayed from then on (kernels.recording).

A step's own numbers lie in buffers: positions, slots, block tables, lengths. As long as these stay where they
are, two steps of one kind and of equally many tokens make the same calls of kernels. That is not taken for
granted: only where two recordings agree is a third step replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from prefold.kernels.recording import Recording, recording
from prefold.workspace import Workspace

MOST_TOKENS = 32
"""Of a step that is recorded: with more, Python takes a small part of it."""

MOST_RECORDINGS = 256
"""Kept at a time; each takes about 2 KB per layer."""

MOST_ATTEMPTS = 4
"""Recordings of one kind of step, of which no two in a row agree, until it is given up."""

logger = logging.getLogger(__name__)


@dataclass
class _Known:
    """What is known of one kind of step."""

    recording: Recording | None = None
    result: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    is_confirmed: bool = False
    attempts: int = 0


class StepReplay:
    """Runs the layers of steps; to be asked for each step on the same thread.

    Args:
        workspace: what is recorded reads and writes its buffers.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._generation = -1
        self._known: dict[Hashable, _Known] = {}
        self._kind: Hashable = None
        self.num_replayed = 0

    def begin_step(self, kind: Hashable) -> None:
        """The next step. `kind`: what its calls of kernels depend on, besides its number of tokens."""
        self._kind = kind

    def run_layers(self, layers: Callable[[], torch.Tensor], residual: torch.Tensor) -> torch.Tensor:
        """layers(), or what it would do. `residual` [num_tokens, hidden]: the stream that it works on."""
        if len(residual) > MOST_TOKENS:
            return layers()
        if self._generation != self._workspace.generation:
            self._known.clear()
            self._generation = self._workspace.generation
        known = self._find((len(residual), residual.data_ptr(), self._kind))
        if known.is_confirmed:
            assert known.recording is not None
            self.num_replayed += 1
            known.recording.replay()
            return known.result
        if known.attempts >= MOST_ATTEMPTS:
            return layers()
        return self._record(known, layers, len(residual))

    def _find(self, kind: Hashable) -> _Known:
        """What is known of a kind; of too many the one that was not needed for longest is forgotten."""
        known = self._known.pop(kind, None) or _Known()
        if len(self._known) >= MOST_RECORDINGS:
            del self._known[next(iter(self._known))]
        self._known[kind] = known
        return known

    def _record(self, known: _Known, layers: Callable[[], torch.Tensor], num_tokens: int) -> torch.Tensor:
        known.attempts += 1
        with recording() as made:
            result = layers()
        if made.foreign:
            known.attempts = MOST_ATTEMPTS
            logger.debug(
                "steps of %d tokens are not replayed: %s", num_tokens, ", ".join(sorted(made.foreign))
            )
            return result
        known.is_confirmed = known.recording is not None and made.same_as(known.recording)
        known.recording, known.result = made, result
        return result
