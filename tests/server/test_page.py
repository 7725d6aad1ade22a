import os
import re
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from jetdraft.server.app import Service
from tests.server.serving import served, until

pytestmark = pytest.mark.skipif(
    not shutil.which("chromedriver") and "CI" not in os.environ,
    reason="needs chromium and chromedriver",
)


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    browser = webdriver.Chrome(
        options, webdriver.ChromeService(shutil.which("chromedriver"))
    )
    yield browser
    browser.quit()


def of(browser, name):
    return browser.find_element(By.ID, name)


def fill(browser, name, value):
    of(browser, name).clear()
    of(browser, name).send_keys(value)


def wait(browser, holds):
    return WebDriverWait(browser, 30).until(lambda _: holds())


@pytest.fixture
def page(browser, address):
    browser.get(address)
    wait(browser, lambda: browser.title == "jetdraft: toy")
    return browser


@pytest.fixture
def slow_passes(service):
    for model in service.pool.models:
        curve = model.parts.curve
        curve.passes = dict.fromkeys(curve.passes, 50.0)


def test_a_prompt_is_tried_and_drafted_tokens_are_coloured(
    page, browser, model, slow_passes
):
    fill(browser, "prompt", "The robot sees")
    fill(browser, "tokens", "40")
    Select(of(browser, "mode")).select_by_value("text")
    Select(of(browser, "method")).select_by_visible_text("cascade")
    of(browser, "run").click()
    wait(browser, lambda: "tokens in" in of(browser, "figures").text)
    expected = model.generate("The robot sees", method="none", max_new_tokens=40)
    assert of(browser, "text").get_property("textContent") == expected.text
    drafted = browser.find_elements(By.CSS_SELECTOR, "#text .drafted")
    assert 0 < len(drafted) < 40
    plain = browser.find_element(By.CSS_SELECTOR, "#text span:not(.drafted)")
    colours = {e.value_of_css_property("background-color") for e in (plain, drafted[0])}
    assert len(colours) == 2
    figures = rf"\d+ tokens in [\d.]+ s \([\d.]+ tokens/s\), {len(drafted)} of"
    assert re.match(figures, of(browser, "figures").text)
    assert of(browser, "error").text == ""


def test_a_text_that_is_stopped_ends_early_and_the_next_is_whole(
    page, browser, service, model, slow, monkeypatch
):
    monkeypatch.setitem(service.pool.models[0].bundle.generation, "ignore_eos", True)
    Select(of(browser, "mode")).select_by_value("text")
    fill(browser, "prompt", "The robot sees")
    fill(browser, "tokens", "200")
    of(browser, "run").click()
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#text span"))
    of(browser, "stop").click()
    wait(browser, lambda: of(browser, "run").is_enabled())
    shown = of(browser, "text").get_property("textContent")
    until(lambda: service.desk.generating == 0)
    assert of(browser, "text").get_property("textContent") == shown
    whole = model.generate("The robot sees", max_new_tokens=200, ignore_eos=True)
    assert whole.text.startswith(shown)
    assert len(shown) < len(whole.text) / 2
    fill(browser, "tokens", "5")
    of(browser, "run").click()
    wait(browser, lambda: "5 tokens in" in of(browser, "figures").text)
    assert whole.text.startswith(of(browser, "text").get_property("textContent"))
    assert not of(browser, "stop").is_enabled()
    assert of(browser, "error").text == ""


def test_a_conversation_goes_on_and_starts_again(page, browser, model):
    fill(browser, "tokens", "12")
    messages = []
    for said in ("The robot", "And the cat?"):
        of(browser, "prompt").send_keys(said + "\n")
        wait(browser, lambda: of(browser, "run").is_enabled())
        messages.append({"role": "user", "content": said})
        answer = model.chat(messages, max_new_tokens=12).text
        messages.append({"role": "assistant", "content": answer})
        *_, reply = browser.find_elements(By.CSS_SELECTOR, "#text .reply")
        assert reply.get_property("textContent") == answer
    assert [e.text for e in browser.find_elements(By.CSS_SELECTOR, "#text .user")] == [
        "The robot",
        "And the cat?",
    ]
    assert of(browser, "error").text == ""
    of(browser, "fresh").click()
    assert of(browser, "text").get_property("textContent") == ""


def test_what_goes_wrong_is_shown(page, browser, service):
    Select(of(browser, "mode")).select_by_value("text")
    of(browser, "run").click()
    wait(browser, lambda: "empty" in of(browser, "error").text)
    with served(Service(service.pool, "toy", api_key="sesame")) as elsewhere:
        browser.get(elsewhere)
        wait(browser, lambda: "API key" in of(browser, "error").text)
        fill(browser, "key", "sesame")
        fill(browser, "prompt", "The cat")
        of(browser, "run").click()
        wait(browser, lambda: "tokens in" in of(browser, "figures").text)
        assert of(browser, "error").text == ""
