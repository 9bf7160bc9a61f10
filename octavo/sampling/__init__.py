"""From logits to tokens: what changes the logits of a row, per-request random streams, the draw, log-probabilities.

Read sampler.py first: it is the order in which everything happens. A row whose request asks for none of it costs
nothing in penalties, token_rules and logits_processors; and a row is never a function of anything but itself.
"""
