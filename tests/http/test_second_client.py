"""langchain-openai as a second client: another reader of the same answers."""

import pytest

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


@pytest.fixture
def model(server):
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="unused",
        model="tiny",
        temperature=0,
        max_completion_tokens=12,
        max_retries=0,
        extra_body={"ignore_eos": True},
    )


def test_an_answer_has_its_text_usage_and_ending(model):
    message = model.invoke("Hello there")
    assert message.content
    assert message.usage_metadata["output_tokens"] == 12
    assert message.response_metadata["finish_reason"] == "length"


def test_a_stream_joins_to_the_answer(model):
    chunks = list(model.stream([("system", "Be brief."), ("human", "Hello there")]))
    assert len(chunks) > 2
    whole = model.invoke([("system", "Be brief."), ("human", "Hello there")])
    assert "".join(chunk.content for chunk in chunks) == whole.content


def test_several_conversations_are_answered_at_once(model):
    answers = model.batch(["One", "Two", "Three"])
    assert [answer.content for answer in answers] == [model.invoke(text).content for text in ("One", "Two", "Three")]


def test_logprobs_are_read(model):
    message = model.bind(logprobs=True, top_logprobs=2).invoke("Hello there")
    assert len(message.response_metadata["logprobs"]["content"]) == 12


def test_a_refusal_is_raised_with_its_message(model):
    with pytest.raises(Exception, match="not built yet"):
        model.bind(tools=[{"type": "function", "function": {"name": "f"}}]).invoke("Hello there")
