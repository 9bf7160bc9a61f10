"""What the engine itself costs a step, without a model: schedule + gather + update, in milliseconds.

    python benchmarks/engine_overhead.py [--json FILE]

A stub stands in for the model and answers every request with one token, so only Octavo's own bookkeeping is timed:
the scheduler's decisions, the gathering of a step's inputs from the request rows, and the update with its stop checks.
All requests decode; their blocks grow as they would in service.
"""

import argparse
import statistics
import time

import numpy as np
import record

from octavo.config.engine_config import CacheConfig, SchedulerConfig
from octavo.protocol.messages import EngineCoreRequest
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import ModelRunnerOutput
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.input_batch import gather_inputs
from octavo.worker.request_rows import RequestRows
from octavo.worker.sampling_inputs import gather_sampling

PHASES = ("schedule", "gather", "update")
PROMPT_TOKENS = 256


def measure(num_running: int, num_steps: int) -> dict[str, float]:
    """Median milliseconds of each phase and of their sum with `num_running` requests decoding."""
    length = PROMPT_TOKENS + num_steps + 2
    blocks_each = -(-length // 16)
    cache = CacheConfig(num_blocks=num_running * blocks_each + 1)
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=num_running * 256, max_model_len=length)
    scheduler, rows = Scheduler(config, cache), RequestRows(num_running, length, cache.block_size)
    for number in range(num_running):
        scheduler.add_request(
            EngineCoreRequest(
                request_id=str(number),
                prompt_token_ids=[number % 1000] * PROMPT_TOKENS,
                sampling_params=SamplingParams(max_tokens=num_steps + 2, seed=number),
                eos_token_ids=[2],
                arrival_time=time.monotonic(),
            )
        )
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(num_steps + 1):
        times = [time.perf_counter()]
        step = scheduler.schedule()
        times.append(time.perf_counter())
        rows.apply(step)
        batch = gather_inputs(rows, step)
        sampled = batch.rows[batch.sampling]
        gather_sampling(rows, sampled)
        times.append(time.perf_counter())
        token_ids = np.full(len(sampled), 7)  # the stub model
        rows.append_tokens(sampled, token_ids)
        result = ModelRunnerOutput(
            request_ids=step.request_ids, sampled_token_ids=[[token_id] for token_id in token_ids.tolist()]
        )
        stub_done = time.perf_counter()
        scheduler.update(step, result)
        update = time.perf_counter() - stub_done
        for phase, elapsed in zip(PHASES, [times[1] - times[0], times[2] - times[1], update], strict=True):
            seconds[phase].append(elapsed)
    decoding = {phase: values[1:] for phase, values in seconds.items()}  # the first step is the prefill
    totals = [sum(parts) for parts in zip(*decoding.values(), strict=True)]
    medians = {phase: statistics.median(values) * 1e3 for phase, values in decoding.items()}
    return {**medians, "total": statistics.median(totals) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256], help="requests running at once")
    parser.add_argument("--steps", type=int, default=300, help="steps timed for each")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args()
    results = []
    print(f"{'running':>8}" + "".join(f"{name + ' ms':>14}" for name in (*PHASES, "total")))
    for num_running in args.running:
        row = measure(num_running, args.steps)
        results.append({"running": num_running, **{f"{name}_ms": value for name, value in row.items()}})
        print(f"{num_running:>8}" + "".join(f"{row[name]:>14.3f}" for name in (*PHASES, "total")))
    if args.json:
        record.write(args.json, "engine_overhead", {"steps": args.steps, "results": results})


if __name__ == "__main__":
    main()
