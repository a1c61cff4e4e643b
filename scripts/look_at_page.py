"""Photograph the page of a running server: desktop and phone, dark and light.

    python scripts/look_at_page.py http://127.0.0.1:8080/ /tmp/shots

EXIT STATUS  0 pictures are in OUTDIR, 1 the page complains or is wider than the window,
             2 Playwright is missing
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from pathlib import Path
from typing import Any, Final

SIZES: Final = {"desktop": (1280, 900), "phone": (390, 844)}
SETTLE_MS: Final = 2500  # two polls


def photograph(browser: Any, url: str, picture: Path) -> list[str]:
    """Write OUTDIR/<size>-<scheme>.png; what is wrong with the page."""
    size, scheme = picture.stem.split("-")
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        is_mobile=size == "phone",
        device_scale_factor=2 if size == "phone" else 1,
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(url)
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=picture, full_page=True)
    if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
        wrong.append(f"{wide} px wide in a window of {width}")
    context.close()
    return wrong


def main() -> int:
    """Read the arguments and take four pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("outdir", type=Path)
    args = parser.parse_args()
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ModuleNotFoundError:
        print("Playwright is missing. In a virtual environment of its own: pip install playwright;")
        print("playwright install chromium (not needed where `chromium` is in the PATH).")
        return 2
    args.outdir.mkdir(parents=True, exist_ok=True)
    wrong = []
    with playwright.sync_playwright() as engines:
        browser = engines.chromium.launch(executable_path=shutil.which("chromium"))
        for name in [f"{size}-{scheme}" for size in SIZES for scheme in ("dark", "light")]:
            found = photograph(browser, args.url, args.outdir / f"{name}.png")
            wrong += [f"{name}: {problem}" for problem in found]
        browser.close()
    print("\n".join(wrong) or f"Pictures are in {args.outdir}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
