"""The worker owns the weights and the KV cache memory and computes steps.

Read in this order: request_rows (what is kept of each request), input_batch (what one step gathers from it),
model_runner (one step), worker (loading and memory).
"""
