"""The check of client_check.py with OpenClaw: a multi-turn tool session on a running server.

    python scripts/test_openclaw_integration.py [--url http://127.0.0.1:8080] [--json]

It needs OpenClaw from npm: CLIENTS_HOME=~/clients scripts/tools/clients/install.sh node24 openclaw
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

from client_check import main

if __name__ == "__main__":
    raise SystemExit(main(["openclaw", *sys.argv[1:]]))
