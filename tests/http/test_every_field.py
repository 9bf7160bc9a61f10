"""Every field of completions and chat: its effect on the answer, its refusal, or the warning that it has no effect.

A field without a proof here fails `test_no_field_is_without_proof`.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import regex
from http_driver import RunningServer, stream_chunks
from tiny_models import BOS, EOS, byte_tokenizer

from octavo.entrypoints.server.schema.chat import ChatCompletionRequest
from octavo.entrypoints.server.schema.completions import CompletionRequest

BODIES = {"chat": ChatCompletionRequest, "completions": CompletionRequest}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ENCODE = byte_tokenizer().encode
LETTERS = ENCODE("abcdefghijklmnopqrstuvwxyz").ids
A = str(LETTERS[0])


@dataclass
class Answer:
    """An answer in the same form from both endpoints."""

    body: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        return [one["message"]["content"] if "message" in one else one["text"] for one in self.body["choices"]]

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def first(self) -> dict[str, Any]:
        return self.body["choices"][0]

    @property
    def ids(self) -> list[int]:
        return self.first["token_ids"]

    @property
    def prompt_ids(self) -> list[int]:
        return self.body.get("prompt_token_ids") or self.first["prompt_token_ids"]

    @property
    def warnings(self) -> list[str]:
        return self.body.get("warnings", [])


class Asker:
    """Asks one endpoint, each time with the same request but for the fields that are given. None leaves one out."""

    def __init__(self, server: RunningServer, kind: str) -> None:
        self.server, self.kind, self.path = server, kind, PATHS[kind]
        self._base = {"seed": 1, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        self._base |= {"prompt": "Hello"} if kind == "completions" else {"messages": [self.message("Hello")]}

    @staticmethod
    def message(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    def body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in {**self._base, **fields}.items() if value is not None}

    def __call__(self, **fields: Any) -> Answer:
        response = self.server.post(self.path, self.body(fields))
        assert response.status_code == 200, response.text
        return Answer(response.json())

    def refused(self, status: int = 400, **fields: Any) -> dict[str, Any]:
        """The error; the last field given is the one it must name."""
        response = self.server.post(self.path, self.body(fields))
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == list(fields)[-1], error
        return error

    def stream(self, **fields: Any) -> list[dict[str, Any]]:
        return stream_chunks(self.server.client, self.path, self.body(fields))

    def greedy(self, **fields: Any) -> Answer:
        return self(temperature=0, seed=None, **fields)

    def logprobs(self, answer: Answer) -> list[float]:
        found = answer.first["logprobs"]
        return found["token_logprobs"] if self.kind == "completions" else [one["logprob"] for one in found["content"]]

    def tokens(self, answer: Answer) -> list[str]:
        found = answer.first["logprobs"]
        return found["tokens"] if self.kind == "completions" else [one["token"] for one in found["content"]]

    @property
    def with_logprobs(self) -> dict[str, Any]:
        return {"logprobs": 1} if self.kind == "completions" else {"logprobs": True}


Proof = Callable[[Asker], None]
PROOFS: dict[str, Proof] = {}


def proof(of: str) -> Callable[[Proof], Proof]:
    def add(function: Proof) -> Proof:
        PROOFS[of] = function
        return function

    return add


def warned(answer: Answer, field: str) -> bool:
    return any(regex.match(rf"{field}\b", warning) for warning in answer.warnings)


@proof("model")
def _(ask: Asker) -> None:
    assert ask(model="tiny-too").body["model"] == "tiny-too"
    assert ask().body["model"] == "tiny"
    ask.refused(404, model="gpt-4o")


@proof("prompt")
def _(ask: Asker) -> None:
    ids = ENCODE("Hello").ids
    alone = ask().text
    assert ask(prompt=ids).text == alone
    assert ask(prompt=["Hello", "Bye"]).texts == [alone, ask(prompt="Bye").text]
    assert ask(prompt=[ids, ENCODE("Bye").ids]).texts == ask(prompt=["Hello", "Bye"]).texts
    for wrong in ("", [], [[]], [[-1]], [259], [1.5], [None], {"a": 1}, 3, "x" * 600):
        ask.refused(prompt=wrong)


@proof("messages")
def _(ask: Asker) -> None:
    assert ask(messages=[ask.message("Bye")]).text != ask().text
    for wrong in ([], "x", [{}], 3, [ask.message("x" * 600)]):
        response = ask.server.post(ask.path, ask.body({"messages": wrong}))
        assert response.status_code == 400


@proof("temperature")
def _(ask: Asker) -> None:
    assert ask(temperature=0, seed=1).text == ask(temperature=0, seed=2).text == ask.greedy().text
    assert ask(temperature=1.0, seed=1).text != ask(temperature=1.0, seed=2).text
    ask.refused(temperature=-0.1)


@proof("top_p")
def _(ask: Asker) -> None:
    assert ask(top_p=0).text == ask.greedy().text != ask(top_p=1).text
    ask.refused(top_p=1.1)


@proof("top_k")
def _(ask: Asker) -> None:
    assert ask(top_k=1).text == ask.greedy().text
    assert ask(top_k=-1).text == ask(top_k=0).text == ask().text
    ask.refused(top_k=-2)


@proof("min_p")
def _(ask: Asker) -> None:
    assert ask(min_p=1.0).text == ask.greedy().text
    ask.refused(min_p=1.1)


@proof("seed")
def _(ask: Asker) -> None:
    assert ask(seed=5).text == ask(seed=5).text != ask(seed=6).text
    assert warned(ask(seed=5, temperature=0), "seed")
    ask.refused(seed=1.5)


@proof("n")
def _(ask: Asker) -> None:
    several = ask(n=3).texts
    assert len(set(several)) == 3
    assert several[0] == ask(n=1).text
    ask.refused(n=0)


@proof("best_of")
def _(ask: Asker) -> None:
    samples = ask(n=4, logprobs=0)
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in samples.body["choices"]]
    ranked = [text for _, text in sorted(zip(sums, samples.texts, strict=True), reverse=True)]
    assert ask(best_of=4).texts == ranked[:1]
    assert ask(best_of=4, n=2).texts == ranked[:2]
    ask.refused(n=3, best_of=2)


@proof("max_tokens")
def _(ask: Asker) -> None:
    short = ask(max_tokens=3)
    assert len(short.ids) == 3
    assert short.first["finish_reason"] == "length"
    clamped = ask(max_tokens=10_000)
    assert len(clamped.ids) + len(clamped.prompt_ids) == 512
    assert warned(clamped, "max_tokens")
    room = 512 - len(clamped.prompt_ids)
    assert len(ask(max_tokens=None).ids) == (16 if ask.kind == "completions" else room)
    ask.refused(max_tokens=-1)


@proof("max_completion_tokens")
def _(ask: Asker) -> None:
    assert len(ask(max_completion_tokens=4).ids) == 4
    ask.refused(max_completion_tokens=0)


@proof("min_tokens")
def _(ask: Asker) -> None:
    fields = {"logit_bias": {str(EOS): 100}, "ignore_eos": False}
    assert len(ask(**fields).ids) == 1
    assert len(ask(min_tokens=4, **fields).ids) == 5
    ask.refused(max_tokens=2, min_tokens=3)


@proof("ignore_eos")
def _(ask: Asker) -> None:
    fields = {"logit_bias": {str(EOS): 100}}
    assert ask(ignore_eos=False, **fields).first["finish_reason"] == "stop"
    assert ask(ignore_eos=True, **fields).ids == [EOS] * 24
    ask.refused(ignore_eos="yes")


@proof("stop")
def _(ask: Asker) -> None:
    text = ask(allowed_token_ids=LETTERS).text
    stop = text[5:8]
    for value in (stop, [stop, "never"]):
        got = ask(allowed_token_ids=LETTERS, stop=value)
        assert got.text == text[: text.index(stop)]
        assert (got.first["finish_reason"], got.first["stop_reason"]) == ("stop", stop)
    for wrong in ("", [""], 3, [None]):
        ask.refused(stop=wrong)


@proof("stop_token_ids")
def _(ask: Asker) -> None:
    ids = ask().ids
    got = ask(stop_token_ids=[ids[5]])
    assert got.ids == ids[: ids.index(ids[5]) + 1]
    assert (got.first["finish_reason"], got.first["stop_reason"]) == ("stop", ids[5])
    ask.refused(stop_token_ids=[191222])


@proof("stop_regex")
def _(ask: Asker) -> None:
    text = ask(allowed_token_ids=LETTERS).text
    pattern = f"[{text[5]}]"
    got = ask(allowed_token_ids=LETTERS, stop_regex=pattern)
    assert got.text == text[: text.index(text[5])]
    assert got.first["stop_reason"] == pattern
    ask.refused(stop_regex="(")


@proof("include_stop_str_in_output")
def _(ask: Asker) -> None:
    stop = ask(allowed_token_ids=LETTERS).text[5:8]
    fields = {"allowed_token_ids": LETTERS, "stop": stop}
    assert ask(include_stop_str_in_output=True, **fields).text == ask(**fields).text + stop
    ask.refused(include_stop_str_in_output=1)


def _penalty(field: str, value: float, beyond: float) -> None:
    @proof(field)
    def _(ask: Asker) -> None:
        fields = {"allowed_token_ids": LETTERS, "max_tokens": 60}
        assert ask.greedy(**{field: value}, **fields).text != ask.greedy(**fields).text
        ask.refused(**{field: beyond})


_penalty("presence_penalty", 2.0, 2.1)
_penalty("frequency_penalty", 2.0, -2.1)
_penalty("repetition_penalty", 5.0, 0.0)


@proof("logit_bias")
def _(ask: Asker) -> None:
    assert ask(logit_bias={A: 100}).text == "a" * 24
    for wrong in ({"191222": -100}, {"x": 1}, {A: 101}, [1]):
        ask.refused(logit_bias=wrong)


@proof("bad_words")
def _(ask: Asker) -> None:
    text = ask.greedy(allowed_token_ids=LETTERS).text
    got = ask.greedy(allowed_token_ids=LETTERS, bad_words=[text[0]]).text
    assert text[0] not in got
    ask.refused(bad_words=[""])


@proof("allowed_token_ids")
def _(ask: Asker) -> None:
    assert set(ask(allowed_token_ids=LETTERS[:2]).text) <= {"a", "b"}
    for wrong in ([], [259], "x"):
        ask.refused(allowed_token_ids=wrong)


@proof("skip_special_tokens")
def _(ask: Asker) -> None:
    fields = {"logit_bias": {str(BOS): 100}, "max_tokens": 2}
    assert ask(**fields).text == ""
    assert ask(skip_special_tokens=False, **fields).text == "<s><s>"
    ask.refused(skip_special_tokens="no")


@proof("spaces_between_special_tokens")
def _(ask: Asker) -> None:
    assert warned(ask(spaces_between_special_tokens=False), "spaces_between_special_tokens")
    ask.refused(spaces_between_special_tokens="no")


@proof("logprobs")
def _(ask: Asker) -> None:
    got = ask(**ask.with_logprobs)
    assert len(ask.logprobs(got)) == 24
    assert all(math.isfinite(number) and number <= 0 for number in ask.logprobs(got))
    assert ask().first["logprobs"] is None
    if ask.kind == "completions":
        assert all(1 <= len(top) <= 2 for top in got.first["logprobs"]["top_logprobs"])
        ask.refused(logprobs=-2)
        ask.refused(logprobs=500)
    else:
        ask.refused(logprobs=1)


@proof("top_logprobs")
def _(ask: Asker) -> None:
    got = ask(logprobs=True, top_logprobs=3)
    assert all(len(one["top_logprobs"]) == 3 for one in got.first["logprobs"]["content"])
    ask.refused(top_logprobs=3)
    ask.refused(logprobs=True, top_logprobs=500)


@proof("prompt_logprobs")
def _(ask: Asker) -> None:
    got = ask(prompt_logprobs=2)
    entries = got.body.get("prompt_logprobs") or got.first["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(got.prompt_ids)
    assert all(2 <= len(entry) <= 3 for entry in entries[1:])
    ask.refused(prompt_logprobs=-2)


@proof("logprobs_mode")
def _(ask: Asker) -> None:
    fields = {**ask.with_logprobs, "top_k": 1}
    assert all(number == 0 for number in ask.logprobs(ask(logprobs_mode="processed_logprobs", **fields)))
    assert any(number < -1e-3 for number in ask.logprobs(ask(logprobs_mode="raw_logprobs", **fields)))
    ask.refused(logprobs_mode="x")


@proof("return_tokens_as_token_ids")
def _(ask: Asker) -> None:
    got = ask(return_tokens_as_token_ids=True, **ask.with_logprobs)
    assert ask.tokens(got) == [f"token_id:{token}" for token in got.ids]
    ask.refused(return_tokens_as_token_ids="yes")


@proof("return_token_ids")
def _(ask: Asker) -> None:
    got = ask(return_token_ids=True)
    assert len(got.ids) == 24
    assert got.prompt_ids
    assert "token_ids" not in ask(return_token_ids=False).first
    ask.refused(return_token_ids="yes")


@proof("echo")
def _(ask: Asker) -> None:
    assert ask(echo=True).text == "Hello" + ask().text
    assert ask(prompt=ENCODE("Hello").ids, echo=True).text == "Hello" + ask().text
    alone = ask(echo=True, max_tokens=0, logprobs=1)
    assert alone.text == "Hello"
    found = alone.first["logprobs"]
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == 5
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    ask.refused(echo="yes")


@proof("stream")
def _(ask: Asker) -> None:
    pieces = [chunk["choices"][0] for chunk in ask.stream(max_tokens=100)]
    texts = [piece["delta"].get("content", "") if "delta" in piece else piece["text"] for piece in pieces]
    assert len(pieces) > 2  # a slow reader gets merged pieces
    assert "".join(texts) == ask(max_tokens=100).text
    ask.refused(stream="yes")


@proof("stream_options")
def _(ask: Asker) -> None:
    assert all("usage" not in chunk for chunk in ask.stream())
    *chunks, last = ask.stream(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 24
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    assert all("usage" in chunk for chunk in ask.stream(stream_options={"continuous_usage_stats": True}))
    (warning,) = ask.stream(stream_options={"include_usag": True})[0]["warnings"]
    assert warning.startswith("stream_options: include_usag ")
    ask.refused(stream_options={"include_usage": True})


@proof("timings")
def _(ask: Asker) -> None:
    assert ask(timings=True).body["timings"]["decode_seconds"] > 0
    assert "timings" not in ask().body
    ask.refused(timings="yes")


@proof("request_id")
def _(ask: Asker) -> None:
    assert ask(request_id="my-own").body["id"].endswith("-my-own")
    ask.refused(request_id="")


@proof("user")
def _(ask: Asker) -> None:
    assert ask(user="somebody").text == ask().text
    for wrong in ("", "x" * 1000, 3):
        ask.refused(user=wrong)


@proof("metadata")
def _(ask: Asker) -> None:
    assert warned(ask(metadata={"a": "b"}), "metadata")
    ask.refused(metadata="x")


@proof("priority")
def _(ask: Asker) -> None:
    assert warned(ask(priority=1), "priority")
    ask.refused(priority="high")


@proof("cache_salt")
def _(ask: Asker) -> None:
    long = f"{ask.kind} and a text that is longer than one block of the cache"
    prompt = {"prompt": long} if ask.kind == "completions" else {"messages": [ask.message(long)]}

    def cached(salt: str) -> int:
        return ask(cache_salt=salt, **prompt).body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0
    ask.refused(cache_salt="")


@proof("response_format")
def _(ask: Asker) -> None:
    assert ask(response_format={"type": "text"}).text == ask().text
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    for wrong in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": loop}},
    ):
        assert "not built yet" in ask.refused(response_format=wrong)["message"]
    for wrong in ({"type": "not-a-type"}, {}, "json_object", {"type": 3}):
        ask.refused(response_format=wrong)


@proof("add_generation_prompt")
def _(ask: Asker) -> None:
    tail = ENCODE("[assistant]").ids
    assert ask().prompt_ids[-len(tail) :] == tail
    assert ask(add_generation_prompt=False).prompt_ids == ask().prompt_ids[: -len(tail)]
    ask.refused(add_generation_prompt="yes")


@proof("continue_final_message")
def _(ask: Asker) -> None:
    messages = [ask.message("Hello"), {"role": "assistant", "content": "OK!\n"}]
    got = ask(messages=messages, continue_final_message=True)
    assert got.prompt_ids == ENCODE("<s>[user]Hello\n[assistant]OK!\n").ids
    ask.refused(continue_final_message="yes")


@proof("chat_template_kwargs")
def _(ask: Asker) -> None:
    assert warned(ask(chat_template_kwargs={"enable_thinking": True}), "chat_template_kwargs.enable_thinking")
    ask.refused(chat_template_kwargs={"messages": []})


@proof("documents")
def _(ask: Asker) -> None:
    assert warned(ask(documents=[{"text": "x"}]), "documents")
    ask.refused(documents="x")


@proof("chat_template")
def _(ask: Asker) -> None:
    assert ask(chat_template="default").text == ask().text
    ask.refused(chat_template="{{ messages }}")


def rows() -> list[tuple[str, str]]:
    return [(kind, field) for kind, body in BODIES.items() for field in PROOFS if field in body.model_fields]


@pytest.mark.parametrize(("kind", "field"), rows())
def test_the_field_has_its_effect(server, kind, field):
    PROOFS[field](Asker(server, kind))


@pytest.mark.parametrize(("kind", "field"), [(kind, name) for kind, body in BODIES.items() for name in body.not_built])
def test_a_field_that_is_not_built_is_refused_by_name(server, kind, field):
    error = Asker(server, kind).refused(**{field: {"any": "thing"}})
    assert "not built yet" in error["message"]


@pytest.mark.parametrize("field", ChatCompletionRequest.no_effect)
def test_a_field_without_effect_is_named_in_the_warnings(server, field):
    assert warned(Asker(server, "chat")(**{field: True}), field)


@pytest.mark.parametrize("kind", BODIES)
def test_no_field_is_without_proof(kind):
    body = BODIES[kind]
    assert set(body.model_fields) <= {*PROOFS, *body.not_built, *getattr(body, "no_effect", ())}


def test_variables_reach_the_template_of_a_chat(start_server, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}{% if think %}?{% endif %}{{ documents[0].text if documents }}")
    ask = Asker(start_server("--chat-template", str(template)), "chat")
    got = ask(chat_template_kwargs={"think": True}, documents=[{"text": "D"}])
    assert got.prompt_ids == ENCODE("Hello?D").ids
    assert not got.warnings


@pytest.mark.parametrize("kind", BODIES)
def test_the_lower_number_goes_first(start_server, kind):
    own = start_server("--scheduling-policy", "priority", "--max-num-seqs", "1")
    ask = Asker(own, kind)
    ended: list[str] = []

    def run(name: str, **fields: Any) -> None:
        assert not ask(**fields).warnings
        ended.append(name)

    # its samples are computed one after the other, so it is there long enough on any machine
    threads = [threading.Thread(target=run, args=("blocker",), kwargs={"max_tokens": 400, "n": 16})]
    # and theirs are long beside the time that its answer, the largest, is on its way
    others = {"max_tokens": 300, "ignore_eos": True}
    threads += [threading.Thread(target=run, args=(str(p),), kwargs={"priority": p, **others}) for p in (5, 3, -1)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        end = time.monotonic() + 60
        while own.client.get("/load").json()["server_load"] < number:  # none leaves before the last one is there
            assert time.monotonic() < end
            time.sleep(0.01)
        if number == 1:
            while not own.client.get("/load").json()["num_running"]:  # it has the only seat
                assert time.monotonic() < end
                time.sleep(0.01)
    for thread in threads:
        thread.join(120)
    assert ended == ["-1", "blocker", "3", "5"]
