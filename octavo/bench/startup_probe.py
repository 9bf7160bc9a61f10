"""One start, as `octavo bench startup` measures it: a process that loads an engine, computes a token and says when.

python -m octavo.bench.startup_probe FILE SECONDS_SINCE_THE_EPOCH OPTIONS_AS_JSON
"""

import json
import sys
import time
from pathlib import Path


def main(path: str, spawned: str, options: str) -> None:
    """Write the seconds of each phase, and the peak RSS, to the file."""
    begun = time.time()
    from octavo.bench.offline import run_requests
    from octavo.bench.report import peak_rss
    from octavo.bench.traffic import BenchRequest
    from octavo.config.options import make_engine_args
    from octavo.engine.llm_engine import LLMEngine

    imported = time.time()
    engine = LLMEngine.from_args(make_engine_args(**json.loads(options)))
    loaded = time.time()
    token = next(iter(engine.tokenizer.get_vocab().values()))
    run_requests(engine, [BenchRequest([token], 1, 1)])
    done = time.time()
    engine.shutdown()
    phases = {
        "python": begun - float(spawned),
        "import": imported - begun,
        "load": loaded - imported,
        "first_token": done - loaded,
        "total": done - float(spawned),
        "peak_rss": peak_rss(),
    }
    Path(path).write_text(json.dumps(phases), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
