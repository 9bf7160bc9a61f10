"""Random schedules: requests, their arrivals and ends, and engines with little room. For the exactness tests."""

from engine_driver import ScriptedRequest
from hypothesis import strategies as st
from tiny_models import EOS, VOCAB_SIZE

from octavo import SamplingParams


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts that often share a beginning, of lengths around the block sizes."""
    shared = [(37 * i + 11) % 250 for i in range(64)]
    tokens = st.integers(0, VOCAB_SIZE - 1)
    fresh = st.lists(tokens, min_size=1, max_size=40)
    common = st.tuples(st.integers(0, 64), st.lists(tokens, min_size=1, max_size=10)).map(
        lambda pair: shared[: pair[0]] + pair[1]
    )
    return st.one_of(fresh, common, common).map(tuple)


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        top_k=st.sampled_from([0, 0, 5]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 50),
        ignore_eos=st.sampled_from([True, True, False]),
        logprobs=st.sampled_from([None, 0, 3]),
    )


def rich_sampling_params() -> st.SearchStrategy[SamplingParams]:
    """Everything that changes which tokens come, and what is told about them."""
    letters = st.sampled_from([[], ["e"], ["a", "th"], ["\n"]])
    return st.builds(
        SamplingParams,
        n=st.sampled_from([1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 0.8, 1.2]),
        top_k=st.sampled_from([0, 20]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(4, 40),
        min_tokens=st.integers(0, 4),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
        logit_bias=st.sampled_from([None, None, {65: 5.0, EOS: 3.0}]),
        bad_words=st.sampled_from([None, None, ["a", "zz"]]),
        allowed_token_ids=st.sampled_from([None, None, None, [*range(40, 120), EOS]]),
        stop=letters,
        stop_token_ids=st.sampled_from([[], [70, 71]]),
        include_stop_str_in_output=st.booleans(),
        logprobs=st.sampled_from([None, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        logprobs_mode=st.sampled_from([None, "processed_logprobs", "raw_logits"]),
    )


def scripts(params: st.SearchStrategy[SamplingParams]) -> st.SearchStrategy[list[ScriptedRequest]]:
    return st.lists(
        st.builds(
            ScriptedRequest,
            prompt=prompts(),
            params=params,
            arrival=st.integers(0, 6),
            abort=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 40)),
            priority=st.integers(-2, 2),
            cache_salt=st.sampled_from([None, None, "a"]),
            tenant=st.sampled_from([None, "a", "b"]),
        ),
        min_size=2,
        max_size=8,
    )


@st.composite
def engine_options(draw) -> dict:
    block_size = draw(st.sampled_from([8, 16, 32]))
    chunked = draw(st.booleans())
    pool_tokens = draw(st.sampled_from([128, 128, 160, 512]))
    return {
        "block_size": block_size,
        "num_kv_blocks": pool_tokens // block_size,
        "enable_prefix_caching": draw(st.booleans()),
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": draw(st.integers(1, 64)) if chunked else 512,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])) if chunked else 0,
        "max_num_seqs": draw(st.integers(2, 8)),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "fair_share": draw(st.booleans()),
    }
