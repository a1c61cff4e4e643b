"""What is tested at night only: `pytest --all`.

By day each property is tested once, where a fault would be seen soonest: on one kind of model
(one with states, where they matter), each family and each value once, one kill, one storm.
At night, too:

- products: kinds x scenarios (engine, agents, drafts, draft model, packed KV, vision), fields and
  settings with each other, families x tests (opaque, vision), kinds x tests
  (status, structured output, tiny models)
- large rows and much memory: two agents of a model with states, what is written to the disk before
  it goes, a small request beside a large one, a long row beside short ones, four tests of engine
  limits
- an exception at four of five steps, on the other kind of model, and at the fourth call
- scenarios of clients that another one is like (as it is, a new session)
- drafters on other kinds of models, after an image and after a sleep but for one drafter each;
  planted faults of a suite but one or two; families of vision models but three, and opaque ones but
  two; other signals inside MLX
- restarts of images on dense layers, of opaque families but deepseek_v4; a rank that stops
- real clients (tests/clients), where they are installed
- a storm of 390 clients (65 by day), 30 bodies for each route (3), each body of each agent for each
  template (a tenth), the templates that another is like, all seeds of the prefix cache, the demo's
  questions one by one
- three of four examples of hypothesis and of damaged calls; shapes of a past with the other
  templates, those of models with their own vocabulary, too; the ledger's other properties with all
- more seeds of the ledger's restarts and of batches beside mlx-lm's own; senders x ids x places;
  images that cannot be read in two other ways; real templates with the other vocabulary
- the dense kind for the Messages API and structured output
- packed KV that goes on from its own end or is joined by rows; a schema of nothing with free calls
- servers behind the real LiteLLM, replicas and by name, and whole replies through it; the page in
  light colours; slow and broken requests of other forms; a console that is closed or full; the
  report of machine_report.py; other kinds of tiny models
"""

from typing import Any

import pytest

is_night = False  # conftest.py says: with --all


def examples(n: int) -> int:
    """How many examples hypothesis makes: all at night, a quarter by day."""
    return n if is_night else max(10, n // 4)


def by_day(n: int, *, of: int) -> list[Any]:
    """Seeds: the first n by day, and all at night."""
    return [*range(n), *map(at_night, range(n, of))]


def at_night(*values: Any) -> Any:
    """A case of parametrize, or a value of a fixture, that a day's tests leave out."""
    return pytest.param(*values, marks=pytest.mark.slow)
