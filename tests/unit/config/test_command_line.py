import os
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest
import tyro

from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import NOT_BUILT, EngineArgs
from octavo.entrypoints.server.options import LATER, ServerArgs
from octavo.entrypoints.server.serve import ServeArgs
from octavo.errors import InvalidInput

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1
    share: float | None = None
    kind: Literal["red", "blue"] = "red"
    words: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Args:
    """A command."""

    name: tyro.conf.Positional[str | None] = None
    loud: bool = False
    inner: tyro.conf.OmitArgPrefixes[Inner] = field(default_factory=Inner)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A command of many texts."""

    texts: tyro.conf.Positional[tuple[str, ...]]
    loud: bool = False


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """A command of options only."""

    loud: bool = False


def parse(*argv: str) -> Args:
    return parse_arguments(Args, "octavo try", argv, later={"later_on": "leave it out"})


def refused(kind: type, *argv: str, **options: object) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse_arguments(kind, "octavo try", argv, **options)
    return str(caught.value)


def test_every_form_of_an_option_reaches_its_field():
    args = parse("--size", "3", "me", "--share=-0.5", "--kind", "blue", "--words", "a", "--words=--b", "--loud")
    assert args == Args(name="me", loud=True, inner=Inner(size=3, share=-0.5, kind="blue", words=("a", "--b")))
    assert parse("--no-loud", "--share", "None", "--size", "-1") == Args(inner=Inner(size=-1))
    assert parse("--sizes", "3", "-4", "--loud", "--sizes=5") == Args(loud=True, inner=Inner(sizes=(5,)))
    assert parse("--sizes=3", "4", "--", "me") == Args(name="me", inner=Inner(sizes=(3, 4)))
    assert parse("--", "--size") == Args(name="--size")
    assert parse_arguments(Texts, "octavo try", ["a", "--loud", "b", "--", "-c"]).texts == ("a", "b", "-c")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A command with a list that has a default."""

    colours: tuple[str, ...] = ("red", "blue")
    loud: bool = False


