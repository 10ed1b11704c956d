"""Rewriting checkpoints: any Llama-type checkpoint as an exactly equal MLA checkpoint."""

from prefold.convert.convert import convert

__all__ = ["convert"]
