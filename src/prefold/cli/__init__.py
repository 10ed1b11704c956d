"""The `prefold` command: arguments, progress and printing. Everything else is somewhere else."""
