"""Photograph the page of a server: desktop and phone, dark and light.

    python scripts/tools/look_at_page.py http://127.0.0.1:8080/ /tmp/shots    a server that runs
    python scripts/tools/look_at_page.py --readme                             README's

--readme starts a server with the demo model, and has four agents work on it. They are scripted:
each sends its growing conversation, as real ones do.

EXIT STATUS  0 the pictures are there, 1 the page complains or is wider than the window,
             2 Playwright is missing
"""

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
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import agent_steps
from agent_steps import CannotAsk, Server
from machine_report import running_server

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
SIZES: Final = {"desktop": (1280, 900), "phone": (390, 844)}
NAMES: Final = ("desktop-dark", "desktop-light", "phone-dark", "phone-light")
CONNECTED: Final = "#top:not([data-is=loading])"
PATIENCE_SECONDS: Final = 240.0
# before the picture: charts and cache have something to show
N_WARM_REQUESTS: Final = 24

AGENTS: Final = {  # by their User-Agent: what each was asked to do
    "claude-cli/2.1.328 (external, cli)": "Fix the failing login test",
    "pi/0.87.1": "Rename Ledger to Transcript everywhere",
    "opencode/1.18.0": "Why is the build slow on Linux?",
    "codex_cli_rs/0.169.0": "Write the release notes of 2.4",
}
INSTRUCTIONS: Final = "You are a coding agent. Work step by step. " * 12


def take_pictures(
    url: str, folder: Path, names: Sequence[str], *, ready: str, last: str = ""
) -> list[str]:
    """Write pictures named [page-]<size>-<scheme>.png; what is wrong, a line each.

    `ready`: a selector of what must be on the page; `last`: of what is shown last.
    """
    playwright = importlib.import_module("playwright.sync_api")
    is_root = os.geteuid() == 0  # whom chromium's sandbox refuses
    problems: list[str] = []

    def note(problem: str) -> None:
        problems.append(f"{name}: {problem}")

    def note_error(message: Any) -> None:
        if message.type == "error":
            note(message.text)

    with playwright.sync_playwright() as engines:
        browser = engines.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox"] if is_root else [],
        )
        for name in names:
            *_, size, scheme = name.split("-")
            width, height = SIZES[size]
            is_phone = size == "phone"
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                is_mobile=is_phone,
                device_scale_factor=2 if is_phone else 1,
            )
            page = context.new_page()
            page.on("console", note_error)
            page.on("pageerror", lambda error: note(str(error)))
            page.goto(url)
            page.wait_for_selector(ready, timeout=1000 * PATIENCE_SECONDS)
            clip = None
            if last:
                box = page.locator(last).bounding_box()
                bottom = box["y"] + box["height"] + 12
                clip = {"x": 0, "y": 0, "width": width, "height": bottom}
            page.screenshot(path=folder / f"{name}.png", full_page=True, clip=clip)
            page_width = page.evaluate("document.documentElement.scrollWidth")
            if page_width > width:
                note(f"{page_width} px wide in a window of {width}")
            context.close()
        browser.close()
    return problems


def work(url: str, user_agent: str, stop: threading.Event) -> None:
    """Send a conversation that grows by a file at every step, until `stop` is set."""
    task = AGENTS[user_agent]
    server = Server(url, model="demo")
    server.headers["User-Agent"] = user_agent
    start = [agent_steps.system(INSTRUCTIONS), agent_steps.user(task)]
    messages = list(start)
    while not stop.is_set():
        n_messages = len(messages)
        limits = {"max_tokens": 96, "seed": n_messages}
        try:
            reply = server.ask_chat({"messages": messages, **limits})
        except CannotAsk:
            if stop.is_set():
                return
            raise
        file_text = f"line {n_messages}: {task}\n" * 4
        messages.append(agent_steps.reply_message(reply))
        messages.append(agent_steps.user(f"The file:\n{file_text}"))
        if len(messages) > 16:
            messages = list(start)


@contextmanager
def agents_at_work(server: Server) -> Iterator[None]:
    """Four agents work inside the block, and have worked for a while before."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=work, args=(server.url, user_agent, stop), daemon=True)
        for user_agent in AGENTS
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
            n_answers = len(server.get("/v1/status")["recent"])
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=60)


def main() -> int:
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
        print("playwright install chromium (or have `chromium` in the PATH)")
        return 2

    if args.readme:
        outdir, names = DOCS, ["page-desktop-dark"]
        ready = f"#requests:has(> [data-live]:nth-child({len(AGENTS)}))"
        settings = {"CACHE_DISK": "on", "ENABLE_REQUEST_LOGGING": "true"}  # titles
        with (
            running_server("demo", **settings) as subject,
            agents_at_work(subject.server),
        ):
            url = subject.server.url
            problems = take_pictures(url, outdir, names, ready=ready, last="#cache")
    else:
        outdir = args.outdir
        outdir.mkdir(parents=True, exist_ok=True)
        problems = take_pictures(args.url, outdir, NAMES, ready=CONNECTED)
    print("\n".join(problems) or f"Pictures are in {outdir}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
