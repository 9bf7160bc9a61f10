"""/v1/completions against a live server: every field has an effect or is refused; every answer has the same form."""

import math

import pytest
from http_driver import stream_chunks

from octavo import LLM, SamplingParams

PATH = "/v1/completions"
PROMPT = "The quick brown fox"


def complete(server, status: int = 200, **fields) -> dict:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": True, **fields}
    response = server.post(PATH, body)
    assert response.status_code == status, response.text
    return response.json()


def choice(server, **fields) -> dict:
    (only,) = complete(server, **fields)["choices"]
    return only


def refusal(server, field: str | None, **fields) -> str:
    """The message of a 400 that is about this field."""
    error = complete(server, 400, **fields)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field, error
    return error["message"]


@pytest.fixture(scope="module")
def offline(tiny_chat_model):
    with LLM(tiny_chat_model, dtype="float32", num_kv_blocks=128, disable_log_stats=True) as llm:
        yield llm


# What an answer looks like


def test_an_answer_has_openai_s_form_and_always_says_how_many_tokens_were_cached(server):
    server.post("/reset_prefix_cache", {})
    answers = [complete(server, prompt="x" * 40, user="u", metadata=None) for _ in range(2)]
    for answer in answers:
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        assert answer["model"] == "tiny"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["logprobs"] is None
        assert "warnings" not in answer
        assert "timings" not in answer
    usages = [answer["usage"] for answer in answers]
    assert [usage["prompt_tokens_details"] for usage in usages] == [{"cached_tokens": 0}, {"cached_tokens": 32}]
    assert usages[0]["prompt_tokens"] == 40
    assert usages[0]["completion_tokens"] == 12
    assert usages[0]["total_tokens"] == 52


def test_16_tokens_are_the_default(server):
    assert complete(server, max_tokens=None)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [65, 66], [[65, 66]]])
def test_every_form_of_one_prompt_is_one_choice(server, prompt):
    only = choice(server, prompt=prompt)
    assert len(only["prompt_token_ids"]) == 2


def test_many_prompts_give_their_choices_in_order(server):
    alone = [choice(server, prompt=prompt, ignore_eos=True) for prompt in ("one", "two two", "three")]
    together = complete(server, prompt=["one", "two two", "three"], ignore_eos=True)
    assert [entry["text"] for entry in together["choices"]] == [entry["text"] for entry in alone]
    assert [entry["index"] for entry in together["choices"]] == [0, 1, 2]
    assert together["usage"]["prompt_tokens"] == 3 + 7 + 5
    assert together["usage"]["completion_tokens"] == 36


def test_the_answer_is_that_of_the_engine_itself(server, offline):
    fields = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 20, "n": 3}
    (expected,) = offline.generate(PROMPT, SamplingParams(**fields))
    answer = complete(server, **fields)
    assert [entry["token_ids"] for entry in answer["choices"]] == [sample.token_ids for sample in expected.outputs]
    assert [entry["text"] for entry in answer["choices"]] == [sample.text for sample in expected.outputs]


def test_one_sample_is_the_first_of_four(server):
    fields = {"temperature": 1.0, "seed": 11}
    assert choice(server, **fields)["text"] == complete(server, **fields, n=4)["choices"][0]["text"]


def test_best_of_gives_the_most_probable_samples(server, offline):
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    (all_samples,) = offline.generate(PROMPT, SamplingParams(**fields, n=6, logprobs=0))
    ranked = sorted(all_samples.outputs, key=lambda sample: -sample.cumulative_logprob)
    answer = complete(server, **fields, n=2, best_of=6)
    assert [entry["token_ids"] for entry in answer["choices"]] == [sample.token_ids for sample in ranked[:2]]
    assert [entry["index"] for entry in answer["choices"]] == [0, 1]
    assert all(entry["logprobs"] is None for entry in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 48


# Fields and their effects


def test_sampling_fields_change_what_is_sampled(server):
    free = {"temperature": 1.5, "seed": 3, "max_tokens": 30}
    plain = choice(server, **free)["token_ids"]
    assert choice(server, **free)["token_ids"] == plain
    assert choice(server, **{**free, "seed": 4})["token_ids"] != plain
    for field, value in [
        ("temperature", 0.3), ("top_p", 0.2), ("top_k", 2), ("min_p", 0.5), ("presence_penalty", 2.0),
        ("frequency_penalty", 2.0), ("repetition_penalty", 1.8),
    ]:  # fmt: skip
        assert choice(server, **{**free, field: value})["token_ids"] != plain, field
    greedy = choice(server)["token_ids"]
    for same in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1.0}):
        assert choice(server, **{"temperature": 1.0, **same})["token_ids"] == greedy


