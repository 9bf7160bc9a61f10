"""LLM: the engine for offline use, in the caller's process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from tqdm import tqdm

from octavo.config.resolve import make_engine_args
from octavo.engine.input_processor import Prompt, as_prompt_list
from octavo.engine.llm_engine import LLMEngine
from octavo.entrypoints.beam_search import beam_search
from octavo.entrypoints.interrupt import Interrupt, deferred_interrupt
from octavo.errors import EngineDeadError, InvalidInput, short_repr
from octavo.protocol.beam_search import BeamSearchOutput, BeamSearchParams
from octavo.protocol.messages import EngineCoreRequest
from octavo.protocol.outputs import RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenization.chat import encode_rendered, render_chat
from octavo.tokenization.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]
"""Messages: dicts with `role` and `content`."""


class LLM:
    """A model that is ready to generate.

        llm = LLM(model="smollm2")
        llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))

    Not thread-safe, except `get_metrics`. After `close` every call raises EngineDeadError.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        """`options` are the fields of `octavo.config.engine_args.EngineArgs`.

        Raises:
            InvalidInput (a ValueError): a value is refused, the model cannot be had or does not fit.
            TypeError: an unknown option.
        """
        self._engine: LLMEngine | None = None
        self._next_request = 0
        self._engine = LLMEngine.from_args(make_engine_args(model=model, **options))

    @property
    def llm_engine(self) -> LLMEngine:
        if self._engine is None:
            raise EngineDeadError("this LLM is closed; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts; outputs in the prompts' order.

        Args:
            prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, each dict with an
                optional "cache_salt"; or a list of these.
            sampling_params: one for all or one each; None: the model's own defaults.
            use_tqdm: a progress bar on stderr, if it is a terminal and the work is long.
            priority: one number a prompt, lower first; needs scheduling_policy="priority" to matter.

        Raises:
            InvalidInput (a ValueError): a prompt or parameter is refused; then nothing has run.
        """
        requests = self._prepare(as_prompt_list(prompts), sampling_params, priority)
        return self._compute(requests, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them. `RequestOutput.prompt` is the rendered text.

        Args:
            messages: [{"role": "user", "content": "Hello"}, ...], or a list of such lists.
            sampling_params, use_tqdm, priority: as for `generate`.
            The others: as for `apply_chat_template`.

        Raises:
            InvalidInput (a ValueError): a message, the template or a parameter is refused; then nothing has run.
        """
        conversations = _as_conversations(messages)
        texts = [
            self.apply_chat_template(
                conversation,
                chat_template=chat_template,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        prompts: list[Prompt] = [encode_rendered(self.get_tokenizer(), text) for text in texts]
        requests = self._prepare(prompts, sampling_params, priority)
        shown = [(request, text) for (request, _), text in zip(requests, texts, strict=True)]
        return self._compute(shown, use_tqdm)

    def apply_chat_template(
        self,
        messages: Conversation,
        *,
        chat_template: str | Path | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation as the model was trained to read it; see `octavo.tokenization.chat.render_chat`.

        Its tokens are those of `get_tokenizer().encode(text, add_special_tokens=False)`.
        """
        return render_chat(
            self.get_tokenizer(),
            messages,
            chat_template=chat_template,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The most probable sequences of each prompt, as far as `params.beam_width` beams find them.

        Raises:
            InvalidInput (a ValueError): a prompt is refused, or one is given as embeddings; then nothing has run.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidInput(f"params is a {type(params).__name__}; beam search needs BeamSearchParams")
        requests = self._prepare(as_prompt_list(prompts), SamplingParams(temperature=0), None)
        if any(request.prompt_embeds is not None for request, _ in requests):
            raise InvalidInput("beam search needs prompts of tokens, not embeddings")
        config = self.llm_engine.config
        return beam_search(
            lambda token_ids, step: self.generate(token_ids, step, use_tqdm=False),
            self.get_tokenizer(),
            frozenset(config.model.eos_token_ids) | frozenset(self.get_tokenizer().eos_token_ids),
            [request.prompt_token_ids for request, _ in requests],
            params,
            min(config.scheduler.max_model_len, config.cache.num_tokens),
            config.model.vocab_size,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without `sampling_params`: the model's generation_config over the usual defaults."""
        return self.llm_engine.input_processor.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_metrics(self) -> dict[str, int | float]:
        """Counters and gauges, named as in `octavo.protocol.stats.EngineStats`. Callable from another thread."""
        return msgspec.structs.asdict(self.llm_engine.stats())

    def kernel_report(self) -> dict[str, str]:
        """Which kernel computes each kind of layer."""
        return self.llm_engine.client.kernel_report()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing changes, while requests hold blocks."""
        return self.llm_engine.client.reset_prefix_cache()

    def audit(self) -> None:
        """Raise AssertionError if the accounts of the KV cache are off."""
        self.llm_engine.client.audit()

    def close(self) -> None:
        """Free the weights and the KV cache. A second call does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[tuple[EngineCoreRequest, str | None]]:
        """Validate everything before anything is queued."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each("sampling_params", sampling_params, len(prompts))
        priorities = [0] * len(prompts) if priority is None else _one_each("priority", priority, len(prompts))
        with self.llm_engine.all_or_nothing():
            return [
                self.llm_engine.prepare(self._new_request_id(), prompt, p, number, RequestOutputKind.FINAL_ONLY)
                for prompt, p, number in zip(prompts, params, priorities, strict=True)
            ]

    def _new_request_id(self) -> str:
        while True:
            request_id, self._next_request = str(self._next_request), self._next_request + 1
            if not self.llm_engine.is_live(request_id):
                return request_id

    def _compute(self, requests: list[tuple[EngineCoreRequest, str | None]], use_tqdm: bool) -> list[RequestOutput]:
        """Queue prepared requests and step until they have finished; whatever goes wrong, they leave nothing behind."""
        engine = self.llm_engine
        mine = {request.request_id for request, _ in requests}
        with deferred_interrupt() as interrupted:
            try:
                for request, prompt in requests:
                    engine.submit(request, prompt)
                finished = self._run(engine, mine, interrupted, use_tqdm)
            except BaseException:
                engine.abort_request(list(mine))
                engine.collect(mine)
                raise
        if interrupted.is_set():  # in the last moment
            raise KeyboardInterrupt
        return [finished[request.request_id] for request, _ in requests]

    def _run(
        self, engine: LLMEngine, mine: set[str], interrupted: Interrupt, use_tqdm: bool
    ) -> dict[str, RequestOutput]:
        """Step until these requests have finished. The outputs of other callers' requests are left to them."""
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=len(mine), desc="requests", delay=2, disable=None if use_tqdm else True) as bar:
            while len(finished) < len(mine):
                engine.advance()
                for output in engine.collect(mine):
                    finished[output.request_id] = output
                    bar.update()
                if interrupted.is_set():
                    raise KeyboardInterrupt
        return finished


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """`value` for each of `count` prompts, or its `count` entries."""
    if isinstance(value, SamplingParams):
        return [value] * count
    if not isinstance(value, Sequence) or isinstance(value, str):
        one = "one SamplingParams or " if name == "sampling_params" else ""
        raise InvalidInput(f"{name} is a {type(value).__name__}; it must be {one}a list with one entry a prompt")
    if len(value) != count:
        raise InvalidInput(f"{name} has {len(value)} entries but there are {count} prompts; give one each")
    return list(value)


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or a list of them, as a list."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidInput(f"messages={short_repr(messages)} must be a list of messages, or a list of such lists")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)
