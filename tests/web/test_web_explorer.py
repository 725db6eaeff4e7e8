"""The explorer in a real Chromium: every view, drags, the keyboard, the numbers of --json, and nothing asked for elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from explore.opened import opened_run
from playwright.sync_api import Browser, Page, expect
from web.chromium import PATH, WAIT_MS, WHY, browser, explorer, watch_page

from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.values.units import format_bytes, format_seconds

pytestmark = pytest.mark.skipif(PATH is None, reason=WHY)

STATE = "model=llama-3-8b&cluster=h100:64&precision=bf16&batch_tokens=1Mi&seq_len=8192"
LAYOUT = f"{STATE}&layout=tp=2+pp=4+fsdp=8+zero_stage=1"
VIEWS = {
    "overview": "Simulated step", "notation": "Every weight", "memory": "Memory", "schedule": "All schedules",
    "batch": "Critical batch size",
}  # fmt: skip
MOST_TRANSFERRED = 150_000  # bytes of the first view, as they travel


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with explorer() as address:
        yield address


def open_page(chromium: Browser, url: str, query: str, **options: Any) -> Page:
    page = chromium.new_context(viewport={"width": 1280, "height": 900}, **options).new_page()
    page.goto(f"{url}?{query}")
    page.wait_for_selector("main h1, main h2")
    return page


def payload(query: str, question: str = "overview") -> dict[str, Any]:
    return Explorer(NameResolver()).answer(question, query)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_without_an_error_or_a_request_to_elsewhere(
    chromium: Browser, url: str, view: str, width: int
) -> None:
    page = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if width < 800 else "light"
    ).new_page()
    activity = watch_page(page)
    page.goto(f"{url}?{LAYOUT}" + (f"&view={view}" if view != "overview" else ""))
    expect(page.get_by_role("heading", name=VIEWS[view], exact=True)).to_be_visible()
    if view == "overview":
        expect(page.get_by_role("heading", name="Pareto front")).to_be_visible()
    assert activity.messages == []
    assert {urlsplit(request).netloc for request in activity.requests if not request.startswith("data:")} == {
        urlsplit(url).netloc
    }
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    overflowing = page.evaluate(
        "[...document.querySelectorAll('main .panel')].filter(one => one.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert overflowing == 0
    page.context.close()


def test_the_page_transfers_few_bytes(chromium: Browser, url: str) -> None:
    page = chromium.new_context().new_page()
    activity = watch_page(page)
    page.goto(f"{url}?{LAYOUT}")
    page.wait_for_selector("svg[aria-label^='simulated step']")
    assert len(activity.ended) > 12
    assert activity.transferred <= MOST_TRANSFERRED
    page.context.close()


def test_numbers_are_those_of_the_payload(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, LAYOUT)
    priced = payload(LAYOUT)["estimate"]["estimate"]
    expect(page.locator('.facts [data-why="step_time_s"]')).to_have_text(format_seconds(priced["step_time_s"]))
    expect(page.locator('.facts [data-why="memory_bytes"]')).to_have_text(format_bytes(priced["memory_bytes"]))
    for name, value in priced["time"].items():
        if value:
            expect(page.locator(f'.terms [data-why="time.{name}"]')).to_have_text(format_seconds(value))
    for name, value in payload(LAYOUT)["memory"]["layouts"][0]["stages"][0].items():
        if value:
            expect(page.locator(f'.terms [data-why="memory.{name}"]')).to_have_text(format_bytes(value))
    page.context.close()


@pytest.mark.parametrize(
    "value", [0.0, 1.0, 12.345, 0.000123, 0.0999951, 999.96, 7200.0, 3.8e6, 1e-7, 0.5678692691198841]
)
def test_the_page_writes_seconds_and_bytes_as_python_does(chromium: Browser, url: str, value: float) -> None:
    page = open_page(chromium, url, LAYOUT)
    script = (
        "async ([value]) => { const f = await import('/format.js'); return [f.seconds(value), f.bytes(value * 1e9)]; }"
    )
    assert page.evaluate(script, [value]) == [format_seconds(value), format_bytes(value * 1e9)]
    page.context.close()


def test_a_drag_asks_one_question_for_each_number_that_it_shows(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, LAYOUT)
    page.wait_for_selector(".best", timeout=WAIT_MS)  # the search has ended
    page.wait_for_selector(".takes")
    activity = watch_page(page)
    script = """async values => {
        const slider = document.getElementById('control-tp'), shown = [];
        const step = () => document.querySelector('.facts [data-why=step_time_s]');
        for (const value of values) {
            const before = step();
            slider.value = value;
            slider.dispatchEvent(new Event('input'));
            while (step() === before) await new Promise(resolve => setTimeout(resolve, 1));
            shown.push(step().textContent);
        }
        return shown;
    }"""
    shown = page.evaluate(script, [0, 1, 2, 3])
    of = (f"{STATE}&layout=tp={tp}+pp=4+fsdp={16 // tp}+zero_stage=1" for tp in (1, 2, 4, 8))
    assert shown == [format_seconds(payload(query)["estimate"]["estimate"]["step_time_s"]) for query in of]
    assert len([request for request in activity.requests if "/ask/overview" in request]) == 4
    page.context.close()


def test_a_slider_moves_degrees_and_the_address_holds_the_state(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, f"{STATE}&layout=fsdp=64")
    page.focus("#control-tp")
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("fsdp=32[+]tp=2"))
    shown = page.locator('.facts [data-why="step_time_s"]').text_content()
    again = open_page(chromium, page.url.partition("?")[0], page.url.partition("?")[2])
    expect(again.locator('.facts [data-why="step_time_s"]')).to_have_text(shown or "")
    page.go_back()
    expect(page).to_have_url(re.compile("fsdp=64"))
    expect(page.locator("#control-tp")).to_have_js_property("value", "0")
    page.context.close()
    again.context.close()


def test_an_illegal_degree_stays_and_says_why(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, f"{STATE}&layout=fsdp=64")
    page.focus("#control-tp")
    page.keyboard.press("End")
    expect(page.get_by_role("heading", name="This layout cannot run")).to_be_visible()
    expect(page.locator("#control-tp-why")).to_contain_text("tp may be one of 1, 2, 4, 8, 16, 32")
    page.keyboard.press("Home")
    expect(page.locator('.facts [data-why="step_time_s"]')).to_be_visible()
    page.context.close()


def test_the_keyboard_alone_reaches_views_numbers_and_the_front(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, LAYOUT)
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.dataset?.why || document.activeElement.textContent"
            )
        )
    assert {"Schedule", "copy as", "control-model", "control-tp", "step_time_s"} <= set(reached)
    page.focus('.facts [data-why="step_time_s"]')
    page.keyboard.press("Enter")
    expect(page.locator("dialog[open]")).to_contain_text("the sum of the terms of time")
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    assert page.evaluate("document.activeElement.dataset.why") == "step_time_s"
    expect(page.get_by_role("heading", name="Pareto front")).to_be_visible(timeout=WAIT_MS)
    page.wait_for_selector(".takes", timeout=WAIT_MS)
    page.evaluate("[...document.querySelectorAll('summary')].at(-1).focus()")
    page.keyboard.press("Enter")
    for _ in range(6):  # the table, and the numbers of its first row
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "take it":
            break
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("^((?!pp=4).)*$"))
    page.context.close()


# Numbers of each view by their places in its payload, and one of them with what its explanation says.
PLACES = {
    "overview": ("roofline.operations.1.intensity", "FLOPs / bytes"),
    "notation": ("units.block.weights.1.shards.rest.copies", "devices / product of the axes"),
    "schedule": ("compared.rows.0.bubble", "idle / (makespan - idle)"),
    "batch": ("rows.0.days", "S(B) · seconds of a step"),
}
OPENED = """([name, button]) => new Promise(resolve => {
    button.click();
    const look = () => {
        const dialog = document.querySelector('dialog[open]');
        if (!dialog?.querySelector('dl')) return setTimeout(look, 5);
        const found = [...dialog.querySelectorAll('dd')].map(one => one.textContent.trim());
        dialog.close();
        resolve([name, ...found, dialog.textContent]);
    };
    look();
})"""


@pytest.mark.parametrize("view", PLACES)
def test_every_number_of_a_view_says_formula_kind_and_source(chromium: Browser, url: str, view: str) -> None:
    page = open_page(chromium, url, f"{LAYOUT}&view={view}")
    if view == "overview":
        page.wait_for_selector(".best", timeout=WAIT_MS)
        page.wait_for_selector(".takes")
    names = page.eval_on_selector_all("main [data-why]", "found => [...new Set(found.map(one => one.dataset.why))]")
    place, formula = PLACES[view]
    assert place in names
    if view == "overview":
        assert {"margin", "hfu", "verdict.times_the_best", "estimate.estimate.interval90.0"} <= set(names)
    for name in names:
        button = page.query_selector(f'[data-why="{name}"]')
        _, *texts, text = page.evaluate(OPENED, [name, button])
        assert len(texts) == 3, name
        assert all(texts), name
        assert texts[1].startswith(("a bound", "a prediction", "exact", "given", "an assumption", "measured")), name
        assert name != place or formula in text
    page.context.close()


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("view", ["overview", "memory"])
def test_bars_label_what_has_room_and_explain_every_colour(chromium: Browser, url: str, view: str, width: int) -> None:
    page = chromium.new_context(viewport={"width": width, "height": 900}).new_page()
    page.goto(f"{url}?{LAYOUT}&view={view}")
    page.wait_for_selector(".segment")
    outside = page.evaluate(
        """[...document.querySelectorAll('.segment text')].filter(text =>
            text.getBoundingClientRect().right > text.parentNode.querySelector('rect').getBoundingClientRect().right).length"""
    )
    assert outside == 0
    drawn, listed = page.evaluate(
        """[[...document.querySelectorAll('.segment rect')].map(one => one.style.fill),
            [...document.querySelectorAll('.terms .swatch')].map(one => one.style.background)]"""
    )
    assert set(drawn) <= set(listed)
    page.context.close()


def test_a_checkbox_switches_and_says_why_it_cannot(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, LAYOUT)
    box = page.locator("#control-sequence_parallel")
    expect(box).to_be_checked()
    box.focus()
    page.keyboard.press("Space")
    expect(page).to_have_url(re.compile("sequence_parallel=false|^((?!sequence_parallel).)*$"))
    expect(box).not_to_be_checked()
    page.focus("#control-tp")
    page.keyboard.press("Home")
    expect(page.locator("#control-sequence_parallel-why")).to_contain_text("tp")
    page.context.close()


def test_a_preset_is_a_job_of_its_own(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, LAYOUT)
    page.select_option("#control-preset", "GPT-2 on 8 A100")
    expect(page).to_have_url(re.compile("model=gpt-2&cluster=a100-40gb:8.*batch_tokens=480Ki"))
    expect(page.locator("#control-preset")).to_have_value("GPT-2 on 8 A100")
    page.context.close()


def test_actions_of_passes_are_in_words(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, f"{LAYOUT}&view=schedule")
    titles = page.eval_on_selector_all(
        ".pass", "found => found.map(one => one.parentNode.querySelector('title').textContent)"
    )
    assert "backward of micro-batch 0 through stage 1" in " ".join(titles)
    assert not [title for title in titles if re.search(r"\d[FBIW]\d", title)]
    page.context.close()


FORMATS = """async () => {
    const { percent } = await import('/format.js');
    return [0.1875, 0.18749999999999994].map(one => percent(one));
}"""


def test_sums_in_another_order_are_the_same_share(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, LAYOUT)
    assert page.evaluate(FORMATS) == ["18.8%", "18.8%"]
    page.context.close()


def test_copy_as_gives_the_command(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, LAYOUT)
    page.get_by_role("button", name="copy as").click()
    expect(page.locator("dialog[open] pre")).to_contain_text("shardwise estimate llama-3-8b h100:64")
    page.select_option("#copy-target", "python")
    expect(page.locator("dialog[open] pre")).to_contain_text("sw.estimate(")
    page.context.close()


def test_markup_in_an_address_is_text(chromium: Browser, url: str) -> None:
    page = chromium.new_context().new_page()
    page.goto(f"{url}?model=%3Cimg+src=x+onerror=document.title=1%3E")
    expect(page.get_by_role("heading", name="No answer")).to_be_visible()
    assert page.locator("main img").count() == 0
    assert page.title() == "shardwise explore"
    page.context.close()


def test_controls_have_labels_and_roles(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, LAYOUT)
    page.wait_for_selector("svg[aria-label^='simulated step']")
    unnamed = page.evaluate(
        """[...document.querySelectorAll('input, select, button, svg:not([aria-hidden])')].filter(one =>
            !(one.getAttribute('aria-label') || one.labels?.length || one.textContent.trim())).length"""
    )
    assert unnamed == 0
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("h1").count() == 1
    page.context.close()


def test_a_run_is_drawn_beside_its_plan(chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver, _ = opened_run(tmp_path, monkeypatch)
    expected = Explorer(resolver).answer("overview", "")["reconcile"]["time"]
    with explorer(resolver) as url:
        page = chromium.new_page()
        activity = watch_page(page)
        page.goto(url)
        expect(page.get_by_role("heading", name="Measured against predicted")).to_be_visible()
        page.get_by_role("link", name="Overview").click()
        page.wait_for_selector("[data-row=predicted] .segment")
        expect(page.locator('[data-why="reconcile.time.measured_s"]')).to_have_text(
            format_seconds(expected["measured_s"])
        )
        assert page.locator("[data-row=predicted] .segment").count() > 1
        assert page.locator("[data-row=measured] .segment").count() == sum(
            term["measured_s"] > 0 for term in expected["terms"]
        )
        for index, term in enumerate(expected["terms"]):
            if term["measured_s"]:
                name = f'[data-why="reconcile.time.terms.{index}.measured_s"]'
                expect(page.locator(name)).to_have_text(format_seconds(term["measured_s"]))
        page.locator('[data-why="reconcile.time.measured_s"]').click()
        expect(page.locator("dialog[open]")).to_contain_text("measured")
        assert activity.messages == []
        page.close()


def test_json_of_the_page_is_that_of_the_command_line(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, LAYOUT)
    answered = page.evaluate(f"fetch('/ask/overview?{LAYOUT}').then(answer => answer.json())")
    expected = json.loads(json.dumps(payload(LAYOUT)))
    assert answered["estimate"] == expected["estimate"]
    assert answered["memory"] == expected["memory"]
    page.context.close()


@pytest.mark.parametrize("view", ["overview", "schedule"])
def test_a_picture_that_is_cut_short_says_how_much_it_shows(chromium: Browser, url: str, view: str) -> None:
    page = open_page(chromium, url, f"{STATE.replace('1Mi', '1Gi')}&layout=tp=8+pp=8&view={view}")
    shown = page.locator(".truncated").first
    expect(shown).to_contain_text("256 of 131,072 micro-batches, 4,096 of 2,097,152 passes are shown")
    page.context.close()


def test_a_picture_of_everything_says_nothing(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, f"{LAYOUT}&view=schedule")
    page.wait_for_selector(".pass")
    expect(page.locator(".truncated")).to_have_count(0)
    page.context.close()


@pytest.mark.parametrize("view", VIEWS)
def test_no_text_of_the_page_names_a_flag(chromium: Browser, url: str, view: str) -> None:
    page = open_page(chromium, url, f"{LAYOUT}&view={view}")
    expect(page.get_by_role("heading", name=VIEWS[view], exact=True)).to_be_visible()
    assert not re.search(r"(?<![\w-])--[a-z]", page.locator("body").inner_text())
    page.context.close()


def test_the_command_of_a_schedule_is_copied(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, f"{LAYOUT}&view=schedule")
    page.get_by_role("button", name="copy the command").click()
    expect(page.locator("dialog[open] pre")).to_contain_text("shardwise schedule 1f1b --stages 4")
    page.context.close()
