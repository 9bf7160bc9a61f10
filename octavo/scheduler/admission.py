"""Whether a request can ever be served, where a waiting one can begin, and the blocks that takes."""

from typing import NamedTuple

from octavo.config.engine_config import CacheConfig, SchedulerConfig
from octavo.errors import InvalidInput
from octavo.kvcache.block import KVCacheBlock
from octavo.kvcache.manager import KVCacheManager, num_unheld
from octavo.kvcache.prompt_hold import PromptHold
from octavo.scheduler.request import Request


class Start(NamedTuple):
    """A beginning whose KV is there already. Valid until the next allocation."""

    num_computed_tokens: int
    num_needed: int
    """Blocks that become unavailable until all known tokens and one more are computed."""
    cached_prefix: list[KVCacheBlock]
    looked_up: bool
    """Whether the prefix cache was asked."""
    hold: PromptHold | None = None
    """To be forked."""
    is_last: bool = False
    """The last to start from `hold`."""


def find_start(kv: KVCacheManager, request: Request) -> Start:
    """The most that need not be computed: the prompt held by the request's group, or else what the prefix cache finds.

    A request that asks for prompt_logprobs computes all of its prompt. Nothing changes.
    """
    num_blocks = kv.num_blocks_for(request.num_tokens + 1)
    group = request.group
    if group is not None and group.hold is not None and group.front is request:
        last = not group.unstarted
        num_needed = num_blocks - len(group.hold.blocks) + kv.needs_copy(group.hold, last)
        return Start(request.num_prompt_tokens - 1, num_needed, [], False, group.hold, last)
    look_up = kv.enable_prefix_caching and request.prompt_logprobs is None
    prefix = kv.find_cached_prefix(request) if look_up else []
    return Start(len(prefix) * kv.block_size, num_blocks - len(prefix) + num_unheld(prefix), prefix, look_up)


def take_start(kv: KVCacheManager, request: Request, start: Start) -> None:
    """Begin the request's block table."""
    if start.hold is not None:
        kv.fork(start.hold, request, start.is_last)
    else:
        kv.allocate(request, start.num_computed_tokens, start.cached_prefix)


def check_prompt_length(num_prompt: int, config: SchedulerConfig, cache: CacheConfig) -> None:
    """Raise InvalidInput if a prompt of so many tokens is empty or leaves no room for one more."""
    if num_prompt == 0:
        raise InvalidInput("the prompt has 0 tokens but needs at least 1; give a prompt that is not empty")
    if num_prompt + 1 > config.max_model_len:
        raise InvalidInput(
            f"the prompt has {num_prompt} tokens and needs room for 1 more, but max_model_len is "
            f"{config.max_model_len}; shorten the prompt or raise max_model_len"
        )
    if num_prompt + 1 > cache.num_tokens:
        raise InvalidInput(
            f"the prompt has {num_prompt} tokens and needs room for 1 more, but the KV cache holds "
            f"{cache.num_tokens} ({cache.num_blocks} blocks x {cache.block_size}); "
            "shorten the prompt or raise num_kv_blocks or kv_cache_memory"
        )
