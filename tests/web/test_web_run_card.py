"""The card of the whole run on the page, in the formats of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from web.chromium import PATH, WHY, browser, explorer

from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.values.units import format_count, format_days, format_energy, format_usd

pytestmark = pytest.mark.skipif(PATH is None, reason=WHY)

STATE = "model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192&layout=tp=2+pp=4+fsdp=8+zero_stage=1"
UNPRICED = "model=llama-3-8b&cluster=h800:64&batch_tokens=1Mi&seq_len=8192&layout=fsdp=64"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with explorer() as address:
        yield address


def open_page(chromium: Browser, url: str, query: str) -> Page:
    page = chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(f"{url}?{query}")
    page.wait_for_selector(".run .facts")
    return page


def test_the_card_has_tokens_days_dollars_and_energy_with_intervals(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, f"{STATE}&tokens=15T")
    run = Explorer(NameResolver()).answer("overview", f"{STATE}&tokens=15T")["training_run"]
    texts = {"tokens": format_count(run["tokens"]), "days": format_days(run["days"]), "usd": format_usd(run["usd"]),
             "energy_mwh": format_energy(run["energy_mwh"])}  # fmt: skip
    for place, text in texts.items():
        expect(page.locator(f'.run [data-why="training_run.{place}"]')).to_have_text(text)
    for place, form in (("days", format_days), ("usd", format_usd), ("energy_mwh", format_energy)):
        for end in (0, 1):
            shown = page.locator(f'.run [data-why="training_run.interval90.{place}.{end}"]')
            expect(shown).to_have_text(form(run["interval90"][place][end]))
    page.context.close()


def test_tokens_are_a_choice_and_have_a_default_with_a_source(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, STATE)
    expect(page.locator(".run")).to_contain_text("20 per parameter: the job names none")
    page.locator('.run [data-why="training_run.tokens"]').click()
    expect(page.locator("dialog[open]")).to_contain_text("Hoffmann")
    page.keyboard.press("Escape")
    page.select_option("#control-tokens", "1T")
    expect(page).to_have_url(re.compile("tokens=1000000000000"))
    expect(page.locator('.run [data-why="training_run.tokens"]')).to_have_text("1T")
    page.context.close()


def test_unknown_is_a_dash_with_its_reason(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, UNPRICED)
    run = Explorer(NameResolver()).answer("overview", UNPRICED)["training_run"]
    for reason in run["missing"].values():
        cell = page.locator(".run dd").filter(has_text=reason)
        expect(cell.locator(".unknown")).to_have_text("-")
    page.context.close()
