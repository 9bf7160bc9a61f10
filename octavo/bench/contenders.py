"""Those who take part in `octavo bench compare`: processes of `octavo.bench.rivals`, and servers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from octavo.bench import rivals
from octavo.bench.http_client import Answer, Target, stream
from octavo.errors import printable

Work = list[tuple[list[int], int]]
"""(token ids of the prompt, output tokens) of each request."""


SERVER = "server"
"""The kind of all servers: nobody knows what weights they have."""


class RivalFailed(Exception):
    """A contender cannot go on; the text says why."""


class Runner(Protocol):
    """Computes requests; see `octavo.bench.rivals` for what comes back. What it cannot know is None."""

    def hello(self) -> dict[str, Any]: ...

    def run(self, work: Work, batch_size: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Contender:
    """One column: an engine and how it batches."""

    name: str
    runner: Runner
    batch_size: int = 0
    """Requests of a static batch; 0: it makes its own batches."""
    kind: str = ""
    """The rival's name, whatever its batches."""


class Rival:
    """A process of its own."""

    def __init__(self, python: str, script: str, options: dict[str, Any], told: dict[str, Any] | None = None) -> None:
        """`told`: what is known of it besides what it says itself."""
        self.name = script
        self._told = told or {}
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by `__exit__`
        path = Path(rivals.__file__).with_name(f"{script}.py")
        environment = dict(os.environ)
        if python == sys.executable:
            environment["PYTHONPATH"] = os.pathsep.join(folder for folder in sys.path if folder)
        self._process = subprocess.Popen(
            [python, str(path), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
        )  # fmt: skip
        self._hello: dict[str, Any] | None = None

    def hello(self) -> dict[str, Any]:
        """{version, load} and more, once it has loaded."""
        self._hello = self._hello or {**self._read(), **self._told}
        return self._hello

    def run(self, work: Work, batch_size: int) -> dict[str, Any]:
        """What it answers to these requests."""
        return self.ask({"requests": work, "batch_size": batch_size})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to any line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_read` finds out why
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        status = self._process.wait()
        self._log.seek(0)
        said = [part for part in self._log.read().splitlines() if part.strip() and not part.startswith("INFO ")]
        ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        # of a traceback the last line says it
        last = said[-1:] if said[-1:] and "Error" in said[-1] else said[-3:]
        reason = f": {printable(' '.join(last), 500)}" if said else ""
        raise RivalFailed(f"{self.name} {ended}{reason}")

    def __enter__(self) -> "Rival":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


class ServerRunner:
    """An OpenAI-compatible server that takes token ids and `ignore_eos`. Its memory cannot be seen from here."""

    def __init__(self, target: Target, model: str) -> None:
        self._target, self._model = target, model

    def hello(self) -> dict[str, Any]:
        return {"url": self._target.url.geturl(), "model": self._model}

    def run(self, work: Work, batch_size: int) -> dict[str, Any]:
        """All requests at once."""
        started = time.perf_counter()
        answers = asyncio.run(self._send(work))
        seconds = time.perf_counter() - started
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            raise RivalFailed(f"{self._target.url.geturl()} failed {len(errors)} of {len(work)} requests: {errors[0]}")
        wanted = sum(length for _, length in work)
        got = sum(answer.output_tokens for answer in answers)
        if got != wanted:
            raise RivalFailed(f"{self._target.url.geturl()} gave {got} tokens of {wanted}: it knows no ignore_eos")
        return {
            "seconds": seconds,
            "output_tokens": got,
            "latencies": [answer.latency for answer in answers],
            "between_tokens": [gap for answer in answers for gap in answer.itls],
            "kv_utilization": None,
            "peak_rss": None,
        }

    async def _send(self, work: Work) -> list[Answer]:
        bodies = [
            {
                "model": self._model, "prompt": ids, "max_tokens": length, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}, "ignore_eos": True,
            }
            for ids, length in work
        ]  # fmt: skip
        return list(await asyncio.gather(*(stream(self._target, "/v1/completions", body, 0.0) for body in bodies)))
