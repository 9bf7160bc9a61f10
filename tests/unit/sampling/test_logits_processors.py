import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo.errors import InvalidInput
from octavo.protocol.sampling_params import SamplingParams
from octavo.sampling.logits_processors import (
    LogitsProcessor,
    ProcessorChain,
    ProcessorFailure,
    load_logits_processor,
)


class AddOne(LogitsProcessor):
    def __init__(self, params, prompt_token_ids):
        self.amount = (params.extra_args or {}).get("amount", 1.0)

    def __call__(self, output_token_ids, logits):
        logits += self.amount
        return logits


class Double(AddOne):
    def __call__(self, output_token_ids, logits):
        return logits * 2


class Spy(AddOne):
    seen: list = []  # noqa: RUF012

    def __init__(self, params, prompt_token_ids):
        self.prompt = prompt_token_ids
        params.top_k = 77
        params.extra_args.clear()

    def __call__(self, output_token_ids, logits):
        Spy.seen.append((self.prompt, list(output_token_ids)))
        output_token_ids.append(0)
        return logits


class BadConstructor(AddOne):
    def __init__(self, params, prompt_token_ids):
        raise KeyError("no such argument")


class Raises(AddOne):
    def __call__(self, output_token_ids, logits):
        logits.zero_()
        raise ZeroDivisionError("oh")


class HasNoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


ODD_ERRORS = [ValueError("bad \ud800 name"), HasNoText(), SystemExit(3), KeyboardInterrupt(), ValueError("x" * 10**6)]


class RaisesOddly(AddOne):
    error: BaseException = ValueError()

    def __call__(self, output_token_ids, logits):
        raise RaisesOddly.error


class CannotBeBuilt(AddOne):
    def __init__(self, params, prompt_token_ids):
        raise RaisesOddly.error


class Returns(AddOne):
    result: object = None

    def __call__(self, output_token_ids, logits):
        return Returns.result


class Unfinished(LogitsProcessor):
    def __init__(self, params, prompt_token_ids):
        pass


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """This module under a name that can be imported."""
    monkeypatch.setitem(sys.modules, "some_processors", sys.modules[__name__])


def chain(*names: str, prompt=(), **params) -> ProcessorChain:
    return ProcessorChain(SamplingParams(logits_processors=[f"some_processors:{n}" for n in names], **params), prompt)


def test_a_class_is_loaded_by_its_path():
    assert load_logits_processor("some_processors:AddOne") is AddOne


@pytest.mark.parametrize(
    "path",
    [
        "no_such_package_anywhere:X", "some_processors:Missing", "some_processors:torch", "builtins:dict",
        "some_processors:LogitsProcessor", "some_processors:Unfinished", "some_processors:importable", ":X",
        "some_processors:", ".relative:X", "some_processors:f.<locals>.X", "octavo:LLM",
    ],
)  # fmt: skip
def test_what_is_no_importable_processor_is_refused_by_name(path):
    with pytest.raises(InvalidInput, match="logits_processors=") as refusal:
        load_logits_processor(path)
    assert repr(path) in str(refusal.value)


def test_a_module_that_fails_to_import_is_refused(tmp_path, monkeypatch):
    (tmp_path / "module_that_explodes.py").write_text("raise RuntimeError('boom')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match="boom"):
        load_logits_processor("module_that_explodes:X")


def test_processors_run_in_the_order_of_the_list_with_their_arguments():
    logits = torch.tensor([1.0, 2.0])
    assert chain("AddOne", "Double")([], logits).tolist() == [4.0, 6.0]
    assert chain("Double", "AddOne", extra_args={"amount": 10})([], logits).tolist() == [12.0, 14.0]
    assert logits.tolist() == [1.0, 2.0]


def test_a_processor_sees_prompt_and_output_and_cannot_change_them_for_others():
    Spy.seen.clear()
    params = SamplingParams(logits_processors=["some_processors:Spy"] * 2, extra_args={"a": 1})
    prompt, output = [1, 2], [3]
    ProcessorChain(params, prompt)(output, torch.zeros(2))
    assert Spy.seen == [([1, 2], [3])] * 2
    assert output == [3]
    assert (params.top_k, params.extra_args) == (0, {"a": 1})


@pytest.mark.parametrize("name", ["BadConstructor", "Missing", "Unfinished"])
def test_one_that_cannot_be_built_fails_with_its_name_and_reason(name):
    with pytest.raises(ProcessorFailure, match=f"some_processors:{name}"):
        chain("AddOne", name)


def test_one_that_raises_fails_with_its_name_and_reason():
    with pytest.raises(ProcessorFailure, match="some_processors:Raises failed: ZeroDivisionError: oh"):
        chain("Raises")([], torch.zeros(3))


@pytest.mark.parametrize("error", ODD_ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["RaisesOddly", "CannotBeBuilt"])
def test_whatever_is_raised_ends_the_request_with_a_short_message_that_can_be_sent(name, error):
    RaisesOddly.error = error
    with pytest.raises(ProcessorFailure, match=f"some_processors:{name} failed: {type(error).__name__}") as failure:
        chain(name)([], torch.zeros(3))
    assert len(str(failure.value).encode()) < 1000


@pytest.mark.parametrize("code", ["raise SystemExit(5)", "raise ValueError('\\ud800')"])
def test_a_module_that_exits_or_fails_oddly_is_refused(tmp_path, monkeypatch, code):
    monkeypatch.delitem(sys.modules, "module_that_exits", raising=False)
    (tmp_path / "module_that_exits.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match="cannot be imported") as refusal:
        load_logits_processor("module_that_exits:X")
    assert str(refusal.value).encode()


def test_an_import_that_ctrl_c_ends_is_no_refusal_in_the_main_thread(tmp_path, monkeypatch):
    (tmp_path / "module_interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        load_logits_processor("module_interrupted:X")
    with ThreadPoolExecutor(1) as thread, pytest.raises(InvalidInput, match="KeyboardInterrupt"):
        thread.submit(load_logits_processor, "module_interrupted:X").result()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "NoneType"), ([0.0, 0.0, 0.0], "list"), (torch.zeros(2), r"\[2\]"), (torch.zeros(1, 3), r"\[1, 3\]"),
        (torch.tensor(0.0), "returned"), (torch.zeros(3, dtype=torch.int64), "int64"),
        (torch.tensor([0.0, torch.nan, 0.0]), "NaN"),
    ],
)  # fmt: skip
def test_one_that_returns_something_else_than_logits_fails(result, message):
    Returns.result = result
    with pytest.raises(ProcessorFailure, match=message):
        chain("Returns")([], torch.zeros(3))


def test_infinities_become_a_ban_and_the_largest_number():
    Returns.result = torch.tensor([torch.inf, -torch.inf, 1.0], dtype=torch.float64)
    got = chain("Returns")([], torch.zeros(3))
    assert got.dtype == torch.float32
    assert got.tolist() == [torch.finfo(torch.float32).max, -torch.inf, 1.0]
