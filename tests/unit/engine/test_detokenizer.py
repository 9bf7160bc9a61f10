"""IncrementalDetokenizer: what comes out token by token is what a whole decode gives, cut where a stop ends it."""

import functools
import random
import re
import time
import unicodedata

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from octavo.engine import detokenizer as module
from octavo.engine import stop_search
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.protocol.sampling_params import SamplingParams
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

TEXTS = (
    "ďábelské 👋 日本",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag",
    "e\u0301a\u0300 o\u0308 combining",
    "日本語のテキストと中文文本。한국어",
    "שלום עולם مرحبا بالعالم",
    "ภาษาไทย हिन्दी မြန်မာ កាន់តែពិសេស",
    "𐍈𐍉𒀀𓀀 rare ꙮ ﷽",
    "  leading\n\n\ttabs   and spaces ",
    "a \ufffd replacement of its own",
    "def f(x):\n    return x ** 2  # 1234567\n",
)
VOCABULARIES = ("smollm2", "qwen05", "llama-spm")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = len(BYTES)
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_LEVEL = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + rank) for rank, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""The character that byte-level BPE writes for each byte: itself if it prints, else the next from U+0100 on."""
_BYTES_OF = {char: byte for byte, char in _BYTE_LEVEL.items()}
load = functools.lru_cache(load_tokenizer)


@pytest.fixture(params=VOCABULARIES)
def real_tokenizer(request, model_path):
    name = request.param
    return load(model_path("vocab") / "ggml-vocab-llama-spm.gguf" if name == "llama-spm" else model_path(name))


@pytest.fixture
def llama_spm(model_path):
    return load(model_path("vocab") / "ggml-vocab-llama-spm.gguf")


@functools.cache
def byte_tokenizer():
    """One token a byte, and </s>."""
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, eos_token_ids=[EOS])


def plain(**options):
    return SamplingParams(max_tokens=None, **options)


def stream(tokenizer, ids, params=None, prompt=(), size=1):
    """All deltas, the stop string found, and the detokenizer."""
    detokenizer = IncrementalDetokenizer(tokenizer, list(prompt), params or plain())
    deltas, stop = [], None
    for start in range(0, len(ids), size):
        stop = detokenizer.update(ids[start : start + size], False)
        if stop is not None:
            break
        deltas.append(detokenizer.next_text(delta=True))
    if stop is None:
        stop = detokenizer.finish()
    deltas.append(detokenizer.next_text(delta=True))
    return deltas, stop, detokenizer


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


class TestRealVocabularies:
    @pytest.mark.parametrize("text", TEXTS)
    @pytest.mark.parametrize("size", [1, 3])
    def test_joined_deltas_are_the_whole_decode(self, real_tokenizer, text, size):
        ids = encode(real_tokenizer, text)
        deltas, _, detokenizer = stream(real_tokenizer, ids, size=size)
        assert "".join(deltas) == detokenizer.text == real_tokenizer.decode(ids)
        assert unicodedata.normalize("NFC", detokenizer.text) == unicodedata.normalize("NFC", text)
        if "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas)

    @pytest.mark.parametrize("text", TEXTS)
    def test_behind_a_prompt_the_deltas_are_what_the_prompt_lacks(self, real_tokenizer, text):
        prompt = encode(real_tokenizer, "Once upon a time, far away, there lived:")
        ids = encode(real_tokenizer, text)
        deltas, _, _ = stream(real_tokenizer, ids, prompt=prompt)
        assert "".join(deltas) == real_tokenizer.decode(prompt + ids)[len(real_tokenizer.decode(prompt)) :]

    @pytest.mark.parametrize("text", [text for text in TEXTS if "\ufffd" not in text])
    def test_a_prompt_may_end_inside_a_character(self, real_tokenizer, text):
        """The output shows the character it completes and nothing of the prompt."""
        ids = encode(real_tokenizer, text)
        encoded = [_bytes_of(real_tokenizer, token_id) for token_id in ids]
        whole = b"".join(encoded).decode()
        for cut in range(1, len(ids)):
            before = b"".join(encoded[:cut]).decode(errors="ignore")
            deltas, _, _ = stream(real_tokenizer, ids[cut:], prompt=ids[:cut])
            assert "".join(deltas) == whole[len(before) :], cut

    def test_special_tokens_are_left_out_or_shown(self, model_path):
        tokenizer = load(model_path("smollm2"))
        ids = encode(tokenizer, "a<|im_end|> b")
        assert "".join(stream(tokenizer, ids)[0]) == "a b"
        assert "".join(stream(tokenizer, ids, plain(skip_special_tokens=False))[0]) == "a<|im_end|> b"

    @pytest.mark.parametrize("seed", range(4))
    def test_random_tokens_are_decoded_as_a_whole_decode_does(self, model_path, seed):
        tokenizer, rng = load(model_path("smollm2")), random.Random(seed)
        for _ in range(100):
            prompt, ids = ([rng.randrange(len(tokenizer)) for _ in range(rng.randrange(n))] for n in (12, 60))
            deltas, _, _ = stream(tokenizer, ids, prompt=prompt)
            before = tokenizer.decode(prompt)
            broken = len(before) - len(before.rstrip("\ufffd"))
            expected = tokenizer.decode(prompt + ids)[len(before) - broken :].rstrip("\ufffd")
            led = min(broken, len(expected) - len(expected.lstrip("\ufffd")))
            assert "".join(deltas) == expected[led:]

    def test_single_bytes_of_every_script(self, real_tokenizer):
        """Byte tokens alone: every character is split over as many tokens as it has bytes."""
        vocabulary, text = real_tokenizer.get_vocab(), "ďábelské👋日本"
        if "<0x00>" in vocabulary:
            ids = [vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()]
        else:
            ids = [vocabulary[char] for char in _as_bytes(text)]
        deltas, _, _ = stream(real_tokenizer, ids)
        assert [delta for delta in deltas if delta] == list(text)


class TestSentencePiece:
    def test_leading_spaces_of_words_survive(self, llama_spm):
        prompt, ids = encode(llama_spm, "Hello"), encode(llama_spm, "big world")
        assert stream(llama_spm, ids, prompt=prompt)[0] == [" big", " world", ""]

    @pytest.mark.parametrize("num_skipped", [1, 10, 40, 100])
    def test_a_space_survives_skipped_special_tokens(self, llama_spm, num_skipped):
        first, second, skipped = encode(llama_spm, "Hello"), encode(llama_spm, "world"), [2] * num_skipped
        assert "".join(stream(llama_spm, [*first, *skipped, *second])[0]) == "Hello world"
        if num_skipped <= 10:
            assert "".join(stream(llama_spm, second, prompt=[*first, *skipped])[0]) == " world"

    def test_without_a_prompt_the_space_of_the_encoding_is_not_shown(self, llama_spm):
        assert "".join(stream(llama_spm, encode(llama_spm, "big world"))[0]) == "big world"

    def test_bytes_that_break_a_finished_character_do_not_kill_the_request(self, llama_spm):
        """The library decodes a run of bytes as one, so a bad byte takes back what was shown: it raises."""
        vocabulary = llama_spm.get_vocab()
        ids = [vocabulary[token] for token in ("<0xC3>", "<0xA9>", "<0x80>", "▁so", "▁on")]
        assert "".join(stream(llama_spm, ids)[0]) == "é\ufffd so on"


class TestBrokenBytes:
    def test_a_text_that_ends_inside_a_character_shows_whole_characters_only(self):
        ids = encode(byte_tokenizer(), "ab日")[:-1]
        assert "".join(stream(byte_tokenizer(), ids)[0]) == "ab"

    def test_whole_characters_of_an_unfinished_token_are_shown_at_the_end(self):
        space_and_a_byte = f"Ġ{_as_bytes('日')[0]}"
        backend = tokenizers.Tokenizer(models.BPE({"a": 0, space_and_a_byte: 1}, []))
        backend.decoder = decoders.ByteLevel()
        assert stream(Tokenizer(backend), [0, 1])[0] == ["a", "", " "]
        assert stream(Tokenizer(backend), [1, 0], prompt=[0, 1])[0] == ["", " \ufffda", ""]

    def test_bytes_of_a_prompt_that_are_never_completed_are_not_shown(self):
        ids = encode(byte_tokenizer(), "日")[:2]
        assert "".join(stream(byte_tokenizer(), encode(byte_tokenizer(), "ok"), prompt=ids)[0]) == "ok"

    def test_a_long_run_of_bad_bytes_comes_out_while_it_runs(self):
        bad = BYTES.index(_as_bytes("日")[1])
        deltas, _, detokenizer = stream(byte_tokenizer(), [bad] * 500 + encode(byte_tokenizer(), "!"))
        assert detokenizer.text == "\ufffd" * 500 + "!"
        assert sum(map(len, deltas[:-2])) > 400

    def test_tokens_that_all_end_inside_a_character_come_out_while_they_run(self):
        text = "日" * 200
        pieces = [_as_bytes("日")[0], _as_bytes("日")[1:] + _as_bytes("日")[0], _as_bytes("日")[1:]]
        backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
        backend.decoder = decoders.ByteLevel()
        deltas, _, detokenizer = stream(Tokenizer(backend), [0] + [1] * 199 + [2])
        assert detokenizer.text == text
        assert max(map(len, deltas)) <= module.MAX_PENDING + 1

    @pytest.mark.parametrize(("failing_calls", "shown"), [({2}, "abcd"), ({2, 3}, "acd"), ({1, 3, 5}, "abcd")])
    def test_a_failing_decode_stream_is_replaced(self, monkeypatch, failing_calls, shown):
        """Call 2 decodes `b`; if it fails, call 3 tries again in a new stream; only then the token is given up."""
        calls = iter(range(1, 100))

        class Failing:
            def __init__(self, **options):
                self.stream = DecodeStream(**options)

            def step(self, tokenizer, token):
                if next(calls) in failing_calls:
                    raise Exception("Invalid prefix encountered")
                return self.stream.step(tokenizer, token)

        monkeypatch.setattr(module, "DecodeStream", Failing)
        assert "".join(stream(byte_tokenizer(), encode(byte_tokenizer(), "abcd"))[0]) == shown

    @settings(max_examples=300, deadline=None)
    @given(prompt=st.binary(max_size=12), output=st.binary(max_size=90))
    def test_any_bytes_come_out_as_a_whole_decode_shows_them(self, prompt, output):
        tokenizer = byte_tokenizer()
        prompt_ids, ids = _byte_ids(prompt), _byte_ids(output)
        text = "".join(stream(tokenizer, ids, prompt=prompt_ids)[0])
        before = prompt.decode(errors="replace")
        broken = len(before) - len(before.rstrip("\ufffd"))
        whole = (prompt + output).decode(errors="replace")[len(before) - broken :].rstrip("\ufffd")
        assert text == whole[min(broken, len(whole) - len(whole.lstrip("\ufffd"))) :]


class TestStopStrings:
    def test_nothing_of_the_stop_string_leaks_and_nothing_before_it_is_lost(self):
        deltas, stop, detokenizer = stream(
            byte_tokenizer(), encode(byte_tokenizer(), "ABCDEFGHIJKL"), plain(stop="DEFGHIJ")
        )
        assert ("".join(deltas), stop, detokenizer.text, detokenizer.num_tokens) == ("ABC", "DEFGHIJ", "ABC", 10)
        assert deltas[:3] == ["A", "B", "C"]

    @pytest.mark.parametrize("size", range(1, 13))
    def test_wherever_tokens_split_it(self, size):
        for lead in range(7):
            text = "x" * lead + "ABCDEFGHIJKL"
            deltas, stop, _ = stream(byte_tokenizer(), encode(byte_tokenizer(), text), plain(stop="DEFGHIJ"), size=size)
            assert ("".join(deltas), stop) == ("x" * lead + "ABC", "DEFGHIJ")

    def test_on_real_tokens_at_every_place(self, real_tokenizer):
        text = "The quick brown fox 👋 jumps over 日本 dogs"
        prompt = encode(real_tokenizer, "Say:")
        ids = encode(real_tokenizer, text)
        shown = real_tokenizer.decode(prompt + ids)[len(real_tokenizer.decode(prompt)) :]
        for start in range(len(shown) - 3):
            stop = shown[start : start + 4]
            deltas, found, _ = stream(real_tokenizer, ids, plain(stop=stop), prompt)
            assert ("".join(deltas), found) == (shown[: shown.find(stop)], stop)

    @pytest.mark.parametrize(
        ("stops", "text", "shown", "found"),
        [
            (["EFG", "DEFGH"], "ABCDEFGHI", "ABCD", "EFG"),  # ends first, though it starts later
            (["FG", "DEFG"], "ABCDEFGHI", "ABC", "DEFG"),  # equal ends: the longest, so that none of either is shown
            (["zzz", "CD"], "ABCDE", "AB", "CD"),
            (["aab"], "aaaab", "aa", "aab"),
            (["日本"], "x日本y", "x", "日本"),
        ],
    )
    def test_of_several_the_one_that_ends_first(self, stops, text, shown, found):
        for size in (1, 2, 3, len(text.encode())):
            tokens = encode(byte_tokenizer(), text)
            deltas, stop, _ = stream(byte_tokenizer(), tokens, plain(stop=stops), size=size)
            assert ("".join(deltas), stop) == (shown, found)

    def test_a_possible_beginning_is_held_back_and_released_when_it_is_none(self):
        ids = encode(byte_tokenizer(), "aSTaSTOx")
        deltas, stop, _ = stream(byte_tokenizer(), ids, plain(stop="STOP"))
        assert stop is None
        assert deltas == ["a", "", "", "STa", "", "", "", "STOx", ""]

    def test_what_is_held_back_comes_at_the_end(self):
        deltas, _, _ = stream(byte_tokenizer(), encode(byte_tokenizer(), "aSTO"), plain(stop="STOP"))
        assert deltas == ["a", "", "", "", "STO"]

    def test_cumulative_text_holds_back_too(self):
        detokenizer = IncrementalDetokenizer(byte_tokenizer(), [], plain(stop="STOP"))
        shown = []
        for token in encode(byte_tokenizer(), "abST!"):
            detokenizer.update([token], False)
            shown.append(detokenizer.next_text(delta=False))
        assert shown == ["a", "ab", "ab", "ab", "abST!"]

    @pytest.mark.parametrize(("min_tokens", "shown"), [(0, "a"), (2, "a"), (3, "aSTb"), (5, "aSTb"), (6, "aSTbSTc")])
    def test_one_completed_within_min_tokens_does_not_count(self, min_tokens, shown):
        """The stop string is completed by tokens 3, 6 and 9."""
        text = "aSTbSTcST"
        deltas, stop, _ = stream(
            byte_tokenizer(), encode(byte_tokenizer(), text), plain(stop="ST", min_tokens=min_tokens)
        )
        assert ("".join(deltas), stop) == (shown, "ST")

    def test_one_that_only_begins_within_min_tokens_counts(self):
        ids = encode(byte_tokenizer(), "aSTOP")
        deltas, stop, _ = stream(byte_tokenizer(), ids, plain(stop="STOP", min_tokens=4))
        assert ("".join(deltas), stop) == ("a", "STOP")

    def test_the_prompt_is_not_searched(self):
        prompt, ids = encode(byte_tokenizer(), "xS"), encode(byte_tokenizer(), "TOPy")
        deltas, stop, _ = stream(byte_tokenizer(), ids, plain(stop="STOP"), prompt)
        assert ("".join(deltas), stop) == ("TOPy", None)

    @settings(max_examples=400, deadline=None)
    @given(
        text=st.text("abc日", max_size=30),
        stops=st.lists(st.text("abc日", min_size=1, max_size=5), min_size=1, max_size=4),
        min_tokens=st.integers(0, 12),
        size=st.integers(1, 5),
    )
    def test_any_stops_in_any_text(self, text, stops, min_tokens, size):
        """Against the definition: look at every end in order; nothing handed out is ever taken back."""
        tokens = encode(byte_tokenizer(), text)
        params = plain(stop=stops, min_tokens=min_tokens)
        deltas, stop, detokenizer = stream(byte_tokenizer(), tokens, params, size=size)
        shown, found = _stop_by_definition(text, stops, min_tokens)
        assert ("".join(deltas), detokenizer.text, stop) == (shown, shown, found)

    def test_one_that_the_last_whole_characters_complete_counts(self):
        """A token that ends inside a character waits; when the request ends its whole characters complete the stop."""
        half = f"P{_as_bytes('日')[0]}"
        backend = tokenizers.Tokenizer(models.BPE({"S": 0, "T": 1, "O": 2, half: 3}, []))
        backend.decoder = decoders.ByteLevel()
        deltas, stop, detokenizer = stream(Tokenizer(backend), [0, 1, 2, 3], plain(stop="STOP"))
        assert ("".join(deltas), stop, detokenizer.text) == ("", "STOP", "")
        assert "".join(stream(Tokenizer(backend), [0, 1, 2, 3], plain(stop="X"))[0]) == "STOP"

    @pytest.mark.parametrize("size", range(1, 13))
    def test_kept_with_the_text_up_to_its_end(self, size):
        params = plain(stop="DEFGHIJ", include_stop_str_in_output=True)
        deltas, stop, _ = stream(byte_tokenizer(), encode(byte_tokenizer(), "ABCDEFGHIJKL"), params, size=size)
        assert ("".join(deltas), stop) == ("ABCDEFGHIJ", "DEFGHIJ")

    def test_kept_needs_no_holding_back(self):
        params = plain(stop="STOP", include_stop_str_in_output=True)
        assert stream(byte_tokenizer(), encode(byte_tokenizer(), "aSTOx"), params)[0] == [*"aSTOx", ""]

    @pytest.mark.parametrize("text", TEXTS)
    def test_multilingual_texts_are_cut_at_every_place(self, real_tokenizer, text):
        """Whatever the token borders: cumulative texts grow, joined deltas equal them, and end before the stop."""
        ids = encode(real_tokenizer, text)
        shown = real_tokenizer.decode(ids)
        for start in range(0, len(shown), 3):
            stop = shown[start : start + 3]
            for keep in (False, True):
                params = plain(stop=stop, include_stop_str_in_output=keep)
                deltas, found, detokenizer = stream(real_tokenizer, ids, params)
                assert found == stop
                end = shown.find(stop) + (len(stop) if keep else 0)
                assert "".join(deltas) == detokenizer.text == shown[:end]


class TestStopExpressions:
    @pytest.mark.parametrize("size", [1, 3, 20])
    @pytest.mark.parametrize(
        ("pattern", "text", "shown"),
        [
            (r"\d+", "abc 123 def", "abc "),
            (r"\bEND\b", "BENDED END", "BENDED "),
            (r"(?i)stop", "please StOp now", "please "),
            (r"(?m)^Q:", "A: Q: b\nQ: c", "A: Q: b\n"),
            (r"(\w)\1", "abcdee", "abcd"),
            (r"日.本", "x日y本z", "x"),
            (r"(?<=a)b", "bbab", "bba"),
            (r"(?=END)", "abEND", "ab"),
            (r"<tool>(?s:.*)</tool>", "a <tool>x\ny</tool> b", "a "),
        ],
    )
    def test_text_ends_before_the_match(self, pattern, text, shown, size):
        ids = encode(byte_tokenizer(), text)
        deltas, stop, detokenizer = stream(byte_tokenizer(), ids, plain(stop_regex=pattern), size=size)
        assert ("".join(deltas), stop, detokenizer.text) == (shown, pattern, shown)

    def test_what_may_become_a_match_is_held_back(self):
        deltas, stop, _ = stream(byte_tokenizer(), encode(byte_tokenizer(), "a12-b12-3"), plain(stop_regex=r"\d+-\d"))
        assert deltas == ["a", "", "", "", "12-b", "", "", "", ""]
        assert stop == r"\d+-\d"

    def test_kept_with_the_text_up_to_the_end_of_the_match(self):
        params = plain(stop_regex=r"E(ND|OF)", include_stop_str_in_output=True)
        deltas, stop, _ = stream(byte_tokenizer(), encode(byte_tokenizer(), "abENDcd"), params)
        assert (deltas, stop) == ([*"abEN", "D"], r"E(ND|OF)")

    def test_kept_never_takes_back_text_when_the_match_ends_early(self):
        params = plain(stop_regex=r"a(?=.*END)", include_stop_str_in_output=True)
        deltas, stop, detokenizer = stream(byte_tokenizer(), encode(byte_tokenizer(), "xa long END"), params)
        assert (stop, detokenizer.text) == (r"a(?=.*END)", "xa long EN")
        assert "".join(deltas) == detokenizer.text

    def test_matches_within_min_tokens_are_passed_over(self):
        ids = encode(byte_tokenizer(), "1a22b3")
        deltas, stop, _ = stream(byte_tokenizer(), ids, plain(stop_regex=r"\d+", min_tokens=4))
        assert ("".join(deltas), stop) == ("1a22b", r"\d+")

    def test_of_a_string_and_an_expression_the_one_that_ends_first(self):
        ids = encode(byte_tokenizer(), "abcde")
        for stop, pattern, shown, found in (
            ("cd", "b.d", "a", "b.d"),
            ("bc", "c.", "a", "bc"),
            ("de", "bcd", "a", "bcd"),
        ):
            deltas, reason, _ = stream(byte_tokenizer(), ids, plain(stop=stop, stop_regex=pattern))
            assert ("".join(deltas), reason) == (shown, found)

    def test_expression_without_end_is_given_up(self, monkeypatch):
        monkeypatch.setattr(stop_search, "TIME_LIMIT", 0.05)
        detokenizer = IncrementalDetokenizer(byte_tokenizer(), [], plain(stop_regex="(a|aa)+c"))
        with pytest.raises(stop_search.SearchTimeout, match=r"\(a\|aa\)\+c.*more than 0.05 s"):
            detokenizer.update(encode(byte_tokenizer(), "a" * 60 + "b"), False)

    def test_all_samples_of_a_request_share_the_time_and_end_with_it(self, monkeypatch):
        monkeypatch.setattr(stop_search, "TIME_LIMIT", 0.05)
        budget = stop_search.SearchBudget()
        params = plain(stop_regex="(a|aa)+c")
        samples = [IncrementalDetokenizer(byte_tokenizer(), [], params, budget) for _ in range(8)]
        started = time.process_time()
        for text in ("a" * 60 + "b", *["b"] * 7):
            with pytest.raises(stop_search.SearchTimeout, match="takes more than 0"):
                samples.pop().update(encode(byte_tokenizer(), text), False)
        assert time.process_time() - started < 1

    def test_many_quick_searches_use_up_no_time(self, monkeypatch):
        monkeypatch.setattr(stop_search, "TIME_LIMIT", 0.0001)
        monkeypatch.setattr(stop_search, "FREE_TIME", 10.0)
        text = "abc" * 300
        deltas, stop, _ = stream(byte_tokenizer(), encode(byte_tokenizer(), text), plain(stop_regex="(a|b)+x"))
        assert ("".join(deltas), stop) == (text, None)

    def test_longest_match_is_bounded_and_so_is_what_is_held_back(self, monkeypatch):
        monkeypatch.setattr(stop_search, "LOOK_BACK", 10)
        ids = encode(byte_tokenizer(), "x<" + "y" * 20 + ">")
        deltas, stop, _ = stream(byte_tokenizer(), ids, plain(stop_regex="<.*>"))
        assert (stop, "".join(deltas)) == (None, "x<" + "y" * 20 + ">")
        deltas, stop, _ = stream(byte_tokenizer(), encode(byte_tokenizer(), "x<yyyyyyy>"), plain(stop_regex="<.*>"))
        assert ("".join(deltas), stop) == ("x", "<.*>")

    @settings(max_examples=300, deadline=None)
    @given(
        text=st.text("ab1日\n", max_size=25),
        patterns=st.lists(
            st.sampled_from(["a+b", "[ab]1", r"1\d*a", "(a|ab)(1|b1)", "b(?=1)", "(?<!a)b", "a.*?1", "^b", "日|aa"]),
            min_size=1,
            max_size=3,
        ),
        stops=st.lists(st.text("ab1", min_size=2, max_size=3), max_size=1),
        min_tokens=st.integers(0, 10),
        keep=st.booleans(),
    )
    def test_any_expressions_in_any_text(self, text, patterns, stops, min_tokens, keep):
        """Against the definition: after every token all text is searched anew; what was handed out is never cut."""
        ids = encode(byte_tokenizer(), text)
        params = plain(stop=stops, stop_regex=patterns, min_tokens=min_tokens, include_stop_str_in_output=keep)
        deltas, stop, detokenizer = stream(byte_tokenizer(), ids, params)
        shown, found = _expressions_by_definition(text, patterns, stops, min_tokens, keep)
        assert ("".join(deltas), detokenizer.text, stop) == (shown, shown, found)


class TestSpacesBetweenSpecialTokens:
    @staticmethod
    def words():
        """A tokenizer that writes spaces between all tokens, the added ones included."""
        backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
        backend.add_special_tokens(["<x>", "<y>"])
        return Tokenizer(backend)

    @pytest.mark.parametrize(
        ("prompt", "ids", "kept", "left_out"),
        [
            ([], [0, 2, 3, 2, 1, 0], "a <x> <y> <x> b a", "a <x><y><x> b a"),
            ([0, 2], [3, 0, 3], " <y> a <y>", "<y> a <y>"),
            ([0], [2, 2], " <x> <x>", " <x><x>"),
        ],
    )
    def test_are_kept_or_left_out(self, prompt, ids, kept, left_out):
        for spaces, shown in ((True, kept), (False, left_out)):
            params = plain(skip_special_tokens=False, spaces_between_special_tokens=spaces)
            assert "".join(stream(self.words(), ids, params, prompt)[0]) == shown

    def test_where_none_are_written_nothing_changes(self):
        for spaces in (True, False):
            params = plain(skip_special_tokens=False, spaces_between_special_tokens=spaces)
            assert "".join(stream(byte_tokenizer(), [0, EOS, EOS, 0], params)[0]) == "!</s></s>!"


class TestEnds:
    def test_token_that_ends_the_request_is_shown_if_asked_for(self):
        tokenizer, ids = byte_tokenizer(), encode(byte_tokenizer(), "abc")
        for skip, last, shown in ((True, ids[-1], "abc"), (True, EOS, "ab"), (False, EOS, "ab</s>")):
            params = plain(skip_special_tokens=skip, include_stop_str_in_output=True)
            detokenizer = IncrementalDetokenizer(tokenizer, [], params)
            assert detokenizer.update([*ids[:2], last], True) is None
            detokenizer.finish()
            assert detokenizer.next_text(delta=False) == shown

    def test_a_token_that_ends_the_request_is_not_shown(self):
        tokenizer, ids = byte_tokenizer(), encode(byte_tokenizer(), "abc")
        for params in (plain(), plain(skip_special_tokens=False)):
            for last in (EOS, ids[-1]):
                detokenizer = IncrementalDetokenizer(tokenizer, [], params)
                assert detokenizer.update([*ids[:2], last], True) is None
                assert detokenizer.finish() is None
                assert detokenizer.next_text(delta=False) == "ab"
                assert detokenizer.num_tokens == 3

    def test_without_detokenize_there_is_no_text(self):
        deltas, stop, detokenizer = stream(byte_tokenizer(), encode(byte_tokenizer(), "abc"), plain(detokenize=False))
        assert (set(deltas), stop, detokenizer.text, detokenizer.num_tokens) == ({""}, None, "", 3)

    def test_nothing_is_handed_out_twice(self):
        detokenizer = IncrementalDetokenizer(byte_tokenizer(), [], plain())
        detokenizer.update(encode(byte_tokenizer(), "abc"), False)
        assert [detokenizer.next_text(delta=True) for _ in range(2)] == ["abc", ""]
        detokenizer.finish()
        assert [detokenizer.next_text(delta=True) for _ in range(2)] == ["", ""]


def _stop_by_definition(text, stops, min_tokens):
    for end in range(1, len(text) + 1):
        if len(text[:end].encode()) > min_tokens:
            matches = [stop for stop in stops if text[:end].endswith(stop)]
            if matches:
                stop = max(matches, key=len)
                return text[: end - len(stop)], stop
    return text, None


def _expressions_by_definition(text, patterns, stops, min_tokens, keep):
    """(text shown, stop) by a search of the whole text after every token (of the byte tokenizer)."""
    passed = dict.fromkeys(patterns, 0)
    seen = 0
    for character_end in range(1, len(text) + 1):
        so_far = text[:character_end]
        found = []
        for pattern in patterns:
            compiled = re.compile(pattern)
            while (match := compiled.search(so_far, passed[pattern])) is not None:
                if len(so_far.encode()) > min_tokens:
                    found.append((match.end(), match.start(), pattern))
                    break
                passed[pattern] = max(match.end(), match.start() + 1)
        if len(so_far.encode()) > min_tokens:
            found += [(character_end, character_end - len(stop), stop) for stop in stops if so_far.endswith(stop)]
        if found:
            end, start, reason = min(found)
            return (text[: max(end, seen)] if keep else text[:start]), reason
        seen = character_end
    return text, None


def _as_bytes(text):
    """`text` as the characters that byte-level BPE writes for its bytes."""
    return "".join(_BYTE_LEVEL[byte] for byte in text.encode())


def _bytes_of(tokenizer, token_id):
    token = tokenizer.backend.id_to_token(token_id)
    if tokenizer.backend.token_to_id("<0x00>") is None:
        return bytes(_BYTES_OF[char] for char in token)
    return bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()


def _byte_ids(data):
    return [BYTES.index(_BYTE_LEVEL[byte]) for byte in data]
