"""`octavo bench compare`: this engine, other engines and servers, on the same weights and requests in turns."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from octavo.bench.contenders import SERVER, Contender, Rival, RivalFailed, ServerRunner
from octavo.bench.engines import checked
from octavo.bench.goals import OURS, ModelSize, as_numbers, limits, machine_of
from octavo.bench.http_client import first_model, make_target
from octavo.bench.ratios import show, summarise
from octavo.bench.report import OutputArgs, Record, check_outputs, write_outputs
from octavo.bench.rival_env import RivalName, python_of
from octavo.bench.rivals import RIVALS
from octavo.bench.scenarios import FIRST_TOKEN, MIXED, ONE_STREAM, Load, Measure, Plan, take
from octavo.bench.traffic import TokenizerWords, TrafficArgs, Words, check_traffic
from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import EngineArgs
from octavo.config.machine import detect
from octavo.config.model import ModelConfig
from octavo.errors import InvalidInput, short_repr
from octavo.files import read_bounded
from octavo.gguf_file import GGUFFile

_SERVER_SECONDS = 600.0
_MOST_SEQUENCES = 256
_LARGEST_FILE = 64 << 20
_MAY_DIFFER = {"rounds", "add_to", "env"}
"""Options of a run that another may be added to."""
_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Random requests."""

    num_prompts: int = 64
    """Requests, all there at once."""
    input_len: int = 136
    """Tokens of a prompt."""
    output_len: int = 136
    """Output tokens of a request."""
    range_ratio: float = 0.88
    """Lengths are spread evenly from (1 - this) to (1 + this) times the lengths given."""
    traffic_seed: int = 0
    """Seed of everything random about the requests."""


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Run this engine, other engines and servers on the same requests, and give the ratios with their spread.

    All but servers compute the same weights, in a process each that idles while another computes; they take turns at
    every measurement of every round, so that a change of the machine meets all. transformers gets its best static
    batches: sorted by output length, KV cache on. llama-cpp gets as many slots as there are requests, openvino its
    continuous batching. With --quantization gguf those that can compute the few bits of the file. Requests differ from
    round to round. Ratios are this engine's advantage: above 1 it is better. Their spread is over the rounds. A goal
    that is missed is followed by what limits it, from what was measured.
    """

    rivals: tuple[RivalName, ...] = ("transformers", "llama-cpp", "openvino")
    """Engines to compare with. One that cannot take part is left out, and the result says why."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Where a rival is installed: NAME=FOLDER of a virtual environment (octavo bench rival-env makes one) or its
    Python. May be repeated. Default: where this engine is."""
    static_batches: tuple[int, ...] = (8, 32)
    """Batch sizes of transformers."""
    measure: tuple[Measure, ...] = (MIXED, FIRST_TOKEN, ONE_STREAM)
    """mixed: all requests. first-token: of a new prompt, and of one whose prefix was seen. one-stream: one request.
    shared-prefix: requests on one long prefix."""
    concurrency: tuple[int, ...] = ()
    """Also compare the throughput of so many requests at once, such as 1 8 32 128."""
    block_sizes: tuple[int, ...] = ()
    """Also run this engine with KV blocks of so many tokens, such as 8 16 32."""
    rounds: int = 3
    """Rounds."""
    add_to: str | None = None
    """A JSON file that this command wrote before: its rounds count as well, and this run's follow them."""
    prefix_len: int = 256
    """Tokens of the prompts of first-token and one-stream."""
    shared_requests: int = 32
    """Requests of shared-prefix."""
    shared_prefix_len: int = 1024
    """Tokens of their prefix."""
    url: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A server to compare with, of any engine that takes token ids and ignore_eos. May be repeated. Its key is taken
    from the environment variable OPENAI_API_KEY."""
    traffic: tyro.conf.OmitArgPrefixes[Lengths] = field(default_factory=Lengths)
    output: tyro.conf.OmitArgPrefixes[OutputArgs] = field(default_factory=OutputArgs)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=lambda: EngineArgs(dtype="float32"))


@dataclass
class Found:
    """What a comparison gathers."""

    rounds: dict[str, dict[str, list[dict[str, float]]]]
    """{engine: {"all" or number of requests: a dict of metrics a round}}."""
    probes: list[dict[str, float]]
    left_out: dict[str, str]
    """Who takes no part, and why."""


def run(argv: Sequence[str]) -> int:
    """Measure, print the tables, write the files."""
    args = parse_arguments(CompareArgs, "octavo bench compare", argv)
    check_outputs(args.output)
    engine = checked(args.engine)
    _check(args, engine)
    own = {name: value for name, value in asdict(args).items() if name not in ("traffic", "output", "engine")}
    record = Record("compare", argv, {**own, **asdict(args.traffic), **asdict(engine)})
    found = _before(args.add_to, json.loads(json.dumps(record.given())))

    from octavo.loader.checkpoint import open_checkpoint
    from octavo.loader.pull import find_model
    from octavo.tokenization.tokenizer import load_tokenizer

    path = Path(find_model(engine.model, engine.revision))
    checkpoint = open_checkpoint(path, engine.load_format)
    words = TokenizerWords(load_tokenizer(Path(engine.tokenizer or path)))
    plan = _plan(args)
    loads = [load for group in plan.loads(words, 0) for load in group]
    engine = _sized(replace(engine, model=str(path), revision=None), loads)
    with ExitStack() as stack:
        try:
            contenders = []
            total = len(_block_sizes(args, engine)) + len(args.rivals) + len(args.url)
            with tqdm(total=total, desc="loading", delay=2, disable=None, leave=False) as bar:
                for loaded in _start(stack, args, engine, loads, found.left_out):
                    contenders += loaded
                    bar.update()
            if len(contenders) == 1:
                raise RivalFailed("; ".join(f"{name}: {why}" for name, why in found.left_out.items()))
            _check_same(found, contenders, args.add_to)
            probe = stack.enter_context(_probe(engine))
            measure(contenders, plan, words, args.rounds, probe, found)
        except RivalFailed as error:
            raise InvalidInput(str(error)) from error
        engines = {one.name: one.runner.hello() for one in contenders if one.name in found.rounds}
    kinds = {one.name: one.kind for one in contenders}
    machine = machine_of(found.probes)
    size = _model_size(checkpoint.config, checkpoint.num_weights(), _item_size(path, engine))
    results = summarise(found.rounds)
    missed = limits(results, loads, size, machine, kinds)
    document = record.finish(
        {
            "engines": engines, "left_out": found.left_out, **results, "kinds": kinds, "limits": missed,
            "machine_speed": as_numbers(machine), "model_size": asdict(size),
            "rounds": found.rounds, "probes": found.probes,
        }
    )  # fmt: skip
    show(document)
    write_outputs(document, args.output)
    return 0


def _check(args: CompareArgs, engine: EngineArgs) -> None:
    lows = {name: getattr(args, name) for name in ("rounds", "prefix_len", "shared_requests", "shared_prefix_len")}
    lows |= {"static_batches": min(args.static_batches, default=0), "concurrency": min(args.concurrency, default=1)}
    for name, value in lows.items():
        if value < 1:
            raise InvalidInput(f"{name}={value} must be at least 1")
    for name in ("static_batches", "concurrency", "block_sizes", "rivals", "measure", "url"):
        values = getattr(args, name)
        if len(set(values)) < len(values):
            raise InvalidInput(f"{name}={values} has one twice; give each once")
    if not (args.measure or args.concurrency):
        raise InvalidInput("there is nothing to measure; give --measure or --concurrency")
    if not (args.rivals or args.url or args.block_sizes):
        raise InvalidInput("there is nobody to compare with; give --rivals, --url or --block-sizes")
    if engine.dtype not in _ITEM_SIZES:
        raise InvalidInput(f"dtype={engine.dtype!r} may differ between engines; give {', '.join(_ITEM_SIZES)}")
    if engine.quantization not in (None, "none", "gguf"):
        raise InvalidInput(f"quantization={engine.quantization!r} is not what others compute; give none or gguf")
    for size in args.block_sizes:
        checked(engine, block_size=size)
    _pythons(args)
    for url in args.url:
        make_target(url, None, _SERVER_SECONDS)
    check_traffic(TrafficArgs(**asdict(args.traffic)))


def _before(path: str | None, options: dict[str, Any]) -> Found:
    """What an earlier run with these options found."""
    if path is None:
        return Found({}, [], {})
    try:
        document = json.loads(read_bounded(Path(path), _LARGEST_FILE))
        earlier, found = document["options"], Found(document["rounds"], list(document["probes"]), {})
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"add_to={short_repr(path, 200)} is no file of octavo bench compare") from error
    for name in sorted((options.keys() | earlier.keys()) - _MAY_DIFFER):
        if options.get(name) != earlier.get(name):
            raise InvalidInput(
                f"add_to={short_repr(path, 200)} was measured with {name}={short_repr(earlier.get(name))} and this is "
                f"{short_repr(options.get(name))}; give the same options, or leave add_to out"
            )
    return found


def _check_same(found: Found, contenders: Sequence[Contender], path: str | None) -> None:
    """Rounds of an earlier run can only be added to if the same engines take part."""
    names = {one.name for one in contenders}
    if path is not None and set(found.rounds) != names:
        different = ", ".join(sorted(set(found.rounds) ^ names))
        raise RivalFailed(f"add_to={short_repr(path, 200)} differs in who takes part: {different}")


def _pythons(args: CompareArgs) -> dict[str, str]:
    """The interpreter of each rival."""
    found = dict.fromkeys(args.rivals, sys.executable)
    given = set()
    for text in args.env:
        name, _, place = text.partition("=")
        if name not in found or name in given:
            raise InvalidInput(f"env={short_repr(text, 200)} must be one of {', '.join(found)}, =, and a folder, once")
        given.add(name)
        found[name] = python_of(Path(place).expanduser())
        if shutil.which(found[name]) is None:
            raise InvalidInput(
                f"env={short_repr(text, 200)} is no environment; octavo bench rival-env {name} FOLDER makes one"
            )
    return {str(name): python for name, python in found.items()}


def _plan(args: CompareArgs) -> Plan:
    return Plan(
        traffic=TrafficArgs(**asdict(args.traffic)),
        measures=args.measure,
        concurrency=args.concurrency,
        prefix_len=args.prefix_len,
        shared_requests=args.shared_requests,
        shared_prefix_len=args.shared_prefix_len,
    )


def _sized(engine: EngineArgs, loads: Sequence[Load]) -> EngineArgs:
    """A KV cache for all requests of the largest load at once, unless one is asked for: several engines share the
    machine's memory."""
    if (engine.num_kv_blocks, engine.kv_cache_memory, engine.kv_cache_memory_bytes) != (None, None, None):
        return engine
    longest = max(load.longest + load.most_output for load in loads)  # requests of other rounds may be longer
    tokens = max(len(load.work) for load in loads) * (longest + engine.block_size)
    return replace(engine, num_kv_blocks=-(-tokens // engine.block_size))


def _item_size(path: Path, engine: EngineArgs) -> float:
    """Bytes of a weight, on average."""
    if engine.quantization != "gguf":
        return _ITEM_SIZES[engine.dtype]
    tensors = GGUFFile(path).tensors.values()
    return sum(tensor.num_bytes for tensor in tensors) / sum(tensor.num_elements for tensor in tensors)


def _model_size(config: ModelConfig, num_weights: int, item_size: float) -> ModelSize:
    table = config.vocab_size * config.hidden_size
    num_tables = 1 if config.tie_word_embeddings else 2
    return ModelSize(num_weights - num_tables * table, table, item_size)


def _threads(engine: EngineArgs) -> int:
    return engine.num_threads or detect().num_cores


def _probe(engine: EngineArgs) -> Rival:
    return Rival(
        sys.executable,
        "machine_probe",
        {"num_threads": _threads(engine), "dtype": engine.dtype, "platform": engine.platform},
    )


def _start(
    stack: ExitStack, args: CompareArgs, engine: EngineArgs, loads: Sequence[Load], left_out: dict[str, str]
) -> Iterator[list[Contender]]:
    """What each process or server takes part as. One after the other: two that load would disturb each other."""
    for size in _block_sizes(args, engine):
        blocks = engine.num_kv_blocks and -(-engine.num_kv_blocks * engine.block_size // size)
        options = asdict(replace(engine, block_size=size, num_kv_blocks=blocks))
        ours = stack.enter_context(Rival(sys.executable, "this_engine", options))
        ours.hello()
        yield [Contender(OURS if size == engine.block_size else f"{OURS}, blocks of {size}", ours, kind=OURS)]
    for name, python in _pythons(args).items():
        try:
            rival = stack.enter_context(_rival(stack, name, python, engine, loads))
            rival.hello()
        except RivalFailed as error:
            left_out[name] = f"{error} (octavo bench rival-env {name} FOLDER makes an environment for --env)"
            yield []
            continue
        if name == "transformers":
            yield [Contender(f"{name}, batches of {batch}", rival, batch, name) for batch in args.static_batches]
        else:
            yield [Contender(name, rival, kind=name)]
    for url in args.url:
        target = make_target(url, os.environ.get("OPENAI_API_KEY"), _SERVER_SECONDS)
        yield [Contender(url, ServerRunner(target, first_model(target)), kind=SERVER)]


def _block_sizes(args: CompareArgs, engine: EngineArgs) -> list[int]:
    """Of each process of this engine; the first is the one that others are compared with."""
    return [engine.block_size, *(size for size in args.block_sizes if size != engine.block_size)]


def _rival(stack: ExitStack, name: str, python: str, engine: EngineArgs, loads: Sequence[Load]) -> Rival:
    """Raises RivalFailed if it cannot read the model."""
    kind, model, dtype = RIVALS[name], Path(engine.model), engine.dtype
    if kind.reads and model.suffix != ".gguf":
        raise RivalFailed(f"{name} reads GGUF files and {model} is none")
    if kind.reads and engine.quantization != "gguf":
        from octavo.bench.plain_gguf import write_plain

        dtype = dtype if dtype in kind.reads else kind.reads[0]
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-bench-"))
        write_plain(model, Path(folder) / f"{dtype}.gguf", dtype)
        model = Path(folder) / f"{dtype}.gguf"
    options = {
        "model": str(model),
        "dtype": engine.dtype,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "num_threads": _threads(engine),
        "max_num_seqs": min(_MOST_SEQUENCES, max(len(load.work) for load in loads)),
        "max_len": max(load.longest + load.most_output for load in loads),
    }
    told = {"weights": "as in the file" if kind.reads and engine.quantization == "gguf" else dtype}
    return Rival(python, kind.script, options, told)


def measure(contenders: Sequence[Contender], plan: Plan, words: Words, rounds: int, probe: Rival, found: Found) -> None:
    """All rounds into `found`. A rival that fails is left out from then on; this engine must not."""
    probe.hello()
    taking_part = list(contenders)
    first = len(found.probes)
    numbers = [-1, *range(first, first + rounds)]
    groups = sum(len(plan.loads(words, number)) for number in numbers)
    with tqdm(total=groups * len(contenders), desc="turns", delay=2, disable=None, leave=False) as bar:
        for number in numbers:
            if number >= 0:
                found.probes.append(probe.ask({}))
            for group in plan.loads(words, number):
                for one in list(taking_part):
                    try:
                        results = list(take(one, group))
                    except RivalFailed as error:
                        if one.name == OURS:
                            raise
                        found.left_out[one.name] = str(error)
                        found.rounds.pop(one.name, None)
                        taking_part.remove(one)
                        continue
                    finally:
                        bar.update()
                    if number >= 0:  # the round before the first warms up
                        _keep(found.rounds.setdefault(one.name, {}), number, results)
    if len(taking_part) == 1 and len(contenders) > 1:
        raise RivalFailed("; ".join(found.left_out.values()))


def _keep(
    rows: dict[str, list[dict[str, float]]], number: int, results: Sequence[tuple[str, dict[str, float]]]
) -> None:
    for row, metrics in results:
        of_rounds = rows.setdefault(row, [])
        if len(of_rounds) <= number:
            of_rounds.append({})
        of_rounds[number].update(metrics)
