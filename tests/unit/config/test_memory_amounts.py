import pytest

from octavo.config.memory import format_bytes, parse_bytes
from octavo.errors import InvalidInput


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1),
        (1048576, 2**20),
        ("1048576", 2**20),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        (" 1.5 GiB ", 3 * 2**29),
        ("64KiB", 64 * 2**10),
        ("1TiB", 2**40),
        ("3KB", 3000),
        ("250MB", 250 * 10**6),
        ("1.5GB", 1_500_000_000),
        ("7 B", 7),
    ],
)
def test_amounts_are_read_in_every_unit(given, expected):
    assert parse_bytes(given, "kv_cache_memory") == expected


@pytest.mark.parametrize(
    "given",
    ["", "GiB", "2 G", "2GiBs", "-2GiB", "1e9", "nan", "1,5GiB", "2GiB 3", "²GiB", True, 1.5, None, b"2GiB", [2]],
)
def test_what_is_no_amount_is_refused_by_the_options_name(given):
    with pytest.raises(InvalidInput, match="kv_cache_memory="):
        parse_bytes(given, "kv_cache_memory")


HUGE = [
    2**60 + 1,
    10**400,
    10**5000,
    -(10**5000),
    "9" * 20,
    "9" * 400 + "GiB",
    "9" * 5000,
    "9" * 400 + ".5GiB",
    "2000000TiB",
]


@pytest.mark.parametrize("given", HUGE, ids=[str(index) for index in range(len(HUGE))])
def test_more_than_any_machine_has_is_refused_in_one_sentence(given):
    with pytest.raises(InvalidInput, match="kv_cache_memory=") as refusal:
        parse_bytes(given, "kv_cache_memory")
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("given", [0, -1, "0", "0GiB", "0.5B"])
def test_less_than_a_byte_is_refused(given):
    with pytest.raises(InvalidInput, match=r"kv_cache_memory=.* at least 1"):
        parse_bytes(given, "kv_cache_memory")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (98362432, "93.8 MiB"),
        (2**31, "2 GiB"),
        (5 * 2**40, "5 TiB"),
        (2**60, "1 EiB"),
        (2**80, "2**80 B"),
        (10**400, "2**1328 B"),
        (-(2**10000), "-2**10000 B"),
    ],
)
def test_amounts_are_shown_with_three_digits(amount, text):
    assert format_bytes(amount) == text
