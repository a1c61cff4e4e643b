"""The page in a real browser: what a person reads, types and hears on it.

It runs where Debian's chromium (or another in the PATH) and Playwright are. Each test waits
for what the page shows, never for a time.
"""

import os
import shutil
import threading
from itertools import pairwise

import pytest
from nights import at_night
from page_stub import (
    AGENTS,
    cache_entry,
    chat_events,
    ended,
    four_agents_body,
    idle_body,
    live,
    serving_page,
    whose,
)

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is missing: requirements-dev.txt has it"
)
expect = playwright.expect
CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium in the PATH: apt-get install chromium"
)

PATIENCE_MS = 30_000  # for a condition to come true: the machine may be busy
EVIL = "<img src=x onerror=document.title='pwned'>\u202e\n<b>x</b>"


@pytest.fixture(scope="module")
def browser():
    is_root = os.geteuid() == 0  # whom chromium's sandbox refuses
    with playwright.sync_playwright() as engines:
        browser = engines.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if is_root else []
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def desktop(browser):
    """A window that tests use one after another."""
    return browser.new_page(viewport={"width": 1280, "height": 900})


@pytest.fixture
def visit(browser, desktop):
    """Opens a stub's page. Whatever the browser complains of fails the test."""
    complaints = []
    pages = []

    def complain(message):
        # An answer that is no 200, and a server that has gone, are what some tests are about.
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def note_error(error):
        complaints.append(str(error))

    def open_page(stub, **options):
        page = browser.new_page(**options) if options else desktop
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", note_error)
        page.on("console", complain)
        pages.append(page)
        page.goto(stub.url)
        page.wait_for_selector("#top[data-is]:not([data-is=loading]), #key:visible")
        return page

    expect.set_options(timeout=PATIENCE_MS)
    yield open_page
    for page in pages:
        page.remove_listener("pageerror", note_error)
        page.remove_listener("console", complain)
        if page is desktop:
            page.goto("about:blank")
        else:
            page.close()

    assert complaints == []


