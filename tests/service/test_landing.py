"""The landing page: what it says, and in a headless Chromium how it behaves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_wheels

from service import landing, matrix, wheels
from service.check import Wheel

MATRIX = matrix.load()
VARIANTS = MATRIX.variants.values()
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

# Every choice of the picker at once: what is greyed, and what the answer is.
PICK_ALL = """
const shown = (id) => {
  const it = document.getElementById(id);
  return it && !it.hidden && it.checkVisibility() ? it.innerText : null;
};
const commands = (id) => shown(id) === null ? null :
  [...document.querySelectorAll(`#${id} .command`)].map((each) => each.textContent);
const found = [];
for (const python of radios("python")) for (const torch of radios("torch")) for (const cuda of radios("cuda")) {
  python.checked = torch.checked = cuda.checked = true;
  python.dispatchEvent(new Event("change", {bubbles: true}));
  found.push({python: python.value, torch: torch.value, cuda: cuda.value, greyTorch: torch.disabled,
    greyCuda: cuda.disabled, main: commands("main"), other: commands("other-commands"), why: shown("why"),
    noteTorch: shown("note-torch"), noteCuda: shown("note-cuda")});
}
return found;
"""

# The contrast of each piece of text with what is behind it, by the formula of WCAG 2.
CONTRASTS = """
const light = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * light(r / 255) + 0.7152 * light(g / 255) + 0.0722 * light(b / 255);
const colour = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (node) => {
  const [r, g, b, a = 1] = colour(getComputedStyle(node).backgroundColor);
  if (a === 1 || !node.parentElement) return [r, g, b];
  return behind(node.parentElement).map((value, i) => [r, g, b][i] * a + value * (1 - a));
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const found = [];
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
  if (!text || !node.checkVisibility() || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
  const pair = [luminance(colour(getComputedStyle(node).color)), luminance(behind(node))];
  found.push([(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), text]);
}
return found;
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("there is no Chromium here: `apt-get install chromium chromium-driver`")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # The sandbox of Chromium refuses root, and so containers; the pages here are our own.
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a site with all wheels is served, below the top as on GitHub's pages."""
    folder = tmp_path_factory.mktemp("all")
    small_wheels.make_site(folder, *MATRIX.variants)
    with small_wheels.served(folder) as (top, _):
        yield f"{top}site/"


def emulate(browser: Any, width: int = 1280, scheme: str = "light") -> None:
    """Makes the browser one of that width and colour scheme."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def commands(what: str, index: str) -> list[str]:
    """The commands for a wheel."""
    return [
        f"pip install {what} --extra-index-url {index}",
        f"uv pip install {what} --index {index}",
    ]


def labelled(address: str, variant: str) -> list[str]:
    """The commands for a variant's own wheel."""
    return commands(f"extops==0.1.0+{variant}", f"{address}{variant}/simple/")


def variant_of(pick: dict[str, Any]) -> str | None:
    """The variant that tests this torch with this CUDA; None where none does."""
    if pick["cuda"] == "none":
        return "cpu"
    own = (variant for variant in VARIANTS if variant.name != matrix.RELEASE)
    found = (v.name for v in own if v.cuda == pick["cuda"] and pick["torch"] in v.torch)
    return next(found, None)


def test_picker_offers_the_release_first(browser: Any, address: str) -> None:
    browser.get(address)
    picks = browser.execute_script(PICK_ALL)
    assert len(picks) == 5 * 12 * 7
    for pick in picks:
        variant = variant_of(pick)
        assert pick["greyTorch"] == (pick["python"] not in MATRIX.pythons[pick["torch"]])
        assert pick["greyCuda"] == (variant is None)
        if pick["greyTorch"] or pick["greyCuda"]:
            assert (pick["main"], pick["other"]) == (None, None)
            assert pick["why"].startswith("There is no such torch: ")
            continue
        assert pick["main"] == commands("extops", f"{address}simple/")
        # Code for Blackwell, or no GPU code at all: the wheels that have something to say for them.
        better = {"cpu", "cu128", "cu130", "cu132"}
        assert pick["other"] == (labelled(address, variant) if variant in better else None)


def test_picker_says_why_something_is_not_there(browser: Any, address: str) -> None:
    browser.get(address)
    picks = {
        (pick["python"], pick["torch"], pick["cuda"]): pick
        for pick in browser.execute_script(PICK_ALL)
    }
    pick = picks["3.10", "2.15.0", "13.2"]
    assert pick["noteTorch"] == "torch 2.15 has no wheel for Python 3.10."
    assert pick["why"] == (
        "There is no such torch: 2.15 has wheels for Python 3.11, 3.12, 3.13, 3.14. Pick another."
    )
    assert picks["3.12", "2.4.1", "none"]["noteCuda"].startswith(
        "PyPI has torch 2.4 for CUDA 12.1."
    )
    assert picks["3.12", "2.4.1", "13.0"]["why"].startswith("There is no such torch: PyPI has")


def test_picker_without_a_release(browser: Any, tmp_path: Path) -> None:
    with small_wheels.served(small_wheels.make_site(tmp_path, "cpu", "cu130")) as (address, _):
        browser.get(address)
        picks = browser.execute_script(PICK_ALL)
    for pick in picks:
        variant = variant_of(pick)
        there = variant in ("cpu", "cu130") and not pick["greyTorch"]
        assert pick["main"] == (labelled(address, variant) if variant and there else None)
        assert pick["other"] is None
        if variant and not there and not pick["greyTorch"]:
            assert f"nox -s build-{pick['python']}-{variant}" in pick["why"]


def test_cuda_follows_torch_and_keys_move_the_choice(browser: Any, address: str) -> None:
    browser.get(address)
    from selenium.webdriver.common.keys import Keys

    chosen = browser.switch_to.active_element
    for _ in range(2):  # Python, torch
        chosen.send_keys(Keys.TAB)
        chosen = browser.switch_to.active_element
    assert chosen.get_attribute("value") == MATRIX.headers_torch == "2.13.0"
    for _ in range(3):
        browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    title = browser.find_element("id", "answer-title").text
    assert title == "Python 3.11, torch 2.10, CUDA 12.8"


def test_commands_can_be_copied(browser: Any, address: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    permissions = {
        "origin": address.removesuffix("/site/"),
        "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"],
    }
    browser.execute_cdp_cmd("Browser.grantPermissions", permissions)
    browser.get(address)
    button = browser.find_element("css selector", "#other-commands button")
    assert button.get_attribute("aria-label") == "Copy the pip command"
    button.click()
    WebDriverWait(browser, 30).until(
        lambda _: button.text == "Copied"
    )  # the clipboard answers later
    copied = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied == labelled(address, "cu130")[0]


@pytest.mark.parametrize("width", [375, 1280])
def test_page_fits(width: int, browser: Any, address: str) -> None:
    emulate(browser, width)
    browser.get(address)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    boxes = (
        "return [...document.querySelectorAll('.scroll')].map((e) => e.scrollWidth - e.clientWidth)"
    )
    assert browser.execute_script(boxes) == [0]
    assert browser.get_log("browser") == []  # nor a file that is not there
    assert browser.execute_script("return document.querySelector('img').naturalWidth") > 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str, browser: Any, address: str) -> None:
    emulate(browser, scheme=scheme)
    browser.get(address)
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, re.findall(r"\d+", ground))) < 3 * 128
    assert dark == (scheme == "dark")
    contrasts = browser.execute_script(CONTRASTS)
    assert len(contrasts) > 100
    assert [(ratio, text) for ratio, text in contrasts if ratio < 4.5] == []


