"""The building blocks of a model. Plain classes over the platform's operators: no global state, no torch.nn.Module.

A layer offers `slots(prefix)`, one `WeightSlot` a checkpoint tensor, and `finish()`, to be called once all are filled.
"""
