import socket
import subprocess
import sys

import pytest

from octavo.entrypoints.cli.main import main
from octavo.entrypoints.server import listeners
from octavo.entrypoints.server.listeners import bind, bound_listener, describe_address, make_tls, warn_if_open
from octavo.entrypoints.server.options import ServerArgs, parse_texts
from octavo.errors import InvalidInput


def refused(capsys, *flags: str) -> str:
    """The one line that `octavo serve` ends with when it refuses these flags."""
    assert main(["serve", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--root-path", "llm"), "root_path"),
        *(
            (("--root-path", path), f"root_path={path!r} is no path of a URL")
            for path in ("/a b", "/é", "/%", "/a%2", "/a%zz", "//a", "/a//b", "/a?b", "/a#b", "/a\n")
        ),
        (("--port", "70000"), "port=70000"),
        (("--port", "-1"), "port=-1"),
        *(
            ((flag, value), f"{flag[2:].replace('-', '_')}={float(value)!r} must be a number of seconds")
            for flag in ("--drain-timeout", "--heartbeat-timeout")
            for value in ("-1", "nan", "inf", "-inf", "1e300", "1e7")
        ),
        (("--timeout-keep-alive", "99999999"), "timeout_keep_alive"),
        (("--drain-timeout", "soon"), "drain_timeout='soon' must be a number"),
        (("--port", "x"), "port='x' must be an integer"),
        (("--enforce-eager",), "enforce_eager=True is not built yet"),
        (("--tool-call-parser", "hermes"), "--tool-call-parser is not built yet"),
        (("--max-queued-requests", "0"), "max_queued_requests"),
        (("--max-queued-tokens", "-5"), "max_queued_tokens"),
        (("--max-request-bytes", "0"), "max_request_bytes"),
        (("--served-model-name", ""), "served_model_name"),
        (("--block-size", "7"), "block_size"),
        (("one-model", "--model", "another"), "two models"),
        (("--api-key", ""), "api_key"),
        (("--api-key", "a b"), "api_key"),
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("--api-key-file", "/dev/null"), "no key"),
        (("--cache-isolation", "key"), "--api-key"),
        (("--ssl-certfile", "/nowhere.pem"), "ssl_certfile='/nowhere.pem' is no file"),
        (("--ssl-certfile", __file__), "the certificate cannot be used"),
        (("--ssl-keyfile", __file__), "ssl_certfile"),
        (("--ssl-cert-reqs", "3"), "ssl_cert_reqs"),
        (("--host", "no.such.host.invalid"), "no address to listen at"),
        (("--uds", "/nowhere/socket"), "uds='/nowhere/socket' cannot be listened at"),
        (("--uds", ""), "uds"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(capsys, flags, names):
    assert names in refused(capsys, "--port", "0", *flags)


def test_a_refusal_imports_neither_torch_nor_the_web_framework():
    code = (
        "import sys; from octavo.entrypoints.cli.main import main; main(['serve', '--uds', '/nowhere/socket']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'fastapi', 'uvicorn')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_taken_port_is_refused_and_a_free_one_bound():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidInput, match="cannot listen at"):
            bind(ServerArgs(host="127.0.0.1", port=taken.getsockname()[1]))
    with bound_listener(ServerArgs(host="127.0.0.1", port=0)) as listener:
        assert describe_address(listener, is_tls=True).startswith("https://127.0.0.1:")


def test_a_socket_s_path_is_taken_over_only_from_a_dead_server(tmp_path):
    path = tmp_path / "socket"
    args = ServerArgs(uds=str(path))
    with bound_listener(args) as listener:
        listener.listen()
        assert describe_address(listener, is_tls=False) == str(path)
        with pytest.raises(InvalidInput, match="uds"):
            bind(args)
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with bound_listener(args):
        assert path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(InvalidInput, match="uds"):
        bind(args)
    assert path.read_text() == "a file of somebody's"


@pytest.mark.parametrize(
    ("host", "keys", "is_open"),
    [("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("127.0.0.1", (), False), ("localhost", (), False)],
)
def test_one_warning_says_that_the_network_can_use_the_server_and_how_to_close_it(host, keys, is_open, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(listeners.logger, "warning", lambda text, *args: said.append(text % args))
    with bound_listener(ServerArgs(host=host, port=0)) as listener:
        warn_if_open(listener, keys)
    assert len(said) == is_open
    assert all("everybody" in text and "--api-key" in text and "--host 127.0.0.1" in text for text in said)


def test_users_of_a_unix_socket_are_not_the_network(tmp_path, monkeypatch):
    monkeypatch.setattr(listeners.logger, "warning", lambda *args: pytest.fail("there is no network"))
    with bound_listener(ServerArgs(uds=str(tmp_path / "socket"))) as listener:
        warn_if_open(listener, ())


def test_without_a_certificate_there_is_no_tls():
    assert make_tls(ServerArgs()) is None


def test_keys_come_from_both_options_once_each(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# comment\n\n  b  \nc\n")
    assert ServerArgs(api_key=("a", "b"), api_key_file=str(file)).read_api_keys() == ("a", "b", "c")
    assert ServerArgs().read_api_keys() == ()


def test_texts_may_be_json_lists_as_well():
    assert parse_texts("allowed_origins", ("a", '["b", "c"]')) == ["a", "b", "c"]
    for bad in ("[1]", "[", '["a"'):
        with pytest.raises(InvalidInput, match="allowed_origins"):
            parse_texts("allowed_origins", (bad,))
