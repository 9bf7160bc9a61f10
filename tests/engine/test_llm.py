"""What `LLM` promises its users, on a tiny model."""

import os
import signal
import threading
import time

import pytest
from tiny_models import VOCAB_SIZE

from octavo import LLM, EngineDeadError, RequestOutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    "prompt", ["Hello", [1, 2, 3], (1, 2, 3), {"prompt": "Hello"}, {"prompt_token_ids": [1, 2], "cache_salt": "x"}]
)
def test_one_prompt_of_any_form_returns_a_list_of_one(make_llm, prompt):
    outputs = make_llm().generate(prompt, GREEDY)
    assert len(outputs) == 1
    assert len(outputs[0].outputs[0].token_ids) == 6
    assert outputs[0].finished


def test_outputs_come_in_the_order_of_the_prompts_and_text_matches_the_tokens(make_llm):
    llm = make_llm(max_num_seqs=2)
    prompts = ["a", "b" * 50, "c", "d" * 30, "e"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 7, 1, 4)]
    outputs = llm.generate(prompts, params)
    assert [out.prompt for out in outputs] == prompts
    assert [len(out.outputs[0].token_ids) for out in outputs] == [9, 2, 7, 1, 4]
    for out in outputs:
        assert out.prompt_token_ids == llm.get_tokenizer().encode(out.prompt)
        assert out.outputs[0].finish_reason == "length"
        whole = llm.get_tokenizer().decode(out.outputs[0].token_ids)
        assert whole.startswith(out.outputs[0].text)
        assert whole[len(out.outputs[0].text) :].strip("�") == ""


def test_token_ids_and_text_of_one_prompt_give_the_same_answer(make_llm):
    llm = make_llm()
    by_text = llm.generate("Hello, world", GREEDY)[0]
    by_ids = llm.generate(by_text.prompt_token_ids, GREEDY)[0]
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert by_ids.prompt is None


@pytest.mark.parametrize(
    "bad",
    [
        "", [], [[]], [1, -1], [1, VOCAB_SIZE], [[1], ""], {"prompt": "a", "prompt_token_ids": [1]}, {"text": "a"},
        None, 7, [1, True], [1.5], {"prompt": "a", "cache_salt": 3}, "\ud800",
    ],
)  # fmt: skip
def test_a_bad_prompt_is_refused_before_anything_runs(make_llm, bad):
    llm = make_llm()
    prompts = ["fine", bad] if not isinstance(bad, list) else bad
    with pytest.raises(ValueError):
        llm.generate(prompts, GREEDY)
    metrics = llm.get_metrics()
    assert metrics["num_waiting"] == metrics["num_running"] == metrics["num_steps"] == 0


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers(make_llm):
    llm = make_llm(num_kv_blocks=5, block_size=16)
    assert len(llm.generate([1] * 79, GREEDY)[0].outputs[0].token_ids) == 1
    with pytest.raises(ValueError, match=r"80.*80") as refusal:
        llm.generate([1] * 80, GREEDY)
    assert "kv_cache_memory" in str(refusal.value) or "num_kv_blocks" in str(refusal.value)
    short = make_llm(max_model_len=20)
    with pytest.raises(ValueError, match=r"20.*20"):
        short.generate([1] * 20, GREEDY)


def test_max_tokens_is_clamped_to_the_room_left(make_llm):
    llm = make_llm(max_model_len=20)
    for max_tokens in (None, 10_000):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        output = llm.generate([1] * 15, params)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (5, "length")


def test_a_request_that_outgrows_the_whole_pool_alone_ends_with_length(make_llm):
    llm = make_llm(num_kv_blocks=2, block_size=8)
    output = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (13, "length")


def test_wrong_numbers_of_params_or_priorities_are_refused(make_llm):
    llm = make_llm()
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="priority"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(ValueError):
        llm.generate("a", {"temperature": 0})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "int3"), ("scheduling_policy", "lifo"), ("kv_cache_dtype", "fp8_e5m2"), ("kv_cache_dtype", "nibble"),
        ("block_size", 7), ("block_size", 0), ("max_num_seqs", 0), ("max_model_len", 0), ("max_model_len", 10**6),
        ("tensor_parallel_size", 2), ("quantization", "awq"), ("speculative_config", {"method": "ngram"}),
        ("kv_cache_memory", "2 parsecs"), ("num_kv_blocks", 0), ("load_format", "pickle"), ("num_threads", 0),
        ("logprobs_mode", "cooked"), ("platform", "abacus"), ("max_num_batched_tokens", 0),
    ],
)  # fmt: skip
def test_a_bad_or_unbuilt_option_is_a_value_error_that_names_it(tiny_llama, option, value):
    options = {"num_kv_blocks": 8} if option not in ("num_kv_blocks", "kv_cache_memory") else {}
    with pytest.raises(ValueError, match=option):
        LLM(tiny_llama, **{**options, option: value})


