"""Who computes how many tokens in each step. Plain Python over plain data: it can be driven without a model.

Read in this order: `request`, `policy`, `queue`, `stop`, `step`, `scheduler`. Never imports torch.
"""
