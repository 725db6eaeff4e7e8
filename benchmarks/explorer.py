"""How long the explorer takes in a real Chromium on this machine: the first paint, and from a drag to the new number.

    python benchmarks/explorer.py

Prints milliseconds: the median, the 90th percentile and how many were timed. A machine that does other work gives other numbers.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from web.chromium import PATH, WHY, browser, explorer, watch_page

STATE = "model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192&layout=tp=2+pp=4+fsdp=8+zero_stage=1"
PAINTS, DRAGS = 7, 40
SETTLED_MS = 2000
DRAG = """async count => {
    const slider = document.getElementById('control-tp'), times = [];
    const step = () => document.querySelector('.facts [data-why=step_time_s]');
    for (let number = 0; number < count; number += 1) {
        const before = step(), started = performance.now();
        slider.value = (Number(slider.value) + 1) % 4;
        slider.dispatchEvent(new Event('input'));
        while (step() === before) await new Promise(resolve => setTimeout(resolve, 0));
        times.push(performance.now() - started);
    }
    return times;
}"""
PAINT = "performance.getEntriesByType('paint').find(one => one.name === 'first-contentful-paint').startTime"


def time_line(label: str, times: list[float]) -> str:
    """A line of the report."""
    tenth = sorted(times)[-1 - len(times) // 10]
    return f"{label:<28}median {statistics.median(times):6.1f} ms, 90% {tenth:6.1f} ms, {len(times)} timed"


def painted(page: Page, url: str) -> float:
    """Milliseconds until the page shows something."""
    page.goto(f"{url}?{STATE}")
    page.wait_for_selector(".facts")
    milliseconds: float = page.evaluate(PAINT)
    return milliseconds


def main() -> int:
    """Time both. Returns an exit code."""
    if PATH is None:
        print(WHY, file=sys.stderr)
        return 1
    with browser() as chromium, explorer() as url:
        paints, bytes_ = [], 0
        for _ in range(PAINTS):
            page = chromium.new_context().new_page()
            activity = watch_page(page)
            paints.append(painted(page, url))
            bytes_ = activity.transferred
        page.wait_for_selector(".best", timeout=300_000)
        page.wait_for_timeout(SETTLED_MS)
        page.evaluate(DRAG, 8)  # the derivations of four structures
        drags = page.evaluate(DRAG, DRAGS)
        print(time_line("first paint", paints))
        print(time_line("from a drag to its number", drags))
        print(f"{'transferred':<28}{bytes_:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
