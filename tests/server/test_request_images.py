"""Images as they are sent: what is read, what is refused and how, what is never fetched."""

import base64
import contextlib
import io
import signal
import struct
import subprocess
import time
import zlib
from http.server import ThreadingHTTPServer

import fetch_image as fetcher
import httpx
import numpy as np
import pytest
import start_llm as s
from PIL import Image, ImageOps
from server_fixture import MAX_WAIT_SECONDS, Served
from stub_server import StubHandler, running
from vision_fixture import data_url, picture

A = picture(1)


def request_of(*parts):
    body = {"messages": [{"role": "user", "content": list(parts)}]}
    return s.parse_chat_request(body, s.Config(), request_id="r", headers={})


def read(*parts, has_vision=True, salt=b"", **settings):
    return s.extract_images(
        request_of(*parts), s.Config(**settings), has_vision=has_vision, salt=salt
    )


def image_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def png_chunk(kind, content):
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def bomb(side):
    """A PNG of a few bytes that says it is `side` pixels wide and high."""

    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress(b""))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + png_chunk(b"IEND", b"")


def test_of_a_gif_the_first_frame():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert s.SentImage(file.getvalue(), "here").decode().getpixel((4, 4)) == (255, 0, 0)


MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr"]


def drawn(mode, kind, **options):
    """A file with noise in this mode; None if the format has none of it."""
    noise = np.random.default_rng(0).integers(0, 255, (24, 17, 4), dtype=np.uint8)
    image = Image.fromarray(noise, "RGBA")
    image = Image.new(mode, (17, 24), 700) if mode == "I;16" else image.convert(mode)
    file = io.BytesIO()
    with contextlib.suppress(Exception):
        image.save(file, kind, **options)
        return file.getvalue()
    return None


def with_8_bits(image):
    """The upper 8 bits of shades that have 16; any other image as it is."""
    if image.mode != "I;16":
        return image
    grey = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    grey.info["exif"] = image.info.get("exif", b"")
    return grey


def composited(data):
    """RGB pixels on white, by the long way that is always right."""
    upright = ImageOps.exif_transpose(with_8_bits(Image.open(io.BytesIO(data))))
    upright = upright.convert("RGBA")
    white = Image.new("RGBA", upright.size, "white")
    return Image.alpha_composite(white, upright).convert("RGB")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_small_image_has_the_pixels_that_it_has_on_white(mode, kind):
    lies = Image.Exif()
    lies[0x0112] = 6
    clear = (1, 2, 3) if mode == "RGB" else 5
    for options in ({}, {"transparency": clear}, {"exif": lies}):
        data = drawn(mode, kind, **options)
        if data is None:
            continue
        expected = composited(data)
        image = s.SentImage(data, "here").decode()
        assert (image.mode, image.size) == ("RGB", expected.size)
        assert image.tobytes() == expected.tobytes()


def test_a_large_image_is_shrunk_before_it_is_composited(monkeypatch):
    monkeypatch.setattr(s, "_MAX_SEEN_PIXELS", 10_000)
    composited_sizes = []
    composite = Image.alpha_composite

    def composite_and_note(first, second):
        composited_sizes.append(second.size)
        return composite(first, second)

    monkeypatch.setattr(Image, "alpha_composite", composite_and_note)
    file = io.BytesIO()
    Image.new("RGBA", (400, 100), "red").save(file, "PNG")

    image = s.SentImage(file.getvalue(), "here").decode()

    assert image.size == (200, 50)
    assert image.getpixel((9, 9)) == (255, 0, 0)
    assert composited_sizes == [(200, 50)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GIF89a",
        A[:200],
        A[: len(A) // 2],
        b"<svg/>",
        bomb(30_000),
        bomb(2**31 - 1),
    ],
    ids=["empty", "head", "cut", "half", "svg", "large", "absurd"],
)
def test_what_is_no_image_is_refused_where_it_stands(data):
    with pytest.raises(s.BadRequest) as refused:
        s.SentImage(data, "messages[3].content[1]").decode()
    assert refused.value.param == "messages[3].content[1]"


