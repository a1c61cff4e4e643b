"""benchmarks/outgrowing.py: what must hold in it whatever its numbers are."""

import math
from dataclasses import replace

import outgrowing
import pytest
from outgrowing import ROUTINGS, Case, Machine, Simulation, simulate

ENDLESS = Machine(kv_tokens=10**12)
TEAM = Case(agents=20, replicas=3, routing="affinity", minutes=40)


def requests_of(case):
    simulation = Simulation(case)
    simulation.run()
    return simulation


def reread_tokens(request):
    return request.prompt_tokens - request.n_cached - request.n_new


@pytest.mark.parametrize("routing", ["affinity", "files", "shared"])
def test_with_endless_memory_a_warm_request_reads_only_what_is_new(routing):
    case = replace(TEAM, routing=routing, machine=ENDLESS)
    done = requests_of(case).done

    after_warm_up = [
        request
        for request in done
        if request.arrived >= case.warm_up and not request.is_first
    ]
    n_reread = [reread_tokens(request) for request in after_warm_up]
    assert len(n_reread) > 200
    # An agent may ask for the first time after the warm-up, in the middle of a conversation.
    assert n_reread.count(0) >= len(n_reread) - TEAM.agents
    assert min(n_reread) >= 0


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("loses_replica", [False, True])
def test_every_request_is_answered_in_its_order(routing, loses_replica):
    case = replace(TEAM, routing=routing, loses_replica=loses_replica)
    simulation = requests_of(case)

    for request in simulation.done:
        assert request.arrived < request.first_token < request.finished
        assert 0 <= request.n_cached < request.prompt_tokens
    n_open = sum(
        len(replica.waiting) + len(replica.replies) + (replica.prefilling is not None)
        for replica in simulation.replicas
        if replica.number in simulation._alive
    )
    assert n_open <= TEAM.agents  # an agent has one request at a time
    assert len(simulation.done) > 300


def test_the_fewest_replicas_are_enough_and_one_fewer_is_not():
    case = replace(TEAM, agents=60, minutes=30)
    n_replicas, outcome = outgrowing.count_replicas(case)

    assert outcome.is_enough
    assert n_replicas > 1
    assert not simulate(replace(case, replicas=n_replicas - 1)).is_enough
    assert math.isfinite(outcome.first_token)
