"""Paged KV cache bookkeeping: which request holds which block, and which blocks can be found again by their content.

Read in this order: `block`, `free_list`, `block_hash`, `extra_keys`, `block_pool`, `prompt_hold`, `manager`. Never
imports torch: the tensors behind the block ids belong to the worker. At every moment each block is in exactly one
state, and they sum to the pool:

    in use   held by at least one request, or for samples of one (a shared block counts once)
    cached   held by nobody, findable by its content, evicted when memory is needed
    free     held by nobody, holds nothing
"""
