"""Answers the lines of a file with an LLM: a bounded number of them in flight, each written as soon as it has finished.

What always holds: a bad line, whatever is wrong with it, is answered with its error and harms no other; and the tokens
of a line depend on the line, its number and the engine's seed, not on which lines were answered in an earlier run.
"""

import difflib
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec
from tqdm import tqdm

from octavo.engine.input_processor import Prompt
from octavo.entrypoints.cli.batch_file import BatchFiles, InputLine, write_answer
from octavo.entrypoints.cli.streams import complain
from octavo.errors import EngineDeadError, InvalidInput, short_repr
from octavo.logging import get_logger
from octavo.protocol.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenization.chat import encode_chat
from octavo.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.entrypoints.llm import LLM

logger = get_logger(__name__)

CHAT_OPTIONS = (
    "tools", "chat_template", "add_generation_prompt", "continue_final_message", "documents", "chat_template_kwargs",
)  # fmt: skip
_CONTENTS = ("prompt", "prompt_token_ids", "messages")
_OWN_KEYS = ("id", *_CONTENTS, "cache_salt", "priority", *CHAT_OPTIONS)
# A file chooses no code to be imported, and every answer is whole.
_NOT_IN_FILES = ("output_kind", "logits_processors", "extra_args")
_JINJA_SIGNS = ("{{", "{%", "{#")
SAMPLING_KEYS = tuple(name for name in SamplingParams.__struct_fields__ if name not in _NOT_IN_FILES)


class _Task(NamedTuple):
    """One line, understood."""

    id: str | int
    prompt: Prompt
    params: SamplingParams
    priority: int


class Summary:
    """What became of the lines of one run."""

    def __init__(self) -> None:
        self.num_answered = 0
        self.num_refused = 0
        self.first_refusal = ""

    def count(self, line: InputLine, refusal: str | None) -> None:
        """One more line is done; `refusal`: why it was not answered."""
        if refusal is None:
            self.num_answered += 1
            return
        self.num_refused += 1
        self.first_refusal = self.first_refusal or f"line {line.number}: {refusal}"

    def __str__(self) -> str:
        num_lines = self.num_answered + self.num_refused
        text = f"{num_lines} line{'s' * (num_lines != 1)}: {self.num_answered} answered, {self.num_refused} refused"
        return f"{text}, the first is {self.first_refusal}" if self.num_refused else text


def run_batch(llm: "LLM", files: BatchFiles, given: dict[str, Any], *, return_token_ids: bool) -> Summary:
    """Answer every line that is not answered yet.

    Args:
        given: sampling parameters of the command line; those of a line go over them.
        return_token_ids: answers hold token ids.

    Raises:
        InvalidInput: the output cannot be written, or a stream does not belong to it.
    """
    with (
        files.open_target() as target,
        tqdm(total=files.num_lines, initial=files.num_answered, unit="line", disable=None) as bar,
    ):
        batch = _Batch(llm, given, return_token_ids, target, bar)
        try:
            return batch.run(files)
        except KeyboardInterrupt:
            complain(f"interrupted after {batch.summary}; the same command goes on where it stopped")
            raise


class _Batch:
    def __init__(self, llm: "LLM", given: dict[str, Any], return_token_ids: bool, target: BinaryIO, bar: Any) -> None:
        self._engine = llm.llm_engine
        self._given = given
        self._defaults = llm.get_default_sampling_params()
        self._return_token_ids = return_token_ids
        self._target = target
        self._bar = bar
        self.summary = Summary()
        self._max_in_flight = 2 * self._engine.config.scheduler.max_num_seqs
        self._in_flight: dict[str, tuple[InputLine, _Task]] = {}

    def run(self, files: BatchFiles) -> Summary:
        reader = _Reader(files, self._max_in_flight)
        while True:
            while len(self._in_flight) < self._max_in_flight:
                line = reader.next_line(wait=not self._in_flight)
                if line is None:
                    break
                self._submit(line)
            if not self._in_flight:
                return self.summary
            for output in self._engine.step():
                line, task = self._in_flight.pop(output.request_id)
                shows_ids = self._return_token_ids or not task.params.detokenize
                self._write(line, describe_output(task.id, output, shows_ids))

    def _submit(self, line: InputLine) -> None:
        line_id: str | int = line.number
        try:
            fields = _read_object(line.data)
            line_id = _read_id(fields, line.number)
            task = _read_task(line_id, fields, self._given, self._defaults, self._engine.tokenizer)
            # Seeds are derived from the number of arrivals: they must be the same in a run that is taken up again.
            self._engine.input_processor.num_arrivals = line.number - 1
            request_id = str(line.number)
            self._engine.add_request(request_id, task.prompt, task.params, task.priority)
        except InvalidInput as error:
            self._write(line, {"id": line_id, "error": str(error)})
        except EngineDeadError:
            raise
        except Exception as error:  # a defect, but it is to cost this line only
            logger.exception("Line %d could not be prepared", line.number)
            self._write(line, {"id": line_id, "error": f"the line could not be prepared: {error!r}"})
        else:
            self._in_flight[request_id] = (line, task)

    def _write(self, line: InputLine, answer: dict[str, Any]) -> None:
        write_answer(self._target, line, answer)
        self.summary.count(line, answer.get("error"))
        self._bar.update()


