"""Engines that `octavo bench compare` measures, each in a process of its own, maybe of another environment.

A rival is a script: `python SCRIPT OPTIONS_AS_JSON`. It loads, writes a line of JSON {version, load}, and answers each
line {requests [[token ids, output tokens], ...], batch_size} with a line {seconds, output_tokens, latencies,
between_tokens, kv_utilization, peak_rss}: seconds, and bytes. Full output lengths are computed. What else a library
prints must not reach stdout. A rival other than this engine uses nothing of this package.
"""
