"""This engine as one of those that are compared. Everything at once: it makes its own batches."""

import json
import os
import sys
import time


def main(options: str) -> None:
    """Serve the lines of stdin until they end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begun = time.perf_counter()
    from octavo import __version__
    from octavo.bench.engines import checked, engine_of
    from octavo.bench.offline import run_requests
    from octavo.bench.report import peak_rss
    from octavo.bench.traffic import BenchRequest
    from octavo.config.engine_args import EngineArgs

    with engine_of(checked(EngineArgs(), **json.loads(options))) as engine:
        print(json.dumps({"version": __version__, "load": time.perf_counter() - begun}), file=answers)
        for line in sys.stdin:
            requests = [BenchRequest(ids, len(ids), wanted) for ids, wanted in json.loads(line)["requests"]]
            run = run_requests(engine, requests)
            answer = {
                "seconds": run["elapsed_time"],
                "output_tokens": run["total_output_tokens"],
                "latencies": run["latencies"],
                "between_tokens": run["between_tokens"],
                "kv_utilization": run["kv_utilization"],
                "peak_rss": peak_rss(),
            }
            print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
