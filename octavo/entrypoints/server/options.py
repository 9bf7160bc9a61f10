"""ServerArgs: every option of the server itself, as the user gives it. The engine's are in EngineArgs."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import tyro

from octavo.errors import InvalidInput, printable, short_repr

Texts = tyro.conf.UseAppendAction[tuple[str, ...]]
MAX_SECONDS = 10**6
"""Eleven days: longer waits are no longer waits, and a system's clocks do not take just any number."""
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


_ROOT_PATH = re.compile(r"/|(/(?:[!\"$&-.0->@-~]|%[0-9A-Fa-f]{2})+)+/?")

LATER = {
    "api_server_count": "one process serves; leave it out",
    "chat_template_content_format": "what the template reads is found out; leave it out",
    "disable_fastapi_docs": "leave it out",
    "disable_frontend_multiprocessing": "the engine has a process of its own; leave it out",
    "disable_uvicorn_access_log": "there is no such log; --disable-log-requests leaves out the line of each request",
    "enable_auto_tool_choice": "leave it out",
    "enable_force_include_usage": 'ask with "stream_options": {"include_usage": true}',
    "enable_log_outputs": "texts are never logged; leave it out",
    "enable_log_requests": "each request has its line in the log without it; leave it out",
    "enable_prompt_tokens_details": "usage always has them; leave it out",
    "enable_request_id_headers": "every answer has its X-Request-Id without it; leave it out",
    "enable_server_load_tracking": "/load always counts; leave it out",
    "enable_ssl_refresh": "start the server anew for a new certificate",
    "h11_max_incomplete_event_size": "the head of a request has a limit of its own; leave it out",
    "lora_modules": "leave it out",
    "max_log_len": "texts are never logged; leave it out",
    "middleware": "leave it out",
    "reasoning_parser": "leave it out",
    "response_role": "the role of an answer is assistant; leave it out",
    "return_tokens_as_token_ids": 'ask with "return_tokens_as_token_ids": true',
    "ssl_ciphers": "the library's choice holds; leave it out",
    "tool_call_parser": "leave it out",
    "tool_parser_plugin": "leave it out",
}
"""Options of vLLM's server that are not built -> what to do instead."""


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Options of the server. Names are vLLM's where it has one."""

    host: str = "0.0.0.0"
    """Address to listen at. 0.0.0.0: every one of this machine; 127.0.0.1: for this machine only."""
    port: int = 8000
    """Port to listen at. 0: a free one; the log says which."""
    uds: str | None = None
    """Path of a Unix socket to listen at instead of host and port."""
    served_model_name: Texts = ()
    """What requests call the model; may be repeated, the first one is in the answers. Default: what --model says."""
    api_key: Texts = ()
    """A key that requests must show (Authorization: Bearer KEY); may be repeated. It closes every route but /health."""
    api_key_file: str | None = None
    """A file of such keys, one a line; lines that begin with # are comments."""
    cache_isolation: Literal["none", "key"] = "none"
    """key: requests share cached prefixes only with requests of the same API key, so that nobody can find out what
    others asked by timing."""
    ssl_keyfile: str | None = None
    """Private key for HTTPS."""
    ssl_certfile: str | None = None
    """Certificate for HTTPS."""
    ssl_ca_certs: str | None = None
    """Certificates of those who may sign the clients' ones."""
    ssl_cert_reqs: int = 0
    """Whether clients need a certificate: 0 no, 1 it is checked if there is one, 2 yes."""
    ssl_keyfile_password: str | None = None
    """Of the private key."""
    root_path: str = ""
    """Path under which a proxy shows this server; requests may come with it or without."""
    allowed_origins: Texts = ()
    """An origin whose web pages may use this server (CORS), or *; may be repeated. Default: none."""
    allowed_methods: Texts = ()
    """A method those pages may use; may be repeated. Default: all."""
    allowed_headers: Texts = ()
    """A header those pages may send; may be repeated. Default: all."""
    allow_credentials: bool = False
    """Those pages may send credentials of the browser."""
    chat_template: str | None = None
    """A file with a Jinja template, or the name of one of the model's. Default: the model's own."""
    max_request_bytes: int = 16 * 2**20
    """A longer body is refused (413) before it is parsed."""
    max_queued_requests: int | None = 1024
    """Requests that may wait for their turn; further ones are refused at once (429)."""
    max_queued_tokens: int | None = 2**20
    """Prompt tokens that may wait for their turn; further ones are refused at once (429)."""
    max_wide_logprobs: int | None = 2**22
    """Log-probabilities that all answers with more than 64 for each token may hold together: some hundred bytes each.
    Who asks for more is refused (400), or told to come again when others have theirs (429)."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after the signal to end (SIGTERM)."""
    heartbeat_timeout: float = 5.0
    """Seconds without a sign of life after which the engine core is taken for dead."""
    restart_core: bool = False
    """Start the engine core anew, once, when it has died. Without: the server ends with exit status 1."""
    metrics_compat: Literal["octavo", "vllm"] = "octavo"
    """Whose names /metrics uses."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that gets a span for each request, such as http://localhost:4318/v1/traces."""
    timings: bool = False
    """Every answer says how long it queued and computed; otherwise those to requests with "timings": true."""
    dev_endpoints: bool = False
    """Serve /reset_prefix_cache, /server_info and /abort_requests, too. Not for everyone's eyes."""
    disable_log_requests: bool = False
    """No line in the log for each request."""
    uvicorn_log_level: LogLevel = "warning"
    """What the HTTP library itself logs."""
    timeout_keep_alive: int = 5
    """Seconds an idle connection is kept."""

    def checked(self) -> "ServerArgs":
        """These options if each is in range.

        Raises:
            InvalidInput: one is not, or two contradict each other.
        """
        _check_range("port", self.port, 0, 65535)
        _check_range("max_request_bytes", self.max_request_bytes, 1, None)
        _check_range("timeout_keep_alive", self.timeout_keep_alive, 0, MAX_SECONDS)
        _check_range("ssl_cert_reqs", self.ssl_cert_reqs, 0, 2)
        for name in ("max_queued_requests", "max_queued_tokens", "max_wide_logprobs"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 1, None)
        for name, least in (("drain_timeout", 0.0), ("heartbeat_timeout", 0.1)):
            if not least <= getattr(self, name) <= MAX_SECONDS:
                raise InvalidInput(
                    f"{name}={getattr(self, name)!r} must be a number of seconds between {least:g} and {MAX_SECONDS}"
                )
        for field in fields(self):
            if getattr(self, field.name) == "" and field.name != "root_path":
                raise InvalidInput(f"{field.name}='' is empty; leave it out or give a value")
        if self.root_path and _ROOT_PATH.fullmatch(self.root_path) is None:
            raise InvalidInput(
                f"root_path={short_repr(self.root_path)} is no path of a URL: it must begin with one slash, such as "
                "/llm, and have visible ASCII characters without ? and #; write others as %XX, in hexadecimal"
            )
        self._check_cors()
        if "" in self.served_model_name:
            raise InvalidInput("served_model_name='' is empty; leave it out or give a name")
        if (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_keyfile_password) and not self.ssl_certfile:
            raise InvalidInput("ssl_keyfile, ssl_ca_certs and ssl_keyfile_password need a certificate: ssl_certfile")
        return self

    def _check_cors(self) -> None:
        """Refuse lists that cannot be read, and those that have no effect."""
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            if "" in parse_texts(name, getattr(self, name)):
                raise InvalidInput(f"{name}='' is empty; leave it out or give a value")
        if not self.allowed_origins:
            for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
                if getattr(self, name):
                    raise InvalidInput(f"{name} has no effect without allowed_origins; give both or leave it out")

    def read_api_keys(self) -> tuple[str, ...]:
        """The keys of both options, each once; none: the server is open.

        Raises:
            InvalidInput: the file cannot be read or has no key, or a key cannot be sent in a header.
        """
        keys = [*self.api_key]
        if self.api_key_file is not None:
            keys += _read_key_file(Path(self.api_key_file))
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidInput("api_key: a key must be visible ASCII characters without spaces; change it")
        if self.cache_isolation == "key" and not keys:
            raise InvalidInput('cache_isolation="key" needs keys; give --api-key or --api-key-file')
        return tuple(dict.fromkeys(keys))


def parse_texts(name: str, values: Sequence[str]) -> list[str]:
    """The values of an option that may be repeated; each may be a JSON list, too, as vLLM takes them."""
    texts: list[str] = []
    for value in values:
        if not value.startswith("["):
            texts.append(value)
            continue
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        if not isinstance(parsed, list) or not all(isinstance(entry, str) for entry in parsed):
            raise InvalidInput(f"{name}={short_repr(value)} is no JSON list of texts; repeat the option instead")
        texts += parsed
    return texts


def _read_key_file(file: Path) -> list[str]:
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(
            f"api_key_file={short_repr(str(file), 200)} cannot be read: {printable(str(error))}; check the file"
        ) from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidInput(f"api_key_file={short_repr(str(file), 200)} holds no key; write one a line")
    return keys


def _check_range(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidInput(f"{name}={short_repr(value)} must be {limit}")
