"""Paged attention against attention written out in float64, query by query and head by head, over unpaged K and V."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.interface import AttentionMetadata, KVCache
from octavo.ops.reference import ReferencePlatform, attention

P = ReferencePlatform()
quick = settings(max_examples=40, deadline=None)


@dataclass
class Case:
    """A ragged batch: requests of (tokens already stored, tokens of this step), with K and V of every token."""

    lengths: list[tuple[int, int]]
    block_size: int
    num_kv_heads: int
    group: int
    dk: int
    dv: int
    seed: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        self.num_heads = self.num_kv_heads * self.group
        self.q = self.draw(sum(new for _, new in self.lengths), self.num_heads, self.dk)
        totals = [old + new for old, new in self.lengths]
        self.keys = [self.draw(n, self.num_kv_heads, self.dk) for n in totals]
        self.values = [self.draw(n, self.num_kv_heads, self.dv) for n in totals]
        self.scale = 1 / math.sqrt(self.dk)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def paged(self, fill=float("nan")):
        """The cache, with blocks in shuffled order and `fill` in every slot that holds no token."""
        counts = [-(-len(k) // self.block_size) for k in self.keys]
        free = torch.randperm(sum(counts) + 3, generator=self.generator).tolist()
        shape = (len(free), self.block_size, self.num_kv_heads)
        k_cache = torch.full((*shape, self.dk), fill, dtype=self.dtype)
        v_cache = torch.full((*shape, self.dv), fill, dtype=self.dtype)
        # What lies beyond a request's blocks must not be read: no valid block is there.
        tables = torch.full((len(counts), max(counts) + 2), 2**30, dtype=torch.int32)
        for row, (count, k, v) in enumerate(zip(counts, self.keys, self.values, strict=True)):
            for index in range(count):
                block = free.pop()
                tables[row, index] = block
                part = slice(index * self.block_size, (index + 1) * self.block_size)
                k_cache[block, : len(k[part])] = k[part]
                v_cache[block, : len(v[part])] = v[part]
        new = torch.tensor([0] + [n for _, n in self.lengths])
        seq_lens = torch.tensor([len(k) for k in self.keys], dtype=torch.int32)
        metadata = AttentionMetadata(tables, new.cumsum(0).int(), seq_lens, torch.zeros(0, dtype=torch.int64))
        return KVCache(k_cache, v_cache), metadata

    def run(self, fill=float("nan"), **options):
        cache, metadata = self.paged(fill)
        return P.paged_attention(self.q, cache, metadata, self.scale, **options)

    def dense(self, sliding_window=None, soft_cap=None, sinks=None):
        """The same by the definition, float64."""
        out = []
        for (old, new), k, v in zip(self.lengths, self.keys, self.values, strict=True):
            for position in range(old, old + new):
                query = self.q[len(out)].double()
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                visible = slice(first, position + 1)
                out.append([self.one_head(query, k[visible], v[visible], h, soft_cap, sinks) for h in self.heads()])
        return torch.stack([torch.stack(row) for row in out])

    def heads(self):
        return range(self.num_heads)

    def one_head(self, query, k, v, head, soft_cap, sinks):
        kv_head = head // self.group
        scores = k[:, kv_head].double() @ query[head] * self.scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.exp()
        denominator = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
        return (weights.unsqueeze(1) * v[:, kv_head].double()).sum(0) / denominator


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dk, dv = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return Case(lengths, draw(st.sampled_from([1, 4, 8, 16])), kv_heads, group, dk, dv, draw(st.integers(0, 2**31)))


def assert_close(got, expected, tolerance=2e-5):
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@quick
@given(cases())
def test_paged_attention_is_dense_attention_for_any_mix_of_prefill_chunks_and_decodes(case):
    assert_close(case.run(), case.dense())


@quick
@given(cases(), st.integers(1, 30))
def test_a_sliding_window_sees_the_token_itself_and_the_ones_just_before(case, window):
    assert_close(case.run(sliding_window=window), case.dense(sliding_window=window))


@quick
@given(cases(), st.sampled_from([0.5, 5.0, 50.0]), st.integers(1, 30))
def test_soft_cap_and_window_together(case, cap, window):
    options = {"soft_cap": cap, "sliding_window": window}
    assert_close(case.run(**options), case.dense(**options))


@quick
@given(cases(), st.sampled_from([None, 7]))
def test_sinks_take_part_in_the_denominator_only(case, window):
    sinks = torch.linspace(-2, 3, case.num_heads)
    assert_close(case.run(sinks=sinks, sliding_window=window), case.dense(sinks=sinks, sliding_window=window))


@quick
@given(cases(), st.sampled_from([None, 5]))
def test_slots_that_hold_no_token_change_not_one_bit(case, window):
    first, *others = (case.run(fill, sliding_window=window) for fill in (0.0, float("nan"), float("inf"), 1e30))
    assert all(torch.equal(first, other) for other in others)


@quick
@given(cases(), st.sampled_from([1, 3, 7]))
def test_queries_computed_in_chunks_give_what_they_give_at_once(case, chunk):
    whole = case.run(sliding_window=11)
    before, attention._QUERY_CHUNK = attention._QUERY_CHUNK, chunk
    try:
        assert_close(case.run(sliding_window=11), whole.double())
    finally:
        attention._QUERY_CHUNK = before


def test_the_workspace_limit_splits_long_prompts_without_changing_them(monkeypatch):
    case = Case([(10, 60)], 8, 2, 2, 4, 4, 0)
    whole = case.run()
    monkeypatch.setattr(attention, "MAX_SCORES", 1)
    assert_close(case.run(), whole.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_caches_lose_only_the_rounding_of_the_result(dtype):
    case = Case([(30, 1), (0, 12)], 8, 2, 2, 8, 6, 0, dtype)
    out = case.run()
    assert out.dtype == dtype
    assert_close(out, case.dense(), 1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_a_request_with_no_tokens_in_this_step_and_padding_rows_are_left_out():
    case = Case([(5, 2), (8, 1)], 4, 1, 2, 4, 4, 0)
    cache, metadata = case.paged()
    tables = metadata.block_tables[[0, 0, 1]]
    starts, seq_lens = torch.tensor([0, 2, 2, 3]).int(), torch.tensor([7, 7, 9]).int()
    q = torch.cat((case.q, torch.full((2, 2, 4), float("nan"))))
    out = P.paged_attention(q, cache, AttentionMetadata(tables, starts, seq_lens, metadata.slot_mapping), case.scale)
    assert_close(out[:3], case.dense())
    assert torch.equal(out[3:], torch.zeros(2, 2, 4))


def test_large_scores_do_not_overflow():
    case = Case([(9, 3)], 4, 1, 1, 4, 4, 0)
    case.q = case.q * 1e4
    assert bool(case.run().isfinite().all())
