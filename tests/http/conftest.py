"""Servers for the tests of HTTP: one that many share, and others of one's own."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for http_driver

import pytest
from http_driver import RunningServer, running_server
from tiny_models import write_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FLAGS = ("--num-kv-blocks", "128", "--served-model-name", "tiny", "--served-model-name", "tiny-too")


def write_chat_model(folder: Path, **config: object) -> str:
    write_model(folder, **config)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory) -> str:
    """A tiny random llama folder with a chat template. Its tokens are bytes."""
    return write_chat_model(tmp_path_factory.mktemp("tiny-http"))


@pytest.fixture(scope="session")
def endless_chat_model(tmp_path_factory) -> str:
    """The same with a context so long that http_driver's ENDLESS request outlasts every test, on any machine."""
    return write_chat_model(tmp_path_factory.mktemp("endless-http"), max_position_embeddings=32768)


@pytest.fixture(scope="session")
def server(tiny_chat_model) -> RunningServer:
    """A ready server that all tests share: no keys, names tiny and tiny-too, with the endpoints of developers."""
    with running_server(tiny_chat_model, *FLAGS, "--dev-endpoints") as running:
        yield running


@pytest.fixture
def start_endless_server(start_server, endless_chat_model):
    """As `start_server`, with the model that ENDLESS wants and room for several such requests in the KV cache."""
    return partial(start_server, "--num-kv-blocks", "4096", model=endless_chat_model)


@pytest.fixture
def start_server(tiny_chat_model):
    """Starts servers of one's own and ends them: `start_server("--api-key", "x")`."""
    made: list[RunningServer] = []

    def start(*flags: str, wait: bool = True, model: str | None = None, **options: object) -> RunningServer:
        made.append(RunningServer(model or tiny_chat_model, "--num-kv-blocks", "128", *flags, **options))
        return made[-1].wait_until_ready() if wait else made[-1]

    yield start
    for one in made:
        one.close()
