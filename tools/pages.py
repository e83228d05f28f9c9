"""Looks at web pages in a browser, as wide as a screen and as a phone, light and dark: none may be scrolled sideways.

python -m tools.pages docs/_build/html build/pages

leaves a picture of each page, such as 400-dark/index.png, in the second folder.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

from extops_build import UserError, errors_for_the_user

WIDTHS, SCHEMES = (1400, 400), ("light", "dark")
# Without them Chromium calls Google's hosts at every start.
_OFFLINE = ("--disable-background-networking", "--disable-component-update", "--disable-sync")


def browser() -> str | None:
    """A Chromium on PATH."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def too_wide(folder: Path, program: str, pictures: Path) -> Iterator[str]:
    """The pages of `folder` that are wider than the window; pictures of all go into `pictures`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", *_OFFLINE]  # the pages are our own, and in CI we may be root
        chromium = playwright.chromium.launch(executable_path=program, args=options)
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            for file in sorted(folder.rglob("*.html")):
                name = file.relative_to(folder)
                page.goto(file.resolve().as_uri())
                target = pictures / f"{width}-{scheme}" / name.with_suffix(".png")
                page.screenshot(path=target, full_page=True)
                found = page.evaluate("document.documentElement.scrollWidth")
                if found > width and scheme == SCHEMES[0]:
                    yield f"{name} is {found} pixels wide in a window of {width}"
        chromium.close()


def look(folder: Path, pictures: Path) -> None:
    """Raises an error that names the pages that are too wide."""
    program = browser()
    if program is None:
        print(
            "extops: whether the pages fit their windows was not checked, since there is no browser here: "
            "`apt-get install chromium` adds one",
            flush=True,
        )
        return
    wide = list(too_wide(folder, program, pictures))
    if wide:
        raise UserError(f"{'; '.join(wide)}: pictures are in {pictures}")
    print(f"extops: all pages fit; pictures are in {pictures}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.pages", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pictures", type=Path)
    arguments = parser.parse_args()
    with errors_for_the_user():
        look(arguments.folder, arguments.pictures)


if __name__ == "__main__":
    main()
