"""The engine on a CPU: decoding and prefill against the same kernels timed alone, and against plain torch.

    python benchmarks/cpu_decode.py [--streams 1 8 32 128] [--dtypes float32 bfloat16] [--json FILE] [--plot FILE]

All sides in one run, turn by turn, on the same weights; greedy, forced lengths, detokenisation on. "kernels" repeats
the forward and the sampling of a step that the engine really made, with nothing around them: the share of it that the
engine reaches is what scheduling, gathering, detokenising and Python's part in them cost. "torch" is the same engine
over plain torch operators (platform "reference"). Medians over the turns.
"""

import argparse
import statistics
import time

import record
import torch

from octavo import LLM, RequestOutputKind, SamplingParams
from octavo.ops.interface import AttentionMetadata

CONTEXT = 256
"""Tokens in the KV cache of each stream when decoding begins."""
PREFILL_CHUNK = 512


class Side:
    """One engine with its streams."""

    def __init__(self, model: str, dtype: str, platform: str, streams: int, threads: int) -> None:
        self.streams = streams
        self.llm = LLM(
            model, dtype=dtype, platform=platform, num_threads=threads, max_model_len=1024, disable_log_stats=True,
            max_num_seqs=max(streams, 2), num_kv_blocks=max(streams, 4) * 32, enable_prefix_caching=False,
            max_num_batched_tokens=PREFILL_CHUNK,
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.runner = self.engine.client.core.executor.worker.runner
        self.last: tuple[torch.Tensor, torch.Tensor, AttentionMetadata] | None = None
        self.forward = self.runner._forward
        self.runner._forward = self._watched

    def _watched(self, x: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        """Keep what a step of all streams computes."""
        if len(x) == len(attention.seq_lens) == self.streams:
            self.last = (x, positions, attention)
        return self.forward(x, positions, attention)

    def add(self, prompt_tokens: int, output_tokens: int, count: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        for stream in range(count):
            prompt = [(stream * 31 + position * 7) % 150 + 100 for position in range(prompt_tokens)]
            self.engine.add_request(f"bench-{stream}", prompt, params)

    def decode(self, num_steps: int) -> float:
        """Tokens/s of all streams together, from the step after the last prompt until the first stream ends."""
        num_prefills = -(-self.streams * CONTEXT // PREFILL_CHUNK)  # in which those that came first decode
        self.add(CONTEXT, num_steps + 2 * num_prefills, self.streams)
        self.last = None
        while self.last is None:
            assert self.engine.has_unfinished_requests(), "there was no step of all streams"
            self.engine.step()
        tokens, started = self.engine.stats().generation_tokens, time.perf_counter()
        while self.engine.stats().num_running == self.streams:
            self.engine.step()
        rate = (self.engine.stats().generation_tokens - tokens) / (time.perf_counter() - started)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return rate

    def prefill(self, num_chunks: int) -> float:
        """Tokens/s of one long prompt in whole chunks."""
        self.add(num_chunks * PREFILL_CHUNK, 1, 1)
        started = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return num_chunks * PREFILL_CHUNK / (time.perf_counter() - started)

    @torch.inference_mode()
    def kernels(self, num_steps: int) -> float:
        """Tokens/s of the last step's forward and greedy sampling, repeated."""
        assert self.last is not None, "decode comes first"
        x, positions, attention = self.last
        started = time.perf_counter()
        for _ in range(num_steps):
            attention.plans.clear()  # it is worked out once a step
            hidden = self.forward(self.runner.model.embed(positions % 100), positions, attention)
            self.runner.model.compute_logits(hidden).argmax(dim=-1)
        return num_steps * len(x) / (time.perf_counter() - started)


def measure(args: argparse.Namespace, dtype: str, streams: int) -> dict[str, float]:
    """Median tokens/s of each side."""
    steps = max(8, args.steps // max(1, streams // 8))
    native = Side(args.model, dtype, "auto", streams, args.threads)
    sides = {"octavo": lambda: native.decode(steps), "kernels": lambda: native.kernels(steps)}
    plain = None
    if streams <= args.torch_streams:
        plain = Side(args.model, dtype, "reference", streams, args.threads)

        def run_plain() -> float:
            torch.set_num_threads(args.threads)
            try:
                return plain.decode(max(4, steps // 8))
            finally:
                torch.set_num_threads(1)

        sides["torch"] = run_plain
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.turns):
        for name, run in sides.items():
            seconds[name].append(run())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if streams == 1:
        medians["prefill"] = statistics.median(native.prefill(1) for _ in range(args.turns))
    native.llm.close()
    if plain is not None:
        plain.llm.close()
    return medians


def line(row: dict[str, float]) -> str:
    ours, kernels = row["octavo"], row["kernels"]
    plain = f"{row['torch']:>8.1f}{ours / row['torch']:>7.1f}" if "torch" in row else f"{'-':>8}{'-':>7}"
    return f"{ours:>9.1f}{kernels:>9.1f}{ours / kernels:>7.0%}{plain}"


def plot(rows: list[dict], file: str) -> None:
    """All sides against the number of streams, a dtype a picture. Needs matplotlib."""
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure = Figure(figsize=(4.5 * len(dtypes), 3.5), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
        for side, style in (("octavo", "o-"), ("kernels", "s--"), ("torch", "^:")):
            found = [(row["streams"], row[side]) for row in rows if row["dtype"] == dtype and side in row]
            if found:
                axes.plot(*zip(*found, strict=True), style, label=side)
        axes.set(title=dtype, xlabel="streams", ylabel="output tokens/s", xscale="log", ylim=(0, None))
        streams = [row["streams"] for row in rows if row["dtype"] == dtype]
        axes.set_xticks(streams, streams)
        axes.xaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or an alias")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--torch-streams", type=int, default=32, help="the side of plain torch runs up to this many")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=64, help="decode steps a turn at few streams")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    parser.add_argument("--plot", metavar="FILE", help="draw tokens/s against streams, as .png or .svg")
    args = parser.parse_args()
    rows = []
    print(f"{'dtype':<10}{'streams':>8}{'octavo':>9}{'kernels':>9}{'share':>7}{'torch':>8}{'ratio':>7}   tokens/s")
    for dtype in args.dtypes:
        for streams in args.streams:
            row = measure(args, dtype, streams)
            print(f"{dtype:<10}{streams:>8}{line(row)}", flush=True)
            if "prefill" in row:
                print(f"{dtype:<10} prefill of {PREFILL_CHUNK} tokens: {row['prefill']:.0f} tokens/s", flush=True)
            rows.append({"dtype": dtype, "streams": streams, **row})
    if args.json:
        settings = {"model": args.model, "threads": args.threads, "context": CONTEXT, "turns": args.turns}
        record.write(args.json, "cpu_decode", {**settings, "results": rows})
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