def test_logit_bias_bad_words_and_allowed_ids_choose_the_tokens(server):
    assert set(choice(server, logit_bias={"70": 100})["token_ids"]) == {70}
    assert set(choice(server, allowed_token_ids=[80, 81])["token_ids"]) <= {80, 81}
    first = choice(server)["text"]
    word = next(char for char in first if char.isascii() and char.isprintable() and char != " ")
    assert word not in choice(server, bad_words=[word])["text"]


def test_stops_end_the_text_before_them(server):
    text = choice(server, max_tokens=40)["text"]
    at = next(i for i in range(4, len(text)) if text[i].isascii() and text[i].isprintable() and text[i] not in text[:i])
    stopped = choice(server, max_tokens=40, stop=text[at])
    assert stopped["text"] == text[:at]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", text[at])
    assert choice(server, max_tokens=40, stop=["nowhere to be seen", text[at]])["text"] == text[:at]
    assert choice(server, max_tokens=40, stop=text[at], include_stop_str_in_output=True)["text"] == text[: at + 1]
    by_regex = choice(server, max_tokens=40, stop_regex=f"[{text[at]}]")
    assert (by_regex["text"], by_regex["stop_reason"]) == (text[:at], f"[{text[at]}]")
    tokens = choice(server, max_tokens=40)["token_ids"]
    by_token = choice(server, max_tokens=40, stop_token_ids=[tokens[5]])
    assert by_token["stop_reason"] == tokens[5]
    assert by_token["token_ids"] == tokens[: tokens.index(tokens[5]) + 1]
    late = choice(server, max_tokens=40, stop_token_ids=[tokens[5]], min_tokens=10)
    assert len(late["token_ids"]) >= 10


def test_ignore_eos_goes_on_past_the_end_of_the_sequence(server):
    ended = choice(server, logit_bias={"257": 100})
    assert (ended["finish_reason"], ended["stop_reason"], ended["text"]) == ("stop", None, "")
    assert len(choice(server, logit_bias={"257": 100}, ignore_eos=True)["token_ids"]) == 12
    assert choice(server, logit_bias={"257": 100}, min_tokens=4)["token_ids"][-1] == 257
    assert len(choice(server, logit_bias={"257": 100}, min_tokens=4)["token_ids"]) >= 4


