"""From logits to token ids: processors, filters, the draw, and log-probabilities."""
