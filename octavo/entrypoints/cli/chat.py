"""`octavo chat`: a conversation with a model, in a terminal or over a pipe.

The answers go to stdout as they come, everything else to stderr. What holds: the conversation is what was shown. A turn
that fails leaves no trace in it; an answer that was stopped is in it as far as it came.
"""

import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import msgspec
import tyro

from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import EngineArgs
from octavo.config.options import make_engine_args
from octavo.entrypoints.cli.generate import SamplingFlags
from octavo.entrypoints.interrupt import deferred_interrupt
from octavo.errors import InvalidInput, short_repr
from octavo.protocol.outputs import CompletionOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenization.chat import encode_chat, find_chat_template

if TYPE_CHECKING:
    from octavo.entrypoints.llm import LLM

PROMPT = "> "
_NOT_IN_CHAT = ("n", "output_kind", "detokenize", "logprobs", "prompt_logprobs", "logprobs_mode")
"""Sampling parameters that ask for what a conversation does not show."""
_ALWAYS_SHOWN = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, kw_only=True)
class ChatArgs:
    """Talk to a model. In a terminal, /help lists the commands; over a pipe, each line is a message."""

    system: str | None = None
    """What the model is told before the conversation begins."""
    chat_template: str | None = None
    """A file with a Jinja template, or the name of one of the model's. What is not given is the model's default."""
    sampling: tyro.conf.OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=EngineArgs)


def run(argv: Sequence[str]) -> None:
    """Parse, check everything that can be checked without the model, then load it and talk."""
    args = parse_arguments(ChatArgs, "octavo chat", argv)
    given = args.sampling.given()
    _check_shown(SamplingParams(**given))
    options = asdict(make_engine_args(**asdict(args.engine)))
    options["disable_log_stats"] = True  # the lines would run through the answers

    from octavo.entrypoints.llm import LLM  # brings torch, so only when everything is in order

    with LLM(**options) as llm:
        find_chat_template(llm.get_tokenizer(), args.chat_template)
        params = msgspec.structs.replace(_default_params(llm), **given)
        chat = Chat(llm, params, system=args.system, chat_template=args.chat_template)
        converse(chat, _line_source(f"{options['model']}: /help lists the commands, Ctrl-D leaves"))


def _default_params(llm: "LLM") -> SamplingParams:
    """The model's own defaults; but an answer may take the room left, unless the model says otherwise."""
    params = llm.get_default_sampling_params()
    if params.max_tokens == SamplingParams().max_tokens:
        params.max_tokens = None
    return params


def _check_shown(params: SamplingParams) -> None:
    usual = SamplingParams()
    for name in _NOT_IN_CHAT:
        if (value := getattr(params, name)) != getattr(usual, name):
            raise InvalidInput(f"{name}={short_repr(value)} has no meaning in a chat: it shows the text of one answer")


