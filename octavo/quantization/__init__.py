"""Weights in few bits: which tensors are kept so (`forms`), how they are made (`groups`, `blocks`), read and cut.

Everything here speaks `QuantizedMatrix` of `ops.interface`; what a platform makes of it is its own matter.
"""