def test_an_unknown_option_is_a_type_error(tiny_llama):
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM(tiny_llama, max_num_seq=3)


def test_a_missing_model_is_a_value_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_kv_cache_memory_is_spent_on_blocks_exactly(make_llm):
    bytes_per_block = 2 * 2 * 16 * 2 * 4 * 16  # layers, K and V, head size, heads, float32, block
    for option in ("kv_cache_memory", "kv_cache_memory_bytes"):
        llm = make_llm(num_kv_blocks=None, **{option: bytes_per_block * 9 + 5})
        assert llm.get_metrics()["kv_blocks_total"] == 9
    assert (
        make_llm(num_kv_blocks=None, kv_cache_memory="1MiB").get_metrics()["kv_blocks_total"]
        == 2**20 // bytes_per_block
    )
    assert make_llm(num_kv_blocks=37).get_metrics()["kv_blocks_total"] == 37


def test_cached_tokens_metrics_and_reset(make_llm):
    llm = make_llm(block_size=16)
    prompt = list(range(40))
    cold = llm.generate(prompt, GREEDY)[0]
    warm = llm.generate(prompt, GREEDY)[0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    metrics = llm.get_metrics()
    assert (metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]) == (80, 32)
    assert (metrics["prompt_tokens"], metrics["generation_tokens"]) == (80, 12)
    assert metrics["kv_blocks_cached"] == 2
    assert llm.reset_prefix_cache() is True
    assert llm.get_metrics()["kv_blocks_cached"] == 0
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    llm.audit()


def test_salts_separate_cached_prefixes(make_llm):
    llm = make_llm()
    prompt = {"prompt_token_ids": list(range(40))}
    salts = ["a", "b", "a", None]
    found = [llm.generate({**prompt, "cache_salt": salt}, GREEDY)[0].num_cached_tokens for salt in salts]
    assert found == [0, 0, 32, 0]


def test_without_prefix_caching_nothing_is_cached(make_llm):
    llm = make_llm(enable_prefix_caching=False)
    for _ in range(2):
        assert llm.generate(list(range(40)), GREEDY)[0].num_cached_tokens == 0
    assert llm.get_metrics()["kv_blocks_cached"] == 0


def test_times_and_preemptions_are_reported(make_llm):
    metrics = make_llm().generate("Hello", GREEDY)[0].metrics
    assert metrics.queue_time >= 0
    assert metrics.prefill_time > 0
    assert metrics.decode_time > 0
    assert metrics.num_preemptions == 0


def test_priorities_decide_who_runs_first(make_llm):
    llm = make_llm(max_num_seqs=1, scheduling_policy="priority")
    order = []
    engine = llm.llm_engine
    for request_id, priority in (("low", 5), ("high", -1), ("middle", 0)):
        engine.add_request(request_id, "abc", GREEDY, priority)
    while engine.has_unfinished_requests():
        order += [out.request_id for out in engine.step() if out.finished]
    assert order == ["high", "middle", "low"]
    assert len(llm.generate(["a", "b"], GREEDY, priority=[1, 0])) == 2


