"""What is tested at night only: `pytest --all`.

By day each property is tested once, where a fault would be seen soonest: on one kind of model
(one with states, where they matter), each family and each value once, one kill, one storm.
At night, too:

- products: kinds x scenarios (engine, agents, drafts, draft model, packed KV, vision), fields
  and settings with each other, families x tests (opaque, vision, system prompts), kinds x tests
  (status, structured output, tiny models)
- large rows and much memory: two agents of a model with states, what is written to the disk
  before it goes, a small request beside a large one, six tests of engine limits
- agents that test_client_changes.py has in other words: append_only, branches
- an exception anywhere on the other kind of model, and at the fourth call
- a restart of windows, of qwen4_exp; LiteLLM killed, its port taken, a server killed beside it
  (by day the keeper in a thread); ranks with other end tokens, a rank that stops
- real clients (tests/clients), where they are installed
- a storm of 390 clients (130 by day), 30 bodies for each route (10), each body of each agent
  for each template (a seventh), all seeds of the prefix cache, the demo's questions one by one
"""

from typing import Any

import pytest


def by_day(n: int, *, of: int) -> list[Any]:
    """Seeds: the first n by day, and all at night."""
    return [*range(n), *map(at_night, range(n, of))]


def at_night(*values: Any) -> Any:
    """A case of parametrize, or a value of a fixture, that a day's tests leave out."""
    return pytest.param(*values, marks=pytest.mark.slow)
