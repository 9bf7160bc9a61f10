import pytest
from tiny_models import write_model

from octavo import LLM


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> str:
    """A tiny random llama folder."""
    return str(write_model(tmp_path_factory.mktemp("tiny-llama")))


@pytest.fixture(scope="session")
def endless_llama(tmp_path_factory) -> str:
    """The tiny llama with a context so long that a request without a limit outlasts every test, on any machine."""
    return str(write_model(tmp_path_factory.mktemp("endless-llama"), max_position_embeddings=32768))


@pytest.fixture
def make_llm(tiny_llama):
    """Makes LLMs over the tiny llama and closes them."""
    made: list[LLM] = []

    def make(model: str | None = None, **options: object) -> LLM:
        options = {"dtype": "float32", "num_kv_blocks": 64, "disable_log_stats": True, **options}
        made.append(LLM(str(model or tiny_llama), **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