@pytest.mark.parametrize("mode", ["RGBA", "I;16"])
def test_strips_that_are_shrunk_are_those_of_the_whole_image(monkeypatch, mode):
    monkeypatch.setattr(s, "_MAX_SEEN_PIXELS", 20_000)
    monkeypatch.setattr(s, "_MAX_STRIP_PIXELS", 1_000)
    noise = np.random.default_rng(1).integers(0, 255, (331, 173, 4), dtype=np.uint8)
    image = Image.fromarray(noise, "RGBA")
    image = Image.new(mode, (173, 331), 700) if mode == "I;16" else image.convert(mode)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(file, "PNG", exif=exif)

    decoded = s.SentImage(file.getvalue(), "here").decode()

    sent = with_8_bits(Image.open(file))
    whole = sent.convert("RGBA" if sent.has_transparency_data else "RGB")
    small = whole.resize((102, 195), Image.Resampling.BICUBIC).convert("RGBA")
    white = Image.new("RGBA", small.size, "white")
    expected = Image.alpha_composite(white, small).convert("RGB")
    expected = expected.transpose(Image.Transpose.ROTATE_270)
    assert decoded.size == expected.size
    difference = np.array(decoded, dtype=int) - np.array(expected)
    assert abs(difference).max() <= 1


# -- the parts of a file


def jpeg(mode="L", **options):
    file = io.BytesIO()
    Image.new(mode, (64, 64)).save(file, "JPEG", **options)
    return file.getvalue()


def scans(n):
    """A progressive JPEG with so many scans; those that are added have no pixels."""
    data = jpeg(progressive=True)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    n_added = n - data.count(b"\xff\xda")
    return data[:-2] + last_scan * n_added + data[-2:]


def segment(marker, content):
    return b"\xff" + marker + (len(content) + 2).to_bytes(2) + content


def with_chunks(chunk, n):
    """A PNG with some chunks before its pixels."""
    start = A.index(b"IDAT") - 4
    return A[:start] + chunk * n + A[start:]


GIF = b"GIF89a" + b"\1\0\1\0" + b"\0\0\0"
QUANTIZER = jpeg()[jpeg().index(b"\xff\xdb") :][:69]
# A table may contain what would hide a scan if it were read as the head of a segment.
HIDING = segment(b"\xdb", b"\0" + (b"\xff\xe1\xff\xff" * 16))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (scans(65), "64 scans"),
        (scans(65).replace(QUANTIZER, HIDING + QUANTIZER), "64 scans"),
        (scans(65).replace(b"\xff\xda", b"\xff\x02\x40\0\xff\xda"), "64 scans"),
        (
            with_chunks(png_chunk(b"zTXt", b"a\0\0" + zlib.compress(b"")), 65),
            "64 scans or compressed texts",
        ),
    ],
    ids=range(4),
)
def test_an_image_of_too_many_parts_is_refused_before_it_is_opened(
    monkeypatch, data, fault
):
    def fail(*_args, **_options):
        raise AssertionError("it was opened")

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(s.BadRequest, match=fault) as refused:
        s.SentImage(data, "messages[3].content[1]").decode()
    assert refused.value.param == "messages[3].content[1]"


