"""The page: it stands alone, its server's words are never markup, and everything has a name."""

import re
from html.parser import HTMLParser
from pathlib import Path

import start_llm as s

PAGE = (Path(__file__).parents[2] / "web" / "index.html").read_text(encoding="utf-8")
VOID = {"meta", "link", "input", "wbr", "br", "hr", "img"}
NAMES = ("aria-label", "aria-labelledby", "title")
MARKUP = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
NAMESPACE = "http://www.w3.org/2000/svg"  # of drawings: a name, never fetched


class Outline(HTMLParser):
    """The elements of a page, each with its text."""

    def __init__(self, page):
        super().__init__()
        self.elements = []
        self._open = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        element = (tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        for _, _, texts in self._open:
            texts.append(data)

    def of(self, *tags):
        return [(a, "".join(texts)) for tag, a, texts in self.elements if tag in tags]


def outside(page):
    """What would be fetched from elsewhere."""
    addresses = re.findall(r"[a-z][a-z0-9+.-]*://[^\s'\"`<>)]*", page)
    found = [address for address in addresses if address != NAMESPACE]
    found += re.findall(r"@import|url\(", page)
    for attributes, _ in Outline(page).of(
        "a", "link", "script", "img", "form", "iframe", "base"
    ):
        links = [
            attributes[name] for name in ("src", "href", "action") if name in attributes
        ]
        found += [link for link in links if not link.startswith("data:")]

    return [f"{address} is outside" for address in found]


def nameless(page):
    """Controls that a screen reader could not name."""
    outline = Outline(page)
    labelled = {a["for"] for a, text in outline.of("label") if text.strip()}
    found = []
    for tag, attributes, texts in outline.elements:
        has_name = any(attributes.get(name, "").strip() for name in NAMES)
        if tag in {"input", "textarea", "select"}:
            has_name = "aria-label" in attributes or attributes.get("id") in labelled
        elif tag in {"button", "summary", "th"}:
            has_name = has_name or bool("".join(texts).strip())
        elif not ("tabindex" in attributes or tag in {"section", "svg", "dialog"}):
            continue
        if not has_name:
            found.append(f"<{tag} {attributes}> has no name")

    return found


def problems(page):
    outline = Outline(page)
    names = set()
    for _, attributes, _ in outline.elements:
        names.update(attributes)
    handlers = sorted(name for name in names if name.startswith("on"))

    return [
        *outside(page),
        *nameless(page),
        *(f"{name} is an inline handler" for name in handlers),
        *(f"{word} makes markup of text" for word in re.findall(MARKUP, page)),
    ]


def test_the_page_is_sound():
    assert problems(PAGE) == []


def test_the_counters_that_stay_at_zero_are_the_servers():
    table = PAGE.partition("const READ_AGAIN = {")[2].partition("};")[0]
    shown = set(re.findall(r"^  (\w+):", table, re.MULTILINE))
    assert len(shown) == 2 and "hybrid_trim_miss" not in shown  # clean traffic has that
    assert shown < set(s.CacheMetrics().snapshot())


def test_it_is_one_style_and_one_script_without_sources():
    outline = Outline(PAGE)
    assert [attributes for attributes, _ in outline.of("script", "style")] == [{}, {}]
