"""The openai package as the client: what it parses, what it streams, what it raises."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

HELLO = [{"role": "user", "content": "Hello there"}]
SHORT = {"model": "tiny", "temperature": 0, "max_tokens": 12}
IGNORE_EOS = {"extra_body": {"ignore_eos": True}}


def connect(server, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, **options)


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with connect(server) as made:
        yield made


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["tiny", "tiny-too"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


def test_a_chat_completion_is_parsed(client):
    got = client.chat.completions.create(messages=HELLO, **SHORT, **IGNORE_EOS)
    assert isinstance(got, ChatCompletion)
    assert ChatCompletion.model_validate(got.model_dump(), strict=True)
    choice = got.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.refusal is None
    assert choice.finish_reason == "length"
    assert got.usage.completion_tokens == 12
    assert got.usage.total_tokens == got.usage.prompt_tokens + 12
    assert got.usage.prompt_tokens_details.cached_tokens >= 0
    assert got._request_id


def test_a_completion_is_parsed(client):
    got = client.completions.create(prompt=["One", "Two"], n=2, logprobs=1, **SHORT, **IGNORE_EOS)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert all(choice.finish_reason == "length" for choice in got.choices)
    logprobs = got.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 12
    assert got.usage.prompt_tokens == 6
    assert got.usage.completion_tokens == 48


def test_chat_logprobs_are_parsed(client):
    got = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **SHORT, **IGNORE_EOS)
    content = got.choices[0].logprobs.content
    assert len(content) == 12
    for entry in content:
        assert entry.top_logprobs[0].bytes == entry.bytes
        assert len(entry.top_logprobs) == 2


def test_chunks_are_parsed_and_join_to_the_whole(client):
    whole = client.chat.completions.create(messages=HELLO, **SHORT, **IGNORE_EOS)
    stream = client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **SHORT, **IGNORE_EOS
    )
    chunks = list(stream)
    assert all(ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True) for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12


def test_the_streaming_helper_follows_the_answer(client):
    text = client.chat.completions.create(messages=HELLO, **SHORT, **IGNORE_EOS).choices[0].message.content
    options = {"messages": HELLO, "logprobs": True, "n": 2, "stop": text[5:8], **SHORT, **IGNORE_EOS}
    whole = client.chat.completions.create(**options)
    events = []
    with client.chat.completions.stream(**options) as stream:
        for event in stream:
            events.append(event.type)
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(events)
    assert events.count("content.done") == 2
    for mine, theirs in zip(final.choices, whole.choices, strict=True):
        assert mine.message.content == theirs.message.content
        assert mine.finish_reason == theirs.finish_reason == "stop"
        for one, other in zip(mine.logprobs.content, theirs.logprobs.content, strict=True):
            assert (one.token, one.bytes) == (other.token, other.bytes)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_the_streaming_helper_says_when_an_answer_was_cut_off(client):
    with (
        client.chat.completions.stream(messages=HELLO, **SHORT, **IGNORE_EOS) as stream,
        pytest.raises(openai.LengthFinishReasonError) as caught,
    ):
        stream.until_done().get_final_completion()
    assert len(caught.value.completion.choices) == 1


def test_a_stream_of_completions_joins_to_the_whole(client):
    whole = client.completions.create(prompt="One", **SHORT, **IGNORE_EOS)
    chunks = list(client.completions.create(prompt="One", stream=True, **SHORT, **IGNORE_EOS))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_fields_beyond_the_reference_go_through_extra_body(client):
    extra = {"top_k": 1, "min_p": 0.1, "return_token_ids": True, "timings": True, "temperatur": 1}
    got = client.chat.completions.create(messages=HELLO, model="tiny", max_completion_tokens=3, extra_body=extra)
    assert got.prompt_token_ids
    assert len(got.choices[0].token_ids) <= 3
    assert got.timings["decode_seconds"] >= 0
    assert got.warnings[0].startswith("temperatur ")


def test_refusals_are_bad_requests_that_name_the_field(client):
    for options in ({"temperature": -1.0}, {"top_p": 1.1}, {"logit_bias": {"191222": -100}}, {"n": 0}):
        (field,) = options
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=HELLO, model="tiny", **options)
        assert caught.value.param == field
        assert caught.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(messages=HELLO, model="tiny", stream=True, **options)
    assert client.chat.completions.create(messages=HELLO, **SHORT)


def test_features_that_are_not_built_are_bad_requests_that_say_so(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for options in ({"tools": [tool]}, {"response_format": {"type": "json_object"}}, {"modalities": ["audio"]}):
        with pytest.raises(openai.BadRequestError, match="not built yet"):
            client.chat.completions.create(messages=HELLO, model="tiny", **options)


def test_a_model_that_is_not_served_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(messages=HELLO, model="gpt-4o")


def test_a_wrong_key_is_an_authentication_error(start_server):
    own = start_server("--api-key", "right")
    with pytest.raises(openai.AuthenticationError) as caught:
        connect(own).with_options(api_key="wrong").chat.completions.create(messages=HELLO, model="x")
    assert caught.value.code == "invalid_api_key"
    right = connect(own).with_options(api_key="right")
    served = right.models.list().data[0].id
    assert right.chat.completions.create(messages=HELLO, model=served, max_tokens=2).choices


def test_an_overflow_is_a_rate_limit_error_with_retry_after(start_endless_server):
    own = start_endless_server("--max-queued-requests", "1", "--max-num-seqs", "1", "--served-model-name", "tiny")

    async def run() -> list[object]:
        async with openai.AsyncOpenAI(base_url=f"{own.url}/v1", api_key="x", max_retries=0) as client:
            # so long that the first still runs when the last comes
            calls = [
                client.completions.create(model="tiny", prompt="x", max_tokens=2000, **IGNORE_EOS) for _ in range(12)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

    got = asyncio.run(run())
    refused = [one for one in got if isinstance(one, Exception)]
    assert refused
    assert len(refused) < len(got)
    for error in refused:
        assert isinstance(error, openai.RateLimitError)
        assert int(error.response.headers["retry-after"]) >= 1


def test_the_asynchronous_client_streams_and_may_leave(server):
    async def run() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            whole = await client.chat.completions.create(messages=HELLO, **SHORT, **IGNORE_EOS)
            text = ""
            stream = await client.chat.completions.create(messages=HELLO, stream=True, **SHORT, **IGNORE_EOS)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            left = await client.chat.completions.create(messages=HELLO, stream=True, model="tiny", **IGNORE_EOS)
            async for _ in left:
                break
            await left.close()
            return whole.choices[0].message.content, text

    whole, text = asyncio.run(run())
    assert text == whole
