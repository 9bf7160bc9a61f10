"""The worker owns the weights and the KV cache memory and computes steps.

Read in this order: request_rows (what is kept of each request), input_batch, sampling_inputs (what one step gathers
from it), model_runner (one step; prompt_embeds and prompt_logprobs are parts of it), worker (loading and memory).
"""