def animated(kind, n):
    frames = [Image.new("RGB", (8, 8), (i % 256, i // 256, 9)) for i in range(n)]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        scans(64),
        jpeg("RGB", progressive=True),
        jpeg("CMYK", progressive=True),
        jpeg("RGB", restart_marker_blocks=1),
        jpeg("RGB") + b"a film \xff\xda" * 1_000,
        jpeg("RGB", exif=b"Exif\0\0" + b"\xff\xda" * 1_000),
        GIF
        + b"!\xff\x0bXMP DataXMP"
        + b"\x20" * 33 * 200
        + b"\0"
        + animated("GIF", 1)[13:],
    ],
    ids=range(7),
)
def test_images_that_people_have_are_read(data):
    assert s.SentImage(data, "here").decode().mode == "RGB"


@pytest.mark.parametrize("kind, n", [("PNG", 9), ("WEBP", 9), ("GIF", 500)])
def test_the_first_picture_of_a_film_is_read(kind, n):
    assert s.SentImage(animated(kind, n), "here").decode().mode == "RGB"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file:///etc/passwd",
        "cat.png",
        "data:image/png;base64",
        "data:image/png,%FF",
        "https://example.org/cat.png",
        "data:image/png;base64,A",
        "data:image/png;base64,\u00e9",
    ],
)
def test_what_is_no_data_url_is_refused_where_it_stands(url):
    text = {"type": "text", "text": "x"}
    with pytest.raises(s.BadRequest) as refused:
        _, images = read(text, image_part(url))
        for image in images.values():
            image.decode()
    assert refused.value.param == "messages[0].content[1]"


def test_the_text_says_which_image_and_nothing_else():
    def text(data, **fields):
        question = {"type": "text", "text": "see"}
        request, _ = read(question, image_part(data_url(data)), **fields)
        return request.messages[0]["content"]

    assert text(A) == text(A) != text(picture(2))
    assert text(A) != text(A, salt=b"another user")

    _, images = read(image_part(data_url(A)), image_part(data_url(A)))
    (image,) = images.values()
    assert image.data == A


def test_a_text_model_refuses_or_says_that_one_was_there():
    part = image_part(data_url(A))
    with pytest.raises(s.BadRequest, match="IMAGES_ON_TEXT_MODEL") as refused:
        read(part, has_vision=False)
    assert refused.value.param == "messages[0].content[0]"
    request, pictures = read(part, has_vision=False, images_on_text_model="placeholder")
    assert "cannot see" in request.messages[0]["content"][0]["text"]
    assert not pictures


def test_a_text_model_refuses_images_through_both_apis(models, tmp_path):
    encoded = base64.b64encode(A).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    block = {"type": "image", "source": source}
    with Served(models("qwen3"), log_root=str(tmp_path)) as served:
        for path, part, place in (
            ("chat/completions", image_part(data_url(A)), "messages[0].content[0]"),
            ("messages", block, "messages.0.content.0"),
        ):
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 8}
            response = httpx.post(
                f"{served._sdk.base_url}{path}", json=body, timeout=MAX_WAIT_SECONDS
            )
            assert response.status_code == 400
            assert place in response.text


# -- remote images


@pytest.fixture
def web():
    """A web server on this machine; what it answers is up to the test."""
    answers = {}
    asked_for = []

    class Handler(StubHandler):
        def do_GET(self):
            asked_for.append(self.path)
            status, headers, body = answers[self.path]
            self.answer(status, body, **headers)

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}", answers, asked_for