def test_special_tokens_show_when_asked_for(server):
    fields = {"logit_bias": {"258": 100}, "max_tokens": 3}
    assert choice(server, **fields)["text"] == ""
    assert choice(server, **fields, skip_special_tokens=False)["text"].replace(" ", "") == "<pad><pad><pad>"
    joined = choice(server, **fields, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined["text"] == "<pad><pad><pad>"


def test_max_tokens_is_clamped_to_the_room_left_and_the_answer_says_so(server):
    answer = complete(server, max_tokens=100_000, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512
    assert any(warning.startswith("max_tokens 100000 -> ") for warning in answer["warnings"])


def test_a_prompt_may_leave_room_for_one_token_and_no_less(server, start_server):
    last = server.post(PATH, {"prompt": [65] * 511, "max_tokens": None, "ignore_eos": True}).json()
    assert last["usage"]["completion_tokens"] == 1
    assert last["choices"][0]["finish_reason"] == "length"
    error = server.post(PATH, {"prompt": [65] * 512}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "512" in error["message"]
    small = start_server("--num-kv-blocks", "8")
    assert small.post(PATH, {"prompt": [65] * 127, "max_tokens": 99}).json()["usage"]["completion_tokens"] == 1
    error = small.post(PATH, {"prompt": [65] * 128}).json()["error"]
    assert all(number in error["message"] for number in ("128", "8 blocks"))


def test_a_salt_keeps_cached_prefixes_apart(server):
    server.post("/reset_prefix_cache", {})
    prompt = "z" * 64
    cached = [
        complete(server, prompt=prompt, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in (None, "a", "a", "b", None)
    ]
    assert cached == [0, 0, 48, 0, 48]


def test_timings_come_when_asked_for(server):
    timings = complete(server, timings=True)["timings"]
    assert set(timings) == {
        "queue_seconds", "prefill_seconds", "decode_seconds", "prefill_tokens_per_second", "decode_tokens_per_second"
    }  # fmt: skip
    assert all(isinstance(value, float) and value >= 0 for value in timings.values())
    assert timings["decode_tokens_per_second"] > 0


def test_the_request_id_is_the_caller_s_if_given(server):
    assert complete(server, request_id="abc-1")["id"] == "cmpl-abc-1"
    response = server.post(PATH, {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "trace-7"})
    assert response.json()["id"] == "cmpl-trace-7"
    assert response.headers["x-request-id"] == "trace-7"
    assert "x-request-id" in server.client.get("/nowhere").headers


def test_any_of_the_served_names_is_taken_and_no_other(server):
    assert complete(server, model="tiny-too")["model"] == "tiny-too"
    error = complete(server, 404, model="gpt-7")["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")


# Log-probabilities


def test_logprobs_have_one_entry_a_token_in_each_list(server):
    only = choice(server, logprobs=3, max_tokens=6)
    logprobs = only["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert all(len(entries) == 6 for entries in logprobs.values())
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] >= logprob
        assert 1 <= len(top) <= 4
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert [list(top) for top in choice(server, logprobs=0, max_tokens=6)["logprobs"]["top_logprobs"]] == [
        [token] for token in logprobs["tokens"]
    ]


def test_offsets_point_at_the_tokens(server):
    only = choice(server, allowed_token_ids=[66, 67, 68], logprobs=0, max_tokens=8, echo=True)
    for token, offset in zip(only["logprobs"]["tokens"], only["logprobs"]["text_offset"], strict=True):
        assert only["text"][offset : offset + len(token)] == token


def test_banned_tokens_have_a_finite_logprob(server):
    only = choice(
        server, logprobs=5, max_tokens=2, allowed_token_ids=[70], logprobs_mode="processed_logprobs", prompt_logprobs=1
    )
    numbers = [value for top in only["logprobs"]["top_logprobs"] for value in top.values()]
    assert all(math.isfinite(number) for number in numbers)
    assert min(numbers) == -9999.0


def test_tokens_may_be_written_as_ids(server):
    only = choice(server, logprobs=1, max_tokens=2, return_tokens_as_token_ids=True)
    assert only["logprobs"]["tokens"] == [f"token_id:{token}" for token in only["token_ids"]]


def test_echo_alone_gives_one_entry_a_prompt_token_and_the_first_is_null(server):
    answer = complete(server, echo=True, max_tokens=0, logprobs=1)
    only = answer["choices"][0]
    assert only["text"] == PROMPT
    assert only["token_ids"] == []
    assert only["finish_reason"] == "length"
    assert "".join(only["logprobs"]["tokens"]) == PROMPT
    assert only["logprobs"]["text_offset"] == list(range(len(PROMPT)))
    for entries in (only["logprobs"]["token_logprobs"], only["logprobs"]["top_logprobs"]):
        assert len(entries) == len(PROMPT)
        assert entries[0] is None
        assert None not in entries[1:]
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_puts_the_prompt_before_each_sample(server):
    fields = {"temperature": 1.0, "seed": 3, "n": 2}
    plain, echoed = complete(server, **fields), complete(server, **fields, echo=True, logprobs=0)
    for without, with_prompt in zip(plain["choices"], echoed["choices"], strict=True):
        assert with_prompt["text"] == PROMPT + without["text"]
        assert len(with_prompt["logprobs"]["tokens"]) == len(PROMPT) + 12
    assert choice(server, prompt=[65, 66, 67], echo=True, max_tokens=0)["text"] != ""


def test_prompt_logprobs_are_those_of_the_engine(server, offline):
    (expected,) = offline.generate(PROMPT, SamplingParams(temperature=0, prompt_logprobs=2))
    only = choice(server, prompt_logprobs=2)
    assert only["prompt_logprobs"][0] is None
    for entry, known in zip(only["prompt_logprobs"][1:], expected.prompt_logprobs[1:], strict=True):
        assert {int(token): value["logprob"] for token, value in entry.items()} == {
            token: value.logprob for token, value in known.items()
        }


# Streams


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 2},
        {"prompt": ["one", "two", [65, 66]], "n": 2, "temperature": 1.0, "seed": 2},
        {"logprobs": 2, "echo": True, "n": 2, "temperature": 1.0, "seed": 9},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"prompt_logprobs": 1, "stop": "e", "max_tokens": 60},
        {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 40},
    ],
)
def test_the_joined_chunks_are_the_whole_answer(server, fields):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": True, **fields}
    whole = server.post(PATH, body).json()
    chunks = stream_chunks(server.client, PATH, {**body, "stream_options": {"include_usage": True}})
    *chunks, last = chunks
    assert last["choices"] == []
    streamed, expected = last["usage"], whole["usage"]
    assert {**streamed, "prompt_tokens_details": None} == {**expected, "prompt_tokens_details": None}
    assert all("usage" not in chunk for chunk in chunks)
    for entry in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == entry["index"]]
        assert "".join(piece["text"] for piece in pieces) == entry["text"]
        assert [token for piece in pieces for token in piece["token_ids"]] == entry["token_ids"]
        assert [piece["finish_reason"] for piece in pieces][:-1] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == entry["finish_reason"]
        assert pieces[-1]["stop_reason"] == entry["stop_reason"]
        assert pieces[0]["prompt_token_ids"] == entry["prompt_token_ids"]
        assert pieces[0].get("prompt_logprobs") == entry.get("prompt_logprobs")
        for name, values in (entry["logprobs"] or {}).items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values, name


