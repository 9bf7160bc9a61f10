"""Who computes how many tokens in each step. Plain Python over plain data: it can be driven without a model.

Read in this order: `request`, `policy`, `queue`, `stop`, `journal`, `step`, `sample_group`, `admission`, `fair_share`,
`scheduler`.
Never imports torch.
"""
