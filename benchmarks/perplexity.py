"""Perplexity of one model in several configurations, in one run: what few bits and small KV caches lose.

    python benchmarks/perplexity.py TEXT [--model smollm2] [--configs CONFIG...] [--windows 16] [--json FILE]

TEXT is a file of plain UTF-8 text, some 100 kB or more. Any will do, as only ratios in one run count; a common one is
the complete Shakespeare of Project Gutenberg (https://www.gutenberg.org/ebooks/100, "Plain Text UTF-8").

A CONFIG is engine options with commas between them, such as dtype=float32 or quantization=gguf,kv_cache_dtype=int8.
The first one is what the others are compared with; the default compares what the file's weights are when they are
dequantised to float32 with what the engine keeps of them. Windows of equal length are spread evenly over the text; in
each, the tokens of the second half count, so that every one has at least half a window before it. All configurations
see the same tokens, so their difference is known far better than each perplexity: "loss" is the mean difference of the
log-probability of a token, as a change of perplexity, and behind it the standard error of that over the windows.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from octavo import LLM, SamplingParams

DEFAULT_CONFIGS = ["dtype=float32", "quantization=gguf"]
BYTES_PER_TOKEN = 8
"""A text has at least a token in so many bytes; no more of it than the windows need is tokenised."""


@dataclass(frozen=True)
class Measured:
    """One configuration."""

    config: str
    losses: list[float]
    """Mean negative log-probability of a token, by window."""
    seconds: float
    weights: int
    """Bytes."""
    forms: list[str]
    kv_cache_dtype: str

    @property
    def perplexity(self) -> float:
        return math.exp(statistics.fmean(self.losses))

    def difference(self, baseline: "Measured") -> tuple[float, float]:
        """(change of perplexity, its standard error), as fractions."""
        differences = [own - other for own, other in zip(self.losses, baseline.losses, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        return math.expm1(statistics.fmean(differences)), error


def parse_config(text: str) -> dict[str, str]:
    try:
        return dict(part.split("=", 1) for part in text.split(","))
    except ValueError:
        raise SystemExit(f"{text!r} is no configuration; write option=value, with commas between several") from None


def make_windows(llm: LLM, text: str, window: int, count: int) -> list[list[int]]:
    """Token ids of windows spread evenly over the text."""
    spread = max(1, len(text) // count)
    needed = window * BYTES_PER_TOKEN
    if spread < needed:
        raise SystemExit(
            f"{count} windows of {window} tokens need about {count * needed} characters, the text has {len(text)}; "
            "use a longer text, or fewer or shorter windows"
        )
    tokenizer = llm.get_tokenizer()
    starts = range(0, spread * count, spread)
    return [tokenizer.encode(text[start : start + needed], add_special_tokens=False)[:window] for start in starts]


def measure(args: argparse.Namespace, config: str, text: str) -> Measured:
    options = {"platform": args.platform, **parse_config(config)}
    with LLM(
        args.model, max_model_len=args.window + 1, max_num_seqs=1, kv_cache_memory="512MiB", num_threads=args.threads,
        disable_log_stats=True, enable_prefix_caching=False, max_num_batched_tokens=512, **options,
    ) as llm:  # fmt: skip
        windows = make_windows(llm, text, args.window, args.windows)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        started, losses = time.perf_counter(), []
        for tokens in windows:
            (output,) = llm.generate(tokens, params, use_tqdm=False)
            half = range(args.window // 2, args.window)
            losses.append(-statistics.fmean(output.prompt_logprobs[i][tokens[i]].logprob for i in half))
        seconds = time.perf_counter() - started
        engine = llm.llm_engine.config
        worker = engine.worker
        return Measured(
            config, losses, seconds, engine.memory.weights, list(worker.weight_forms), worker.kv_cache_dtype
        )


def row_of(result: Measured, baseline: Measured) -> dict[str, object]:
    loss, error = result.difference(baseline)
    return {
        "config": result.config,
        "perplexity": result.perplexity,
        "loss": loss,
        "loss_standard_error": error,
        "weights_bytes": result.weights,
        "weight_forms": result.forms,
        "kv_cache_dtype": result.kv_cache_dtype,
        "seconds": result.seconds,
        "window_losses": result.losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, metavar="TEXT", help="a file of plain text")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or an alias")
    parser.add_argument("--configs", nargs="+", default=DEFAULT_CONFIGS, metavar="CONFIG")
    parser.add_argument("--platform", default="auto", help="reference computes with the dequantised weights")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8", errors="replace")
    width = max(len(config) for config in args.configs)
    print(f"{'config':<{width}}{'perplexity':>12}{'loss':>20}{'weights MiB':>13}{'seconds':>9}")
    results: list[Measured] = []
    for config in args.configs:
        results.append(measure(args, config, text))
        row = row_of(results[-1], results[0])
        loss = "-" if len(results) == 1 else f"{row['loss']:+.3%} ± {row['loss_standard_error']:.3%}"
        size = results[-1].weights / 2**20
        print(f"{config:<{width}}{row['perplexity']:>12.4f}{loss:>20}{size:>13.1f}{row['seconds']:>9.1f}", flush=True)
    if args.json:
        settings = {"model": args.model, "text": args.text.name, "window": args.window, "windows": args.windows,
                    "platform": args.platform}  # fmt: skip
        rows = [row_of(result, results[0]) for result in results]
        Path(args.json).write_text(
            json.dumps({"benchmark": "perplexity", **settings, "results": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
