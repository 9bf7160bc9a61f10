"""Whatever arrives, is aborted or fails, and however small the pool: all that `World` checks holds after each step."""

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from scheduler_world import VOCAB_SIZE, World

from octavo.config.engine_config import CacheConfig, SchedulerConfig
from octavo.errors import InvalidInput
from octavo.kvcache import block_hash

FAMILIES = [[(7 * i + 13 * family) % VOCAB_SIZE for i in range(1000)] for family in range(3)]
"""Prompts begin as one of these, so that they share prefixes of every length."""

seeds = st.integers(0, 2**32 - 1)


def random_world(seed: int) -> World:
    """Small pools and budgets, so that preemption, eviction and chunks are common. Block ids are shuffled."""
    rng = Random(seed)
    block_size, num_blocks = rng.choice([8, 8, 16, 16, 32]), rng.choice([2, 3, 4, 6, 8, 12, 24])
    pool_tokens = num_blocks * block_size
    max_model_len = rng.choice([pool_tokens, pool_tokens, pool_tokens + 20, pool_tokens - 3, pool_tokens // 2])
    chunked = rng.random() < 0.8
    scheduler = SchedulerConfig(
        max_num_seqs=rng.choice([1, 2, 3, 6, 12]),
        max_num_batched_tokens=rng.choice([1, 2, 3, 5, 8, 20, 50, 100]) + (0 if chunked else max_model_len),
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice([0, 0, 1, 5, 16]) if chunked else 0,
        policy=rng.choice(["fcfs", "priority"]),
        fair_share=rng.random() < 0.5,
    )
    cache = CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=rng.random() < 0.6)
    return World(scheduler, cache, rng.sample(range(num_blocks), num_blocks))


worlds = st.builds(random_world, seeds)


def random_prompt(rng: Random, world: World) -> list[int]:
    """Up to the longest that fits, most of them short."""
    room = min(world.config.max_model_len, world.cache.num_tokens) - 1
    length = max(1, int(room * rng.random() ** rng.choice([1, 4])))
    num_own = rng.randint(1, length)
    shared = rng.choice(FAMILIES)[: length - num_own]
    return shared + [rng.randrange(VOCAB_SIZE) for _ in range(num_own)]


def random_options(rng: Random) -> dict:
    max_tokens = rng.choice([1, 10, 60, 120])
    return {
        "max_tokens": max_tokens,
        "min_tokens": min(rng.choice([0, 0, 5, 30]), max_tokens),
        "priority": rng.randint(-2, 2),
        "tenant": rng.choice([None, "x", "x", "x", "y"]),
        "salt": rng.choice([None, None, None, "a", "b"]),
        "eos": rng.choice([(), (5,), (5, 11)]),
        "stop_token_ids": rng.choice([[], [23], [11, 23]]),
        "embeds": rng.random() < 0.15,
        "prompt_logprobs": rng.choice([None, None, None, 0]),
    }


def random_n(rng: Random) -> int:
    return rng.choice([1, 1, 1, 2, 3, 5])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(world=worlds, collisions=st.booleans())
    def start(self, world: World, collisions: bool) -> None:
        self.world = world
        self.world.collisions = collisions
        self.patch = pytest.MonkeyPatch()
        if collisions:
            real = block_hash.hash_block
            self.patch.setattr(block_hash, "hash_block", lambda *parts: bytes([real(*parts)[0] % 4]))

    @rule(seed=seeds, count=st.sampled_from([4, 1]), reuse=st.booleans())
    def add(self, seed: int, count: int, reuse: bool) -> None:
        world, rng = self.world, Random(seed)
        for _ in range(count):
            live = {known.message.request_id for known in world.live.values()}
            used = [known.message.request_id for known in world.ended if known.message.request_id not in live]
            request_id = used[-1] if reuse and used else f"r{world.num_arrived}"
            world.add_samples(request_id, random_prompt(rng, world), random_n(rng), **random_options(rng))

    @rule(seed=seeds)
    def add_next_turn(self, seed: int) -> None:
        """A prompt that goes on from an earlier prompt and its answer."""
        world, rng = self.world, Random(seed)
        if not world.ended:
            return
        known = rng.choice(world.ended)
        prompt = [*known.message.prompt_token_ids, *known.output, rng.randrange(VOCAB_SIZE)]
        if len(prompt) < min(world.config.max_model_len, world.cache.num_tokens):
            world.add_samples(f"r{world.num_arrived}", prompt, random_n(rng), **random_options(rng))
        else:
            with pytest.raises(InvalidInput):
                world.add(f"r{world.num_arrived}", prompt)

    @rule(count=st.sampled_from([10, 30, 1]))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(pick=st.integers(0, 100), whole=st.booleans())
    def abort(self, pick: int, whole: bool) -> None:
        self.world.abort([*self.picked(pick, whole), "nobody"])

    @rule(pick=st.integers(0, 100), whole=st.booleans())
    def abort_in_flight(self, pick: int, whole: bool) -> None:
        self.world.step(abort_in_flight=self.picked(pick, whole))

    @rule(lose=st.sampled_from(["unseen", "computed"]), pick=st.none() | st.integers(0, 100))
    def step_fails(self, lose: str, pick: int | None) -> None:
        self.world.step(lose=lose, abort_in_flight=[] if pick is None else self.picked(pick))

    @rule(pick=st.integers(0, 100))
    def request_fails(self, pick: int) -> None:
        self.world.step(failing=self.picked(pick))

    @rule()
    def reset_prefix_cache(self) -> None:
        stats = self.world.scheduler.stats()
        assert self.world.scheduler.reset_prefix_cache() == (stats.kv_blocks_in_use == 0)
        self.world.check_now()

    def picked(self, pick: int, whole: bool = False) -> list[str]:
        """The id of a live request or sample, or of the request it belongs to."""
        live = [known.message.request_id if whole else name for name, known in self.world.live.items()]
        return [live[pick % len(live)]] if live else []

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.drain()
            finally:
                self.patch.undo()


def test_every_invariant_holds_after_every_step_and_everybody_ends():
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=50,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@settings(max_examples=150, deadline=None)
@given(world=worlds, seed=seeds, count=st.integers(2, 16), gap=st.sampled_from([0, 3, 15]))
def test_whenever_requests_arrive_each_gets_the_tokens_it_has_alone(world, seed, count, gap):
    rng = Random(seed)
    for number in range(count):
        world.add_samples(str(number), random_prompt(rng, world), random_n(rng), **random_options(rng))
        for _ in range(rng.randint(0, gap)):
            world.step()
    world.drain()
    for known in world.ended:
        assert known.num_preemptions <= len(known.output) + len(known.message.prompt_token_ids)
