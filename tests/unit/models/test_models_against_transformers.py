"""Whole models against transformers on the same random weights: prefill at once, in chunks, decode, ragged batches."""

import threading

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from octavo.config.engine_config import ParallelConfig

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama attention bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "llama mlp bias": (LlamaForCausalLM, LlamaConfig, {"mlp_bias": True}),
    "llama wide heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 20}),
    "llama one kv head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama no grouping": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama llama3 rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "mistral window": (MistralForCausalLM, MistralConfig, {"sliding_window": 11}),
    "mistral no window": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 12}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2 untied": (Qwen2ForCausalLM, Qwen2Config, {}),
}


def make_oracle(name, tiny):
    model_class, config_class, changes = MODELS[name]
    oracle = model_class(config_class(**(SIZES | changes))).eval()
    tiny.randomize(oracle)
    return oracle


def tensors_of(oracle):
    tensors = dict(oracle.state_dict())
    if oracle.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


@pytest.fixture(params=list(MODELS))
def pair(request, tiny):
    """(driver of our model, function from token ids to the oracle's logits [n, vocab])."""
    oracle = make_oracle(request.param, tiny)
    model = tiny.build(tiny.model_config(oracle.config), tensors_of(oracle))
    return tiny.Driver(model), logits_of(oracle)


def logits_of(oracle):
    def logits(tokens):
        with torch.inference_mode():
            return oracle(torch.tensor([tokens]), use_cache=False).logits[0]

    return logits


def prompt(length, seed=0):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(got, expected, relative=1e-4):
    """The promise is 1e-3 of the largest logit; rounding alone stays well below."""
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() <= relative * expected.abs().max()


def test_prefill_in_one_go(pair):
    driver, oracle = pair
    tokens = prompt(45)
    assert_close(driver.step({"a": tokens})["a"], oracle(tokens))


def test_prefill_in_chunks_that_cut_blocks(pair):
    driver, oracle = pair
    tokens = prompt(45)
    parts = [driver.step({"a": tokens[i:j]})["a"] for i, j in ((0, 5), (5, 6), (6, 30), (30, 45))]
    assert_close(torch.cat(parts), oracle(tokens))


def test_decode_from_the_cache_token_by_token(pair):
    driver, oracle = pair
    tokens = prompt(40)
    parts = [driver.step({"a": tokens[:17]})["a"]] + [driver.step({"a": [token]})["a"] for token in tokens[17:]]
    assert_close(torch.cat(parts), oracle(tokens))


def test_a_ragged_batch_of_chunks_and_decodes(pair):
    driver, oracle = pair
    tokens = {name: prompt(length, seed) for seed, (name, length) in enumerate((("a", 41), ("b", 9), ("c", 30)))}
    schedule = [{"a": 20}, {"a": 1, "b": 7}, {"c": 13, "a": 19}, {"b": 1, "a": 1, "c": 16}, {"c": 1, "b": 1}]
    done = dict.fromkeys(tokens, 0)
    parts = {name: [] for name in tokens}
    for work in schedule:
        out = driver.step({name: tokens[name][done[name] : done[name] + n] for name, n in work.items()})
        for name, n in work.items():
            done[name] += n
            parts[name].append(out[name])
    assert done == {name: len(ids) for name, ids in tokens.items()}
    for name, ids in tokens.items():
        assert_close(torch.cat(parts[name]), oracle(ids))


def test_a_prefix_shared_by_block_table_is_the_prefix_computed_again(pair):
    driver, oracle = pair
    tokens = prompt(37)
    driver.step({"a": tokens})
    driver.blocks["b"], driver.computed["b"] = driver.blocks["a"][:3], 24
    other = [*tokens[:24], *prompt(10, seed=5)]
    assert_close(driver.step({"b": other[24:]})["b"], oracle(other)[24:])


def test_the_sliding_window_matters(tiny):
    oracle = make_oracle("mistral window", tiny)
    config = tiny.model_config(oracle.config, sliding_window=None)
    logits = tiny.Driver(tiny.build(config, tensors_of(oracle))).step({"a": prompt(30)})["a"]
    expected = logits_of(oracle)(prompt(30))
    assert_close(logits[:11], expected[:11])
    assert (logits[11:] - expected[11:]).abs().max() > 0.05 * expected.abs().max()


def test_a_tied_checkpoint_with_a_head_of_its_own_uses_that_head(tiny):
    oracle = make_oracle("llama", tiny)
    config = tiny.model_config(oracle.config, tie_word_embeddings=True)
    tokens = prompt(20)
    logits = tiny.Driver(tiny.build(config, tensors_of(oracle))).step({"a": tokens})["a"]
    assert_close(logits, logits_of(oracle)(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_stay_near_the_oracle(tiny, dtype):
    oracle = make_oracle("llama", tiny)
    model = tiny.build(tiny.model_config(oracle.config), tensors_of(oracle), dtype=dtype)
    tokens = prompt(30)
    expected = logits_of(oracle)(tokens)
    error = (tiny.Driver(model).step({"a": tokens})["a"] - expected).norm() / expected.norm()
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02)


class ThreadGroup:
    """Ranks as threads of one process that meet at every exchange."""

    def __init__(self, size):
        self.parts = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def of_rank(self, rank):
        return _Member(self, rank)


class _Member:
    def __init__(self, group, rank):
        self.group, self.rank = group, rank

    def _exchange(self, x, join):
        self.group.parts[self.rank] = x
        self.group.barrier.wait()
        out = join(list(self.group.parts))
        self.group.barrier.wait()
        return out

    def all_reduce(self, x):
        return self._exchange(x, lambda parts: sum(parts[1:], start=parts[0]))

    def all_gather(self, x):
        return self._exchange(x, lambda parts: torch.cat(parts, dim=-1))


@pytest.mark.parametrize("name", ["llama attention bias", "llama mlp bias", "llama one kv head", "qwen2"])
def test_two_shards_together_are_the_whole_model(tiny, name):
    oracle = make_oracle(name, tiny)
    group = ThreadGroup(2)
    tokens, results = prompt(25), {}

    def run(rank):
        parallel = ParallelConfig(tensor_parallel_size=2, tensor_parallel_rank=rank)
        config = tiny.model_config(oracle.config)
        driver = tiny.Driver(tiny.build(config, tensors_of(oracle), parallel, group.of_rank(rank)))
        results[rank] = torch.cat((driver.step({"a": tokens[:24]})["a"], driver.step({"a": tokens[24:]})["a"]))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(results[0], results[1])
    assert_close(results[0], logits_of(oracle)(tokens))
