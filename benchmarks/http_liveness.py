"""Whether the server answers /health/live promptly while it is busy: streams run and prompts of 5 MB are refused.

    python benchmarks/http_liveness.py [--streams 200] [--seconds 20] [--json FILE]

The server's event loop answers /health/live; whatever blocks it shows here. Three other processes: one asks for
/health/live all the time over one connection, one reads the streams, one sends prompts that are far too long for the
model, one after the other. Reported: percentiles in milliseconds, idle and busy, in one run.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import record
from http_load import Client, running_server

GOAL_MS = 50.0
"""At the 99th percentile, busy."""
PERCENTILES = (50, 90, 99)
_PAUSE = 0.005
"""Seconds between two probes."""


def probe(host: str, port: int, pipe: Connection) -> None:
    """Measure between two messages; answer the second one with the milliseconds of each probe."""
    asyncio.run(_probe(host, port, pipe))


async def _probe(host: str, port: int, pipe: Connection) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    request = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    while pipe.recv() == "begin":
        times = []
        while not pipe.poll():
            started = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head, head
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
            times.append((time.perf_counter() - started) * 1e3)
            await asyncio.sleep(_PAUSE)
        pipe.recv()
        pipe.send(times)
    writer.close()


def keep_streaming(host: str, port: int, num_streams: int, max_tokens: int, pipe: Connection) -> None:
    """Read so many streams at once, each followed by the next, until told to end; then send the number of events."""
    asyncio.run(_keep_streaming(host, port, num_streams, max_tokens, pipe))


async def _keep_streaming(host: str, port: int, num_streams: int, max_tokens: int, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(Client, host, port))[1] for _ in range(num_streams)]
    fields = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    num_events = 0

    async def work(number: int, client: Client) -> None:
        nonlocal num_events
        body = json.dumps({"prompt": [100 + number % 100] * 8, **fields}).encode()
        while True:
            num_events += await client.stream("/v1/completions", body)

    tasks = [asyncio.create_task(work(*pair)) for pair in enumerate(clients)]
    pipe.send("begun")
    while not pipe.poll():
        await asyncio.sleep(0.1)
        for task in tasks:
            if task.done():
                task.result()  # only a failure ends it
    pipe.send(num_events + sum(client.num_events for client in clients))
    for task in tasks:
        task.cancel()


def keep_refusing(host: str, port: int, num_bytes: int, pipe: Connection) -> None:
    """Send prompts of so many bytes until told to end; then send how many were refused."""
    body = json.dumps({"prompt": "word " * (num_bytes // 5), "max_tokens": 1}).encode()
    url = f"http://{host}:{port}/v1/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    num_refused = 0
    pipe.send("begun")
    while not pipe.poll():
        try:
            urllib.request.urlopen(request, timeout=60).close()
            raise AssertionError("a prompt that is far too long was served")
        except urllib.error.HTTPError as error:
            assert error.code == 400, error.read()
            num_refused += 1
    pipe.send(num_refused)


class Helper:
    """A process at the other end of a pipe."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=target, args=(*args, other), daemon=True)
        self._process.start()

    def check(self) -> None:
        """Raise if it has ended."""
        if not self._process.is_alive():
            raise RuntimeError("a helper failed; its error is above")

    def ask(self, message: str) -> Any:
        self.pipe.send(message)
        return self.pipe.recv()


def summary(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"probes": len(times), **{f"p{p}_ms": cuts[p - 1] for p in PERCENTILES}, "max_ms": max(times)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    blocks = args.streams * -(-(args.max_tokens + 24) // 16)
    flags = ("--max-num-seqs", str(args.streams), "--num-kv-blocks", str(blocks), "--num-threads", str(args.threads))
    with running_server(args.model, *flags) as server:
        address = (server.host, server.port)
        prober = Helper(probe, *address)

        def measure() -> dict[str, float]:
            prober.pipe.send("begin")
            time.sleep(args.seconds)
            return summary(prober.ask("end"))

        idle = measure()
        streams = Helper(keep_streaming, *address, args.streams, args.max_tokens)
        streams.pipe.recv()
        refusals = Helper(keep_refusing, *address, args.prompt_bytes)
        refusals.pipe.recv()
        while server.get("/load")["num_running"] < args.streams:
            streams.check()
            time.sleep(0.05)
        busy = measure()
        prober.pipe.send("no more")
        return {
            "benchmark": "http_liveness", "model": args.model, "streams": args.streams, "threads": args.threads,
            "prompt_bytes": args.prompt_bytes, "seconds": args.seconds, "goal_p99_ms": GOAL_MS, "idle": idle,
            "busy": busy, "refused_prompts": refusals.ask("end"), "streamed_events": streams.ask("end"),
            "load_average": os.getloadavg()[0],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or an alias")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--prompt-bytes", type=int, default=5 * 10**6)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the two measurements")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="of the engine")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args()
    result = run(args)
    for name in ("idle", "busy"):
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in result[name].items()))
    print(f"{result['refused_prompts']} prompts refused, {result['streamed_events']} events streamed meanwhile")
    print(f"goal: p99 {GOAL_MS:g} ms, busy: {'met' if result['busy']['p99_ms'] <= GOAL_MS else 'missed'}")
    if args.json:
        record.write(args.json, "http_liveness", result)


if __name__ == "__main__":
    main()
