"""`octavo generate --input`: every line is answered exactly once, however often the run was cut off."""

import itertools
import json
import logging
import os
import random
import sys
import types

import pytest
import tiny_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.config.model import ModelConfig
from octavo.engine.input_processor import InputProcessor
from octavo.entrypoints.cli.batch import run_batch
from octavo.entrypoints.cli.batch_file import BatchFiles
from octavo.entrypoints.cli.main import main
from octavo.errors import EngineDeadError, InvalidInput
from octavo.protocol.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenization.tokenizer import Tokenizer

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=tiny_models.VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=512,
)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


class FakeEngine:
    """Real checks at the door; then one live request a step, chosen at random, answers "seed:prompt"."""

    def __init__(self, max_num_seqs=2, dies_after=None, order=0):
        self.tokenizer = Tokenizer(tiny_models.byte_tokenizer(), chat_templates={"default": TEMPLATE})
        self.config = types.SimpleNamespace(scheduler=types.SimpleNamespace(max_num_seqs=max_num_seqs))
        self.input_processor = InputProcessor(
            tokenizer=self.tokenizer, model=MODEL, max_model_len=200, num_blocks=100, block_size=16, engine_seed=0
        )
        self.requests = []
        self.live = []
        self.max_live = 0
        self._dies_after = dies_after
        self._random = random.Random(order)

    def add_request(self, request_id, prompt, params, priority):
        request, _ = self.input_processor.process(request_id, prompt, params, priority)
        self.requests.append(request)
        self.live.append(request)
        self.max_live = max(self.max_live, len(self.live))

    def step(self):
        if self._dies_after is not None:
            self._dies_after -= 1
            if self._dies_after < 0:
                raise KeyboardInterrupt
        return [self.finish(self.live.pop(self._random.randrange(len(self.live))))]

    def finish(self, request):
        params = request.sampling_params
        logprobs = None if params.logprobs is None else [{7: Logprob(float("-inf"), 3, "x")}]
        text = f"{params.seed}:{self.tokenizer.decode(request.prompt_token_ids)}"
        completions = [
            CompletionOutput(index, text, [7], logprobs=logprobs, finish_reason="stop", stop_reason="END")
            for index in range(params.n)
        ]
        metrics = RequestMetrics(clamps=request.clamps, ignored=request.ignored)
        return RequestOutput(
            request.request_id, None, request.prompt_token_ids, completions, True, num_cached_tokens=1, metrics=metrics
        )


class FakeLLM:
    def __init__(self, defaults=None, **options):
        self.llm_engine = FakeEngine(**options)
        self._defaults = {"temperature": 0.5, **(defaults or {})}

    def get_default_sampling_params(self):
        return SamplingParams(**self._defaults)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


class Folder:
    """An input and an output file."""

    def __init__(self, path):
        self.input, self.output = path / "in.jsonl", path / "out.jsonl"

    def write(self, *lines):
        self.input.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))

    def run(self, given=None, return_token_ids=False, **options):
        llm = FakeLLM(**options)
        with BatchFiles(str(self.input), str(self.output)) as files:
            self.summary = run_batch(llm, files, given or {}, return_token_ids=return_token_ids)
        return llm.llm_engine

    def answers(self):
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def by_line(self):
        return {answer["line"]: answer for answer in self.answers()}


# Answers


def test_each_line_is_answered_with_its_id_or_number(folder):
    folder.write({"prompt": "one"}, "\n", {"id": "b", "prompt_token_ids": [1, 2]}, {"id": 9, "prompt": "three"})
    folder.run()
    answers = folder.by_line()
    assert {line: answer["id"] for line, answer in answers.items()} == {1: 1, 3: "b", 4: 9}
    assert answers[1]["text"].endswith(":one")
    assert answers[1]["finish_reason"] == "stop"
    assert answers[1]["stop_reason"] == "END"
    assert answers[1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 1}
    assert "token_ids" not in answers[1]


