"""How long clients of one explorer wait for an answer while they all drag a degree, each without a pause.

    python benchmarks/explorer_load.py [CLIENTS]

Prints milliseconds: the median, the 99th percentile and how many were timed. A machine that does other work gives other numbers.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from contextlib import closing

CLIENTS, QUESTIONS = 20, 25
QUERY = "model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192&layout=tp={tp}+pp=4+fsdp={fsdp}+zero_stage=1"


def client(address: tuple[str, int], times_s: list[float]) -> None:
    """Drag the degree of tensor parallelism from 1 to 8 and back, and note the time of each answer."""
    with closing(http.client.HTTPConnection(*address, timeout=60)) as connection:
        for number in range(QUESTIONS):
            tp = 1 << number % 4
            started_s = time.perf_counter()
            connection.request("GET", "/ask/overview?" + QUERY.format(tp=tp, fsdp=16 // tp))
            response = connection.getresponse()
            response.read()
            times_s.append(time.perf_counter() - started_s)
            assert response.status == 200


def main(num_clients: int) -> None:
    """Serve an explorer, wait until it has searched its first state, and time the clients."""
    command = [sys.executable, "-m", "shardwise", "explore", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().removeprefix("http://").rstrip("/").partition(":")
        address, warm, times_s = (host, int(port)), [], []
        client(address, warm)
        time.sleep(10)  # the search of this state
        threads = [threading.Thread(target=client, args=(address, times_s)) for _ in range(num_clients)]
        started_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s = time.perf_counter() - started_s
        process.terminate()
    times_ms = sorted(1e3 * seconds for seconds in times_s)
    print(
        f"{num_clients} clients: median {times_ms[len(times_ms) // 2]:.0f} ms, 99% {times_ms[int(0.99 * len(times_ms))]:.0f} ms, "
        f"{len(times_ms)} timed, {len(times_ms) / wall_s:.0f} answers/s"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else CLIENTS)
