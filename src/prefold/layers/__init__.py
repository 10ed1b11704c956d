"""Building blocks of models: they own parameters and no KV, and know nothing of the batch."""
