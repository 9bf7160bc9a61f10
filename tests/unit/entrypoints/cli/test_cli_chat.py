"""`octavo chat` in this process, with a scripted stand-in for the engine."""

import io
import signal
import sys
import types
from collections.abc import Callable

import pytest
from tiny_models import byte_tokenizer

from octavo.entrypoints.cli import chat as module
from octavo.entrypoints.cli.chat import Chat, converse
from octavo.entrypoints.cli.main import main
from octavo.errors import EngineDeadError, InvalidInput
from octavo.protocol.outputs import CompletionOutput, RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenization.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class FakeEngine:
    """Answers each request with the next script: texts, callables to call in between, and at last a finish reason."""

    def __init__(self, tokenizer: Tokenizer, scripts: list[list]) -> None:
        self.tokenizer, self.scripts = tokenizer, scripts
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.live: dict[str, list] = {}
        self.outputs: list[RequestOutput] = []

    def prepare(self, request_id, prompt, params, priority=0, output_kind=None):
        assert output_kind is RequestOutputKind.DELTA
        self.prompts.append(self.tokenizer.decode(prompt["prompt_token_ids"], skip_special_tokens=False))
        self.params.append(params)
        if "too long" in self.prompts[-1]:
            raise InvalidInput("prompt has 9 tokens; shorten it")
        return types.SimpleNamespace(request_id=request_id, sampling_params=params), None

    def submit(self, request, prompt):
        self.live[request.request_id] = list(self.scripts.pop(0))

    def advance(self):
        for request_id, script in list(self.live.items()):
            step = script.pop(0)
            if callable(step):
                step()
            else:
                self.emit(request_id, step, script[0] if script in (["stop"], ["length"]) else None)

    def emit(self, request_id, text, finish_reason):
        completion = CompletionOutput(0, text, [1], finish_reason=finish_reason)
        self.outputs.append(RequestOutput(request_id, None, [1], [completion], finish_reason is not None))
        if finish_reason is not None:
            del self.live[request_id]

    def collect(self, request_ids):
        taken = [output for output in self.outputs if output.request_id in request_ids]
        self.outputs = [output for output in self.outputs if output.request_id not in request_ids]
        return taken

    def abort_request(self, request_ids):
        for request_id in request_ids:
            if request_id in self.live:
                self.emit(request_id, "", "abort")


class FakeLLM:
    def __init__(self, scripts: list[list], template: str | None = TEMPLATE) -> None:
        self.tokenizer = Tokenizer(byte_tokenizer(), chat_templates={} if template is None else {"default": template})
        self.llm_engine = FakeEngine(self.tokenizer, scripts)
        self.closed = False

    def get_tokenizer(self):
        return self.tokenizer

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True


@pytest.fixture
def talk(monkeypatch, capsys) -> Callable:
    """Runs the command over lines of stdin: (exit status, stdout, stderr, stand-in)."""

    def run(lines: str, scripts: list[list], *argv: str, template: str | None = TEMPLATE):
        llm = FakeLLM(scripts, template)
        fake = types.ModuleType("octavo.entrypoints.llm")
        fake.LLM = lambda **options: (setattr(llm, "options", options), llm)[1]
        monkeypatch.setitem(sys.modules, "octavo.entrypoints.llm", fake)
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = main(["chat", *argv])
        return (status, *capsys.readouterr(), llm)

    return run


def test_each_line_is_a_message_and_the_conversation_is_kept(talk):
    scripts = [["Hel", "lo.\n", "stop"], ["Bye", "stop"]]
    status, out, err, llm = talk("Hi\n\n  Go  \n", scripts, "--system", "Be brief.")
    assert (status, out, err) == (0, "Hello.\n\nBye\n", "")
    assert llm.llm_engine.prompts == [
        "<system>Be brief.<user>Hi<assistant>",
        "<system>Be brief.<user>Hi<assistant>Hello.\n<user>Go<assistant>",
    ]
    assert llm.closed


def test_an_answer_has_the_room_left_unless_told_otherwise(talk):
    _, _, _, llm = talk("Hi\n", [["x", "stop"]])
    assert llm.llm_engine.params == [SamplingParams(temperature=0.2, max_tokens=None)]
    argv = ["--max-tokens", "5", "--temperature", "0", "--stop", "END", "--block-size", "32"]
    _, _, _, llm = talk("Hi\n", [["x", "stop"]], *argv)
    assert llm.llm_engine.params == [SamplingParams(temperature=0, max_tokens=5, stop=["END"])]
    assert llm.options["block_size"] == 32


def test_reset_forgets_the_messages_and_keeps_the_system_message(talk):
    lines = "One\n/reset\nTwo\n/system New.\nThree\n/system\n/reset\nFour\n"
    _, out, _, llm = talk(lines, [["1", "stop"], ["2", "stop"], ["3", "stop"], ["4", "stop"]], "--system", "S")
    assert out == "1\n2\n3\n4\n"
    assert llm.llm_engine.prompts == [
        "<system>S<user>One<assistant>",
        "<system>S<user>Two<assistant>",
        "<system>New.<user>Two<assistant>2<user>Three<assistant>",
        "<user>Four<assistant>",
    ]