def test_without_javascript(browser: Any, address: str) -> None:
    off = "Emulation.setScriptExecutionDisabled"
    browser.execute_cdp_cmd(off, {"value": True})
    try:
        browser.get(address)
        assert not browser.find_element("css selector", "form").is_displayed()
        shown = browser.find_element("css selector", "#main .command").text
        assert shown == commands("extops", "https://<this-site>/simple/")[0]
        assert not browser.find_element("css selector", "#main button").is_displayed()
        assert not browser.find_element("id", "other").is_displayed()
        assert "extops-0.1.0+cu130-" in browser.find_element("css selector", "table").text
    finally:
        browser.execute_cdp_cmd(off, {"value": False})


def read(folder: Path, variant: str) -> Wheel:
    wheel = small_wheels.make(folder, variant, MATRIX.variants[variant].architectures)
    return Wheel(wheel)


def test_advantage_of_a_wheel(tmp_path: Path) -> None:
    """The release's first GPU is Maxwell and its last Hopper; cu130's are Turing and Blackwell."""
    released, newer = read(tmp_path, "release"), read(tmp_path, "cu130")
    assert landing.advantage(newer, released) == (
        "It has code for Blackwell GPUs (compute capability 10.0, 12.0); for those the release "
        "wheel is compiled by the driver at first use."
    )
    assert landing.advantage(released, newer) == (
        "It serves Maxwell and Pascal GPUs, which the release wheel does not."
    )
    assert landing.advantage(read(tmp_path, "cu121"), released) == ""
    assert landing.advantage(read(tmp_path, "cpu"), released).startswith(
        "It has no GPU code: 0.0 MB"
    )


