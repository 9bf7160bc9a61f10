"""Small inputs on which engines of this kind have gone wrong, and what must come out."""

import itertools
import logging
import random

import pytest
import torch
from engine_driver import ScriptedRequest, run_script, shuffle_blocks
from tiny_models import EOS, LLAMA, VOCAB_SIZE, random_weights, write_model

from octavo import SamplingParams


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **fields})


def test_a_hit_never_covers_the_whole_prompt(make_llm):
    llm = make_llm(block_size=16)
    prompt = list(range(32))
    first, second = (llm.generate(prompt, greedy(8, logprobs=3))[0] for _ in range(2))
    assert second.num_cached_tokens == 16
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    for one, other in zip(first.outputs[0].logprobs, second.outputs[0].logprobs, strict=True):
        assert one.keys() == other.keys()
        assert all(one[i].logprob == pytest.approx(other[i].logprob, abs=1e-4) for i in one)


def test_a_short_prompt_preempted_many_times_gives_the_same_tokens(make_llm):
    prompts = [(5, 6, 7 + i) for i in range(5)]
    roomy = make_llm(max_model_len=256, num_kv_blocks=128)
    expected = [out.outputs[0].token_ids for out in roomy.generate([list(p) for p in prompts], greedy(200))]
    tight = make_llm(max_model_len=256, num_kv_blocks=26, block_size=8)
    shuffle_blocks(tight, 1)
    run = run_script(tight, [ScriptedRequest(prompt=p, params=greedy(200)) for p in prompts])
    assert run.num_preemptions >= 3
    assert [out.outputs[0].token_ids for out in run.outputs] == expected
    assert sum(out.metrics.num_preemptions for out in run.outputs) == run.num_preemptions


def test_a_long_request_beside_short_decoders_does_not_thrash(make_llm):
    llm = make_llm(max_model_len=400, num_kv_blocks=42, block_size=8)
    script = [ScriptedRequest(prompt=tuple(range(200)), params=greedy(100))] + [
        ScriptedRequest(prompt=(i, i + 1), params=greedy(60), arrival=i) for i in range(1, 7)
    ]
    run = run_script(llm, script, max_steps=2000)
    assert all(out.outputs[0].finish_reason == "length" for out in run.outputs)
    assert run.num_preemptions <= 3 * len(script)


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_nobody_waits(make_llm):
    llm = make_llm(num_kv_blocks=20, block_size=16, max_model_len=512)
    engine = llm.llm_engine
    engine.add_request("running", [1, 2, 3], greedy(20))
    engine.step()
    with pytest.raises(ValueError, match=r"322.*320"):
        engine.add_request("too long", [1] * 322, greedy(5))
    engine.add_request("behind", [4] * (19 * 16 - 30), greedy(3))
    done = set()
    while engine.has_unfinished_requests():
        done |= {out.request_id for out in engine.step() if out.finished}
    assert done == {"running", "behind"}
    assert llm.generate([1] * (19 * 16), greedy(5))[0].finished


def test_a_storm_of_aborts_and_refusals_returns_every_block(make_llm):
    llm = make_llm(num_kv_blocks=40, block_size=8, max_num_seqs=16, max_num_batched_tokens=32)
    shuffle_blocks(llm, 5)
    draw = random.Random(0)
    engine = llm.llm_engine
    started = ended = 0
    while started < 200 or engine.has_unfinished_requests():
        for _ in range(draw.randrange(4)):
            prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 9, 60, 400]))]
            if started < 200:
                started += 1
                try:
                    engine.add_request(str(started), prompt, greedy(draw.randrange(1, 30)))
                except ValueError:
                    assert len(prompt) == 400
                    ended += 1
        ended += sum(out.finished for out in engine.step())
        if draw.random() < 0.5:
            engine.abort_request([str(draw.randrange(1, 201)) for _ in range(3)])
        llm.audit()
    ended += sum(out.finished for out in engine.step())
    metrics = llm.get_metrics()
    assert ended == 200
    assert metrics["kv_blocks_in_use"] == 0
    assert metrics["kv_blocks_free"] + metrics["kv_blocks_cached"] == 40


