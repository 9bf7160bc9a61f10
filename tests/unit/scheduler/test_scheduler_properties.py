"""Whatever arrives, whenever it is aborted and however small the pool: everything `World` checks holds after each step."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from scheduler_world import VOCAB_SIZE, World

from octavo.config.engine_config import CacheConfig, SchedulerConfig
from octavo.errors import InvalidInput
from octavo.kvcache import block_hash

FAMILIES = [[(7 * i + 13 * family) % VOCAB_SIZE for i in range(400)] for family in range(3)]
"""Prompts begin as one of these, so that they share prefixes of every length."""


@st.composite
def worlds(draw) -> World:
    block_size = draw(st.sampled_from([8, 16, 32]))
    num_blocks = draw(st.integers(2, 20))
    max_model_len = draw(st.integers(2, num_blocks * block_size + 20))
    chunked = draw(st.booleans())
    scheduler = SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 10)),
        max_num_batched_tokens=draw(st.integers(1, 100)) + (0 if chunked else max_model_len),
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 1, 5, 16])) if chunked else 0,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
    )
    cache = CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=draw(st.booleans()))
    free_order = draw(st.permutations(range(num_blocks)))
    return World(scheduler, cache, free_order, collisions=draw(st.booleans()))


@dataclass
class Arrival:
    family: int
    shared: int
    tail: list[int]
    options: dict


arrivals = st.builds(
    Arrival,
    st.integers(0, len(FAMILIES) - 1),
    st.integers(0, 300),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 120),
            "priority": st.integers(-2, 2),
            "salt": st.sampled_from([None, None, "a", "b"]),
            "eos": st.sampled_from([(), (5,), (5, 11)]),
            "stop_token_ids": st.sampled_from([[], [23], [11, 23]]),
        }
    ),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(world=worlds())
    def start(self, world: World) -> None:
        self.world = world
        self.patch = pytest.MonkeyPatch()
        if world.collisions:
            real = block_hash.hash_block
            self.patch.setattr(block_hash, "hash_block", lambda *parts: bytes([real(*parts)[0] % 4]))

    @rule(arrival=arrivals, min_tokens=st.integers(0, 5), reuse=st.booleans())
    def add(self, arrival: Arrival, min_tokens: int, reuse: bool) -> None:
        world = self.world
        room = min(world.config.max_model_len, world.cache.num_tokens) - 1
        prompt = [*FAMILIES[arrival.family][: arrival.shared % room], *arrival.tail][-room:]
        options = arrival.options | {"min_tokens": min(min_tokens, arrival.options["max_tokens"])}
        used = [known.message.request_id for known in world.ended if known.message.request_id not in world.live]
        request_id = used[-1] if reuse and used else f"r{world.num_arrived}"
        world.add(request_id, prompt, **options)

    @rule(pick=st.integers(0, 100), arrival=arrivals)
    def add_next_turn(self, pick: int, arrival: Arrival) -> None:
        """A prompt that goes on from an earlier prompt and its answer."""
        world = self.world
        if not world.ended:
            return
        known = world.ended[pick % len(world.ended)]
        prompt = [*known.message.prompt_token_ids, *known.output, *arrival.tail]
        if len(prompt) < min(world.config.max_model_len, world.cache.num_tokens):
            world.add(f"r{world.num_arrived}", prompt, **arrival.options)
        else:
            with pytest.raises(InvalidInput):
                world.add(f"r{world.num_arrived}", prompt, **arrival.options)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        self.world.abort([*self.picked(pick), "nobody"])

    @rule(pick=st.integers(0, 100))
    def abort_in_flight(self, pick: int) -> None:
        self.world.step(abort_in_flight=self.picked(pick))

    @rule(lose=st.sampled_from(["unseen", "computed"]), pick=st.none() | st.integers(0, 100))
    def step_fails(self, lose: str, pick: int | None) -> None:
        self.world.step(lose=lose, abort_in_flight=[] if pick is None else self.picked(pick))

    @rule()
    def reset_prefix_cache(self) -> None:
        stats = self.world.scheduler.stats()
        assert self.world.scheduler.reset_prefix_cache() == (stats.kv_blocks_in_use == 0)
        self.world.check_now()

    def picked(self, pick: int) -> list[str]:
        live = list(self.world.live)
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
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@settings(max_examples=40, deadline=None)
@given(world=worlds(), batch=st.lists(arrivals, min_size=2, max_size=12))
def test_a_batch_that_arrives_at_once_gets_the_tokens_each_request_has_alone(world, batch):
    room = min(world.config.max_model_len, world.cache.num_tokens) - 1
    for number, arrival in enumerate(batch):
        prompt = [*FAMILIES[arrival.family][: arrival.shared % room], *arrival.tail][-room:]
        world.add(str(number), prompt, **arrival.options)
    world.drain()
    for known in world.ended:
        assert known.num_preemptions <= len(known.output) + len(known.message.prompt_token_ids)
