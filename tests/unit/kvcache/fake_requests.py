"""Requests as the KV cache manager sees them, and what a scheduler does with them."""

from dataclasses import dataclass, field

from octavo.config.engine_config import CacheConfig
from octavo.kvcache.manager import KVCacheManager
from octavo.protocol.messages import PromptEmbeds


@dataclass
class Request:
    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    prompt_embeds: PromptEmbeds | None = None
    block_contents: list = field(default_factory=list)


def make(num_blocks=8, block_size=4, caching=True) -> KVCacheManager:
    return KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching))


def compute(manager: KVCacheManager, request: Request) -> int:
    """Admit and compute all of a request at once; the number of tokens it found cached."""
    prefix = manager.find_cached_prefix(request)
    assert manager.allocate(request, len(request.token_ids), prefix) is not None
    request.num_computed_tokens = len(request.token_ids)
    manager.publish(request)
    return len(prefix) * manager.block_size


def numbers(manager: KVCacheManager) -> tuple[int, int, int]:
    return manager.pool.num_free, manager.pool.num_cached, manager.pool.num_in_use