def test_twins_in_one_batch_share_only_written_blocks(make_llm):
    prompt = [(3 * i) % 200 for i in range(70)]
    for budget in (2048, 16):
        llm = make_llm(max_num_batched_tokens=budget)
        twins = run_script(llm, [ScriptedRequest(prompt=tuple(prompt), params=greedy(10))] * 2).outputs
        alone = make_llm(enable_prefix_caching=False).generate(prompt, greedy(10))[0]
        assert [out.outputs[0].token_ids for out in twins] == [alone.outputs[0].token_ids] * 2


def test_prompts_of_one_beginning_in_either_order_give_uncached_values(make_llm):
    common = list(range(50, 82))
    prompts = [[*common, 1], [*common, 2, 3], common[:17]]
    plain = make_llm(enable_prefix_caching=False)
    expected = [plain.generate(p, greedy(4, logprobs=2))[0].outputs[0] for p in prompts]
    for order in ([0, 1, 2], [2, 1, 0], [1, 1, 2]):
        llm = make_llm(block_size=16)
        for index in order:
            output = llm.generate(prompts[index], greedy(4, logprobs=2))[0].outputs[0]
            assert output.token_ids == expected[index].token_ids
            for mine, theirs in zip(output.logprobs, expected[index].logprobs, strict=True):
                assert all(mine[i].logprob == pytest.approx(theirs[i].logprob, abs=1e-4) for i in theirs)


def test_two_prompts_whose_hashes_collide_never_share_kv(make_llm, monkeypatch):
    import octavo.kvcache.block_hash as block_hash

    monkeypatch.setattr(block_hash, "hash_block", lambda *args: b"the same digest for all")
    llm = make_llm()
    plain = make_llm(enable_prefix_caching=False)
    for first in range(3):
        prompt = [first, *range(40)]
        output = llm.generate(prompt, greedy(6))[0]
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == plain.generate(prompt, greedy(6))[0].outputs[0].token_ids


def test_a_seeded_request_repeats_beside_unseeded_ones(make_llm):
    llm = make_llm()
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
    unseeded = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    runs = [llm.generate(["one prompt"] * 2, [seeded, unseeded]) for _ in range(4)]
    assert len({tuple(run[0].outputs[0].token_ids) for run in runs}) == 1
    assert len({tuple(run[1].outputs[0].token_ids) for run in runs}) == 4


@pytest.fixture(scope="module")
def eager_to_stop(tmp_path_factory):
    """A model whose most probable token is always an end of sequence, with three ids of them."""
    config = {**LLAMA, "eos_token_id": [EOS, 65]}
    weights = random_weights(config)
    # the final norm outputs a constant vector, so the head row decides: row . 1 is the logit
    weights["model.norm.weight"].zero_()
    weights["model.embed_tokens.weight"][:, 0] = 50.0
    for name in list(weights):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    weights["model.norm.weight"][0] = 1.0
    weights["lm_head.weight"] = torch.zeros(VOCAB_SIZE, 64)
    for token_id, logit in ((EOS, 9.0), (65, 8.0), (66, 7.0), (67, 6.0)):
        weights["lm_head.weight"][token_id, 0] = logit
    path = tmp_path_factory.mktemp("eager")
    return write_model(path, config, weights=weights, generation_config={"eos_token_id": [EOS, 66]})


def test_min_tokens_holds_back_every_end_and_then_the_union_of_ends_stops(make_llm, eager_to_stop):
    llm = make_llm(eager_to_stop)
    at_once = llm.generate("x", greedy(10, ignore_eos=False))[0].outputs[0]
    assert (at_once.token_ids, at_once.finish_reason, at_once.stop_reason, at_once.text) == ([EOS], "stop", None, "")
    late = llm.generate("x", greedy(10, ignore_eos=False, min_tokens=4))[0].outputs[0]
    assert late.token_ids == [67, 67, 67, 67, EOS]
    assert (late.finish_reason, late.stop_reason) == ("stop", None)
    letter = llm.get_tokenizer().decode([67])
    with_string = llm.generate("x", greedy(10, ignore_eos=False, min_tokens=4, stop=letter))[0].outputs[0]
    assert len(with_string.token_ids) >= 4
    with_id = llm.generate("x", greedy(10, ignore_eos=False, min_tokens=4, stop_token_ids=[67]))[0].outputs[0]
    assert len(with_id.token_ids) >= 4
    assert 67 not in with_id.token_ids[:4]