def test_a_list_with_a_default_may_be_asked_to_be_empty():
    assert parse_arguments(Chosen, "octavo try", []).colours == ("red", "blue")
    assert parse_arguments(Chosen, "octavo try", ["--colours", "--loud"]) == Chosen(colours=(), loud=True)
    assert parse_arguments(Chosen, "octavo try", ["--colours"]).colours == ()
    assert parse_arguments(Chosen, "octavo try", ["--colours", "green"]).colours == ("green",)
    assert refused(Inner, "--sizes").startswith("--sizes has no value")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--size", "x"), "size='x' must be an integer"),
        (("--size=1.5",), "size='1.5' must be an integer"),
        (("--size", "9" * 5000), "size="),
        (("--sizes", "3", "x"), "sizes='x' must be an integer"),
        (("--share", "many"), "share='many' must be a number"),
        (("--kind", "green"), "kind='green' is not supported; use red or blue"),
        (("--kind",), "--kind has no value; give red or blue"),
        (("--size", "--loud"), "--size has no value; give an integer"),
        (("--words", "--", "a"), "--words has no value"),
        (("--loud=yes",), "--loud is a switch and takes no value such as 'yes'; write --loud or --no-loud"),
        (("--no-loud=1",), "--loud is a switch"),
        (("--loud", "False"), "--loud is a switch and takes no value such as 'False'"),
        (("--siz", "3"), "--siz is no option of octavo try; did you mean --size?"),
        (("--no-lout",), "did you mean --no-loud?"),
        (("--zzz=secret",), "--zzz is no option of octavo try; octavo try --help shows its options"),
        (("-s", "3"), "-s is no option"),
        (("-size", "3"), "-size is no option of octavo try"),
        (("--later-on", "3"), "--later-on is not built yet; leave it out"),
        (("a", "b"), "'b' is one too many"),
        (("--", "a", "b"), "'b' is one too many"),
        (("--\n\x1b[31m", "b"), "one too many"),
        (("--x\n\x1b[31m", "b"), "is no option"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(argv, said):
    message = refused(Args, *argv, later={"later_on": "leave it out"})
    assert said in message
    assert message.isprintable()
    assert "secret" not in message


def test_a_command_that_takes_no_texts_says_so():
    assert refused(Nothing, "a").startswith("'a' is no option, and octavo try takes nothing else")


@dataclass(frozen=True, kw_only=True)
class Two:
    """A command of two texts."""

    colour: tyro.conf.Positional[Literal["red", "blue"]]
    folder: tyro.conf.Positional[str]


def test_texts_that_a_command_needs_are_asked_for_and_checked():
    assert parse_arguments(Two, "octavo try", ["red", "x"]) == Two(colour="red", folder="x")
    assert refused(Two, "red").startswith("octavo try needs folder;")
    assert refused(Two).startswith("octavo try needs colour and folder;")
    assert refused(Two, "green", "x") == "colour='green' is not supported; use red or blue"
    assert refused(Two, "red", "x", "y").startswith("'y' is one too many: octavo try takes 2")


def test_a_truth_after_a_switch_may_be_a_text_where_texts_are_taken():
    assert parse_arguments(Texts, "octavo try", ["--loud", "true"]) == Texts(texts=("true",), loud=True)


def test_without_pairs_a_switch_has_no_opposite():
    assert "is no option" in refused(Nothing, "--no-loud", pairs=False)
    assert "write --loud or nothing" in refused(Nothing, "--loud=1", pairs=False)


@pytest.mark.parametrize("argv", [["-h"], ["--size", "3", "--help"], ["--help", "--nonsense"]])
def test_help_is_shown_whatever_follows(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 0
    assert "octavo try" in capsys.readouterr().out


@pytest.mark.parametrize("name", NOT_BUILT)
def test_an_engine_option_of_later_is_taken_only_where_it_asks_for_nothing(name):
    flag, neutral = "--" + name.replace("_", "-"), NOT_BUILT[name]
    ways = [f"--no-{flag[2:]}", f"{flag}=False"] if neutral is False else [f"{flag}={neutral}"]
    for word in ways:
        assert parse_arguments(EngineArgs, "octavo try", [word]) == EngineArgs()
    if neutral is not False:
        assert parse_arguments(EngineArgs, "octavo try", [flag, str(neutral)]) == EngineArgs()
    for words in ([flag], [f"{flag}=something"], [flag.replace("-", "_").replace("__", "--", 1), "--dtype=auto"]):
        message = refused(EngineArgs, *words)
        assert message.startswith(f"{name}=")
        assert "not built yet" in message or "not supported" in message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-num-seqs", "abc"), "max_num_seqs='abc' must be an integer >= 1"),
        (("--load-format", "pt"), "load_format='pt' is not supported; use auto, safetensors, gguf or dummy"),
        (("--tensor-parallel-size", "2"), "tensor_parallel_size=2 is not built yet; leave it out or give 1"),
        (("--blok-size", "16"), "did you mean --block-size?"),
    ],
)
def test_engine_options_are_refused_in_the_words_of_the_python_api(words, said):
    assert said in refused(EngineArgs, *words)


@pytest.mark.parametrize("name", LATER)
def test_a_server_option_of_later_is_refused_with_the_way_out(name):
    assert name not in {one.name for kind in (ServerArgs, EngineArgs) for one in fields(kind)}
    for flag in (f"--{name}", f"--{name.replace('_', '-')}=x"):
        message = refused(ServeArgs, flag, later=LATER)
        assert message.endswith(f"is not built yet; {LATER[name]}")


def test_every_default_can_be_given_in_words():
    """No field has a type that the reader does not know: what it lets through, the parser takes."""
    for kind in (ServerArgs, EngineArgs):
        for one in fields(kind):
            if isinstance(one.default, (int, float, str)) and not isinstance(one.default, bool):
                words = [f"--{one.name.replace('_', '-')}={one.default}"]
                assert parse_arguments(kind, "octavo try", words) == kind(), words


def test_the_package_is_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", "--port", "x"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (2, "", "octavo: port='x' must be an integer\n")
