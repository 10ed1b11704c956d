"""Tools for tests of Prefold and of programs that use it: tiny checkpoints, ranks, oracles."""
