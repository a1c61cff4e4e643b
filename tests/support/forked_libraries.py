"""Imported by the fork server of forked_process.py: start-llm.py with all that it imports."""

import conftest

conftest.load_start_llm()
