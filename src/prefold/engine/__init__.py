"""Requests in, steps planned, outputs out. No torch: only `executor` knows what computes."""
