"""The base of all layers."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A module without hooks whose parameters and parts are plain attributes.

    A decode step calls a hundred modules, after weights that have left nothing else in the caches: what torch
    does around a call, and its search for parameters, which are no attributes, took 6 % of such a step.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)