class _Reader:
    """Reads lines in a thread of its own, a bounded number ahead: a slow input must not hold up what is computed."""

    def __init__(self, files: BatchFiles, max_ahead: int) -> None:
        self._lines: queue.Queue[InputLine | BaseException | None] = queue.Queue(max_ahead)
        self._ended = False
        threading.Thread(target=self._read, args=(files.lines(),), daemon=True, name="octavo-batch-reader").start()

    def next_line(self, wait: bool) -> InputLine | None:
        """None: at the end, or without `wait` if none has come yet. Raises what reading raised."""
        if self._ended:
            return None
        try:
            line = self._lines.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(line, InputLine):
            return line
        self._ended = True
        if line is not None:
            raise line
        return None

    def _read(self, lines: Iterator[InputLine]) -> None:
        try:
            for line in lines:
                self._lines.put(line)
        except BaseException as error:
            self._lines.put(error)
        else:
            self._lines.put(None)


def _read_object(data: bytes) -> dict[str, Any]:
    """The fields of a line that are not null."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(
            f"the line holds a {type(value).__name__}; it must be an object with {' or '.join(_CONTENTS)}"
        )
    return {key: field for key, field in value.items() if field is not None}


def _read_id(fields: dict[str, Any], number: int) -> str | int:
    line_id = fields.get("id", number)
    if isinstance(line_id, bool) or not isinstance(line_id, (str, int)):
        raise InvalidInput(f"id={short_repr(line_id)} must be a text or an integer")
    return line_id


def _read_task(
    line_id: str | int, fields: dict[str, Any], given: dict[str, Any], defaults: SamplingParams, tokenizer: Tokenizer
) -> _Task:
    for key in fields:
        if key not in _OWN_KEYS and key not in SAMPLING_KEYS:
            raise _unknown_field(key)
    contents = [name for name in _CONTENTS if name in fields]
    if len(contents) != 1:
        raise InvalidInput(f"the line must have exactly one of {', '.join(_CONTENTS)}; it has {contents or 'none'}")
    chosen = {**given, **{name: value for name, value in fields.items() if name in SAMPLING_KEYS}}
    options = {name: fields[name] for name in CHAT_OPTIONS if name in fields}
    if contents == ["messages"]:
        _check_template(options.get("chat_template"), tokenizer)
        content = {"prompt_token_ids": encode_chat(tokenizer, fields["messages"], **options)}
        if defaults.max_tokens == SamplingParams().max_tokens:  # unless the model itself says how long
            chosen = {"max_tokens": None, **chosen}
    elif options:
        raise InvalidInput(f"{', '.join(options)} are for messages, but the line has {contents[0]}; leave them out")
    else:
        content = {contents[0]: fields[contents[0]]}
    params = msgspec.structs.replace(defaults, **chosen, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt: Any = {**content, "cache_salt": fields.get("cache_salt")}
    return _Task(line_id, prompt, params, fields.get("priority", 0))


def _check_template(template: Any, tokenizer: Tokenizer) -> None:
    """Who writes a line need not be who runs the command, so a line names no file of this machine."""
    names = tokenizer.chat_templates
    if isinstance(template, str) and template not in names and not any(sign in template for sign in _JINJA_SIGNS):
        raise InvalidInput(
            f"chat_template={short_repr(template)} is neither a Jinja text nor one of the model's templates "
            f"({', '.join(sorted(names)) or 'it has none'}); a line cannot name a file, so give the text"
        )


def _unknown_field(key: str) -> InvalidInput:
    if key in _NOT_IN_FILES:
        return InvalidInput(f"the line has {key}, which a file cannot give; leave it out")
    near = difflib.get_close_matches(key, (*_OWN_KEYS, *SAMPLING_KEYS), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "leave it out"
    return InvalidInput(f"the line has the unknown field {short_repr(key)}; {hint}")


def describe_output(line_id: str | int, output: RequestOutput, return_token_ids: bool) -> dict[str, Any]:
    """What the output file says about a finished request."""
    samples = [_describe_sample(completion, return_token_ids) for completion in output.outputs]
    answer: dict[str, Any] = {"id": line_id}
    if len(samples) == 1:
        answer |= samples[0]
    else:
        answer["outputs"] = [{"index": index, **sample} for index, sample in enumerate(samples)]
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [_describe_logprobs(position) for position in output.prompt_logprobs]
    if return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    answer["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(completion.token_ids) for completion in output.outputs),
        "cached_tokens": output.num_cached_tokens,
    }
    for name in ("clamps", "ignored"):
        if notes := getattr(output.metrics, name):
            answer[name] = notes
    return answer


def _describe_sample(completion: CompletionOutput, return_token_ids: bool) -> dict[str, Any]:
    sample: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
    if completion.stop_reason is not None:
        sample["stop_reason"] = completion.stop_reason
    if return_token_ids:
        sample["token_ids"] = completion.token_ids
    if completion.logprobs is not None:
        sample["cumulative_logprob"] = completion.cumulative_logprob
        sample["logprobs"] = [_describe_logprobs(position) for position in completion.logprobs]
    return sample


def _describe_logprobs(position: dict[int, Logprob] | None) -> list[dict[str, Any]] | None:
    if position is None:
        return None
    return [
        {"token_id": token_id, "logprob": entry.logprob, "rank": entry.rank, "token": entry.decoded_token}
        for token_id, entry in position.items()
    ]