def test_generations_are_known() -> None:
    names = {name.removesuffix("+PTX") for each in VARIANTS for name in each.architectures}
    assert names <= set(landing.GENERATIONS)


def test_runs_come_from_the_survey_and_from_passports(tmp_path: Path) -> None:
    wheel = read(tmp_path, "cu130")
    counts = {"cell": "3.11-cu130", "torch": "2.13.0+cu130", "failed": 0}
    passport = [
        {**counts, "device": "CPU", "passed": 20, "skipped": 5},
        {**counts, "device": "NVIDIA H200", "passed": 25, "skipped": 0},
    ]
    wheels.passport(wheel.path).write_text(json.dumps({"tests": passport, "rules": []}))
    surveyed = [
        {**counts, "built": True, "device": "CPU", "passed": 10, "skipped": 9},
        {"cell": "3.12-cu132", "built": False, "built_where": "local"},
    ]
    assert landing.runs(surveyed, [wheel]) == {
        "3.11-cu130": [landing.Run("CPU", 20, 0, 5), landing.Run("H200", 25, 0, 0)],
        "3.12-cu132": [landing.Run("not built", 0, 0, 0)],
    }


def write_page(wheel: Wheel, folder: Path) -> str:
    """The page of this one wheel; without a benchmark, `folder`/results has what was recorded."""
    (folder / "site").mkdir()
    landing.write([wheel], folder / "site", MATRIX, folder / "results")
    return (folder / "site" / "index.html").read_text()


def test_wheel_without_a_commit(tmp_path: Path) -> None:
    wheel = Wheel(small_wheels.make(tmp_path, "cpu", commit=None))
    page = write_page(wheel, tmp_path)
    group = page[page.index('id="wheel-cpu"') :]
    assert "names no commit" in group[: group.index("</th>")]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((40, 0, 2), "✓ 40 passed, 2 skipped: torch 2.16.0, Python 3.13.1, extops.whl, 2026-11-20"),
        ((38, 3, 0), "✗ 3 failed, 38 passed, 0 skipped: torch 2.16.0"),
        ((0, 0, 40), "✗ 0 failed, 0 passed, 40 skipped: torch 2.16.0"),
    ],
)
def test_run_with_the_newest_torch(counts: tuple[int, int, int], said: str, tmp_path: Path) -> None:
    run = {"date": "2026-11-20", "torch": "2.16.0", "python": "3.13.1", "wheel": "extops.whl"}
    (tmp_path / "results").mkdir()
    record = {**run, **dict(zip(("passed", "failed", "skipped"), counts, strict=True))}
    (tmp_path / "results" / landing.NEWEST_TORCH).write_text(json.dumps(record))
    page = write_page(read(tmp_path, "cpu"), tmp_path)
    shown = page[page.index('id="newest"') :]
    text = " ".join(re.sub(r"<[^>]+>", "", shown).split()).replace(" ,", ",")
    assert said in text


def test_table_shows_each_state(tmp_path: Path) -> None:
    wheel = read(tmp_path, "cu132")
    rows = [
        {
            "cell": f"{python}-cu132",
            "device": "NVIDIA H200",
            "torch": "2.15.0",
            "skipped": 3,
            **counts,
        }
        for python, counts in (
            ("3.11", {"passed": 7, "failed": 0}),
            ("3.12", {"passed": 5, "failed": 2}),
            ("3.13", {"passed": 0, "failed": 0}),
        )
    ]
    rules = [{"rule": "size", "passed": True}, {"rule": "files", "passed": False}]
    wheels.passport(wheel.path).write_text(json.dumps({"tests": rows, "rules": rules}))
    page = write_page(wheel, tmp_path)
    group = page[page.index('id="wheel-cu132"') :]
    cells = re.findall(r"<td>(.*?)</td>", group, re.DOTALL)
    texts = [" ".join(re.sub(r"<[^>]+>", "", cell).split()) for cell in cells]
    assert texts == [
        "– no such torch",
        "✓ 7 passed tests H200, 3 skipped",
        "✗ 2 failed tests failed H200, 3 skipped",
        "✗ none of the tests ran H200, 3 skipped",
        "· not run",
    ]
    assert "1 of 2 rules passed" in " ".join(page.split())
    assert "How fast" not in page
