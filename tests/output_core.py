"""A scripted core for the tests of the output processor, over a tokenizer of one token a byte."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.engine.output_processor import OutputProcessor
from octavo.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    RequestTimings,
    TokenLogprobs,
)
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenization.tokenizer import load_tokenizer

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
EOS = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token a byte, and <eos> = 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    path = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


class Core:
    """Scripts the core's side of requests and keeps what the processor hands out."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer)
        self.emitted = []
        self.dropped = []

    def add(self, request_id="r", prompt="hi", receipt=(), **params):
        fields = {"prompt_token_ids": self.ids("hi"), **dict(receipt)}
        request = EngineCoreRequest(
            request_id=request_id,
            sampling_params=SamplingParams(**{"max_tokens": 1000, "seed": 0, **params}),
            arrival_time=10.0,
            **fields,
        )
        self.processor.add_request(request, prompt)
        return request

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def send(self, ids=(), finish=None, request_id="r", **fields):
        """One step's output of one request; what the processor handed out for it."""
        output = EngineCoreOutput(
            request_id=request_id,
            new_token_ids=list(ids),
            finish_reason=finish,
            timings=fields.pop("timings", RequestTimings(arrival=10.0)),
            **fields,
        )
        outputs, dropped = self.processor.process([output])
        self.emitted += outputs
        self.dropped += dropped
        return outputs

    def stream(self, text, finish=FinishReason.LENGTH, request_id="r"):
        """Token by token to the end, or until the processor wants no more."""
        ids = self.ids(text)
        for index, token_id in enumerate(ids):
            self.send([token_id], finish if index == len(ids) - 1 else None, request_id)
            if request_id in self.dropped:
                break
        return [output.outputs[0] for output in self.emitted]


@pytest.fixture
def core(tokenizer):
    return Core(tokenizer)


def prompt_entries(ids):
    return [TokenLogprobs(token_ids=[id, 5], logprobs=[-2.0, -0.5], sampled_rank=3) for id in ids[1:]]
