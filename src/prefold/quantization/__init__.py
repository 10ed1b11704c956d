"""Quantised checkpoints: which formats there are, which tensor has which, and their values as floats.

No parameters live here: the loader takes tensors, or parts of them, from these descriptions.
"""
