"""Tenants share slots and token budget: played through with a fake model. `World` checks order and blocks as well."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import VOCAB_SIZE, World, make_world

from octavo.scheduler.fair_share import divide


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % VOCAB_SIZE for i in range(length)]


def fair_world(**options) -> World:
    return make_world(**{"num_blocks": 2000, "budget": 256, "fair_share": True, **options})


def flood(world: World, tenant: str, count: int = 500, length: int = 20, max_tokens: int = 200) -> None:
    for number in range(count):
        world.add(f"{tenant}{number}", prompt(length, number), max_tokens=max_tokens, tenant=tenant)


def steps_to_first_token(world: World, known) -> int:
    before = world.num_steps
    world.step_until(lambda: known.output)
    return world.num_steps - before


def tokens_by_tenant(world: World, num_steps: int) -> Counter:
    """Tokens computed in so many steps."""
    computed: Counter = Counter()
    for _ in range(num_steps):
        tenants = {request_id: known.message.tenant for request_id, known in world.live.items()}
        world.step()
        step = world.last_step
        for request_id, count in zip(step.request_ids, step.num_scheduled_tokens, strict=True):
            computed[tenants[request_id]] += count
    return computed


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_blocks", [2000, 40])
def test_a_newcomer_gets_its_first_token_at_once_while_another_has_500_queued(policy, num_blocks):
    world = fair_world(policy=policy, num_blocks=num_blocks, max_model_len=300)
    flood(world, "a", max_tokens=200)
    for _ in range(30):
        world.step()
    newcomer = world.add("new", prompt(50, 7), max_tokens=30, tenant="b", priority=9)
    assert steps_to_first_token(world, newcomer) == 1
    world.step_until(lambda: newcomer.last is not None and newcomer.last.finish_reason is not None, max_steps=30)
    assert newcomer.num_preemptions == 0


def test_without_fair_share_it_waits_for_the_flood():
    world = fair_world(fair_share=False)
    flood(world, "a", count=40)
    for _ in range(30):
        world.step()
    assert steps_to_first_token(world, world.add("new", prompt(50, 7), tenant="b")) > 100


def test_a_newcomer_does_not_wait_for_a_long_prompt_of_another():
    world = fair_world(max_model_len=20_000)
    world.add("a", prompt(16_000), tenant="a")
    world.step()
    newcomer = world.add("new", prompt(100, 7), tenant="b")
    assert steps_to_first_token(world, newcomer) == 1


@pytest.mark.parametrize("num_tenants", [2, 3, 4])
def test_tenants_that_want_more_than_there_is_get_equal_shares(num_tenants):
    world = fair_world()
    flood(world, "a")
    for _ in range(10):
        world.step()
    for tenant in "bcd"[: num_tenants - 1]:
        flood(world, tenant, count=100)
    for _ in range(30):
        world.step()
    computed = tokens_by_tenant(world, 300)
    average = computed.total() / num_tenants
    assert all(0.8 * average < computed[tenant] < 1.2 * average for tenant in "abcd"[:num_tenants]), computed
    running = Counter(world.live[request.request_id].message.tenant for request in world.running())
    assert max(running.values()) - min(running.values()) <= 1


def test_long_prompts_of_many_tenants_share_the_budget():
    world = fair_world(max_model_len=20_000, num_blocks=5000)
    for tenant in "abc":
        world.add(tenant, prompt(15_000, ord(tenant)), tenant=tenant)
    world.step()
    computed = tokens_by_tenant(world, 30)
    assert all(computed[tenant] == pytest.approx(30 * 256 / 3, rel=0.05) for tenant in "abc")


def test_more_tenants_than_slots_take_turns():
    world = fair_world(max_num_seqs=2)
    flood(world, "a", count=100, max_tokens=10)
    for _ in range(5):
        world.step()
    known = [world.add(tenant, prompt(20), max_tokens=10, tenant=tenant) for tenant in "bcdef"]
    world.step_until(lambda: all(k.last is not None and k.last.finish_reason for k in known), max_steps=60)


def test_what_one_tenant_leaves_the_others_use():
    world = fair_world()
    flood(world, "a", count=40)
    world.add("b", prompt(20), max_tokens=1000, tenant="b")
    for _ in range(20):
        world.step()
    assert len(world.running()) == world.config.max_num_seqs
    assert world.last_step.total_num_scheduled_tokens >= world.config.max_num_seqs


def test_a_request_yields_a_slot_only_to_a_tenant_that_runs_fewer():
    world = fair_world(max_num_seqs=4)
    flood(world, "a", count=10)
    world.step()
    flood(world, "b", count=10)
    for _ in range(40):
        world.step()
    assert world.scheduler.stats().num_preemptions == 2, "two of four slots changed hands, once"


def test_a_stream_of_short_requests_of_one_tenant_does_not_thrash_another():
    world = fair_world(max_num_seqs=4)
    known = [world.add(f"a{i}", prompt(30, i), max_tokens=60, tenant="a") for i in range(4)]
    for number in range(40):
        world.add(f"b{number}", prompt(5, number), max_tokens=2, tenant="b")
        for _ in range(4):
            world.step()
    world.drain()
    assert all(len(k.output) == 60 for k in known)
    assert sum(k.num_preemptions for k in known) <= 40


def test_one_tenant_alone_is_served_as_without_fair_share():
    schedules = []
    for fair_share in (True, False):
        world = fair_world(fair_share=fair_share, num_blocks=30, max_num_seqs=6, budget=40, policy="priority")
        steps = []
        for number in range(12):
            world.add(str(number), prompt(10 + 9 * number, number), max_tokens=30, priority=number % 3)
            world.step()
            steps.append((world.last_step.request_ids, world.last_step.num_scheduled_tokens))
        while world.live:
            world.step()
            steps.append((world.last_step.request_ids, world.last_step.num_scheduled_tokens))
        schedules.append(steps)
    assert schedules[0] == schedules[1]


def test_samples_of_one_request_count_as_many():
    world = fair_world(max_num_seqs=8)
    world.add_samples("a", prompt(20), 50, max_tokens=100, tenant="a")
    for _ in range(20):
        world.step()
    newcomer = world.add("new", prompt(50, 7), tenant="b")
    assert steps_to_first_token(world, newcomer) == 1
    world.drain()


def test_tenants_that_are_gone_are_forgotten():
    world = fair_world()
    flood(world, "a", count=1, max_tokens=1500)
    for number in range(300):
        world.add(f"t{number}", prompt(5), max_tokens=1, tenant=f"t{number}")
        world.step()
        world.step()
    assert len(world.scheduler._shares._served) < 100
    world.drain()
    world.add("z", prompt(5), max_tokens=3, tenant="z")
    world.step()
    assert set(world.scheduler._shares._served) == {"z"}


@settings(max_examples=200, deadline=None)
@given(budget=st.integers(0, 300), demands=st.dictionaries(st.integers(0, 9), st.integers(0, 200)))
def test_shares_are_max_min_fair(budget, demands):
    shares = divide(budget, demands)
    assert shares.keys() == demands.keys()
    assert sum(shares.values()) == min(budget, sum(demands.values()))
    for tenant, share in shares.items():
        assert 0 <= share <= demands[tenant]
        if share < demands[tenant]:
            assert share >= max(shares.values()) - 1, "somebody gets less than another and wants more"


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), max_num_seqs=st.sampled_from([2, 4, 16]), budget=st.sampled_from([16, 64, 256]),
    num_blocks=st.sampled_from([24, 60, 500]), length=st.integers(1, 60), max_tokens=st.integers(1, 100),
)  # fmt: skip
def test_a_newcomer_never_starves(seed, max_num_seqs, budget, num_blocks, length, max_tokens):
    world = fair_world(max_num_seqs=max_num_seqs, budget=budget, num_blocks=num_blocks, max_model_len=200)
    flood(world, "a", count=60, length=length, max_tokens=max_tokens)
    for _ in range(seed % 50):
        world.step()
    newcomer = world.add("new", prompt(40, 7), tenant="b")
    room = max(1, budget // 2 - max_num_seqs) if budget > 2 * max_num_seqs else 1
    assert steps_to_first_token(world, newcomer) <= 2 + -(-40 // room)
