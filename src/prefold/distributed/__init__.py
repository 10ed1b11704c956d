"""Ranks: where they sit (`mesh`), what each computes (`pcp_layout`), how they talk (`group`)."""