def refresh(page):
    """Ask for the status now: not in a second."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def text_of(page, selector):
    return " ".join(page.locator(selector).inner_text().split())


# -- how it is, at a glance ------------------------------------------------------------


def test_an_idle_server_shows_that_it_is_healthy_and_how_to_begin(visit):
    with serving_page() as stub:
        page = visit(stub)

        expect(page.locator("#sentence")).to_have_text(
            "Healthy and ready; no request has come yet."
        )
        expect(page.locator("#connect")).to_have_attribute("open", "")
        expect(page.locator("#exact")).to_have_attribute("data-is", "good")
        url = stub.url.rstrip("/")
        command = f"python3.12 install_and_run.py launch claude --url {url}"
        expect(page.locator("#commands code").first).to_have_text(command)
        assert stub.url + "v1/chat/completions" in text_of(page, "#commands")


def test_clients_are_sent_to_litellm_where_it_serves_other_servers_too(visit):
    with serving_page() as stub:
        stub.status["proxy"] = {"state": "up", "url": "http://127.0.0.1:4321"}
        page = visit(stub)
        assert "4321" not in text_of(page, "#commands")

        stub.status["replicas"] = [replica("one", "up", 0), replica("two", "up", 0)]
        refresh(page)

        expect(page.locator("#commands")).to_contain_text("127.0.0.1:4321/v1")
        commands = text_of(page, "#commands")
        assert "ANTHROPIC_BASE_URL=http://127.0.0.1:4321 " in commands
        # launch asks this server, and goes there by itself
        assert f"launch claude --url {stub.url.rstrip('/')}" in commands


def test_a_busy_server_says_what_it_does_what_it_saved_and_what_it_refused(visit):
    with serving_page(status=four_agents_body()) as stub:
        page = visit(stub)

        expect(page.locator("#sentence")).to_have_text(
            "Healthy: 1 request is being answered, 1 being read, 2 waiting."
        )
        refresh(page)  # the second status must leave the lines of the first
        agents = [f"“{title}”" for _, _, title in AGENTS.values()]
        expect(page.locator("#asides li")).to_have_text(
            [
                f"PI {agents[1]}: 31 s left to read.",
                f"opencode {agents[2]} has waited 9.4 s for a prefix"
                f" that PI {agents[1]} is reading.",
                "1 request was refused in the last ten minutes.",
                "1 request failed in the last ten minutes.",
            ]
        )
        expect(page.locator("#connect")).not_to_have_attribute("open", "")
        expect(page.locator("#saved-number")).to_have_text("49 min saved")
        saved = "1.19M of 1.24M prompt tokens (95 %)"
        expect(page.locator("#saved-words")).to_contain_text(saved)
        expect(page.locator("#refusals li")).to_contain_text(
            [
                "curl refused with 404: POST /chat/completions",
                "Claude Code “Fix the failing login test” failed",
                "refused with 401: POST /v1/messages",
            ]
        )


def test_what_is_wrong_stands_in_the_first_sentence(visit):
    with serving_page() as stub:
        page = visit(stub)
        healthy = stub.status

        def show(change, kind, words):
            stub.status = {**healthy, **change}
            refresh(page)
            expect(page.locator("#top")).to_have_attribute("data-is", kind)
            expect(page.locator("#sentence")).to_contain_text(words)

        show({"status": "loading"}, "loading", "The model is being loaded")
        show({"status": "error", "error": "see the log"}, "error", "Out of order: see")
        show({"status": "asleep"}, "ok", "Asleep: its memory is given back")
        show({"counters": {"vlm_retreat": 2}}, "warn", "something that was kept")
        expect(page.locator("#exact")).to_have_text(
            "2 times an image that was kept was read again."
            " Answers are right all the same; they came later."
        )
        dead = [replica("a", "up", 1), replica("b", "down", 0)]
        show({"replicas": dead}, "warn", "1 of 2 servers cannot be used")
        show({"replicas": [replica("b", "draining", 0)]}, "ok", "Healthy and ready")
        disk = dict.fromkeys(("bytes", "max_bytes", "written_today_bytes"), 1)
        disk["off"] = "No space left on device"
        show({"disk": disk}, "warn", "No space left on device")
        show({}, "ok", "Healthy and ready")


def test_the_state_of_the_proxy_is_in_words(visit):
    url = "http://127.0.0.1:4001"
    words = {
        "up": ("#model", "port 4001 (LiteLLM, for Codex) up"),
        "starting": ("#model", "port 4001 (LiteLLM, for Codex) starting"),
        "off": ("#model", "LiteLLM off"),
        "port_taken": ("#asides", "is taken by another program; Codex"),
        "given_up": ("#asides", "LiteLLM does not start; Codex"),
    }
    with serving_page() as stub:
        page = visit(stub)
        assert "LiteLLM" not in page.locator("body").inner_text()  # an older server
        for state, (place, expected) in words.items():
            has_url = state in ("up", "starting")
            stub.status["proxy"] = {"state": state, "url": url if has_url else None}
            refresh(page)
            expect(page.locator(place)).to_contain_text(expected)


def replica(name, state, sessions):
    return {"url": f"http://{name}:8080", "state": state, "sessions": sessions}


def test_the_servers_behind_litellm_and_how_they_are(visit):
    with serving_page() as stub:
        page = visit(stub)
        expect(page.locator("#servers")).to_be_hidden()  # it is alone

        stub.status["replicas"] = [
            replica("127.0.0.1", "up", 3),
            replica("other", "draining", 1),
            replica("third", "down", 0),
        ]
        refresh(page)
        expect(page.locator("#servers-sum")).to_have_text("1 of 3 up")
        expect(page.locator("#replicas li")).to_have_text(
            [
                "http://127.0.0.1:8080 up, 3 sessions in the last ten minutes",
                "http://other:8080 being drained: no new sessions,"
                " 1 session in the last ten minutes",
                "http://third:8080 does not answer, 0 sessions in the last ten minutes",
            ]
        )

        stub.status["replicas"] = [replica(EVIL, EVIL, 0)]
        refresh(page)
        expect(page.locator("#servers-sum")).to_have_text("0 of 1 up")
        assert page.locator("#servers img").count() == 0
        assert page.locator("#replicas b").count() == 1
        assert page.title() != "pwned"


def test_the_demo_model_is_offered_what_it_knows_and_no_agent(visit):
    with serving_page() as stub:
        page = visit(stub)
        expect(page.locator("#commands")).to_contain_text("launch claude")
        expect(page.locator("#try-demo")).to_be_hidden()

        stub.status["model"]["id"] = "demo"
        refresh(page)
        expect(page.locator("#try-demo")).to_contain_text("What is 17 + 25?")
        expect(page.locator("#connect-note")).to_contain_text("too small for an agent")
        expect(page.locator("#commands")).to_contain_text("curl")
        expect(page.locator("#commands")).not_to_contain_text("launch")


def test_a_server_that_is_gone_is_told_from_one_that_is_idle(visit):
    with serving_page() as stub:
        page = visit(stub)
    refresh(page)

    expect(page.locator("#sentence")).to_contain_text("cannot be reached")
    expect(page.locator("#top")).to_have_attribute("data-is", "error")


# -- why a request was slow ------------------------------------------------------------


def test_a_request_that_waited_says_for_what(visit):
    with serving_page(status=four_agents_body()) as stub:
        page = visit(stub)

        waiting = page.locator(".request[data-is=queued]", has_text="opencode")
        expect(waiting.locator(".reason")).to_have_text(
            "Mostly waiting. Has waited 9.4 s for a prefix that PI "
            "“Rename Ledger to Transcript everywhere” is reading."
        )
        others = [r for r in stub.status["requests"] if r["client"] != "opencode"]
        stub.status["requests"] = others
        refresh(page)
        slow = page.locator(".request:not([data-live])", has_text="opencode").first
        expect(slow.locator(".reason")).to_contain_text(
            "Mostly waiting. Waited 13 s for a prefix that PI"
        )
        widths = slow.locator(".times > *").evaluate_all(
            "parts => parts.map((part) => [part.className, part.offsetWidth])"
        )
        assert [name for name, _ in widths] == ["waited", "read", "wrote"]
        assert max(widths, key=lambda pair: pair[1])[0] == "waited"


def test_a_long_prefill_shows_the_time_that_is_left(visit):
    body = four_agents_body()
    body["requests"] = body["requests"][1:2]
    body["requests"][0]["prefill_left_seconds"] = 183.0
    with serving_page(status=body) as stub:
        row = visit(stub).locator(".request", has_text="PI").first

        expect(row.locator(".reason")).to_contain_text("about 3 min 3 s left")
        expect(row.locator(".times .left")).to_be_visible()


def test_what_was_read_again_is_explained_at_its_request(visit):
    body = four_agents_body()
    body["divergences"][0]["id"] = body["recent"][-1]["id"]
    with serving_page(status=body) as stub:
        page = visit(stub)

        row = page.locator(".request", has_text=body["recent"][-1]["title"])
        again = "2,012 tokens were read again: Message 14"
        expect(row).to_contain_text(f"In the step before {again}")
        stub.status["requests"] = []
        refresh(page)
        expect(row).to_contain_text(again)


def test_a_conversation_is_one_row_with_its_newest_step(visit):
    body = idle_body()
    steps = [
        ended(f"s{n}", waited_seconds=0.0, prefill=1.0, decode=1.0, **whose("a"))
        for n in range(12)
    ]
    body["recent"] = [*steps, ended("other", **whose("b"))]
    with serving_page(status=body) as stub:
        page = visit(stub)

        expect(page.locator(".request")).to_have_count(2)
        row = page.locator(".request", has_text="Fix the failing login test")
        expect(row.locator(".total")).to_contain_text("12 steps, 24 s")

        stub.status["requests"] = [live("s12", **whose("a"))]
        refresh(page)
        expect(page.locator(".request")).to_have_count(2)
        first = page.locator(".request").first
        expect(first).to_contain_text("Fix the failing login test")
        expect(first.locator(".total")).to_contain_text("13 steps")


def test_no_figure_sticks_out_of_its_card_nor_covers_another(visit):
    body = idle_body()
    steps = [
        ended(f"s{n}", prefill=3600.0, decode=80.0, **whose("a")) for n in range(12)
    ]
    body["recent"] = [*steps, *(ended(f"t{name}", **whose(name)) for name in "bcd")]
    with serving_page(status=body) as stub:
        page = visit(stub)

        expect(page.locator("#live")).to_contain_text("bar cut short · 12 steps")
        assert page.evaluate(
            "[...document.querySelectorAll('.total')]"
            ".every(total => total.scrollWidth <= total.clientWidth)"
        )
        lefts_and_rights = page.evaluate(
            "[...document.querySelectorAll('#scale span')]"
            ".map(share => share.getBoundingClientRect())"
            ".map(({left, right}) => [left, right])"
        )
        for (_, right), (left, _) in pairwise(lefts_and_rights):
            assert right < left


# -- what is in the cache --------------------------------------------------------------


def test_each_cache_entry_says_whose_it_is_and_what_it_saves(visit):
    body = four_agents_body()
    body["recent"] = [
        ended("cold", prompt=8_000, cached=0, prefill=20.0),  # 400 tokens a second
        ended("warm", prompt=8_000, cached=7_990, prefill=0.05, **whose("a")),
    ]
    body["cache"] = [cache_entry(1, session="5f2e8d10", cold_seconds=14.0)]
    with serving_page(status=body) as stub:
        page = visit(stub)

        entry = page.locator(".entry")
        expect(entry).to_contain_text("Claude Code “Fix the failing login test”")
        expect(entry).to_contain_text("0.05 s instead of 14 s")


# -- trying it -------------------------------------------------------------------------


def test_a_reply_streams_and_its_figures_stand_under_it(visit):
    second_line_may_come = threading.Event()
    body = four_agents_body()
    body["recent"].append(ended("abcdef12", waited_seconds=0.25))
    events = chat_events("Forty\ntwo\n", reasoning="17 and 25")

    def hold_back(index):
        if events[index].get("choices") and "two" in str(events[index]):
            assert second_line_may_come.wait(60)

    with serving_page(status=body, events=events, before_event=hold_back) as stub:
        page = visit(stub)
        page.fill("#prompt", "What is 17 + 25?")
        page.keyboard.press("Enter")

        expect(page.locator(".reply .text")).to_have_text("Forty")
        second_line_may_come.set()
        expect(page.locator(".reply .text")).to_have_text("Forty\ntwo")
        figures = page.locator(".reply .figures")
        expect(figures).to_contain_text("86 % of 100 tokens cached · waited 0.25 s")
        expect(figures).to_contain_text("first token")
        expect(figures).to_contain_text("tokens/s")
        expect(page.locator(".reply .badge:visible")).to_have_text("demo model")
        expect(figures).to_be_in_viewport(ratio=1)
        thinking = page.locator(".reply details")
        expect(thinking).not_to_have_attribute("open", "")
        expect(thinking.locator("summary")).to_have_text("Thinking, 12 tokens")


def test_a_conversation_is_sent_whole_until_a_new_one_begins(visit):
    with serving_page(events=chat_events("Hello.", model="other")) as stub:
        page = visit(stub)

        def say(text, n_replies):
            page.fill("#prompt", text)
            page.click("#send")
            expect(page.locator(".figures", has_text="tokens/s")).to_have_count(
                n_replies
            )

        say("One", 1)
        say("Two", 2)
        page.click("#anew")
        say("Three", 1)

        sent = [
            [message["content"] for message in body["messages"]]
            for _, path, body in stub.asked
            if path == "/v1/chat/completions"
        ]
        assert sent == [["One"], ["One", "Hello.", "Two"], ["Three"]]
        expect(page.locator(".badge:visible")).to_have_count(0)  # not the demo


def test_a_refused_message_is_not_lost_and_an_error_in_the_stream_is_shown(visit):
    refusal = (400, "the prompt is too long: 9 tokens of 8")
    with serving_page(refusal=refusal) as stub:
        page = visit(stub)
        page.fill("#prompt", "One")
        page.click("#send")

        expect(page.locator(".figures")).to_have_text(refusal[1])
        expect(page.locator("#prompt")).to_have_value("One")
        stub.refusal = None
        stub.events = chat_events("Hello.")
        page.click("#send")
        expect(page.locator(".reply .text").last).to_have_text("Hello.")
        assert [m["content"] for m in stub.asked[-1][2]["messages"]] == ["One"]

        cut_off = {"error": {"message": "it was cut off"}}
        stub.events = [*chat_events("Half")[:2], cut_off]
        page.fill("#prompt", "Two")
        page.click("#send")
        expect(page.locator(".figures").last).to_have_text("it was cut off")
        expect(page.locator("#send")).to_be_enabled()


def test_a_reply_can_be_stopped(visit):
    may_end = threading.Event()
    with serving_page(
        events=chat_events("Half\nof it\n"),
        before_event=lambda index: index < 2 or may_end.wait(60),
    ) as stub:
        page = visit(stub)
        page.fill("#prompt", "One")
        page.click("#send")
        expect(page.locator(".reply .text")).to_have_text("Half")
        page.click("#halt")

        expect(page.locator(".figures")).to_have_text("Stopped.")
        expect(page.locator("#send")).to_be_enabled()
        may_end.set()


# -- keys, copying, dropping -----------------------------------------------------------


def test_a_key_is_asked_for_and_used_but_not_shown(visit):
    key = "secret-k3y"
    with serving_page(key=key, events=chat_events("Hello.")) as stub:
        page = visit(stub, permissions=["clipboard-read", "clipboard-write"])
        expect(page.locator("#key-input")).to_be_focused()
        page.keyboard.type(key)
        page.keyboard.press("Enter")

        expect(page.locator("#sentence")).to_contain_text("Healthy")
        page.locator("#commands li", has_text="curl").get_by_role("button").click()
        expect(page.locator("#toast")).to_have_text("Copied.")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert f"'Authorization: Bearer {key}'" in copied
        assert key not in page.locator("body").inner_text()
        page.fill("#prompt", "One")
        page.click("#send")
        expect(page.locator(".reply .text")).to_have_text("Hello.")


def test_the_cache_is_dropped_only_after_a_second_question(visit):
    with serving_page(status=four_agents_body()) as stub:
        page = visit(stub)
        expect(page.locator("#drop")).to_be_hidden()
        page.click("#hood > summary")
        page.click("#drop")
        page.keyboard.press("Enter")  # on "Keep it"
        expect(page.locator("#confirm")).to_be_hidden()
        assert stub.asked == []

        for refusal, words in (
            (None, "Dropped 3 cache entries."),
            ((500, "disk full"), "Not everything could be dropped: disk full"),
        ):
            stub.refusal = refusal
            page.click("#drop")
            page.get_by_role("button", name="Drop it").click()
            expect(page.locator("#toast")).to_have_text(words)
        asked = [(method, path) for method, path, _ in stub.asked]
        assert asked == [("DELETE", "/v1/cache")] * 2


# -- whatever it is given --------------------------------------------------------------


def test_it_does_with_hardly_anything(visit):
    with serving_page(status={"status": "ok"}) as stub:
        page = visit(stub)

        expect(page.locator("#sentence")).to_contain_text("Healthy and ready")
        shown = page.locator("body").inner_text()
        assert not [word for word in ("undefined", "NaN", "null") if word in shown]


def test_what_clients_choose_is_text_and_never_markup(visit):
    evil = {"client": EVIL, "title": EVIL, "session": EVIL}
    body = four_agents_body()
    for request in body["requests"] + body["recent"]:
        request.update(evil)
    body["requests"][0]["id"] = body["recent"][0]["id"] = EVIL
    body["cache"][0]["session"] = EVIL
    body["model"]["id"] = body["version"] = EVIL
    body["refusals"][0].update(client=EVIL, sentence=EVIL, path=EVIL, method=EVIL)
    body["divergences"][0].update(why=EVIL, session=EVIL)
    body["sessions"] = [{"id": EVIL, "idle_seconds": 1.0, "turns": []}]
    body["counters"][EVIL] = 1
    with serving_page(status=body, events=chat_events(EVIL, reasoning=EVIL)) as stub:
        page = visit(stub)
        page.fill("#prompt", EVIL)
        page.click("#send")
        expect(page.locator(".reply .text")).to_contain_text("<img src=x")

        expect(page.locator(".request").first).to_contain_text("<img src=x")
        assert page.locator("img, .words b:has-text('x')").count() == 0
        assert page.title().endswith("start-llm")
        assert "\u202e" not in page.locator("#live").inner_text()


@pytest.mark.parametrize("scheme", ["dark", at_night("light")])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(visit, scheme):
    with serving_page(status=four_agents_body()) as stub:
        page = visit(
            stub,
            viewport={"width": 390, "height": 844},
            is_mobile=True,
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        page.click("#connect > summary")
        page.click("#hood > summary")

        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        expect(page.locator(".entry").first).to_contain_text("instead of")
        assert page.evaluate("document.getAnimations().length") == 0


def test_everything_is_reached_with_the_tab_key(visit):
    with serving_page(status=four_agents_body()) as stub:
        page = visit(stub)
        wanted = {"prompt", "send", "entries", "share-chart", "ttft-chart", "anew"}
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id"))

        assert wanted <= reached
