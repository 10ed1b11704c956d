"""A rank's place in the pipeline: hidden states from the stage before, and on to the one after.

Stages run the same steps in the same order, each as soon as its input is there. A send returns before
the next stage has asked for it, so that a stage computes the next step meanwhile.
"""

from __future__ import annotations

import torch

from prefold.distributed.group import Group
from prefold.workspace import Workspace


class PipelineStage:
    """Passes one tensor per step, [tokens of this rank, hidden_size], the residual stream.

    Ranks at the same place of the PCP x TP plane are neighbours: they have the same tokens.

    Args:
        group: "pp" group of this rank; its place there is the stage.
        dtype: compute dtype.
    """

    def __init__(self, group: Group, hidden_size: int, dtype: torch.dtype, workspace: Workspace) -> None:
        self._group = group
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._workspace = workspace
        self.is_first = group.rank == 0
        self.is_last = group.rank == group.size - 1

    def receive(self, num_tokens: int) -> torch.Tensor | None:
        """What the previous stage sent: a buffer that may be overwritten. None on the first stage."""
        if self.is_first:
            return None
        hidden = self._workspace.get("pipeline.hidden", (num_tokens, self._hidden_size), self._dtype)
        return self._group.recv(hidden, self._group.rank - 1)

    def send(self, hidden: torch.Tensor) -> None:
        """Give hidden [num_tokens, hidden_size] to the next stage; nothing on the last. `hidden` may be
        overwritten afterwards."""
        if not self.is_last:
            self._group.send(hidden, self._group.rank + 1)
