# SPDX-License-Identifier: GPL-3.0-or-later
"""The report's page in a real browser, opened from the disk, as a person uses it. Screenshots go to tests/output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import report_support as fake
from ansible_collections.gpufleet.sglang.plugins.module_utils import _report
from ansible_collections.gpufleet.sglang.plugins.plugin_utils import _report_html
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

OUTPUT = Path("tests/output/report")
EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"


def page(tmp_path_factory, hosts):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(
        _report_html.render(_report.document(_report.records(hosts, hosts), generated="2026-11-30T22:00:00Z"))
    )
    return path.as_uri()


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    return page(tmp_path_factory, fake.fleet(1000))


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    return page(tmp_path_factory, fake.fleet(120))


def go(browser, address):
    browser.get("about:blank")
    for log in ("performance", "browser"):
        browser.get_log(log)
    browser.get(address)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    return browser


@pytest.fixture
def opened(browser, some):
    return go(browser, some)


@pytest.fixture
def opened_big(browser, thousand):
    return go(browser, thousand)


def shown(browser):
    return browser.execute_script(
        "return [...document.querySelectorAll('tr.host')].filter((r) => !r.hidden).map((r) => r.dataset.host)"
    )


def test_it_opens_from_the_disk_without_a_request_or_a_complaint(opened_big):
    opened = opened_big
    requests = [
        message["params"]["request"]["url"]
        for message in (json.loads(entry["message"])["message"] for entry in opened.get_log("performance"))
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requests if not url.startswith("file://")] == []
    assert len([url for url in requests if url.startswith("file://")]) == 1
    assert opened.get_log("browser") == []
    assert len(shown(opened)) == 1000
    opened.save_screenshot(str(OUTPUT / "light.png"))


def test_search_and_filters_find_hosts_and_live_in_the_address(opened_big):
    opened = opened_big
    opened.find_element(By.ID, "q").send_keys("0013")
    assert shown(opened) == ["gpu-0013.dc1.example"]
    assert opened.find_element(By.ID, "shown").text == "1 of 1000 hosts shown"
    opened.find_element(By.ID, "clear").click()
    Select(opened.find_element(By.ID, "cause")).select_by_visible_text("missing_system_lib")
    found = shown(opened)
    assert len(found) == 121 and "gpu-0007.dc1.example" in found
    address = opened.current_url
    assert address.endswith("#cause=missing_system_lib")
    opened.get("about:blank")
    opened.get(address)
    assert shown(opened) == found


def test_a_tile_and_a_next_step_choose_their_hosts(opened):
    opened.find_element(By.CSS_SELECTOR, "button.tile[data-status=unreachable]").click()
    assert len(shown(opened)) == 1
    opened.find_element(By.CSS_SELECTOR, ".steps tbody tr:first-child .show").click()
    count = int(opened.find_element(By.CSS_SELECTOR, ".steps tbody tr:first-child .count").text)
    assert len(shown(opened)) == count == 16


def test_nothing_found_is_said(opened):
    opened.find_element(By.ID, "q").send_keys("no such host")
    assert opened.find_element(By.ID, "none").is_displayed()


def test_the_keyboard_is_enough(opened):
    body = opened.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    assert opened.switch_to.active_element.get_attribute("class") == "skip"
    body.send_keys("/")
    assert opened.switch_to.active_element.get_attribute("id") == "q"
    opened.switch_to.active_element.send_keys("0031")
    button = opened.find_element(By.CSS_SELECTOR, "tr.host:not([hidden]) .open")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-expanded") == "true"
    detail = opened.find_element(By.CSS_SELECTOR, "tr.detail").text
    assert "crash loop" in detail and "lower mem_fraction_static" in detail and "out of memory" in detail
    opened.find_element(By.ID, "matrix").screenshot(str(OUTPUT / "detail.png"))
    button.send_keys(Keys.SPACE)
    assert button.get_attribute("aria-expanded") == "false"
    assert opened.find_elements(By.CSS_SELECTOR, "tr.detail") == []


def test_sorting_brings_failures_up_and_says_so(opened):
    head = opened.find_element(By.CSS_SELECTOR, "#hosts thead th:nth-child(2)")
    head.find_element(By.TAG_NAME, "button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    first = opened.find_element(By.CSS_SELECTOR, "tr.host")
    assert first.get_attribute("data-status") == "failed"
    head.find_element(By.TAG_NAME, "button").click()
    assert opened.find_element(By.CSS_SELECTOR, "tr.host").get_attribute("data-status") == "ok"


CONTRAST = """
const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((v) => linear(v / 255));
const light = (c) => .2126 * c[0] + .7152 * c[1] + .0722 * c[2];
const back = (e) => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
};
const texts = [...document.querySelectorAll('.pill, .cause, .soft, .tile, th, td, a, button, summary')];
return texts.slice(0, 1500).map((e) => {
  const [a, b] = [light(rgb(getComputedStyle(e).color)), light(rgb(back(e)))];
  return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.className || e.tagName];
}).filter(([ratio]) => ratio < 4.5).map(([ratio, name]) => `${name} ${ratio.toFixed(2)}`);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_can_be_read(opened, scheme):
    opened.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    background = "return getComputedStyle(document.body).backgroundColor"
    before = opened.execute_script(background)
    assert (sum(map(int, before[4:-1].split(","))) < 200) is (scheme == "dark")
    assert sorted(set(opened.execute_script(CONTRAST))) == []
    opened.save_screenshot(str(OUTPUT / f"{scheme}.png"))
    opened.find_element(By.ID, "theme").click()
    assert opened.execute_script(background) != before
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_screen_reader_finds_names_for_everything(opened):
    opened.execute_cdp_cmd("Accessibility.enable", {})
    opened.find_element(By.ID, "q").send_keys("0013")
    nodes = opened.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = ("button", "link", "combobox", "searchbox", "table", "region", "heading")
    seen = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n.get("ignored")]
    assert [role for role, name in seen if role in roles[:4] + roles[5:] and not name.strip()] == []
    assert {"main", "navigation", "banner", "search", "columnheader", "rowheader"} <= {role for role, _ in seen}
    ids = opened.execute_script("return [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_itself_never_scrolls_sideways(opened, width):
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        assert opened.execute_script("return document.documentElement.scrollWidth") <= width
        opened.save_screenshot(str(OUTPUT / f"width-{width}.png"))
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_text_is_shown_and_never_runs(browser, tmp_path_factory):
    facts = fake.facts(
        fake.broken("mooncake", state="broken", code="missing_system_lib", message=EVIL, name=EVIL),
        fake.plan(remedies=[fake.remedy(summary=EVIL)], warnings=[{"code": "w", "message": EVIL}]),
        ready_results=fake.ready("failed", code=EVIL, message=EVIL, mend=EVIL, lines=[EVIL]),
        rollout_failure={"task": EVIL, "message": EVIL, "cause": {}},
    )
    browser.get(page(tmp_path_factory, {EVIL: facts, "gpu-b": fake.facts()}))
    browser.find_element(By.CSS_SELECTOR, ".open").click()
    assert EVIL in browser.find_element(By.CSS_SELECTOR, "tr.detail").text
    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert "owned" not in browser.title.split(":")[0] and browser.title.startswith("Probe")
    assert [entry for entry in browser.get_log("browser") if "Content Security Policy" in entry["message"]] == []
