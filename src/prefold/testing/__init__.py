"""Tools for tests of Prefold and of programs that use it: tiny checkpoints, ranks, oracles.

Nothing is imported here: what needs no torch (model_config) is to come without it.
"""
