"""What stands in for LiteLLM: it starts a child of its own, listens, and answers nothing."""

import sys
from pathlib import Path

# Its last argument is the port.
LISTENS = """
import http.server, os, subprocess, sys
print("environment", sorted(os.environ), "CORS", os.environ.get("LITELLM_CORS_ORIGINS"), flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), None).serve_forever()
"""


def write_litellm_that_listens(folder: Path) -> Path:
    """A Python in a folder of its own, and beside it such a LiteLLM."""
    python = folder / "python"
    programs = {
        python: f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        folder / "litellm": LISTENS,
    }
    for program, code in programs.items():
        program.write_text(code)
        program.chmod(0o755)
    return python
