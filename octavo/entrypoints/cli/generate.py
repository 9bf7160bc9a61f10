"""`octavo generate`: complete texts, or the lines of a file. Texts go to stdout, everything else to stderr."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import tyro

from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import EngineArgs
from octavo.config.options import make_engine_args
from octavo.entrypoints.cli.batch import run_batch
from octavo.entrypoints.cli.batch_file import STANDARD_STREAM, BatchFiles
from octavo.entrypoints.cli.streams import complain
from octavo.errors import InvalidInput
from octavo.protocol.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen. What is not given is the model's own default."""

    max_tokens: int | None = None
    """Output tokens at most."""
    temperature: float | None = None
    """Divides the logits. 0: greedy."""
    top_p: float | None = None
    """Sample from the smallest set of most probable tokens whose probability sums to at least this."""
    top_k: int | None = None
    """Sample from the k most probable tokens. 0: off."""
    min_p: float | None = None
    """Drop tokens less probable than this fraction of the most probable one."""
    n: int | None = None
    """Samples of each prompt."""
    presence_penalty: float | None = None
    """Taken off the logit of every token the output holds already."""
    frequency_penalty: float | None = None
    """Taken off a token's logit for each time the output holds it."""
    repetition_penalty: float | None = None
    """Divides positive, multiplies negative logits of tokens in prompt or output."""
    min_tokens: int | None = None
    """Output tokens before the text may end."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text that ends the output and is not part of it."""
    stop_regex: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A regular expression whose match ends the output and is not part of it."""
    stop_token_ids: tyro.conf.UseAppendAction[tuple[int, ...]] = ()
    """A token that ends the output."""
    include_stop_str_in_output: bool | None = None
    """Keep what ended the output in it."""
    bad_words: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text that is not generated."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def given(self) -> dict[str, Any]:
        """The fields that were given, as SamplingParams takes them."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value is not None and value != ()
        }


@dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Complete texts: one output text a prompt and sample, on stdout, in the prompts' order.

    With --input: answer the lines of a file, each as soon as it has finished. A run that was cut off goes on where it
    was when it is started again; a line that was refused is tried again. What became of the lines is said on stderr.

    The exit status is 0 if everything was answered, 1 if a line was refused or the engine failed, 2 if the command
    itself was refused, 130 if it was interrupted, 143 if it was terminated.
    """

    prompts: tyro.conf.Positional[tuple[str, ...]]
    """The texts to complete. After -- they may begin with a dash."""
    input: str | None = None
    """A file of JSON lines, or - for stdin. Each line is an object with prompt, prompt_token_ids or messages, and
    perhaps an id, sampling parameters, cache_salt, priority, and for messages tools, chat_template and so on. An answer
    to messages is as long as there is room unless max_tokens is given."""
    output: str | None = None
    """Where the answers to --input go, as JSON lines; lines it holds already are not computed again. One run at a time
    may write to a file. Default: -, that is stdout."""
    return_token_ids: bool = False
    """With --input: the answers hold token ids, too."""
    sampling: tyro.conf.OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=EngineArgs)


def run(argv: Sequence[str]) -> int:
    """Parse, check everything that can be checked without the model, then load it and generate.

    Returns:
        The exit status: 1 if a line of --input was refused, else 0.
    """
    args = parse_arguments(GenerateArgs, "octavo generate", argv)
    given = args.sampling.given()
    SamplingParams(**given)
    options = asdict(make_engine_args(**asdict(args.engine)))
    if args.input is None:
        _complete_prompts(args, given, options)
        return 0
    return _answer_file(args, args.input, given, options)


def _complete_prompts(args: GenerateArgs, given: dict[str, Any], options: dict[str, Any]) -> None:
    if args.output is not None or args.return_token_ids:
        raise InvalidInput("--output and --return-token-ids are for the lines of --input; give it, or leave them out")
    if not args.prompts:
        raise InvalidInput('there is nothing to complete; give a prompt: octavo generate "Once upon a time"')

    from octavo.entrypoints.llm import LLM  # brings torch, so only when everything is in order

    with LLM(**options) as llm:
        params = msgspec.structs.replace(llm.get_default_sampling_params(), **given)
        for output in llm.generate(list(args.prompts), params):
            for completion in output.outputs:
                print(completion.text)


def _answer_file(args: GenerateArgs, source: str, given: dict[str, Any], options: dict[str, Any]) -> int:
    if args.prompts:
        raise InvalidInput("--input and prompts on the command line exclude each other; give one of them")
    with BatchFiles(source, STANDARD_STREAM if args.output is None else args.output) as files:
        if files.is_done:
            files.open_target().close()
            complain(f"nothing to do: of the {files.num_lines} lines of {source} every one is answered")
            return 0

        from octavo.entrypoints.llm import LLM  # brings torch, so only when everything is in order

        with LLM(**options) as llm:
            summary = run_batch(llm, files, given, return_token_ids=args.return_token_ids)
    complain(str(summary))
    return 1 if summary.num_refused else 0