def test_messages_go_through_the_chat_template_and_may_be_answered_at_length(folder):
    messages = [{"role": "u", "content": "hi"}]
    folder.write({"messages": messages}, {"messages": messages, "max_tokens": 3, "add_generation_prompt": False})
    engine = folder.run()
    assert [answer["text"].split(":")[1] for answer in sorted(folder.answers(), key=lambda a: a["line"])] == [
        "[u]hi[a]",
        "[u]hi",
    ]
    assert [request.sampling_params.max_tokens for request in engine.requests] == [200 - len("[u]hi[a]"), 3]
    folder.output.unlink()
    engine = folder.run(defaults={"max_tokens": 20})
    assert [request.sampling_params.max_tokens for request in engine.requests] == [20, 3]


def test_parameters_of_a_line_go_over_the_command_lines_and_these_over_the_models(folder):
    folder.write({"prompt": "a"}, {"prompt": "b", "top_k": 3, "min_p": None, "stop": "x"})
    first, second = (request.sampling_params for request in folder.run({"top_k": 7, "min_p": 0.2}).requests)
    assert (first.temperature, first.top_k, first.min_p, first.max_tokens, first.stop) == (0.5, 7, 0.2, 16, [])
    assert (second.temperature, second.top_k, second.min_p, second.stop) == (0.5, 3, 0.2, ["x"])
    assert first.output_kind is RequestOutputKind.FINAL_ONLY


def test_priority_and_salt_arrive(folder):
    folder.write({"prompt": "a", "priority": -3, "cache_salt": "s"})
    (request,) = folder.run().requests
    assert (request.priority, request.cache_salt) == (-3, "s")


def test_several_samples_are_listed(folder):
    folder.write({"prompt": "a", "n": 2})
    folder.run()
    (answer,) = folder.answers()
    assert [output["index"] for output in answer["outputs"]] == [0, 1]
    assert all(output["text"].endswith(":a") and output["finish_reason"] == "stop" for output in answer["outputs"])
    assert answer["usage"]["completion_tokens"] == 2
    assert "text" not in answer


def test_token_ids_are_shown_if_asked_for_or_if_there_is_no_text(folder):
    folder.write({"prompt": "a"})
    folder.run(return_token_ids=True)
    folder.input, folder.output = folder.input.with_name("in2"), folder.output.with_name("out2")
    folder.write({"prompt": "a", "detokenize": False})
    folder.run()
    assert folder.answers()[0]["token_ids"] == [7]


def test_logprobs_are_written_and_what_is_not_finite_is_null(folder):
    folder.write({"prompt": "a", "logprobs": 0})
    folder.run()
    assert folder.answers()[0]["logprobs"] == [[{"token_id": 7, "logprob": None, "rank": 3, "token": "x"}]]


def test_receipt_is_written_if_there_is_one(folder):
    folder.write({"prompt": "a", "max_tokens": 1000, "temperature": 0, "top_p": 0.5}, {"prompt": "b"})
    folder.run()
    answers = folder.by_line()
    assert answers[1]["clamps"] == ["max_tokens 1000 -> 199 (room left)"]
    assert answers[1]["ignored"][0].startswith("top_p=0.5: ")
    assert not {"clamps", "ignored"} & set(answers[2])


