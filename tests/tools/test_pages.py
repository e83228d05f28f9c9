"""The pages in a real browser: none is wider than its window. `nox -s docs` looks at the documentation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from extops_build import UserError
from tools import pages
from torchwheels.index import site

REPORT = {
    "name": "tinyops",
    "version": "1.2+cu130.torch2.13",
    "wheel": "tinyops-1.2+cu130.torch2.13-cp311-cp311-manylinux_2_24_x86_64.whl",
    "requires": ["torch==2.13.*"],
    "requires_python": ">=3.10",
    "works_with": {"python": "==3.11.*"},
    "size": 1_234_567,
    "tags": ["cp311-cp311-manylinux_2_24_x86_64"],
    "build": {
        "target": "3.11-cu130",
        "cuda": "13.0",
        "architectures": ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0+PTX"],
    },
    "tests": [],
    "yanked": None,
    "variant": "tinyops-1.2-cp311-cp311-manylinux_2_24_x86_64-cu130.whl",
}


@pytest.fixture
def _browser() -> None:
    pytest.importorskip("playwright", reason="no playwright, which steers the browser")
    if pages.browser() is None:
        assert "GITHUB_ACTIONS" not in os.environ, "its machines have a browser"
        pytest.skip("no browser: `apt-get install chromium` adds one")


@pytest.mark.usefixtures("_browser")
def test_a_page_that_is_too_wide_is_named(tmp_path: Path) -> None:
    (tmp_path / "fits.html").write_text("<p>short</p>")
    (tmp_path / "wide.html").write_text('<div style="width: 700px">wide</div>')
    with pytest.raises(UserError, match=r"^wide\.html is 7\d\d pixels wide in a window of 400: "):
        pages.look(tmp_path, tmp_path / "pictures")
    names = {f"{width}-{scheme}" for width in (1400, 400) for scheme in ("light", "dark")}
    assert {file.parent.name for file in tmp_path.glob("pictures/*/fits.png")} == names


@pytest.mark.usefixtures("_browser")
def test_the_page_of_an_index_fits_and_its_buttons_copy(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    sections = site._section("tinyops", [REPORT])
    page = site.page(site.TEMPLATE, title="Wheels of tinyops", documentation="", sections=sections)
    (tmp_path / "index.html").write_text(page)
    pages.look(tmp_path, tmp_path / "pictures")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=pages.browser(), args=["--no-sandbox"]
        )
        context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
        shown = context.new_page()
        shown.goto((tmp_path / "index.html").as_uri())
        assert shown.locator("td").first.get_attribute("data-column") == "version"
        commands = shown.locator("output code").all_inner_texts()
        assert [command.partition(" install ")[0] for command in commands] == ["pip", "uv pip"]
        assert not shown.locator("td code").first.is_visible()
        commands.insert(0, shown.locator("p code").inner_text())  # which leaves the choice to uv
        for button, command in zip(shown.get_by_role("button").all(), commands, strict=True):
            button.click()
            assert shown.evaluate("navigator.clipboard.readText()") == command
        chromium.close()


def test_that_nobody_looked_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    pages.look(tmp_path, tmp_path)
    assert "was not checked" in capsys.readouterr().out
