"""/v1/chat/completions: what a conversation is answered with, whole and streamed."""

import json
import math

import pytest
from http_driver import read_events, stream_chunks
from tiny_models import BOS

from octavo import LLM, SamplingParams
from octavo.tokenization.chat import encode_chat

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]
BROKEN = "\N{REPLACEMENT CHARACTER}"
GREEDY = {"messages": HELLO, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def offline(tiny_chat_model) -> LLM:
    """The same model in this process."""
    with LLM(tiny_chat_model, dtype="float32", num_kv_blocks=128, disable_log_stats=True) as llm:
        yield llm


def answer(server, **fields) -> dict:
    response = server.post(PATH, {**GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(server, status: int = 400, **fields) -> dict:
    response = server.post(PATH, {**GREEDY, **fields})
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def chunks_of(server, **fields) -> list[dict]:
    return stream_chunks(server.client, PATH, {**GREEDY, **fields})


def joined(chunks: list[dict], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_an_answer_is_what_the_model_says_offline(server, offline):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (wanted,) = offline.chat(HELLO, params)
    got = answer(server, return_token_ids=True)
    (choice,) = got["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.outputs[0].text, "refusal": None}
    assert choice["token_ids"] == wanted.outputs[0].token_ids
    assert choice["finish_reason"] == "length"
    assert got["prompt_token_ids"] == wanted.prompt_token_ids
    assert got["object"] == "chat.completion"
    assert got["id"].startswith("chatcmpl-")
    assert got["model"] == "tiny"
    usage = got["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(wanted.prompt_token_ids), 24)
    assert usage["total_tokens"] == len(wanted.prompt_token_ids) + 24
    assert "warnings" not in got


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_joins_to_the_whole_answer(server, seed):
    fields = {"temperature": 1.0, "seed": seed, "max_tokens": 60}
    whole = answer(server, **fields)["choices"][0]
    chunks = chunks_of(server, **fields)
    assert joined(chunks) == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    middle = [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]]
    assert all(delta.get("content") for delta in middle), "an empty chunk was sent"


def test_each_of_several_choices_has_one_role_and_one_finish_reason(server):
    fields = {"n": 3, "temperature": 1.0, "seed": 7}
    chunks = chunks_of(server, **fields)
    whole = answer(server, **fields)["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    for index in range(3):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in own[1:])
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons == [None] * (len(own) - 1) + [whole[index]["finish_reason"]]
        assert joined(chunks, index) == whole[index]["message"]["content"]


def test_one_sample_is_the_first_of_several(server):
    fields = {"temperature": 1.0, "seed": 11}
    several = answer(server, n=4, **fields)["choices"]
    assert several[0]["message"] == answer(server, n=1, **fields)["choices"][0]["message"]
    assert len({choice["message"]["content"] for choice in several}) > 1


def test_usage_is_a_chunk_of_its_own_and_comes_only_when_asked_for(server):
    chunks = chunks_of(server, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answer(server)["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks[:-1])


def test_continuous_usage_grows_to_the_whole(server):
    counts = [
        chunk["usage"]["completion_tokens"]
        for chunk in chunks_of(server, stream_options={"continuous_usage_stats": True})
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 24


def test_an_answer_may_fill_the_room_that_is_left(server):
    got = answer(server, max_tokens=None)
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["total_tokens"] == 512


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_there_is_room_for_are_clamped_and_that_is_said(server, field):
    got = answer(server, **{"max_tokens": None, field: 10_000})
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["total_tokens"] == 512
    assert any(field in warning and "10000" in warning for warning in got["warnings"])


def test_max_completion_tokens_wins(server):
    got = answer(server, max_completion_tokens=3, max_tokens=9)
    assert got["usage"]["completion_tokens"] == 3
    assert any(warning.startswith("max_tokens: ") for warning in got["warnings"])


def test_every_field_may_be_null(server):
    from octavo.entrypoints.server.schema.chat import ChatCompletionRequest

    names = {*ChatCompletionRequest.model_fields, *ChatCompletionRequest.not_built} - set(GREEDY)
    got = answer(server, **dict.fromkeys(names))
    assert got["choices"] == answer(server)["choices"]
    assert "warnings" not in got


def test_an_unknown_field_is_named_and_the_request_served(server):
    got = answer(server, temperatur=0.5)
    assert got["choices"] == answer(server)["choices"]
    (warning,) = got["warnings"]
    assert warning.startswith("temperatur ")
    assert "temperature" in warning
    chunks = chunks_of(server, temperatur=0.5)
    assert chunks[0]["warnings"] == [warning]
    assert all("warnings" not in chunk for chunk in chunks[1:])


def test_a_stop_string_leaks_nothing_and_loses_nothing_before_it(server):
    text = answer(server, max_tokens=60)["choices"][0]["message"]["content"]
    stop = text[20:27]
    wanted = text[: text.index(stop)]
    got = answer(server, max_tokens=60, stop=stop)["choices"][0]
    assert (got["message"]["content"], got["finish_reason"], got["stop_reason"]) == (wanted, "stop", stop)
    chunks = chunks_of(server, max_tokens=60, stop=[stop, "never to be seen"])
    assert joined(chunks) == wanted
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_characters_out_of_several_tokens_come_whole(server, offline):
    text = "ďábelské 👋 日本 "
    ids = offline.get_tokenizer().encode(text)
    for position, token_id in enumerate(ids[:4]):  # the first character has two tokens
        bias = {str(token_id): 100}
        got = answer(server, logit_bias=bias, max_tokens=1)
        assert got["choices"][0]["message"]["content"] in ("", text[0]), position
    biased = {str(token_id): 100 for token_id in set(ids)}
    fields = {"logit_bias": biased, "temperature": 1.0, "seed": 3, "max_tokens": 120}
    chunks = chunks_of(server, **fields)
    assert joined(chunks) == answer(server, **fields)["choices"][0]["message"]["content"]


def test_logprobs_have_exact_bytes_and_finite_numbers(server):
    fields = {"logprobs": True, "top_logprobs": 3, "temperature": 1.0, "seed": 5, "max_tokens": 40}
    whole = answer(server, return_token_ids=True, **fields)["choices"][0]
    content = whole["logprobs"]["content"]
    assert len(content) == len(whole["token_ids"]) == 40
    raw = bytes(byte for entry in content for byte in entry["bytes"])
    assert raw.decode("utf-8", "replace").replace("<s>", "").rstrip(BROKEN) == whole["message"]["content"].rstrip(
        BROKEN
    )
    for entry in content:
        top = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert all(math.isfinite(number) for number in (entry["logprob"], *top))
        assert entry["logprob"] <= top[0]
    streamed = [
        entry
        for chunk in chunks_of(server, **fields)
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
    wanted = [entry["logprob"] if server.is_exact else pytest.approx(entry["logprob"], abs=1e-4) for entry in content]
    assert [entry["logprob"] for entry in streamed] == wanted


def test_logprobs_of_what_cannot_be_chosen_are_finite(server):
    got = answer(server, logprobs=True, top_logprobs=-1, allowed_token_ids=[65], logprobs_mode="processed_logprobs")
    (first, *_) = got["choices"][0]["logprobs"]["content"]
    numbers = [one["logprob"] for one in first["top_logprobs"]]
    assert len(numbers) == 259
    assert numbers[0] == pytest.approx(0.0)
    assert set(numbers[1:]) == {-9999.0}


def test_logprobs_are_raw_by_default_and_processed_when_asked_for(server):
    fields = {"logprobs": True, "temperature": 0.5, "top_k": 1, "max_tokens": 1}
    raw = answer(server, **fields)["choices"][0]["logprobs"]["content"][0]["logprob"]
    plain = answer(server, logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"][0]["logprob"]
    processed = answer(server, logprobs_mode="processed_logprobs", **fields)
    assert raw == (plain if server.is_exact else pytest.approx(plain))
    assert raw < -1e-4
    assert processed["choices"][0]["logprobs"]["content"][0]["logprob"] == pytest.approx(0.0)


def test_the_begin_of_sequence_token_is_there_once_through_every_entry_point(server, offline):
    ids = answer(server, return_token_ids=True)["prompt_token_ids"]
    assert ids.count(BOS) == 1
    assert ids == offline.chat(HELLO, SamplingParams(max_tokens=1))[0].prompt_token_ids
    assert ids == encode_chat(offline.get_tokenizer(), HELLO)
    assert ids == server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    text = server.post("/apply-template", {"messages": HELLO}).json()["prompt"]
    completion = {"prompt": ids, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    assert text == "<s>[user]Hello there\n[assistant]"
    assert (
        server.post("/v1/completions", completion).json()["choices"][0]["text"]
        == answer(server)["choices"][0]["message"]["content"]
    )


def test_a_final_message_is_continued_exactly(server, offline):
    messages = [*HELLO, {"role": "assistant", "content": "OK!\n"}]
    got = answer(server, messages=messages, continue_final_message=True, return_token_ids=True)
    ids = offline.get_tokenizer().encode("<s>[user]Hello there\n[assistant]OK!\n")
    assert got["prompt_token_ids"] == ids
    (wanted,) = offline.generate(
        {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    assert got["choices"][0]["message"]["content"] == wanted.outputs[0].text


def test_content_may_be_a_list_of_texts(server):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    got = answer(server, messages=[{"role": "user", "content": parts}], return_token_ids=True)
    joined_text = [{"role": "user", "content": "Hello\nthere"}]
    assert got["prompt_token_ids"] == server.post("/tokenize", {"messages": joined_text}).json()["tokens"]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        ([{"role": "user"}], "content"),
        ([{"content": "x"}], "role"),
        (["x"], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "not built"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "not built"),
        ([{"role": "user", "content": 3}], "content"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(server, messages, named):
    error = refusal(server, messages=messages)
    assert named in error["message"]
    assert error["param"] == "messages"


def test_a_lone_surrogate_is_refused(server):
    body = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]})
    response = server.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_messages_are_required(server):
    response = server.post(PATH, {})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_a_refusal_of_the_template_is_a_400_with_its_own_message(start_server, tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    strict = start_server("--chat-template", str(template))
    for path in (PATH, "/tokenize", "/apply-template"):
        response = strict.post(path, {"messages": HELLO})
        assert response.status_code == 400
        assert "roles must alternate" in response.json()["error"]["message"]
    response = strict.post(PATH, {"messages": HELLO, "stream": True})
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


def test_a_template_that_cannot_be_used_is_refused_at_the_start(start_server, tmp_path):
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    for template in (broken, tmp_path / "absent.jinja"):
        server = start_server("--chat-template", str(template), wait=False)
        assert server.wait() == 2
        assert "Traceback" not in server.log()
        assert "template" in server.log()


def test_a_template_may_be_a_file_of_the_server_and_never_of_the_client(server, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    for template in (str(secret), "{{ messages }}"):
        for path in (PATH, "/tokenize", "/apply-template"):
            body = {"messages": HELLO, "max_tokens": 1} if path == PATH else {"messages": HELLO}
            response = server.post(path, {**body, "chat_template": template})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "chat_template"
            assert "the secret" not in response.text


def test_what_the_template_does_not_use_is_said(server):
    got = answer(server, chat_template_kwargs={"enable_thinking": True}, documents=[{"text": "x"}])
    assert len(got["warnings"]) == 2
    assert any("chat_template_kwargs.enable_thinking" in warning for warning in got["warnings"])
    assert any("documents" in warning for warning in got["warnings"])


def test_a_conversation_that_is_too_long_is_refused_with_the_code_clients_look_for(server):
    error = refusal(server, messages=[{"role": "user", "content": "x" * 600}])
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "max_model_len is 512" in error["message"]


def test_a_stream_that_cannot_go_on_ends_with_an_error_event_and_the_others_go_on(server):
    fields = {"logit_bias": {"64": 100}, "max_tokens": 400, "stream": True, "stop_regex": "(?<=a{20})(a|aa)+c"}
    with server.client.stream("POST", PATH, json={**GREEDY, **fields}) as response:
        assert response.status_code == 200
        events = read_events("".join(response.iter_text()))
    assert len(events) > 5
    assert all(name == "" for name, _ in events[:-1])
    name, data = events[-1]
    assert name == "error"
    error = json.loads(data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "(a|aa)+c" in error["message"]  # it takes too long
    assert answer(server)["choices"]


def test_both_endings_at_once_are_refused(server):
    error = refusal(server, add_generation_prompt=True, continue_final_message=True)
    assert "exclude each other" in error["message"]


def test_prompt_logprobs_come_once_whole_and_streamed(server):
    got = answer(server, prompt_logprobs=1)
    entries = got["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == got["usage"]["prompt_tokens"]
    chunks = chunks_of(server, prompt_logprobs=1)
    assert chunks[0]["prompt_logprobs"] == entries
    assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])


def test_token_ids_of_a_stream_join_to_those_of_the_whole(server):
    whole = answer(server, return_token_ids=True)
    chunks = chunks_of(server, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]


def test_timings_are_there_when_asked_for(server):
    timings = answer(server, timings=True)["timings"]
    assert all(timings[f"{name}_seconds"] >= 0 for name in ("queue", "prefill", "decode"))
    assert timings["decode_tokens_per_second"] > 0
    chunks = chunks_of(server, timings=True, stream_options={"include_usage": True})
    assert "timings" in chunks[-1]
    assert "timings" in chunks_of(server, timings=True)[-1]
    assert "timings" not in answer(server)


def test_a_second_turn_finds_the_first_in_the_cache(start_server):
    own = start_server()
    long = [{"role": "user", "content": "Tell me a long story. " * 5}]
    first = own.post(PATH, {**GREEDY, "messages": long}).json()["usage"]
    again = own.post(PATH, {**GREEDY, "messages": [*long, {"role": "assistant", "content": "Once."}, *HELLO]})
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96


def test_a_seeded_request_repeats_whatever_runs_beside_it(server):
    fields = {"temperature": 1.0, "seed": 99}
    alone = answer(server, **fields)["choices"][0]["message"]
    for _ in range(3):
        answer(server, temperature=1.0)
        assert answer(server, **fields)["choices"][0]["message"] == alone
