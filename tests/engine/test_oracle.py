"""Token-identical greedy output against transformers, in float32.

Each greedy output is checked in one forward of the oracle over prompt and output: every token must be the oracle's
most probable one, or within a near-tie (gap under 1e-3) of it. That is the same as comparing with the oracle's own
greedy run, except that a near-tie does not end the comparison.
"""

import pytest
import torch
from tiny_models import LLAMA, QWEN2, write_model

from octavo import LLM, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in the year 1984,",
    "1 2 3 4 5 6 7",
    "Die Straße über den Fluß",
    "日本の首都は",
    "x",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And the Spirit of God moved upon the face of the waters.",
]
NEAR_TIE = 1e-3


def check_greedy(oracle, outputs) -> None:
    for output in outputs:
        prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1].double()
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
        assert gaps.max() < NEAR_TIE, f"{output.prompt!r}: token {int(gaps.argmax())} is off by {gaps.max():.4f}"


def check_logprobs(oracle, outputs) -> None:
    """Whole-vocabulary log-probabilities within 1e-3, relative to their size."""
    for output in outputs:
        prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        for expected, entry in zip(logits.log_softmax(-1), output.outputs[0].logprobs, strict=True):
            mine = torch.tensor([entry[i].logprob for i in range(len(expected))])
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)


VARIANTS = {
    "llama": (LLAMA, {}),
    "llama tied": (LLAMA, {"tie_word_embeddings": True}),
    "llama with biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama with its own head_dim": (LLAMA, {"head_dim": 24}),
    "llama3 rope": (LLAMA, {"rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "linear rope, old spelling": (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "yarn rope": (LLAMA, {"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
    "mistral with a window": (LLAMA, {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}),
    "qwen2": (QWEN2, {}),
    "qwen2 untied": (QWEN2, {"tie_word_embeddings": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_tiny_models_give_the_oracles_tokens_and_logprobs(tmp_path, name):
    from transformers import AutoModelForCausalLM

    config, overrides = VARIANTS[name]
    path = write_model(tmp_path, config, **overrides)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=-1)
    options = {"dtype": "float32", "num_kv_blocks": 256, "disable_log_stats": True}
    with LLM(str(path), **options) as whole, LLM(str(path), max_num_batched_tokens=7, **options) as chunked:
        for llm in (whole, chunked):
            for _ in range(2):  # the second time from the prefix cache
                outputs = llm.generate(PROMPTS, params)
                check_greedy(oracle, outputs)
                check_logprobs(oracle, outputs)
        assert sum(out.num_cached_tokens for out in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen05"])
def test_real_weights_give_the_oracles_tokens(model_path, name):
    from transformers import AutoModelForCausalLM

    path = model_path(name)
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with LLM(
        str(path), dtype="float32", max_model_len=1024, kv_cache_memory="256MiB", max_num_batched_tokens=32
    ) as llm:
        check_greedy(oracle, llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)))
        cached = llm.generate(PROMPTS[-1:], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1))
        assert cached[0].num_cached_tokens > 0
        check_logprobs(oracle, cached)
