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


def test_with_one_replica_the_routing_changes_nothing():
    outcomes = [
        simulate(replace(TEAM, replicas=1, routing=routing, machine=ENDLESS))
        for routing in ROUTINGS
    ]

    assert outcomes.count(outcomes[0]) == len(ROUTINGS)


def test_a_seed_gives_the_same_each_time_and_another_one_something_else():
    assert simulate(TEAM) == simulate(TEAM)
    assert simulate(TEAM) != simulate(replace(TEAM, seed=2))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_memory_is_never_more_than_there_is(routing, monkeypatch):
    limit = 2 * outgrowing.LAST_TOKENS[1]
    most = 0
    keep = outgrowing.Replica.keep

    def checked(replica, talk, n_tokens):
        nonlocal most
        keep(replica, talk, n_tokens)
        assert replica.n_kept == sum(replica.kv.values())
        most = max(most, replica.n_kept)

    monkeypatch.setattr(outgrowing.Replica, "keep", checked)
    outcome = simulate(replace(TEAM, routing=routing, machine=Machine(kv_tokens=limit)))

    assert limit / 2 < most <= limit
    is_all_stored = routing in ("files", "shared")
    assert (outcome.misses > 0) != is_all_stored


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


def test_conversations_that_stay_are_reused_more_than_those_that_wander():
    wandering = simulate(replace(TEAM, routing="random")).hit_rate
    staying = simulate(TEAM).hit_rate

    assert wandering < staying - 0.05


def test_replies_side_by_side_take_longer_each_and_are_faster_together():
    machine = Machine()
    speeds = [machine.stream_speed(n) for n in range(1, 33)]

    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == machine.decode_speed
    assert 8 * speeds[7] == pytest.approx(machine.batch_speed)
    assert 32 * speeds[31] == pytest.approx(machine.batch_speed)


def test_one_request_alone_takes_the_seconds_of_its_tokens():
    simulation = Simulation(replace(TEAM, agents=1, replicas=1, minutes=30))
    simulation.run()
    first = simulation.done[0]

    n_read = first.prompt_tokens - first.n_cached
    seconds = outgrowing.FIRST_TOKEN_SECONDS + n_read / outgrowing.PREFILL_SPEED
    assert first.first_token - first.arrived == pytest.approx(seconds)
    reply_seconds = first.reply_tokens / outgrowing.DECODE_SPEED
    assert first.finished - first.first_token == pytest.approx(reply_seconds)


def test_the_fewest_replicas_are_enough_and_one_fewer_is_not():
    case = replace(TEAM, agents=60, minutes=30)
    n_replicas, outcome = outgrowing.count_replicas(case)

    assert outcome.is_enough
    assert n_replicas > 1
    assert not simulate(replace(case, replicas=n_replicas - 1)).is_enough
    assert math.isfinite(outcome.first_token)
