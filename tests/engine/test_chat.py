"""Conversations through a whole engine: LLM.chat, and the command in a process of its own."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import BOS, write_model

from octavo import LLM, SamplingParams
from octavo.entrypoints.cli.chat import Chat
from octavo.errors import InvalidInput
from octavo.tokenization.chat import encode_chat

TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% if think %}?{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello there"}]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> str:
    """The tiny llama with a chat template."""
    path = write_model(tmp_path_factory.mktemp("tiny-chat"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


@pytest.fixture(scope="module")
def endless_chat_model(tmp_path_factory) -> str:
    """The same with a context so long that an answer without a limit goes on until it is stopped, on any machine."""
    path = write_model(tmp_path_factory.mktemp("endless-chat"), max_position_embeddings=32768)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def llm(make_llm, chat_model) -> LLM:
    return make_llm(chat_model)


def test_an_answer_is_that_of_the_rendered_ids(llm):
    (output,) = llm.chat(HELLO, GREEDY)
    ids = encode_chat(llm.get_tokenizer(), HELLO)
    (wanted,) = llm.generate({"prompt_token_ids": ids}, GREEDY)
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert output.prompt == "<s><user>Hello there<assistant>"
    assert output.prompt_token_ids == ids
    assert ids.count(BOS) == 1


def test_ids_are_equal_through_every_entry_point(llm):
    ids = llm.chat(HELLO, GREEDY)[0].prompt_token_ids
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode(llm.apply_chat_template(HELLO), add_special_tokens=False) == ids
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=True) == ids
    assert tokenizer.apply_chat_template(HELLO, tokenize=False) == "<s><user>Hello there"


def test_several_conversations_are_answered_in_order(llm):
    other = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]
    together = llm.chat([HELLO, other], [GREEDY, SamplingParams(temperature=0, max_tokens=3)])
    alone = [*llm.chat(HELLO, GREEDY), *llm.chat(other, SamplingParams(temperature=0, max_tokens=3))]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert [o.prompt for o in together] == [o.prompt for o in alone]


def test_options_reach_the_template(llm):
    tools = [{"type": "function", "function": {"name": "f"}}]
    (output,) = llm.chat(HELLO, GREEDY, tools=tools, chat_template_kwargs={"think": True}, add_generation_prompt=False)
    assert output.prompt == '<s><user>Hello there[[{"type": "function", "function": {"name": "f"}}]]?'
    (output,) = llm.chat(HELLO, GREEDY, chat_template="{{ messages[0].content }}")
    assert output.prompt == "Hello there"


def test_a_final_message_is_continued_exactly(llm):
    messages = [*HELLO, {"role": "assistant", "content": "OK!\n"}]
    (output,) = llm.chat(messages, GREEDY, continue_final_message=True)
    assert output.prompt == "<s><user>Hello there<assistant>OK!\n"
    (wanted,) = llm.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY)
    assert output.outputs[0].text == wanted.outputs[0].text


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([], {}),
        ([HELLO, []], {}),
        ([HELLO, "x"], {}),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}),
        (HELLO, {"continue_final_message": True, "add_generation_prompt": True}),
        (HELLO, {"chat_template": "{{ raise_exception('no') }}"}),
    ],
)
def test_a_refused_conversation_leaves_nothing_behind(llm, messages, options):
    with pytest.raises(InvalidInput):
        llm.chat(messages, GREEDY, **options)
    assert not llm.llm_engine.has_unfinished_requests()
    llm.audit()


def test_the_next_turn_finds_the_conversation_in_the_cache(llm):
    long = [{"role": "user", "content": "Tell me a long story. " * 5}]
    (first,) = llm.chat(long, GREEDY)
    after = [*long, {"role": "assistant", "content": "Once upon a time."}, *HELLO]
    (second,) = llm.chat(after, GREEDY)
    assert second.num_cached_tokens >= len(first.prompt_token_ids) // 16 * 16 - 16 > 0


def test_the_command_streams_what_chat_answers(llm, capsys):
    params = SamplingParams(temperature=0, max_tokens=12)
    chat = Chat(llm, params, system="S")
    for text in ("One", "Two"):
        asked = [*chat.messages, {"role": "user", "content": text}]
        chat.handle(text)
        (wanted,) = llm.chat(asked, params)
        assert chat.messages == [*asked, {"role": "assistant", "content": wanted.outputs[0].text}]
        assert capsys.readouterr().out == f"{wanted.outputs[0].text}\n"
    llm.audit()


def test_a_conversation_that_is_too_long_goes_on_after_reset(make_llm, chat_model, capsys):
    llm = make_llm(chat_model, max_model_len=64)
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    chat.handle("Hi")
    assert "[cut off after" in capsys.readouterr().err
    before = chat.messages
    with pytest.raises(InvalidInput, match="max_model_len is 64"):
        chat.handle("Hi again")
    assert chat.messages == before
    chat.handle("/reset")
    chat.handle("Hi")
    assert len(chat.messages) == 2
    llm.audit()


def test_an_interrupt_frees_the_blocks(llm, monkeypatch, capsys):
    engine, steps = llm.llm_engine, []
    advance = engine.advance

    def advance_and_interrupt():
        advance()
        steps.append(1)
        if len(steps) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine, "advance", advance_and_interrupt)
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    chat.handle("Hi")
    assert len(steps) == 5
    assert capsys.readouterr().err == "[stopped]\n"
    assert chat.messages[1]["content"]
    assert not engine.has_unfinished_requests()
    llm.audit()


COMMAND = [sys.executable, "-m", "octavo.entrypoints.cli.main", "chat", "--num-kv-blocks", "4096", "--dtype", "float32"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "OCTAVO_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


class Reader:
    """What a process writes, up to each text that is waited for."""

    def __init__(self, fd: int) -> None:
        self.fd, self.seen = fd, b""

    def wait_for(self, what: bytes, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while what not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{what!r} did not come within {seconds} s; there was {self.seen!r}"
            chunk = os.read(self.fd, 4096)
            assert chunk, f"{what!r} did not come before the end; there was {self.seen!r}"
            self.seen += chunk
        self.seen = self.seen.partition(what)[2]


@pytest.fixture
def start(chat_model):
    """Starts the command; it is not left running."""
    started: list[subprocess.Popen] = []

    def run(*argv: str, model: str = chat_model, **streams: object) -> subprocess.Popen:
        command = [*COMMAND, "--model", model, *argv]
        started.append(subprocess.Popen(command, env=ENVIRONMENT, bufsize=0, start_new_session=True, **streams))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_over_a_pipe_ctrl_c_stops_the_answer_and_not_the_program(start, endless_chat_model):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = start("--ignore-eos", "--max-tokens", "30000", "--temperature", "0", model=endless_chat_model, **pipes)
    said = Reader(process.stderr.fileno())
    process.stdin.write(b"Hi\n")
    assert select.select([process.stdout], [], [], 60)[0]  # the answer has begun
    process.send_signal(signal.SIGINT)
    said.wait_for(b"[stopped]")
    process.stdin.write(b"/params max_tokens=3\n")
    said.wait_for(b"max_tokens=3")
    out, err = process.communicate(b"Go on\n", timeout=60)
    assert process.returncode == 0, err
    assert b"[cut off after 3 tokens]" in err
    assert out.count(b"\n") >= 2


def wait_until_it_sleeps(process: subprocess.Popen) -> None:
    """Until the main thread waits for input: Python does not hear a signal between the prompt and that wait."""
    end = time.monotonic() + 60
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < end
        os.sched_yield()


def test_in_a_terminal_the_prompt_comes_and_ctrl_d_leaves(start):
    master, slave = pty.openpty()
    process = start("--max-tokens", "5", "--temperature", "0", stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    screen = Reader(master)
    screen.wait_for(b"> ")
    os.write(master, b"Hi\n")
    screen.wait_for(b"> ")
    wait_until_it_sleeps(process)
    process.send_signal(signal.SIGINT)
    screen.wait_for(b"Ctrl-C again")
    screen.wait_for(b"> ")
    os.write(master, b"/exi\n")
    screen.wait_for(b"there is no command /exi")
    screen.wait_for(b"> ")
    os.write(master, b"\x04")
    assert process.wait(60) == 0
    os.close(master)