BAD_LINES = [
    ("{broken\n", "not JSON"),
    ('"text"\n', "must be an object"),
    ("[" * 100_000 + "\n", "not JSON"),
    ("{}\n", "exactly one of prompt, prompt_token_ids, messages; it has none"),
    ('{"prompt": "a", "messages": []}\n', "exactly one"),
    ('{"prompt": ""}\n', "empty"),
    ('{"prompt": 5}\n', "must be a string"),
    ('{"prompt": ["a"]}\n', "must be a string"),
    ('{"prompt_token_ids": [5000]}\n', "vocabulary"),
    ('{"prompt_token_ids": "a"}\n', "must be a list"),
    ('{"prompt": "a", "temperatur": 1}\n', "'temperatur'; did you mean 'temperature'?"),
    ('{"prompt": "a", "temperature": -1}\n', "temperature=-1"),
    ('{"prompt": "a", "temperature": NaN}\n', "not JSON"),
    ('{"prompt": "a", "output_kind": 0}\n', "output_kind, which a file cannot give"),
    ('{"prompt": "a", "logits_processors": ["os:getcwd"]}\n', "logits_processors, which a file cannot give"),
    ('{"prompt": "a", "id": [1]}\n', "id="),
    ('{"prompt": "a", "id": true}\n', "id=True"),
    ('{"prompt": "a", "priority": "high"}\n', "priority="),
    ('{"messages": [{"role": "u", "content": "a"}], "chat_template": "/etc/passwd"}\n', "a line cannot name a file"),
    ('{"messages": [{"role": "u", "content": "a"}], "chat_template": ""}\n', "neither a Jinja text nor one of"),
    ('{"messages": [{"role": "u", "content": "a"}], "chat_template": 5}\n', "must be a Jinja text"),
    (
        json.dumps({"messages": [{"role": "u", "content": "a"}], "chat_template": r"{{ raise_exception('\ud800') }}"})
        + "\n",
        "refuses this conversation: \\ud800",
    ),
    ('{"prompt": "a", "tools": []}\n', "tools are for messages"),
    ('{"messages": 5}\n', "messages"),
    ('{"messages": [{"role": "u", "content": "a"}], "chat_template": "{{ 1/0 }}"}\n', "division by zero"),
    (json.dumps({"prompt": "a" * 500}) + "\n", "500 tokens"),
    (b"\xff\xfe\n", "not JSON"),
    (b'{"prompt": "\\ud800"}\n', "not JSON"),
]


def test_bad_line_is_answered_with_its_error_and_harms_no_other(folder):
    good = json.dumps({"prompt": "good"}) + "\n"
    data = [line.encode() if isinstance(line, str) else line for line, _ in BAD_LINES]
    folder.input.write_bytes(good.encode() + b"".join(itertools.chain(*((line, good.encode()) for line in data))))
    folder.run()
    answers = folder.by_line()
    assert len(answers) == 2 * len(BAD_LINES) + 1
    for index, (_, message) in enumerate(BAD_LINES):
        assert message in answers[2 * index + 2]["error"]
        assert answers[2 * index + 3]["text"].endswith(":good")


def test_summary_counts_the_lines_of_the_run_and_tells_the_first_refusal(folder):
    folder.write({"prompt": "a"})
    folder.run()
    assert str(folder.summary) == "1 line: 1 answered, 0 refused"
    folder.write({"prompt": "a"}, {"prompt": "b"}, {"prompt": ""}, "{bad\n")
    folder.run()
    assert str(folder.summary).startswith("3 lines: 1 answered, 2 refused, the first is line 3: ")
    assert folder.by_line()[3]["error"] in str(folder.summary)


def test_template_of_a_line_may_be_a_text_or_a_name(folder):
    message = {"messages": [{"role": "u", "content": "hi"}]}
    folder.write({**message, "chat_template": "{{ messages[0].content }}"}, {**message, "chat_template": "default"})
    folder.run()
    answers = folder.by_line()
    assert [answers[line]["text"].split(":")[1] for line in (1, 2)] == ["hi", "[u]hi[a]"]


