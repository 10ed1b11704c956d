"""What ranks need of memory, from their configuration alone. No torch, nothing is allocated."""

from prefold.memory.plan import MemoryPlan, RankMemory, plan_memory, plan_workspace

__all__ = ["MemoryPlan", "RankMemory", "plan_memory", "plan_workspace"]
