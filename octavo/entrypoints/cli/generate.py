"""`octavo generate`: complete texts. The texts go to stdout, everything else to stderr."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import tyro

from octavo.config.engine_args import EngineArgs
from octavo.config.options import make_engine_args
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
    min_tokens: int | None = None
    """Output tokens before the text may end."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text that ends the output and is not part of it."""
    stop_token_ids: tyro.conf.UseAppendAction[tuple[int, ...]] = ()
    """A token that ends the output."""
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
    """Complete texts: one output text a prompt, on stdout, in the prompts' order."""

    prompts: tyro.conf.Positional[tuple[str, ...]]
    """The texts to complete. After -- they may begin with a dash."""
    sampling: tyro.conf.OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=EngineArgs)


def run(argv: Sequence[str]) -> None:
    """Parse, check everything that can be checked without the model, then load it and generate."""
    args = tyro.cli(GenerateArgs, prog="octavo generate", args=argv)
    if not args.prompts:
        raise InvalidInput('there is nothing to complete; give a prompt: octavo generate "Once upon a time"')
    given = args.sampling.given()
    SamplingParams(**given)
    options = asdict(make_engine_args(**asdict(args.engine)))

    from octavo.entrypoints.llm import LLM  # brings torch, so only when everything is in order

    with LLM(**options) as llm:
        params = msgspec.structs.replace(llm.get_default_sampling_params(), **given)
        for output in llm.generate(list(args.prompts), params):
            print(output.outputs[0].text)