def test_params_are_changed_and_shown(talk):
    lines = '/params temperature=0.5 stop=["a b", "c"] ignore_eos=True max_tokens=7\nHi\n/params stop=x  seed=null\n'
    _, _, err, llm = talk(lines + "Hi\n/params\n", [["x", "stop"], ["y", "stop"]])
    wanted = SamplingParams(temperature=0.5, stop=["a b", "c"], ignore_eos=True, max_tokens=7)
    assert llm.llm_engine.params[0] == wanted
    assert llm.llm_engine.params[1].stop == ["x"]
    assert "temperature=0.5" in err.splitlines()[-1]
    assert "stop=['x']" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/params temperature=-1", "temperature=-1"),
        ("/params temperatur=1", "did you mean temperature?"),
        ("/params nonsense", "'nonsense' sets no sampling parameter"),
        ("/params temperature=0.1 top_p=7", "top_p=7"),
        ("/params n=2", "n=2 has no meaning in a chat"),
        ("/params logprobs=1", "logprobs=1 has no meaning"),
        ("/params detokenize=false", "detokenize=False has no meaning"),
        ("/rest", "there is no command /rest; /help lists them"),
        ("/", "there is no command /"),
        ("/reset now", "takes nothing after it"),
        ("too long", "prompt has 9 tokens"),
        ("lone \udcff", "lone surrogate"),
    ],
)
def test_a_refusal_is_said_and_the_conversation_goes_on_as_it_was(talk, line, said):
    status, out, err, llm = talk(f"One\n{line}\nTwo\n", [["1", "stop"], ["2", "stop"]])
    assert (status, out) == (0, "1\n2\n")
    assert said in err
    assert "/reset begins a new one" in err
    assert llm.llm_engine.prompts[-1] == "<user>One<assistant>1<user>Two<assistant>"
    assert llm.llm_engine.params[-1].temperature == 0.2


def test_a_message_may_begin_with_a_slash(talk):
    _, _, _, llm = talk("//etc\n", [["x", "stop"]])
    assert llm.llm_engine.prompts == ["<user>/etc<assistant>"]


def test_help_names_every_command(talk):
    _, out, err, _ = talk("/help\n", [])
    assert out == ""
    assert all(f"{command} " in err for command in ("/reset", "/system", "/params", "/help", "/exit"))


def test_exit_leaves_at_once(talk):
    status, out, _, llm = talk("Hi\n/exit\nNo\n", [["x", "stop"]])
    assert (status, out, len(llm.llm_engine.prompts)) == (0, "x\n", 1)


def test_an_answer_that_was_cut_off_says_so(talk):
    _, out, err, _ = talk("Hi\n", [["x", "length"]], "--max-tokens", "1")
    assert (out, err) == ("x\n", "[cut off after 1 tokens]\n")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_stops_the_answer_and_what_came_stays_in_the_conversation(talk):
    status, out, err, llm = talk("Hi\nGo on\n", [["Hel", interrupt, "lo", "stop"], ["lo", "stop"]])
    assert (status, out) == (0, "Hel\nlo\n")
    assert "[stopped]" in err
    assert llm.llm_engine.prompts[1] == "<user>Hi<assistant>Hel<user>Go on<assistant>"
    assert not llm.llm_engine.live


def test_ctrl_c_before_the_answer_leaves_the_message_out(talk):
    _, out, err, llm = talk("Hi\nHo\n", [[interrupt, "x", "stop"], ["y", "stop"]])
    assert out == "\ny\n"
    assert "left out" in err
    assert llm.llm_engine.prompts[1] == "<user>Ho<assistant>"


def lines_of(*steps) -> Callable:
    """A source of lines; an exception among them is raised."""
    script = list(steps)

    def next_line():
        step = script.pop(0)
        if isinstance(step, BaseException):
            raise step
        return step

    next_line.left = script
    return next_line


def test_ctrl_c_at_the_prompt_hints_and_twice_leaves(capsys):
    chat = Chat(FakeLLM([["x", "stop"]]), SamplingParams())
    source = lines_of(KeyboardInterrupt(), "Hi", KeyboardInterrupt(), KeyboardInterrupt(), "No", None)
    converse(chat, source)
    out, err = capsys.readouterr()
    assert out == "x\n"
    assert err.count("Ctrl-C again") == 2
    assert source.left == ["No", None]


def test_a_dead_engine_ends_the_program_and_leaves_no_request(talk):
    def die():
        raise EngineDeadError("gone")

    status, _, err, llm = talk("Hi\nHo\n", [["Hel", die]])
    assert status == 1
    assert "gone" in err
    assert llm.closed and not llm.llm_engine.live


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--top-p", "1.1"], "top_p=1.1"),
        (["--block-size", "7"], "block_size=7"),
        (["--chat-template", "no-such"], "chat_template='no-such'"),
    ],
)
def test_a_wrong_option_is_exit_2(talk, argv, said):
    status, out, err, _ = talk("Hi\n", [], *argv)
    assert (status, out) == (2, "")
    assert said in err


def test_a_model_without_a_template_is_refused_at_the_start(talk):
    status, out, err, _ = talk("Hi\n", [], template=None)
    assert (status, out) == (2, "")
    assert "no chat template" in err


def test_a_template_may_be_given(talk, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[-1].content }}!")
    _, _, _, llm = talk("Hi\n", [["x", "stop"]], "--chat-template", str(file))
    assert llm.llm_engine.prompts == ["Hi!"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_greeted_prompted_and_left_with_ctrl_d(talk, monkeypatch):
    asked: list[str] = []
    answers = iter(["Hi"])

    def ask(prompt=""):
        asked.append(prompt)
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(io, "StringIO", Terminal)
    status, out, err, _ = talk("", [["x", "stop"]])
    assert (status, out) == (0, "x\n")
    assert "/help lists the commands" in err
    assert asked == ["", ""] and err.count(module.PROMPT) == 2  # stdout is no terminal here: it holds answers only