def test_usage_comes_only_when_asked_for(server):
    body = {"prompt": PROMPT, "max_tokens": 5}
    assert all("usage" not in chunk and chunk["choices"] for chunk in stream_chunks(server.client, PATH, body))
    body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    chunks = stream_chunks(server.client, PATH, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert all("prompt_tokens_details" in chunk["usage"] for chunk in chunks)


def test_a_stream_says_its_warnings_first_and_its_timings_last(server):
    body = {"prompt": PROMPT, "max_tokens": 5, "temperatur": 1, "timings": True, "temperature": 0, "seed": 3}
    chunks = stream_chunks(server.client, PATH, body)
    assert "temperatur " in chunks[0]["warnings"][0]
    assert any("seed" in warning for warning in chunks[0]["warnings"])
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_no_chunk_is_sent_while_a_stop_string_may_begin(server):
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 40, "allowed_token_ids": [65, 66, 67]}
    text = choice(server, **fields)["text"]
    stop = text[20:28]
    chunks = stream_chunks(server.client, PATH, {"prompt": PROMPT, **fields, "stop": stop})
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == text[: text.index(stop)]
    assert all(texts[:-1])


def test_what_is_refused_before_the_first_token_has_a_status_of_its_own(server):
    response = server.post(PATH, {"prompt": "x" * 600, "stream": True})
    assert response.status_code == 400
    assert "512" in response.json()["error"]["message"]


# Warnings and refusals


def test_unknown_fields_are_answered_and_named(server):
    warnings = complete(server, temperatur=0.5, frobnicate=None, stop_at=3)["warnings"]
    assert any("temperatur " in warning and "temperature" in warning for warning in warnings)
    assert any("stop_at" in warning for warning in warnings)
    assert not any("frobnicate" in warning for warning in warnings)


def test_fields_without_effect_are_named(server):
    answer = complete(server, temperature=0, top_p=0.5, metadata={"a": "b"}, priority=3)
    assert {warning.split("=")[0].split(":")[0] for warning in answer["warnings"]} == {"top_p", "metadata", "priority"}