PRIVATE = [
    *("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "10.1.2.3", "192.168.0.1"),
    *("169.254.169.254", "[::ffff:127.0.0.1]", "[fe80::1]", "[fd00::1]"),
    *("2130706433", "127.1", "224.0.0.1", "[fec0::1]", "[2002:7f00:1::]"),
    *("[64:ff9b::7f00:1]", "[64:ff9b:1::a00:1]", "[::127.0.0.1]", "192.0.0.8"),
    *("[3fff::1]", "[5f00::1]", "[2001:0:7f00:1::]", "100.64.0.1", "198.18.0.1"),
]


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_are_never_asked(host):
    with pytest.raises((ValueError, OSError)):
        fetcher.fetch(f"http://{host}/cat.png")


def test_a_private_address_is_refused_through_the_server(web):
    url, answers, asked_for = web
    answers["/cat.png"] = (200, {}, A)
    with pytest.raises(s.BadRequest, match="not a public address") as refused:
        read(image_part(f"{url}/cat.png"), allow_remote_images=True)
    assert refused.value.param == "messages[0].content[0]"
    assert not asked_for


def test_what_the_fetching_script_prints_when_it_fails_is_not_sent(monkeypatch, caplog):
    script_path = b"/home/anna/start-llm/scripts/helpers/fetch_image.py"
    error = b"Traceback (most recent call last): %s" % script_path
    failed = subprocess.CompletedProcess([], 1, b"", error)
    monkeypatch.setattr(s.subprocess, "run", lambda *_, **__: failed)

    with pytest.raises(s.BadRequest) as refused:
        read(image_part("https://example.org/cat.png"), allow_remote_images=True)
    assert str(refused.value).endswith("what fetches images here has failed")
    assert "anna" in caplog.text


def test_images_from_elsewhere_are_no_more_than_a_body_may_have(monkeypatch):
    """They are fetched one by one, and all are held until the request is prepared."""
    fetched = []

    def fetch(url, **_):
        fetched.append(url)
        return url.encode() * 1_000

    monkeypatch.setattr(s, "_fetch_image", fetch)
    parts = [image_part(f"https://example.org/{n}.png") for n in range(1_000)]

    with pytest.raises(s.BadRequest, match="MAX_BODY_BYTES") as refused:
        read(*parts, allow_remote_images=True, max_body_bytes=1_000_000)
    assert 20 < len(fetched) < 50
    assert refused.value.param == f"messages[0].content[{len(fetched) - 1}]"

    same = [parts[0]] * 100  # an image that comes again is held once
    read(*same, allow_remote_images=True, max_body_bytes=1_000_000)


def test_public_images_are_fetched_and_redirects_are_checked_again(web, monkeypatch):
    url, answers, asked_for = web
    answers["/cat.png?a=b"] = (200, {}, A)
    answers["/moved"] = (302, {"Location": "/cat.png?a=b"}, b"")
    answers["/round"] = (302, {"Location": "/round"}, b"")
    answers["/gone"] = (404, {}, b"")
    answers["/inside"] = (302, {"Location": "http://localhost:1/"}, b"")
    answers["/file"] = (302, {"Location": "file:///etc/passwd"}, b"")
    real = fetcher.public_address
    public = {"127.0.0.1": "127.0.0.1"}  # this one test's public internet

    def public_address(host, port):
        return public.get(host) or real(host, port)

    monkeypatch.setattr(fetcher, "public_address", public_address)
    assert fetcher.fetch(f"{url}/cat.png?a=b") == A
    assert fetcher.fetch(f"{url}/moved") == A

    for path in ("/round", "/gone", "/inside", "/file"):
        with pytest.raises(ValueError):
            fetcher.fetch(url + path)
    assert asked_for.count("/round") == fetcher.MAX_REDIRECTS + 1


def test_a_header_a_second_does_not_keep_it_waiting(monkeypatch):
    def endless(url):
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(fetcher, "fetch", endless)
    monkeypatch.setattr(fetcher, "MAX_SECONDS", 1.0)
    monkeypatch.setattr("sys.stdin", io.StringIO("http://example.org/"))
    errors = io.StringIO()
    monkeypatch.setattr("sys.stderr", errors)
    try:
        assert fetcher.main() == 1
    finally:
        signal.alarm(0)

    assert "over 1 s" in errors.getvalue()


@pytest.mark.parametrize("host", ["93.184.216.34", "[2606:2800:21f:cb07::1]"])
def test_public_addresses_pass(host):
    address = host.strip("[]")
    assert fetcher.public_address(address, 80) == address


def test_what_is_too_large_or_too_slow_is_given_up(web, monkeypatch):
    url, answers, _ = web
    answers["/large"] = (200, {}, b"x" * 200_000)
    monkeypatch.setattr(fetcher, "public_address", lambda h, p: h)
    for name, limit in (("MAX_BYTES", 100_000), ("MAX_SECONDS", 1e-9)):
        with monkeypatch.context() as patch, pytest.raises((ValueError, OSError)):
            patch.setattr(fetcher, name, limit)
            fetcher.fetch(f"{url}/large")
