"""The page opens on the best layout of a job; while it is searched, a fallback stands in and the page says so."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from web.chromium import PATH, WAIT_MS, WHY, browser, explorer, watch_page

import shardwise as sw
from shardwise.present.explorer.background_search import SEARCHING, Searches, Values, report_searches
from shardwise.present.explorer.state import State

pytestmark = pytest.mark.skipif(PATH is None, reason=WHY)

JOB = "model=llama-3.2-1b&cluster=h100:8"
TOO_LONG = "model=gpt-2&cluster=h100:8&batch_tokens=64Ki&seq_len=2048"  # its table of positions has 1,024 rows
DONE_TASK = (
    "task=short-bubble&model=llama-3-70b&cluster=h100:64&batch_tokens=256Ki&seq_len=4096"
    "&layout=tp=8+pp=8+num_virtual_stages=2+schedule=interleaved"
)


class HeldSearches(Searches):
    """Searches that report nothing until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        """Return what the search of a setting ends with, once it is released."""
        if not self.released.is_set():
            return SEARCHING
        if setting not in self.results:
            self._keep_now(setting, values)
        return self.results[setting]

    def _keep_now(self, setting: State, values: Values) -> None:
        *_, last = report_searches(*values)
        with self.changed:
            self._keep(setting, last)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as launched:
        yield launched


@pytest.fixture
def searches() -> HeldSearches:
    return HeldSearches()


@pytest.fixture
def url(searches: HeldSearches) -> Iterator[str]:
    with explorer(searches=searches) as address:
        yield address


def open_page(chromium: Browser, url: str, query: str) -> Page:
    page = chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(f"{url}?{query}")
    page.wait_for_selector("main h1")
    return page


def test_the_page_moves_to_the_best_layout_by_itself(chromium: Browser, url: str, searches: HeldSearches) -> None:
    page = open_page(chromium, url, JOB)
    expect(page.locator(".progress")).to_contain_text("Searching all layouts of llama-3.2-1b on h100:8")
    expect(page.locator(".verdict .facts")).to_be_visible()
    expect(page.locator(".layout")).to_contain_text("fsdp=8")
    expect(page.get_by_role("heading", name="Pareto front")).to_be_visible()
    assert "layout=" not in page.url
    searches.released.set()
    expect(page.locator(".verdict h1")).to_contain_text("the best layout")
    expect(page.locator(".progress")).to_have_count(0)
    best = sw.plan("llama-3.2-1b", "h100:8", global_batch_tokens="1Mi", seq_len=4096).layout
    expect(page.locator(".layout")).to_have_text(f"this layout: {best}")
    expect(page).to_have_url(re.compile("layout="))
    expect(page.locator("#live")).to_contain_text(str(best))
    page.context.close()


def test_a_layout_that_was_changed_meanwhile_stays(chromium: Browser, url: str, searches: HeldSearches) -> None:
    page = open_page(chromium, url, JOB)
    page.focus("#control-tp")
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("tp=2"))
    searches.released.set()
    expect(page.locator(".best, .verdict .quiet").last).to_contain_text("best")
    page.wait_for_selector(".takes")
    expect(page).to_have_url(re.compile("tp=2"))
    expect(page.locator(".layout")).to_contain_text("tp=2")
    page.context.close()


def test_an_announcement_outlasts_the_search(chromium: Browser, url: str, searches: HeldSearches) -> None:
    page = open_page(chromium, url, DONE_TASK)
    expect(page.locator(".task.done")).to_be_visible()
    expect(page.locator("#live")).to_contain_text("task done")
    searches.released.set()
    page.wait_for_selector(".best", timeout=WAIT_MS)  # the page is drawn again
    expect(page.locator("#live")).to_contain_text("task done")
    page.focus("#control-micro_batch_seqs")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#live")).to_contain_text("slower than the best")
    page.context.close()


def test_a_fallback_that_cannot_run_is_no_verdict(chromium: Browser, url: str, searches: HeldSearches) -> None:
    page = open_page(chromium, url, TOO_LONG)
    expect(page.get_by_role("heading", name="Searching for the best layout")).to_be_visible()
    expect(page.get_by_role("heading", name="This layout cannot run")).to_have_count(0)
    searches.released.set()
    expect(page.get_by_role("heading", name="This layout cannot run")).to_be_visible()
    expect(page.locator(".verdict")).to_contain_text("learned table of positions has 1,024 rows")
    page.context.close()


def test_nothing_is_blank_before_the_first_answer(chromium: Browser, url: str) -> None:
    page = chromium.new_context().new_page()
    page.route("**/ask/**", lambda route: None)  # no answer comes
    page.goto(f"{url}?{JOB}")
    expect(page.get_by_role("navigation", name="views")).to_be_visible()
    expect(page.locator("main")).to_contain_text("pricing the first layout")
    expect(page.locator("#controls")).to_contain_text("loading the choices")
    page.context.close()


def test_figures_that_take_longer_say_what_is_being_done(chromium: Browser, url: str) -> None:
    page = chromium.new_context().new_page()
    activity = watch_page(page)
    page.route(re.compile("/ask/(timeline|roofline|pareto)"), lambda route: None)
    page.goto(f"{url}?{JOB}")
    expect(page.locator("main")).to_contain_text("simulating a step of this layout")
    expect(page.locator("main")).to_contain_text("searching all layouts of this job")
    assert activity.messages == []
    page.context.close()


def test_another_model_opens_on_its_own_usual_job(chromium: Browser, url: str, searches: HeldSearches) -> None:
    searches.released.set()
    page = open_page(chromium, url, JOB)
    expect(page.locator("#control-batch_tokens + *, label[for=control-batch_tokens] + output").first).to_have_text(
        "1Mi"
    )
    page.select_option("#control-model", "gpt-2")
    expect(page).to_have_url(re.compile("model=gpt-2.*batch_tokens=512Ki&seq_len=1024"))
    expect(page.locator(".verdict h1")).to_contain_text("the best layout")
    page.context.close()