class Chat:
    """A conversation: what was said, and how answers are made.

    Args:
        llm: the engine. Nothing else may run on it meanwhile.
        params: how answers are sampled.
        system: what the model is told first.
        chat_template: as in `octavo.tokenization.chat.render_chat`.
    """

    def __init__(
        self, llm: "LLM", params: SamplingParams, *, system: str | None = None, chat_template: str | None = None
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._chat_template = chat_template
        self._messages: list[dict[str, str]] = []
        self._num_turns = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "reset": self._reset,
            "system": self._set_system,
            "params": self._set_params,
            "help": self._help,
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, as the template gets it."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]

    def handle(self, line: str) -> bool:
        """A line of input: a command or a message. False: leave.

        Raises:
            InvalidInput: there is no such command, or the turn failed; the conversation is as before.
        """
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            if name == "exit":
                return False
            if name not in self._commands:
                raise InvalidInput(f"there is no command /{name}; /help lists them, and //{name} says /{name}")
            self._commands[name](rest.strip())
        elif text:
            self._take_turn(text.removeprefix("/") if text.startswith("//") else text)
        return True

    def _take_turn(self, text: str) -> None:
        message = {"role": "user", "content": text}
        engine = self._llm.llm_engine
        token_ids = encode_chat(self._llm.get_tokenizer(), [*self.messages, message], chat_template=self._chat_template)
        self._num_turns += 1
        request, prompt = engine.prepare(
            f"chat-{self._num_turns}",
            {"prompt_token_ids": token_ids},
            self._params,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.submit(request, prompt)
        answer, last = self._stream(request.request_id)
        if last.finish_reason == "abort" and not answer:
            _say("[stopped before the answer began; the message is left out]")
            return
        self._messages += [message, {"role": "assistant", "content": answer}]
        if last.finish_reason == "abort":
            _say("[stopped]")
        elif last.finish_reason == "length":
            _say(f"[cut off after {request.sampling_params.max_tokens} tokens]")

    def _stream(self, request_id: str) -> tuple[str, CompletionOutput]:
        """Print the answer as it comes, until it ends or Ctrl-C ends it: the whole text, and the last output."""
        engine = self._llm.llm_engine
        pieces: list[str] = []
        with deferred_interrupt() as interrupted:
            try:
                while True:
                    if interrupted.is_set():
                        engine.abort_request([request_id])
                    else:
                        engine.advance()
                    for output in engine.collect({request_id}):
                        pieces.append(output.outputs[0].text)
                        print(pieces[-1], end="", flush=True)
                        if output.finished:
                            print(flush=True)
                            return "".join(pieces), output.outputs[0]
            except BaseException:
                engine.abort_request([request_id])
                engine.collect({request_id})
                raise

    def _reset(self, rest: str) -> None:
        """/reset                   forget what was said; the system message stays"""
        _refuse_rest("reset", rest)
        self._messages.clear()
        _say("[the conversation begins anew]")

    def _set_system(self, rest: str) -> None:
        """/system TEXT             tell the model something first; without a text: nothing"""
        self._system = rest or None
        _say("[system message set]" if rest else "[no system message]")

    def _set_params(self, rest: str) -> None:
        """/params NAME=VALUE ...   change how answers are sampled; alone: show it"""
        if rest:
            params = msgspec.structs.replace(self._params, **_parse_params(rest))
            _check_shown(params)
            self._params = params
        usual = SamplingParams()
        values = {name: getattr(self._params, name) for name in self._params.__struct_fields__}
        shown = [n for n, value in values.items() if n in _ALWAYS_SHOWN or value != getattr(usual, n)]
        _say(", ".join(f"{name}={short_repr(values[name], 200)}" for name in shown))

    def _help(self, rest: str) -> None:
        """/help                    show this"""
        _refuse_rest("help", rest)
        lines = [command.__doc__ or "" for command in self._commands.values()]
        _say("\n".join([*lines, "/exit                    leave, as Ctrl-D; Ctrl-C stops an answer",
                        "//TEXT                   a message that begins with a slash"]))  # fmt: skip


def converse(chat: Chat, next_line: Callable[[], str | None]) -> None:
    """Handle lines until there are no more (None), /exit, or Ctrl-C twice in a row while none is being answered."""
    interrupted = False
    while True:
        try:
            line = next_line()
            interrupted = False
            if line is None or not chat.handle(line):
                return
        except InvalidInput as error:
            _say(f"octavo: {error}\n[the conversation is as before; /reset begins a new one]")
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            _say("\n[Ctrl-C again, Ctrl-D or /exit leaves]")


def _line_source(greeting: str) -> Callable[[], str | None]:
    """Reads the next line of stdin; edited and with a prompt if that is a terminal. None: no more."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):  # one odd character must not end a conversation
            stream.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        return lambda: sys.stdin.readline() or None
    with suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines with it
    _say(greeting)
    return _ask


def _ask() -> str | None:
    prompt = PROMPT
    if not sys.stdout.isatty():  # then the prompt would be among the answers
        print(PROMPT, end="", file=sys.stderr, flush=True)
        prompt = ""
    try:
        return input(prompt)
    except EOFError:
        _say("")
        return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _refuse_rest(name: str, rest: str) -> None:
    if rest:
        raise InvalidInput(f"/{name} takes nothing after it, but {short_repr(rest)} was given")


def _parse_params(text: str) -> dict[str, Any]:
    """NAME=VALUE pairs. A value is JSON (0.5, true, null, ["a", "b"]) or else a text."""
    values = {}
    for pair in re.split(r"\s+(?=\w+=)", text):
        name, equals, value = pair.partition("=")
        known = SamplingParams.__struct_fields__
        if not equals or name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "write /params temperature=0.5 max_tokens=100"
            raise InvalidInput(f"{short_repr(pair)} sets no sampling parameter; {hint}")
        values[name] = _parse_value(value)
    return values


def _parse_value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
