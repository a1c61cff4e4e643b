"""A server that answers what a test has written down."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StubHandler(BaseHTTPRequestHandler):
    def answer(self, status: int, body: bytes, **headers: str) -> None:
        """Send a whole response; an underscore in the name of a header is a hyphen."""
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: what pytest shows is for failures."""


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[int]:
    """The port of a server that answers until the end."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
