"""`octavo plan`: what an engine would decide and take, before anything is loaded. No torch: it answers at once.

stdout has the answer, as text or as one JSON object with plain numbers.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import tyro

from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import EngineArgs
from octavo.config.machine import detect
from octavo.config.memory import format_bytes
from octavo.config.options import make_engine_args
from octavo.config.plan import Plan, Subject, make_plan
from octavo.config.weights import report_kernels
from octavo.errors import InvalidInput, short_repr

EXIT_DOES_NOT_FIT = 1
_DEFAULT_LENGTH = 128


@dataclass(frozen=True, kw_only=True)
class PlanArgs:
    """What an engine with these options would decide on this machine, and the memory it would take, without loading it.

    Takes every option of the engine, so a command line of generate or serve can be asked about as it is. A model that
    is not on this machine is downloaded first.

    With --json: one object. Bytes: weights {dtype or quantization: bytes}, weight_forms {form: bytes} as chosen,
    kv_bytes_per_token {KV dtype: bytes}, memory {limit, libraries, weights, kv_cache, workspace, total, loading,
    peak_rss, least}; total is weights + kv_cache + workspace, loading the worst moment while weights are read, both
    beside the libraries, and peak_rss what the process is seen to hold at most. Tokens: kv_cache {blocks, block_size,
    tokens, dtype}, max_model_len, largest_prompt. Requests: concurrency [{input_len, output_len, requests}]. Choices
    and reasons: fits, problem, advice [{options, kv_tokens, instead_of}], limit_source, platform, platform_reason,
    kernels, kernels_reason, dtype, dtype_reason, quantization, quantization_reason, threads, threads_source,
    max_num_seqs, max_num_batched_tokens, notes. Of the model: model, architecture, load_format, checkpoint_dtype,
    parameters.

    The exit status is 0 if it fits, 1 if it does not, 2 if an option or the model is refused.
    """

    model_tag: tyro.conf.Positional[str | None] = None
    """The model; the same as --model."""
    input_len: int | None = None
    """Tokens of a prompt that must be possible; default: several usual lengths are shown."""
    output_len: int | None = None
    """Tokens of its output."""
    json: bool = False
    """Print one JSON object."""
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=EngineArgs)


@dataclass(frozen=True, slots=True)
class Answer:
    """The plan and what it was made for."""

    plan: Plan
    subject: Subject
    args: EngineArgs
    platform_reason: str
    parameters: int


def run(argv: Sequence[str]) -> int:
    """Print the plan.

    Returns:
        The exit status: 1 if it does not fit.
    """
    args = parse_arguments(PlanArgs, "octavo plan", argv)
    engine = args.engine
    if args.model_tag is not None:
        if engine.model not in (args.model_tag, EngineArgs().model):
            raise InvalidInput(
                f"two models are given: {short_repr(args.model_tag, 200)} and --model={short_repr(engine.model, 200)}; "
                "give one"
            )
        engine = replace(engine, model=args.model_tag)
    answer = _answer(make_engine_args(**asdict(engine)), _lengths(args))
    print(json.dumps(to_json(answer), indent=2) if args.json else to_text(answer))
    return 0 if answer.plan.fits else EXIT_DOES_NOT_FIT


def _lengths(args: PlanArgs) -> tuple[tuple[int, int], ...]:
    for name in ("input_len", "output_len"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 2**31:
            raise InvalidInput(f"{name}={short_repr(value)} must be a number of tokens from 1 to {2**31}")
    if args.input_len is None and args.output_len is None:
        return ()
    return ((args.input_len or _DEFAULT_LENGTH, args.output_len or _DEFAULT_LENGTH),)


def _answer(args: EngineArgs, lengths: tuple[tuple[int, int], ...]) -> Answer:
    from octavo.config.engine_config import LoadConfig
    from octavo.loader.checkpoint import open_checkpoint
    from octavo.loader.pull import find_model
    from octavo.ops.registry import choose_platform, get_traits
    from octavo.quantization.forms import CheckpointSizes

    path = find_model(args.model, args.revision)
    checkpoint = open_checkpoint(path, args.load_format)
    _, platform_reason = choose_platform(args.platform)
    subject = Subject(
        model=checkpoint.config,
        load=LoadConfig(path=path, load_format=checkpoint.load_format, seed=args.seed),
        weights=CheckpointSizes(checkpoint),
        machine=detect(),
        platform=get_traits(args.platform, checkpoint.config.dtype),
    )
    return Answer(make_plan(args, subject, lengths), subject, args, platform_reason, checkpoint.num_weights())


def to_json(answer: Answer) -> dict[str, Any]:
    """The keys that PlanArgs documents."""
    plan, model, args = answer.plan, answer.subject.model, answer.args
    config, traits = plan.config, answer.subject.platform
    memory, cache = config.memory, config.cache
    return {
        "model": str(config.load.path),
        "architecture": model.architecture,
        "load_format": config.load.load_format,
        "checkpoint_dtype": model.dtype,
        "parameters": answer.parameters,
        "fits": plan.fits,
        "problem": plan.problem or None,
        "advice": [asdict(advice) for advice in plan.advice],
        "weights": plan.weights,
        "kv_bytes_per_token": plan.kv_per_token,
        "memory": {
            "limit": memory.limit,
            "libraries": memory.libraries,
            "weights": memory.weights,
            "kv_cache": memory.kv_cache,
            "workspace": memory.workspace,
            "total": memory.total,
            "loading": plan.loading,
            "peak_rss": plan.peak_rss,
            "least": plan.least_memory,
        },
        "limit_source": memory.limit_source,
        "kv_cache": {
            "blocks": cache.num_blocks,
            "block_size": cache.block_size,
            "tokens": cache.num_tokens,
            "dtype": config.worker.kv_cache_dtype,
        },
        "max_model_len": config.scheduler.max_model_len,
        "largest_prompt": plan.largest_prompt,
        "concurrency": [asdict(load) for load in plan.loads],
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "dtype": config.worker.dtype,
        "dtype_reason": config.worker.dtype_reason,
        "quantization": config.worker.quantization,
        "quantization_reason": config.worker.quantization_reason or None,
        "weight_forms": plan.weight_forms,
        "platform": traits.name,
        "platform_reason": answer.platform_reason,
        "kernels": report_kernels(traits.kernels, config.worker),
        "kernels_reason": traits.kernels_reason,
        "threads": config.worker.num_threads,
        "threads_source": answer.subject.machine.num_cores_source if args.num_threads is None else "num_threads",
        "notes": list(config.notes),
    }


def to_text(answer: Answer) -> str:
    """For people."""
    facts, plan = to_json(answer), answer.plan
    return "\n\n".join(("\n".join(_verdict(facts, plan)), _table(_rows(facts))))


def _verdict(facts: dict[str, Any], plan: Plan) -> list[str]:
    lines = [
        f"{facts['model']}: {facts['architecture']}, {facts['parameters'] / 1e6:.1f} million parameters, "
        f"{facts['load_format']}, {facts['checkpoint_dtype']}"
    ]
    if plan.fits:
        lines.append("It fits.")
    else:
        lines.append(f"It does not fit: {plan.problem}")
    if plan.fits and plan.advice:
        lines.append(
            f"No request can be as long as max_model_len={facts['max_model_len']}: the KV cache holds "
            f"{facts['kv_cache']['tokens']} tokens."
        )
    for advice in plan.advice:
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in advice.options.items())
        without = " and ".join(f"--{name.replace('_', '-')}" for name in advice.instead_of)
        instead = f" instead of {without}" if without else ""
        lines.append(f"  it does with {options}{instead}: {advice.kv_tokens} tokens of KV cache")
    if not plan.fits and not plan.advice:
        least, left = format_bytes(plan.least_memory), format_bytes(plan.config.memory.limit)
        way_out = (
            f"at its smallest this model takes {least} beside the libraries, and {left} are left there; use a smaller "
            "model, or raise the limit"
            if plan.least_memory > plan.config.memory.limit
            else "shorten the request, or use a model that takes longer ones"
        )
        lines.append(f"  No option helps: {way_out}.")
    return lines


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    memory, cache = facts["memory"], facts["kv_cache"]
    sizes = {name: format_bytes(value) for name, value in memory.items()}
    return [
        ("weights", _sizes_by_dtype(facts["weights"], _chosen_weights(facts))),
        *_few_bits_rows(facts),
        ("dtype", f"{facts['dtype']} ({facts['dtype_reason']})"),
        ("KV cache a token", _sizes_by_dtype(facts["kv_bytes_per_token"], cache["dtype"])),
        ("KV cache", "{blocks} blocks x {block_size} = {tokens} tokens of {dtype}".format(**cache)),
        ("largest prompt", f"{facts['largest_prompt']} tokens (max_model_len {facts['max_model_len']})"),
        *(
            (f"requests {load['input_len']} + {load['output_len']}", f"{load['requests']} at once")
            for load in facts["concurrency"]
        ),
        ("memory limit", f"{sizes['limit']} ({facts['limit_source']}, beside the libraries)"),
        (
            "memory sum",
            f"weights {sizes['weights']} + KV cache {sizes['kv_cache']} + workspace {sizes['workspace']} "
            f"= {sizes['total']}, beside the libraries' {sizes['libraries']}",
        ),
        ("memory peak", f"{sizes['peak_rss']} of the whole process; {sizes['loading']} of it while loading"),
        ("platform", f"{facts['platform']} ({facts['platform_reason']})"),
        ("kernels", f"{'; '.join(dict.fromkeys(facts['kernels'].values()))} ({facts['kernels_reason']})"),
        ("threads", f"{facts['threads']} ({facts['threads_source']})"),
    ]


def _chosen_weights(facts: dict[str, Any]) -> str:
    quantization: str = facts["quantization"]
    return facts["dtype"] if quantization == "none" else quantization


def _few_bits_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Where there was a choice."""
    if facts["quantization_reason"] is None:
        return []
    forms = " + ".join(f"{name} {format_bytes(size)}" for name, size in facts["weight_forms"].items() if size)
    return [("quantization", f"{facts['quantization']} ({facts['quantization_reason']}): {forms}")]


def _sizes_by_dtype(sizes: dict[str, int], chosen: str) -> str:
    return ", ".join(
        f"{dtype} {format_bytes(size)}{' (chosen)' if dtype == chosen else ''}" for dtype, size in sizes.items()
    )


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)
