"""Photograph the page of a server: desktop and phone, dark and light.

    python scripts/tools/look_at_page.py http://127.0.0.1:8080/ /tmp/shots    a server that runs
    python scripts/tools/look_at_page.py --readme                             README's

--readme starts a server with the demo model, and has four agents work on it. They are scripted:
each sends its growing conversation, as real ones do.

EXIT STATUS  0 the pictures are there, 1 the page complains or is wider than the window,
             2 Playwright is missing
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import agent_steps
from machine_report import running_server

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
SIZES: Final = {"desktop": (1280, 900), "phone": (390, 844)}
NAMES: Final = ("desktop-dark", "desktop-light", "phone-dark", "phone-light")
CONNECTED: Final = "#top:not([data-is=loading])"
PATIENCE_SECONDS: Final = 240.0
# before the picture: charts and cache have something to show
N_WARM_REQUESTS: Final = 24


class Agent(NamedTuple):
    """A client, as its User-Agent names it, and what it was asked to do."""

    user_agent: str
    task: str


AGENTS: Final = (
    Agent("claude-cli/2.1.328 (external, cli)", "Fix the failing login test"),
    Agent("pi/0.87.1", "Rename Ledger to Transcript everywhere"),
    Agent("opencode/1.18.0", "Why is the build slow on Linux?"),
    Agent("codex_cli_rs/0.169.0", "Write the release notes of 2.4"),
)
INSTRUCTIONS: Final = "You are a coding agent. Work step by step. " * 12


# Taking pictures ------------------------------------------------------------------------


class Shot(NamedTuple):
    """How a picture is taken."""

    ready: str  # a selector: what must be on the page
    last: str | None = None  # a selector: what a desktop shows last; None: all of it


def photograph(browser: Any, url: str, picture: Path, shot: Shot) -> list[str]:
    """Write a picture named <size>-<scheme>.png; what is wrong with the page."""
    *_, size, scheme = picture.stem.split("-")
    width, height = SIZES[size]
    is_phone = size == "phone"
    window = {"width": width, "height": height}
    scale = {"is_mobile": is_phone, "device_scale_factor": 2 if is_phone else 1}
    context = browser.new_context(viewport=window, color_scheme=scheme, **scale)
    page = context.new_page()
    wrong: list[str] = []

    def note_error(message: Any) -> None:
        if message.type == "error":
            wrong.append(message.text)

    page.on("console", note_error)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(url)
    page.wait_for_selector(shot.ready, timeout=1000 * PATIENCE_SECONDS)
    if shot.last is None:
        page.screenshot(path=picture, full_page=True)
    elif is_phone:
        page.screenshot(path=picture)
    else:
        box = page.locator(shot.last).bounding_box()
        clip = {"x": 0, "y": 0, "width": width, "height": box["y"] + box["height"] + 12}
        page.screenshot(path=picture, full_page=True, clip=clip)

    page_width = page.evaluate("document.documentElement.scrollWidth")
    if page_width > width:
        wrong.append(f"{page_width} px wide in a window of {width}")
    context.close()
    return wrong


def take_pictures(
    url: str, folder: Path, shot: Shot, *, names: Sequence[str] = NAMES
) -> list[str]:
    """Write pictures named [page-]<size>-<scheme>.png; what is wrong, a line each."""
    playwright = importlib.import_module("playwright.sync_api")
    is_root = os.geteuid() == 0  # whom chromium's sandbox refuses
    problems = []
    with playwright.sync_playwright() as engines:
        browser = engines.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox"] if is_root else [],
        )
        for name in names:
            found = photograph(browser, url, folder / f"{name}.png", shot)
            problems += [f"{name}: {problem}" for problem in found]
        browser.close()
    return problems


# A server with four agents --------------------------------------------------------------


def work(url: str, agent: Agent, stop: threading.Event) -> None:
    """Send a conversation that grows by a file at every step, until `stop` is set."""
    start = [agent_steps.system(INSTRUCTIONS), agent_steps.user(agent.task)]
    messages = list(start)
    headers = {"User-Agent": agent.user_agent}
    with httpx.Client(headers=headers, timeout=PATIENCE_SECONDS) as client:
        while not stop.is_set():
            n_messages = len(messages)
            body = {"model": "demo", "messages": messages, "max_tokens": 96}
            body["seed"] = n_messages
            try:
                answer = client.post(f"{url}/v1/chat/completions", json=body)
                reply = answer.json()["choices"][0]["message"]
            except (httpx.HTTPError, LookupError, ValueError):
                if stop.is_set():
                    return
                raise
            file_text = f"line {n_messages}: {agent.task}\n" * 4
            content = reply["content"] or "..."
            messages.append({"role": "assistant", "content": content})
            messages.append(agent_steps.user(f"The file:\n{file_text}"))
            if len(messages) > 16:
                messages = list(start)


@contextmanager
def agents_at_work(url: str) -> Iterator[None]:
    """Four agents work inside the block, and have worked for a while before."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=work, args=(url, agent, stop), daemon=True)
        for agent in AGENTS
    ]
    for thread in threads:
        thread.start()
    try:
        ends = time.monotonic() + PATIENCE_SECONDS
        n_answers = 0
        while n_answers < N_WARM_REQUESTS:
            if time.monotonic() > ends:
                raise TimeoutError("the agents got no answers")
            time.sleep(0.2)
            status = httpx.get(f"{url}/v1/status", timeout=30).json()
            n_answers = len(status["recent"])
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=60)


def picture_for_readme() -> list[str]:
    """Write docs/page-desktop-dark.png; what is wrong, a line each."""
    shot = Shot(
        ready=f"#requests:has(> [data-live]:nth-child({len(AGENTS)}))",
        last="#cache",
    )
    settings = {"CACHE_DISK": "on", "ENABLE_REQUEST_LOGGING": "true"}  # titles
    with running_server("demo", **settings) as subject:
        url = subject.server.url
        with agents_at_work(url):
            return take_pictures(url, DOCS, shot, names=["page-desktop-dark"])


def main() -> int:
    """Read the arguments and take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", nargs="?")
    parser.add_argument("outdir", nargs="?", type=Path)
    readme_help = "write docs/page-desktop-dark.png"
    parser.add_argument("--readme", action="store_true", help=readme_help)
    args = parser.parse_args()
    if args.readme == bool(args.outdir):
        parser.error("give URL and OUTDIR, or --readme")
    if importlib.util.find_spec("playwright") is None:
        print("Playwright is missing: pip install -r requirements-dev.txt; then")
        print(
            "playwright install chromium (not needed where `chromium` is in the PATH)"
        )
        return 2

    outdir = DOCS if args.readme else args.outdir
    if args.readme:
        problems = picture_for_readme()
    else:
        outdir.mkdir(parents=True, exist_ok=True)
        problems = take_pictures(args.url, outdir, Shot(ready=CONNECTED))
    print("\n".join(problems) or f"Pictures are in {outdir}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
