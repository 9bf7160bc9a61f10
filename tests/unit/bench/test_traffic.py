"""The requests that measurements are made with: seeded, of the lengths asked for, and what a broken file gives."""

import json
from itertools import pairwise

import pytest
from tiny_models import byte_tokenizer

from octavo.bench.recordings import agent_turns, sharegpt_turns
from octavo.bench.traffic import PlainWords, TokenizerWords, TrafficArgs, make_traffic, poisson_arrivals
from octavo.errors import InvalidInput
from octavo.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def words():
    return TokenizerWords(Tokenizer(byte_tokenizer(), bos_token_id=None, eos_token_ids=(257,)))


def conversations(*texts):
    return [
        {"id": str(n), "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text[::-1]}]}
        for n, text in enumerate(texts)
    ]


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_the_same_seed_gives_the_same_requests_and_another_gives_others(words):
    args = TrafficArgs(num_prompts=5, input_len=20, range_ratio=0.5)
    assert make_traffic(args, words) == make_traffic(args, words)
    other = TrafficArgs(num_prompts=5, input_len=20, range_ratio=0.5, traffic_seed=1)
    assert make_traffic(args, words) != make_traffic(other, words)


def test_random_prompts_have_the_lengths_asked_for_and_no_special_token(words):
    requests = make_traffic(TrafficArgs(num_prompts=50, input_len=40, output_len=10, range_ratio=0.5), words)
    assert {type(request.prompt) for request in requests} == {list}
    assert all(len(request.prompt) == request.prompt_len and max(request.prompt) < 256 for request in requests)
    assert all(20 <= request.prompt_len <= 60 and 5 <= request.output_len <= 15 for request in requests)
    assert len({request.prompt_len for request in requests}) > 5


@pytest.mark.parametrize("plain", [False, True])
def test_shared_prefixes_are_shared_by_as_many_as_asked_for_and_the_rest_differs(words, plain):
    args = TrafficArgs(dataset_name="shared-prefix", num_prompts=6, input_len=8, prefix_len=32, num_prefixes=2)
    prompts = [request.prompt for request in make_traffic(args, PlainWords() if plain else words)]
    prompts = [prompt.split() if plain else prompt for prompt in prompts]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 6


def test_a_made_request_that_is_too_long_is_refused_with_both_numbers(words):
    with pytest.raises(InvalidInput, match=r"30 \+ 20 tokens.*49"):
        make_traffic(TrafficArgs(input_len=30, output_len=20), words, max_len=49)


@pytest.mark.parametrize("cut", [None, 1, 30, 100, 200])
def test_whole_records_of_a_cut_off_sharegpt_file_are_used(tmp_path, cut):
    texts = ["first", "zweite Frage ä 日本", "third"]
    whole = json.dumps(conversations(*texts), indent=1, ensure_ascii=False)
    data = whole.encode() if cut is None else whole.encode()[:-cut]
    (tmp_path / "s.json").write_bytes(data)
    found = [question for question, _ in sharegpt_turns(tmp_path / "s.json")]
    assert found == texts[: len(found)]
    assert len(found) >= (3 if cut in (None, 1) else 1)


def test_a_sharegpt_file_is_read_in_pieces_of_any_size(tmp_path, monkeypatch):
    texts = [f"question {n} é日" for n in range(20)]
    path = write(tmp_path / "s.json", json.dumps(conversations(*texts), ensure_ascii=False))
    monkeypatch.setattr("octavo.bench.recordings._CHUNK", 7)
    requests = make_traffic(TrafficArgs(dataset_name="sharegpt", dataset_path=path, num_prompts=100), PlainWords())
    assert [request.prompt for request in requests] == texts


def test_what_is_longer_than_the_limits_is_passed_over(tmp_path, words):
    path = write(tmp_path / "s.json", conversations("a" * 50, "b" * 10, "c" * 20))
    args = TrafficArgs(dataset_name="sharegpt", dataset_path=path, input_len=30)
    assert [request.prompt[0] for request in make_traffic(args, words)] == ["b", "c"]
    assert [request.prompt[0] for request in make_traffic(args, words, max_len=25)] == ["b"]
    with pytest.raises(InvalidInput, match="no request within"):
        make_traffic(args, words, max_len=5)


def test_every_turn_of_an_agent_is_a_request_that_begins_with_the_one_before(tmp_path):
    messages = [
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look"}]},
        {"role": "tool", "content": "result"},
    ]
    path = tmp_path / "a.json"
    write(path, {"cases": [{"messages": messages, "reference_response": "done"}, {"prompt": "of another kind"}]})
    (first, answer), (second, last) = agent_turns(path)
    assert (answer, last) == ("I look", "done")
    assert second.startswith(first + "I look") and "result" in second


def test_json_lines_keep_prompt_length_and_arrival(tmp_path, words):
    lines = '{"prompt": "abc", "output_len": 3, "arrival": 0.5}\n\n{"prompt_token_ids": [1, 2]}\n'
    args = TrafficArgs(dataset_name="jsonl", dataset_path=write(tmp_path / "t.jsonl", lines))
    first, second = make_traffic(args, words)
    assert (first.prompt, first.prompt_len, first.output_len, first.arrival) == ("abc", 3, 3, 0.5)
    assert (second.prompt, second.output_len, second.arrival) == ([1, 2], 128, None)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("nope", "line 1 is not JSON"),
        ("[]", "must be an object"),
        ('{"prompt": "a", "temperature": 0}', "must be an object with some of the fields"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "not both"),
        ('{"prompt": ""}', "non-empty text"),
        ('{"prompt_token_ids": [true]}', "list of integers"),
        ('{"prompt": "a", "output_len": 0}', "output_len=0"),
        ('{"prompt": "a", "arrival": -1}', "arrival=-1"),
        ('{"prompt": "a", "arrival": NaN}', "arrival=nan"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path, words, line, what):
    args = TrafficArgs(dataset_name="jsonl", dataset_path=write(tmp_path / "t.jsonl", line))
    with pytest.raises(InvalidInput, match=r"line 1") as refusal:
        make_traffic(args, words)
    assert what in str(refusal.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_prompts": 0},
        {"input_len": 0},
        {"range_ratio": 1.0},
        {"range_ratio": float("nan")},
        {"dataset_path": "x"},
        {"prefix_len": 3},
        {"dataset_name": "sharegpt"},
        {"dataset_name": "sharegpt", "dataset_path": "x", "range_ratio": 0.5},
        {"dataset_name": "agents", "dataset_path": "/nowhere"},
    ],
)
def test_what_cannot_be_meant_is_refused(words, wrong):
    with pytest.raises(InvalidInput):
        make_traffic(TrafficArgs(**wrong), words)


@pytest.mark.parametrize("content", ["", "{}", "[", "[1, 2]x", '{"cases": []}'])
@pytest.mark.parametrize("name", ["sharegpt", "agents"])
def test_a_file_of_another_kind_is_refused(tmp_path, words, name, content):
    with pytest.raises(InvalidInput):
        make_traffic(TrafficArgs(dataset_name=name, dataset_path=write(tmp_path / "f", content)), words)


def test_poisson_arrivals_have_the_rate_and_the_spread(words):
    requests = poisson_arrivals(make_traffic(TrafficArgs(num_prompts=2000), words), 10.0, seed=3)
    times = [request.arrival for request in requests]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0 and mean == pytest.approx(0.1, rel=0.1)
    assert deviation == pytest.approx(mean, rel=0.15)