def test_ignore_eos_ignores_all_of_them_but_not_the_users_stop_tokens(make_llm, eager_to_stop):
    llm = make_llm(eager_to_stop)
    on = llm.generate("x", greedy(6))[0].outputs[0]
    assert (on.token_ids, on.finish_reason) == ([EOS] * 6, "length")
    stopped = llm.generate("x", greedy(6, stop_token_ids=[EOS]))[0].outputs[0]
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ([EOS], "stop", EOS)


def test_a_stop_string_over_token_borders_leaks_nothing_and_loses_nothing(make_llm, tmp_path):
    """A model that counts: after each byte token it puts the next one."""
    config = {**LLAMA, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 1}
    weights = random_weights(config)
    for name in list(weights):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    weights["model.norm.weight"].fill_(1.0)
    weights["model.embed_tokens.weight"] = torch.eye(VOCAB_SIZE, 256) * 10
    weights["lm_head.weight"] = torch.roll(torch.eye(VOCAB_SIZE, 256), 1, dims=0)
    llm = make_llm(write_model(tmp_path, config, weights=weights))
    assert llm.generate("A", greedy(9))[0].outputs[0].text == "BCDEFGHIJ"
    output = llm.generate("A", greedy(20, stop=["DEFGHIJ"]))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("BC", "stop", "DEFGHIJ")
    assert len(output.token_ids) == 9
    engine = llm.llm_engine
    engine.add_request("s", "A", greedy(20, stop=["DEFGHIJ", "FX"]))
    seen = []
    while engine.has_unfinished_requests():
        seen += [out.outputs[0].text for out in engine.step()]
    assert seen[-1] == "BC"
    assert all("BC".startswith(text) for text in seen)
    held_then_freed = llm.generate("A", greedy(5, stop=["DEFGHIJ"]))[0].outputs[0]
    assert held_then_freed.text == "BCDEF"
    assert llm.get_metrics()["kv_blocks_in_use"] == 0


def test_the_defaults_of_generation_config_are_used_and_logged(make_llm, tmp_path, caplog):
    path = write_model(tmp_path, generation_config={"temperature": 0.25, "top_k": 3, "top_p": 0.5, "do_sample": True})
    logging.getLogger("octavo").propagate = True
    try:
        with caplog.at_level(logging.INFO, logger="octavo"):
            llm = make_llm(path)
    finally:
        logging.getLogger("octavo").propagate = False
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.25, 3, 0.5)
    assert "temperature=0.25" in caplog.text
    by_default = llm.generate("abc")[0].outputs[0].token_ids
    # same arrival number in a fresh engine, parameters spelled out
    same = make_llm(path).generate("abc", SamplingParams(temperature=0.25, top_k=3, top_p=0.5))[0].outputs[0].token_ids
    assert by_default == same


def test_text_of_split_characters_has_no_replacement_characters(make_llm, tmp_path):
    """A model that repeats its prompt's bytes: each character comes over several steps."""
    config = {**LLAMA, "hidden_size": 256, "num_hidden_layers": 1}
    text = "ďábelské 👋 日本"
    llm = make_llm()
    ids = llm.get_tokenizer().encode(text)
    weights = random_weights(config)
    for name in list(weights):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    weights["model.norm.weight"].fill_(1.0)
    weights["model.embed_tokens.weight"] = torch.eye(VOCAB_SIZE, 256) * 10
    # only a text without a repeated byte is a function of the last byte: use each character's own bytes
    for character in ["ď", "👋", "日"]:
        ids = llm.get_tokenizer().encode("#" + character)
        head = torch.zeros(VOCAB_SIZE, 256)
        for one, following in itertools.pairwise(ids):
            head[following, one] = 1.0
        weights["lm_head.weight"] = head
        repeater = make_llm(write_model(tmp_path / str(ids[1]), config, weights=weights))
        engine = repeater.llm_engine
        engine.add_request("c", "#", greedy(len(ids) - 1))
        texts = []
        while engine.has_unfinished_requests():
            texts += [out.outputs[0].text for out in engine.step()]
        assert texts[-1] == character
        assert all("�" not in seen for seen in texts)