def test_the_engine_streams_cumulative_outputs_and_aborts(make_llm):
    llm = make_llm()
    engine = llm.llm_engine
    engine.add_request("kept", "abc", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    engine.add_request("gone", "abd", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    lengths, last = [], {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
            if output.request_id == "kept":
                lengths.append(len(output.outputs[0].token_ids))
        if lengths == [1, 2, 3]:
            engine.abort_request(["gone", "never heard of"])
            assert llm.get_metrics()["num_running"] == 1
    assert lengths == list(range(1, 9))
    assert last["gone"].outputs[0].finish_reason == "abort"
    assert len(last["gone"].outputs[0].token_ids) == 3
    assert llm.get_metrics()["kv_blocks_in_use"] == 0


def test_an_output_handed_out_is_not_changed_later(make_llm):
    engine = make_llm().llm_engine
    engine.add_request("a", "abc", GREEDY)
    first = engine.step()[0]
    tokens, text = list(first.outputs[0].token_ids), first.outputs[0].text
    while engine.has_unfinished_requests():
        engine.step()
    assert (first.outputs[0].token_ids, first.outputs[0].text) == (tokens, text)


def test_delta_outputs_add_up_to_the_cumulative_one(make_llm):
    llm = make_llm()
    whole = llm.generate("Hello", GREEDY)[0].outputs[0]
    engine = llm.llm_engine
    engine.add_request("d", "Hello", SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA))  # fmt: skip
    tokens, text = [], ""
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += output.outputs[0].token_ids
            text += output.outputs[0].text
    assert (tokens, text) == (whole.token_ids, whole.text)


def test_a_live_request_id_cannot_be_taken_twice_but_can_be_reused(make_llm):
    engine = make_llm().llm_engine
    engine.add_request("a", "abc", GREEDY)
    with pytest.raises(ValueError, match="'a'"):
        engine.add_request("a", "abc", GREEDY)
    engine.step()
    engine.abort_request(["a"])
    engine.add_request("a", "abd", GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_generate_leaves_the_requests_of_others_to_them(make_llm):
    llm = make_llm()
    llm.llm_engine.add_request("0", "abc", GREEDY)
    assert len(llm.generate(["x", "y"], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))) == 2
    outputs = llm.llm_engine.step()
    assert {output.request_id for output in outputs} == {"0"}
    assert outputs[-1].finished


def test_metrics_are_consistent_from_another_thread(make_llm):
    llm = make_llm(num_kv_blocks=12, block_size=8)
    seen, done = [], threading.Event()

    def watch() -> None:
        while not done.wait(0.0002):  # without a pause it would keep the engine from its turn
            seen.append(llm.get_metrics())

    watcher = threading.Thread(target=watch)
    watcher.start()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        llm.generate([[i] * 20 for i in range(8)], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        if any(m["num_running"] for m in seen):  # the watcher has had its turn while the engine ran
            break
    done.set()
    watcher.join()
    assert any(m["num_running"] for m in seen)
    for m in seen:
        assert m["kv_blocks_total"] == m["kv_blocks_free"] + m["kv_blocks_cached"] + m["kv_blocks_in_use"]


def test_ctrl_c_aborts_the_requests_and_the_engine_lives_on(make_llm):
    llm = make_llm(max_model_len=512, num_kv_blocks=256)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        while True:
            llm.generate(["a", "b"] * 20, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    metrics = llm.get_metrics()
    assert metrics["num_running"] == metrics["num_waiting"] == metrics["kv_blocks_in_use"] == 0
    llm.audit()
    assert llm.llm_engine.step() == []
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_that_fails_leaves_a_usable_engine_and_the_same_answers(make_llm):
    llm = make_llm()
    expected = llm.generate("Hello", GREEDY)[0].outputs[0].token_ids
    runner = llm.llm_engine.client.core.executor.worker.runner
    forward = runner._forward

    def fail_once(*args):
        runner._forward = forward
        raise MemoryError("out of memory")

    engine = llm.llm_engine
    engine.add_request("other", "Hello", GREEDY)
    engine.step()
    runner._forward = fail_once
    with pytest.raises(MemoryError):
        llm.generate("doomed", GREEDY)
    llm.audit()
    last = None
    while engine.has_unfinished_requests():
        last = engine.step()[-1]
    assert last.request_id == "other"
    assert last.outputs[0].token_ids == expected


def test_after_close_every_call_raises_and_a_second_close_is_fine(tiny_llama):
    with LLM(tiny_llama, num_kv_blocks=8) as llm:
        engine = llm.llm_engine
    llm.close()
    calls = [
        lambda: llm.generate("a", GREEDY), llm.get_metrics, llm.get_tokenizer, llm.reset_prefix_cache, llm.audit,
        llm.kernel_report, llm.get_default_sampling_params, engine.step, engine.has_unfinished_requests,
        lambda: engine.add_request("a", "a", GREEDY), lambda: engine.abort_request(["a"]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EngineDeadError):
            call()


def test_unseeded_requests_repeat_with_the_engine_and_differ_between_arrivals(make_llm):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        outputs = make_llm(seed=seed).generate(["same"] * 3, params)
        runs.append([tuple(out.outputs[0].token_ids) for out in outputs])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len(set(runs[0])) == 3


def test_logprobs_have_the_sampled_token_first_and_ranks(make_llm):
    llm = make_llm()
    for count in (0, 1, 4, -1):
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True, logprobs=count)
        output = llm.generate("Hello", params)[0].outputs[0]
        assert len(output.logprobs) == 5
        total = 0.0
        for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert next(iter(entry)) == token_id
            total += entry[token_id].logprob
            ranks = sorted(logprob.rank for logprob in entry.values())
            assert len(entry) in ({0: (1,), -1: (VOCAB_SIZE,)}.get(count, (count, count + 1)))
            assert all(entry[i].decoded_token is not None for i in entry)
            assert count == 0 or ranks[:count] == list(range(1, len(ranks) + 1))[:count] if count > 0 else True
        assert output.cumulative_logprob == pytest.approx(total)
    assert llm.generate("Hello", GREEDY)[0].outputs[0].logprobs is None


def test_the_start_prints_the_plan_to_the_log(make_llm, caplog):
    import logging

    logging.getLogger("octavo").propagate = True
    try:
        with caplog.at_level(logging.INFO, logger="octavo"):
            make_llm(num_threads=1)
    finally:
        logging.getLogger("octavo").propagate = False
    for word in ("dtype", "kernels", "thread", "weights", "KV", "workspace", "sampling"):
        assert word in caplog.text, word


def test_importing_the_library_is_light_and_installs_no_signal_handler():
    import subprocess
    import sys

    code = (
        "import signal, sys; before = signal.getsignal(signal.SIGINT); import octavo; octavo.SamplingParams();"
        "assert signal.getsignal(signal.SIGINT) is before; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_close_frees_the_memory(make_llm, tiny_llama):
    import gc
    import weakref

    llm = make_llm()
    llm.generate("a", GREEDY)
    cache = weakref.ref(llm.llm_engine.client.core.executor.worker.runner.kv_caches[0].k)
    llm.close()
    gc.collect()
    assert cache() is None


def test_the_statistics_line_appears_under_load(make_llm, monkeypatch, caplog):
    import logging

    monkeypatch.setenv("OCTAVO_LOG_INTERVAL", "0.05")
    llm = make_llm(disable_log_stats=False)
    logging.getLogger("octavo").propagate = True
    try:
        with caplog.at_level(logging.INFO, logger="octavo"):
            end = time.monotonic() + 30
            while "unning" not in caplog.text and time.monotonic() < end:
                llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    finally:
        logging.getLogger("octavo").propagate = False
    assert "unning" in caplog.text


def test_ctrl_c_again_and_again_tears_nothing(make_llm):
    llm = make_llm(num_kv_blocks=128)
    expected = llm.generate("a", GREEDY)[0].outputs[0].token_ids
    stop = threading.Event()

    def hammer() -> None:
        while not stop.wait(0.002):
            os.kill(os.getpid(), signal.SIGINT)

    for _ in range(5):
        stop.clear()
        timer = threading.Timer(0.03, hammer)
        try:
            timer.start()
            llm.generate(["a", "b"] * 8, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        except KeyboardInterrupt:
            pass
        finally:
            while True:  # interrupts still come until the hammer has stopped
                try:
                    stop.set()
                    timer.join()
                    break
                except KeyboardInterrupt:
                    continue
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        llm.audit()
        metrics = llm.get_metrics()
        assert metrics["num_running"] == metrics["num_waiting"] == metrics["kv_blocks_in_use"] == 0
        assert llm.generate("a", GREEDY)[0].outputs[0].token_ids == expected


def test_end_of_sequence_ids_outside_the_vocabulary_harm_nobody(make_llm, tmp_path, caplog):
    from tiny_models import write_model

    path = write_model(tmp_path, generation_config={"eos_token_id": [257, 300, 99999]})
    llm = make_llm(path)
    params = SamplingParams(temperature=0, max_tokens=6, min_tokens=3)
    assert len(llm.generate("a", params)[0].outputs[0].token_ids) >= 3


def test_a_model_whose_logits_are_not_finite_says_so(make_llm, tmp_path):
    from tiny_models import LLAMA, random_weights, write_model

    weights = random_weights(LLAMA)
    weights["model.norm.weight"].fill_(float("nan"))
    llm = make_llm(write_model(tmp_path, weights=weights))
    for temperature in (0.0, 1.0):
        output = llm.generate("a", SamplingParams(temperature=temperature, max_tokens=4))[0].outputs[0]
        assert output.finish_reason == "abort"
        assert "not finite" in output.stop_reason


def test_abort_request_takes_one_id_alone(make_llm):
    engine = make_llm().llm_engine
    for request_id in ("1", "0", "10"):
        engine.add_request(request_id, "abc", GREEDY)
    engine.abort_request("10")
    assert not engine.is_live("10")
    assert engine.is_live("1")
    assert engine.is_live("0")
