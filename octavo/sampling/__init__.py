"""From logits to tokens: per-request random streams, the sampler and log-probabilities."""