def test_defect_costs_the_line_only_even_if_its_text_cannot_be_encoded(folder, monkeypatch):
    add_request = FakeEngine.add_request

    def fail(self, request_id, *args):
        if request_id == "1":
            raise RuntimeError("odd")
        if request_id == "2":
            raise InvalidInput("bad \ud800")
        add_request(self, request_id, *args)

    monkeypatch.setattr(FakeEngine, "add_request", fail)
    folder.write({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    folder.run()
    answers = folder.by_line()
    assert "RuntimeError('odd')" in answers[1]["error"]
    assert answers[2]["error"] == "bad \\ud800"
    assert answers[3]["text"].endswith(":c")
    folder.run()  # the records can be read again
    assert str(folder.summary).startswith("2 lines: 0 answered, 2 refused")


def test_engine_that_died_is_no_matter_of_one_line(folder, monkeypatch):
    def die(self, *args):
        raise EngineDeadError("gone")

    monkeypatch.setattr(FakeEngine, "add_request", die)
    folder.write({"prompt": "a"})
    with pytest.raises(EngineDeadError):
        folder.run()
    assert folder.answers() == []


def test_id_of_a_bad_line_is_kept_if_it_can_be_read(folder):
    folder.write({"id": "mine", "prompt": "a", "top_p": 5})
    folder.run()
    assert folder.answers()[0]["id"] == "mine"


def test_file_may_begin_with_a_byte_order_mark_and_end_without_a_line_break(folder):
    folder.input.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}')
    folder.run()
    assert [answer["text"][-2:] for answer in sorted(folder.answers(), key=lambda a: a["line"])] == [":a", ":b"]


def test_only_so_many_are_in_flight(folder):
    folder.write(*({"prompt": f"p{i}"} for i in range(50)))
    engine = folder.run(max_num_seqs=3)
    assert engine.max_live == 6
    assert len(folder.by_line()) == 50


# Running again


def test_seed_of_a_line_depends_on_its_number_not_on_the_lines_before(folder):
    folder.write({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    folder.run()
    whole = folder.by_line()
    folder.output.unlink()
    folder.write("{bad\n", {"prompt": "b"}, {"prompt": "c"})
    folder.run()
    assert {line: folder.by_line()[line]["text"] for line in (2, 3)} == {line: whole[line]["text"] for line in (2, 3)}


def test_lines_that_were_answered_are_not_computed_again(folder):
    folder.write({"prompt": "a"}, {"prompt": "b"})
    folder.run()
    before = folder.output.read_bytes()
    assert folder.run().requests == []
    assert folder.output.read_bytes() == before
    folder.write({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    assert [request.request_id for request in folder.run().requests] == ["3"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.sampled_from(["a", "b", "", "bad", "é日"]), max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 200)), max_size=4),
    order=st.integers(0, 5),
)
def test_run_that_was_cut_off_anywhere_ends_as_one_that_never_was(tmp_path, lines, cuts, order):
    """Killed after any number of steps, with any number of bytes of the last answers lost."""
    folder = Folder(tmp_path)
    folder.write(*("{bad\n" if text == "bad" else "\n" if not text else {"prompt": text} for text in lines))
    folder.output.unlink(missing_ok=True)
    folder.run()
    expected = sorted(folder.output.read_text().splitlines())
    folder.output.unlink()
    for steps, num_lost in cuts:
        try:
            folder.run(dies_after=steps, order=order)
        except KeyboardInterrupt:
            data = folder.output.read_bytes()
            folder.output.write_bytes(data[: max(0, len(data) - num_lost)])
    folder.run()
    assert sorted(folder.output.read_text().splitlines()) == expected


def test_output_of_another_input_is_refused_before_anything_is_written(folder):
    folder.write({"prompt": "a"}, {"prompt": "b"})
    folder.run()
    before = folder.output.read_bytes()
    folder.write({"prompt": "a"}, {"prompt": "B"})
    with pytest.raises(InvalidInput, match=r"line 2 of .*in\.jsonl is not the one that .*out\.jsonl has an answer to"):
        folder.run()
    assert folder.output.read_bytes() == before


@pytest.mark.parametrize("text", ["hello\n", "{}\n", '{"line": 1}\n', '{"line": 0, "digest": "01"}\n', "[]\n",
                                  '{"line": 1, "digest": "zz"}\n', '{"line": 1, "digest": "0"}\n'])  # fmt: skip
def test_file_of_something_else_is_not_written_to(folder, text):
    folder.write({"prompt": "a"})
    folder.output.write_text(text)
    with pytest.raises(InvalidInput, match=r"line 1 of --output .* is no answer of this command"):
        folder.run()
    assert folder.output.read_text() == text


@pytest.mark.parametrize("text", ["hello", '{"a": 1}', '{"line":1,"text":"a"}', '{"line"=', "[1]", "\x00"])
def test_foreign_file_without_a_line_break_is_left_alone(folder, text):
    folder.write({"prompt": "a"})
    folder.output.write_text(text)
    with pytest.raises(InvalidInput, match=r"line 1 of --output .* is no answer of this command"):
        folder.run()
    assert folder.output.read_text() == text


def test_torn_record_is_cut_off_only_when_answers_are_about_to_be_written(folder):
    folder.write({"prompt": "a"}, {"prompt": "b"})
    folder.run()
    whole = folder.output.read_bytes()
    for num_lost in (1, 5, len(whole.splitlines()[1])):
        torn = whole[:-num_lost]
        folder.output.write_bytes(torn)
        with BatchFiles(str(folder.input), str(folder.output)) as files:
            assert files.num_answered == 1
        assert folder.output.read_bytes() == torn
        folder.run()
        assert sorted(folder.output.read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("lines", [[{"prompt": "a"}], [{"prompt": "a"}, "\n"], []])
def test_output_that_answers_lines_the_input_has_not_is_refused(folder, lines):
    folder.write({"prompt": "a"}, {"prompt": "b"})
    folder.run()
    before = folder.output.read_bytes()
    folder.write(*lines)
    with pytest.raises(InvalidInput, match="has an answer to"):
        folder.run()
    assert folder.output.read_bytes() == before


def test_second_run_on_one_output_is_refused_and_writes_nothing(folder):
    folder.write({"prompt": "a"}, {"prompt": ""})
    for _ in range(3):  # without a file, with one, and with one that is replaced
        with BatchFiles(str(folder.input), str(folder.output)) as files, files.open_target():
            before = folder.output.read_bytes()
            with pytest.raises(InvalidInput, match="another run is writing to --output"):
                folder.run()
            assert folder.output.read_bytes() == before
        folder.run()


def test_run_that_began_before_there_was_an_output_does_not_answer_again(folder):
    folder.write({"prompt": "a"})
    with BatchFiles(str(folder.input), str(folder.output)) as early:
        folder.run()
        before = folder.output.read_bytes()
        with pytest.raises(InvalidInput, match="written by another run meanwhile"):
            early.open_target()
    assert folder.output.read_bytes() == before


def test_refused_line_is_tried_again_and_may_be_corrected(folder):
    folder.write({"prompt": "a"}, {"prompt": ""}, "{bad\n", {"prompt": "d"})
    folder.run()
    folder.output.chmod(0o640)
    folder.write({"prompt": "a"}, {"prompt": "b"}, "{bad\n", {"prompt": "d"})
    assert [request.request_id for request in folder.run().requests] == ["2"]
    assert sorted(answer["line"] for answer in folder.answers()) == [1, 2, 3, 4]
    answers = folder.by_line()
    assert (answers[2]["text"].endswith(":b"), "error" in answers[3]) == (True, True)
    assert folder.output.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in folder.output.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_refused_lines_stay_on_record_until_the_run_starts(folder, monkeypatch):
    folder.write({"prompt": ""})
    folder.run()
    before = folder.output.read_bytes()
    BatchFiles(str(folder.input), str(folder.output)).close()
    assert folder.output.read_bytes() == before

    def fail(*args):
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InvalidInput, match="no space"):
        folder.run()
    assert folder.output.read_bytes() == before
    assert len(list(folder.output.parent.iterdir())) == 2


def test_output_may_be_a_link(folder):
    real = folder.output.with_name("real.jsonl")
    folder.output.symlink_to(real)
    folder.write({"prompt": ""})
    folder.run()
    folder.run()
    assert folder.output.is_symlink()
    assert len(real.read_text().splitlines()) == 1


def test_input_is_never_the_output(folder):
    folder.write({"prompt": "a"})
    os.link(folder.input, folder.output)
    with pytest.raises(InvalidInput, match="same file"):
        folder.run()
    assert folder.input.read_text() == '{"prompt": "a"}\n'


def test_error_while_computing_leaves_what_was_answered(folder, monkeypatch):
    def die(self):
        if len(self.requests) == len(self.live):
            return [self.finish(self.live.pop())]
        raise EngineDeadError("gone")

    monkeypatch.setattr(FakeEngine, "step", die)
    folder.write({"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(EngineDeadError):
        folder.run()
    assert len(folder.answers()) == 1


# The command


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--input", "no/such/file"], "--input 'no/such/file' does not exist"),
        (["--input", "-", "a prompt"], "exclude each other"),
        (["--output", "x", "a prompt"], "for the lines of --input"),
        (["--return-token-ids", "a prompt"], "for the lines of --input"),
        (["--input", os.devnull, "--output", "no/such/folder/out"], "cannot write to --output"),
        (["--input", ".", "--output", "."], "--input '.' is a folder"),
        (["--input", os.devnull, "--top-p", "5"], "top_p=5"),
    ],
)
def test_refusal_is_one_paragraph_and_exit_2(monkeypatch, capsys, argv, said):
    fake = types.ModuleType("octavo.entrypoints.llm")
    fake.LLM = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "octavo.entrypoints.llm", fake)
    monkeypatch.setattr(fake, "LLM", lambda **_: ClosingLLM())
    assert main(["generate", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


class ClosingLLM(FakeLLM):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_whole_command_with_a_real_engine(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "level", logging.WARNING)  # no handler on a stderr that goes away
    model = tiny_models.write_model(tmp_path / "model")
    folder = Folder(tmp_path)
    folder.write({"prompt": "hello"}, {"prompt": ""}, {"prompt_token_ids": [1, 2], "n": 2, "max_tokens": 2})
    argv = ["generate", "--model", str(model), "--num-kv-blocks", "16", "--max-tokens", "3", "--temperature", "0"]
    both = ["--input", str(folder.input), "--output", str(folder.output)]
    assert main([*argv, *both]) == 1
    assert "octavo: 3 lines: 2 answered, 1 refused, the first is line 2: " in capfd.readouterr().err
    answers = folder.by_line()
    assert answers[1]["usage"]["completion_tokens"] == 3
    assert "empty" in answers[2]["error"]
    assert len(answers[3]["outputs"]) == 2
    assert main([*argv, "--input", str(folder.input)]) == 1
    out, err = capfd.readouterr()
    assert {line["line"]: line for line in map(json.loads, out.splitlines())} == answers
    assert "Traceback" not in err


def test_finished_batch_needs_no_model(folder, monkeypatch, capsys):
    folder.write({"prompt": "a"}, {"prompt": "b"})
    folder.run()
    before = folder.output.read_bytes()
    monkeypatch.setitem(sys.modules, "octavo.entrypoints.llm", None)  # cannot be imported
    assert main(["generate", "--input", str(folder.input), "--output", str(folder.output)]) == 0
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("octavo: nothing to do: ")
    assert folder.output.read_bytes() == before


def test_run_on_a_file_in_use_exits_2_before_the_model_is_loaded(folder, monkeypatch, capsys):
    folder.write({"prompt": "a"})
    monkeypatch.setitem(sys.modules, "octavo.entrypoints.llm", None)  # cannot be imported
    with BatchFiles(str(folder.input), str(folder.output)) as files, files.open_target():
        assert main(["generate", "--input", str(folder.input), "--output", str(folder.output)]) == 2
    assert "another run is writing to --output" in capsys.readouterr().err


def test_lines_of_a_pipe_are_answered_while_it_is_open(monkeypatch, tmp_path):
    """A program that waits for each answer before it writes the next line must not wait for ever."""
    read_end, write_end = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(read_end))
    writer = os.fdopen(write_end, "w")
    writer.write('{"prompt": "0"}\n')
    writer.flush()
    output = tmp_path / "out.jsonl"
    finish = FakeEngine.finish

    def write_next(self, request):
        if len(self.requests) < 3:
            writer.write(f'{{"prompt": "{len(self.requests)}"}}\n')
            writer.flush()
        elif not writer.closed:
            writer.close()
        return finish(self, request)

    monkeypatch.setattr(FakeEngine, "finish", write_next)
    run_batch(FakeLLM(), BatchFiles("-", str(output)), {}, return_token_ids=False)
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [1, 2, 3]


def test_an_interrupted_run_says_how_far_it_came_and_that_it_can_go_on(folder, capsys):
    folder.write(*({"prompt": text} for text in "abc"))
    with pytest.raises(KeyboardInterrupt):
        folder.run(dies_after=2)
    assert "interrupted after 2 lines: 2 answered, 0 refused; the same command goes on" in capsys.readouterr().err