def test_null_means_absent_everywhere(server):
    schema = server.client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    nulls = {name: None for name in schema["properties"] if name not in ("prompt", "temperature")}
    answer = complete(server, **{**nulls, "return_token_ids": True, "suffix": None, "tools": None, "nonsense": None})
    assert "warnings" not in answer
    assert answer["choices"][0]["token_ids"] == choice(server, max_tokens=16)["token_ids"]
    assert complete(server, stream_options=None, stream=None)["choices"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", "hot"), ("top_p", 1.1), ("top_p", -0.1), ("min_p", 1.1), ("top_k", -2),
        ("top_k", 1.5), ("n", 0), ("n", "2"), ("n", True), ("best_of", 0), ("best_of", "x"), ("max_tokens", -1),
        ("max_tokens", 0), ("max_tokens", "many"), ("min_tokens", -1), ("min_tokens", 13), ("stop", ""), ("stop", [1]),
        ("stop", {}), ("stop_token_ids", [999]), ("stop_token_ids", "a"), ("stop_regex", "("), ("logprobs", -2),
        ("logprobs", True), ("logprobs", 10**6), ("prompt_logprobs", -2), ("presence_penalty", 3),
        ("frequency_penalty", -3), ("repetition_penalty", 0), ("logit_bias", {"191222": -100}),
        ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}), ("logit_bias", [1]), ("bad_words", [""]),
        ("bad_words", "x"), ("allowed_token_ids", []), ("seed", "s"),
        ("seed", 2**70), ("ignore_eos", 1), ("skip_special_tokens", "no"),
        ("include_stop_str_in_output", 3), ("logprobs_mode", "x"), ("priority", "high"), ("priority", 2**70),
        ("cache_salt", ""), ("cache_salt", 5), ("request_id", "a\nb"), ("user", 7), ("user", ""), ("metadata", 3),
        ("echo", "yes"), ("stream", 1), ("stream_options", {"include_usage": True}), ("stream_options", 3),
        ("timings", "x"), ("return_token_ids", 1), ("model", 3), ("suffix", "end"), ("use_beam_search", True),
        ("guided_json", {}), ("logits_processors", ["os:system"]), ("add_special_tokens", False),
        ("truncate_prompt_tokens", 5), ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "not-a-type"}), ("response_format", "json"), ("response_format", {"type": []}),
        ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", [""]), ("prompt", [[-1]]), ("prompt", [259]),
        ("prompt", [1.5]), ("prompt", [True]), ("prompt", [None]), ("prompt", {"prompt": "a"}), ("prompt", 5),
        ("prompt", ["a", 3]), ("prompt", ["a", {"prompt": "b"}]), ("prompt", [[1], "a", [10**30]]),
        ("prompt", ["a"] * 3000),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_and_named(server, field, value):
    assert len(refusal(server, field, **{field: value})) < 500


def test_known_values_that_ask_for_nothing_are_taken(server):
    answer = complete(
        server, suffix="", use_beam_search=False, response_format={"type": "text"}, add_special_tokens=True, best_of=1
    )
    assert "warnings" not in answer


def test_best_of_cannot_be_streamed(server):
    assert "stream" in refusal(server, "best_of", best_of=2, stream=True)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"a"', b"3", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff\xfe",
        b"[" * 50_000,
        b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "user": "\\udfff"}', b'{"a": 1}',
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_an_unreadable_body_is_a_400(server, body):
    response = server.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_duplicate_keys_take_the_last_value(server):
    body = b'{"prompt": "a", "max_tokens": 5, "max_tokens": 3}'
    response = server.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "garbage/;;"])
def test_only_json_that_says_so_is_read(server, content_type):
    response = server.client.post(PATH, content=b'{"prompt": "a"}', headers={"content-type": content_type})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


def test_one_bad_prompt_refuses_the_request_and_leaves_nothing_behind(server):
    assert "vocabulary" in refusal(server, "prompt", prompt=["good", [65], [9999]])
    assert server.client.get("/load").json()["server_load"] == 0
