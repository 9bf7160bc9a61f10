"""The commands themselves, in this process, with a stand-in for the engine."""

import dataclasses
import sys
import types
from pathlib import Path

import msgspec
import pytest

from octavo.config.engine_args import EngineArgs
from octavo.entrypoints.cli.generate import SamplingFlags
from octavo.entrypoints.cli.main import main
from octavo.loader import pull as pull_module
from octavo.loader.catalogue import catalogue
from octavo.protocol.outputs import CompletionOutput, RequestOutput
from octavo.protocol.sampling_params import SamplingParams


@pytest.fixture
def calls(monkeypatch):
    """What a stand-in for LLM was asked for: options, prompts, params, closed."""
    seen = types.SimpleNamespace(options=None, prompts=None, params=None, closed=False)

    class FakeLLM:
        def __init__(self, **options):
            seen.options = options

        def __enter__(self):
            return self

        def __exit__(self, *_):
            seen.closed = True

        def get_default_sampling_params(self):
            return SamplingParams(temperature=0.2, top_p=0.9)

        def generate(self, prompts, params):
            seen.prompts, seen.params = prompts, params
            return [
                RequestOutput(str(i), p, [1], [CompletionOutput(0, f"text {i}", [2])], True)
                for i, p in enumerate(prompts)
            ]

    fake = types.ModuleType("octavo.entrypoints.llm")
    fake.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "octavo.entrypoints.llm", fake)
    return seen


def test_generate_prints_the_texts_only(calls, capsys):
    assert main(["generate", "--model", "m", "--max-tokens", "7", "--temperature", "0", "one", "two words"]) == 0
    assert capsys.readouterr() == ("text 0\ntext 1\n", "")
    assert calls.prompts == ["one", "two words"]
    assert (calls.params.max_tokens, calls.params.temperature) == (7, 0.0)
    assert calls.options["model"] == "m"
    assert calls.closed


def test_what_is_not_given_is_the_models_default(calls):
    assert main(["generate", "p"]) == 0
    assert calls.params == SamplingParams(temperature=0.2, top_p=0.9)
    assert calls.options == dataclasses.asdict(EngineArgs())


def test_every_sampling_flag_arrives(calls):
    argv = ["generate", "--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.4", "--top-k", "3", "--min-p", "0.1",
            "--min-tokens", "2", "--stop", "A B", "--stop", "C", "--stop-token-ids", "4", "--stop-token-ids", "5",
            "--ignore-eos", "--no-skip-special-tokens", "p"]  # fmt: skip
    assert main(argv) == 0
    assert calls.params == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.4, top_k=3, min_p=0.1, min_tokens=2, stop=["A B", "C"],
        stop_token_ids=[4, 5], ignore_eos=True, skip_special_tokens=False,
    )  # fmt: skip


def test_flags_are_sampling_parameters():
    parameters = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert {field.name for field in dataclasses.fields(SamplingFlags)} <= parameters


def test_every_engine_option_has_a_flag(calls, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(EngineArgs):
        assert f"--{field.name.replace('_', '-')} " in shown.replace(",", " ").replace("\n", " ")


def test_engine_options_arrive(calls):
    argv = ["generate", "--no-enable-prefix-caching", "--kv-cache-memory", "2MiB", "--block-size", "32",
            "--scheduling-policy", "priority", "--load-format", "dummy", "--", "-a prompt"]  # fmt: skip
    assert main(argv) == 0
    assert calls.prompts == ["-a prompt"]
    options = calls.options
    assert (options["enable_prefix_caching"], options["kv_cache_memory"], options["block_size"]) == (False, 2**21, 32)
    assert (options["scheduling_policy"], options["load_format"]) == ("priority", "dummy")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate"], "give a prompt"),
        (["generate", "--top-p", "1.1", "p"], "top_p=1.1"),
        (["generate", "--stop", "", "p"], "stop="),
        (["generate", "--block-size", "7", "p"], "block_size=7"),
        (["generate", "--num-kv-blocks", "4", "--kv-cache-memory", "1GiB", "p"], "give one of them"),
        (["pull"], "nothing to pull"),
        (["pull", "--list", "smollm2"], "'smollm2'"),
        (["pull", "no-such-model"], "no model 'no-such-model'"),
        (["pull", "./nowhere"], "no file or folder './nowhere'"),
        (["pull", "smollm2", "--revision", "main"], "revision='main'"),
        (["pull", "--max-tokens", "3", "m"], "--max-tokens is no option of octavo pull"),
        (["pull", "a", "b"], "'b' is one too many"),
        (["generate", "--max-tokenz", "3", "p"], "did you mean --max-tokens?"),
        (["generate", "--max-tokens", "three", "p"], "max_tokens='three' must be an integer"),
        (["generate", "--tensor-parallel-size", "2", "p"], "tensor_parallel_size=2 is not built yet"),
        (["chat", "--enforce-eager"], "enforce_eager=True is not built yet"),
        (["doctor", "--jsn"], "did you mean --json?"),
        (["doctor", "all"], "'all' is no option"),
        (["plan", "--max-num-seqs", "many"], "max_num_seqs='many' must be an integer >= 1"),
        (["bench", "throughput", "--num-promts", "3"], "did you mean --num-prompts?"),
        (["bench", "serve", "--request-rate", "fast"], "request_rate='fast' must be a number"),
    ],
)
def test_a_refusal_is_one_paragraph_and_exit_2_before_anything_is_loaded(calls, capsys, argv, said):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert calls.options is None


def test_pull_prints_the_path_last(monkeypatch, capsys):
    monkeypatch.setattr(pull_module, "pull", lambda name, revision: Path("/there") / name / str(revision))
    assert main(["pull", "org/name", "--revision", "v1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "/there/org/name/v1"


def test_pull_list_shows_the_catalogue(capsys):
    assert main(["pull", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(catalogue())
