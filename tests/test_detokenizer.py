"""Detokenizer: text while tokens arrive (E9), characters and stop strings that lie across tokens, and what may not be shown yet.

The reference is one decode of all tokens by the tokenizer, cut by `str.find`; where bytes are garbage, Python's own UTF-8 decoder.
"""

import copy
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data import Detokenizer

E9 = "ok 🦙👍🏽 é 汉 done"
SMOLLM2 = Path(__file__).parents[1] / "models/smollm2-135m"
PIECES = [b"say ", b"stop", b" now", b"st", b"op", b"to", b"p!", b"ay st", b"aa", b"aab", b"aaab", b" END", b"say stop END now",
          b" \xf0\x9f", b"\xa6\x99x", b"\xe6\xb1", b"\x89 \xe6", "👍".encode(), "é 汉".encode(), b"\n\nQ", b"\xef\xbf\xbd"]
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 writes these bytes as themselves, the others from U+0100
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
WRITTEN = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + number) for number, byte in enumerate(OTHERS)}
BYTES = [bytes([byte]) for byte in range(256)] + PIECES  # the byte-level tokenizer's ids, in order
EOS = len(BYTES)
PROPERTY = settings(max_examples=250, deadline=None, derandomize=True, database=None)


def wrapped(tokenizer: Tokenizer, **more) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **more)


def byte_level() -> PreTrainedTokenizerFast:
    """Llama 3, Qwen, SmolLM2: any bytes may be a token, also half a character with what stands before it."""
    names = ["".join(WRITTEN[byte] for byte in piece) for piece in BYTES] + ["</s>"]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [("s", "t"), ("o", "p"), ("st", "op")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer)


def pieces_of(extra: list[str]) -> dict[str, int]:
    return {name: at for at, name in enumerate(["<unk>", *extra, *"▁abdeknopst", "▁▁", "st", "op", "▁do", "▁ok", "ne", "</s>"])}


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama 2, Mistral: spaces are part of the next word, the first one goes, unknown characters are byte tokens."""
    merges = [("s", "t"), ("o", "p"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(pieces_of([f"<0x{byte:02X}>" for byte in range(256)]), merges, byte_fallback=True,
                                     unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return wrapped(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """As T5 and many Unigram models: the decoder drops the space of whichever token comes first."""
    names = pieces_of(list("🦙👍🏽é汉"))
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return wrapped(tokenizer)


TOKENIZERS = {make.__name__: make() for make in (byte_level, sentencepiece, metaspace)}
BYTE_LEVEL = TOKENIZERS["byte_level"]


def ids_of(*pieces: bytes) -> list[int]:
    return [EOS if piece == b"</s>" else BYTES.index(piece) for piece in pieces]


def decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cut(text: str, stops: tuple[str, ...]) -> str:
    return text[:min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def watched(tokenizer, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[Detokenizer, int, list[str]]:
    """Push until a stop string is complete: (detokenizer, tokens taken, settled text after each); what is shown only grows."""
    one, seen = Detokenizer(tokenizer, stops), []
    for token in ids:
        stopped = one.push(token)
        seen.append(one.settled)
        assert stopped == one.stopped and one.text.startswith(one.settled)
        if stopped:
            break
    whole = copy.copy(one).close()
    assert all(later.startswith(earlier) for earlier, later in pairwise([*seen, whole])), "text that is out was taken back"
    return one, len(seen), seen


# --- characters


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_e9_increments_join_to_one_decode(tokenizer):
    """E9: a space lost at a token boundary, half an emoji shown as U+FFFD and kept, an end that never comes out."""
    ids = tokenizer.encode(E9, add_special_tokens=False)
    one, taken, seen = watched(tokenizer, ids)
    assert taken == len(ids) and not any("\ufffd" in text for text in seen)
    assert seen[-1] == one.close() == one.close() == one.text == decode(tokenizer, ids) == E9
    assert len(set(seen)) >= 7, "it must come piece by piece"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_e9_a_response_may_be_cut_inside_any_character(kind):
    """E9: an emoji cut after any of its bytes: an exception, a complete character lost with it, or U+FFFD before the end."""
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(E9, add_special_tokens=False)
    inside = 0
    for end in range(len(ids) + 1):
        one, _, seen = watched(tokenizer, ids[:end])
        complete = one.text
        assert "\ufffd" not in complete and E9.startswith(complete)
        closed = one.close()
        assert closed.rstrip("\ufffd") == complete == decode(tokenizer, ids)[:len(complete)]
        cut_off = decode(tokenizer, ids[:end]).endswith("\ufffd")
        assert closed.endswith("\ufffd") == cut_off
        inside += cut_off
        if kind == "byte_level":  # sentencepiece's decoder makes a whole run of bytes U+FFFD, also characters that are out
            assert closed == decode(tokenizer, ids[:end])
    assert inside >= 3 + 3 + 3 + 1 + 2 - 1, "every byte but the last of each character (one piece has é's first alone)"


@pytest.mark.parametrize("garbage", [
    b"\x80", b"\xff\xfe", b"\xf0\x9f", b"\xf0\x9fok", b"ok\xf0\x9f \xa6\x99", b"\xc3(", b"\xed\xa0\x80a", b"\xe6\xb1a\xe6\xb1",
    b"\xf0\x9f\xa6\xf0\x9f\xa6\x99", b"\xc0\xafz", b"a\xef\xbf\xbdb", b"\x89\x89\x89\x89stop", "a\u0301\u200d".encode(), b"\x00"],
    ids=repr)
@pytest.mark.parametrize("stops", [(), ("stop",)], ids=["", "stop"])
def test_garbage_bytes(garbage, stops):
    """Bytes that no text has (a random model, temperature 2): an exception, a hang-up for the rest, bytes after them lost."""
    ids = ids_of(*(bytes([byte]) for byte in garbage))
    one, taken, _ = watched(BYTE_LEVEL, ids, stops)
    assert taken == len(ids)
    assert one.close() == cut(garbage.decode("utf-8", "replace"), stops)


def test_special_tokens_are_no_text():
    """`</s>` in the answer that is graded; a character or stop string that a special token between its halves breaks."""
    half = ids_of(b"a", b"</s>", b"\xe6\xb1", b"</s>", b"\x89", b"</s>")
    one, _, seen = watched(BYTE_LEVEL, half)
    assert seen == ["a", "a", "a", "a", "a汉", "a汉"] and one.close() == "a汉"
    one, taken, _ = watched(BYTE_LEVEL, ids_of(b"a", b"st", b"</s>", b"op", b"b"), ("stop",))
    assert (taken, one.close()) == (4, "a")
    assert watched(BYTE_LEVEL, ids_of(b"</s>", b"</s>"), ("stop",))[0].close() == ""
    assert Detokenizer(BYTE_LEVEL, ("stop",)).close() == "" == Detokenizer(BYTE_LEVEL).settled


@pytest.mark.parametrize("cleans", [False, True])
def test_spaces_before_punctuation_stay(cleans):
    """A tokenizer that tidies " ." into ".": the text shrinks while it arrives, and what shrank it was lost for good."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, " ": 2, ".": 3, " n't": 4, "</s>": 5}, "<unk>"))
    words.decoder = decoders.Fuse()
    ids = [1, 2, 3, 1, 2, 4, 2, 3]
    one, _, seen = watched(wrapped(words, clean_up_tokenization_spaces=cleans), ids)
    assert seen == ["a", "a ", "a .", "a .a", "a .a ", "a .a  n't", "a .a  n't ", "a .a  n't ."] and one.close() == seen[-1]


# --- stop strings


STOPS = {
    "inside a token": ([b"say stop END now"], ("stop",), "say "),
    "nothing before it": ([b"stop"], ("stop",), ""),
    "across two tokens": ([b"say ", b"st", b"op"], ("stop",), "say "),
    "begins and ends inside tokens": ([b"s", b"ay st", b"op"], ("y sto",), "sa"),
    "across four": ([b"a", b"s", b"t", b"o", b"p!"], ("stop",), "a"),
    "a false start before it": ([b"st", b"ay st", b"op"], ("stop",), "stay "),
    "the earlier of two in one token": ([b"say stop END now"], ("END", "stop"), "say "),
    "one begins with the other": ([b"stop"], ("stop now", "stop"), ""),
    "the inner one is complete first": ([b"st", b"op"], ("stop now", "to"), "s"),
    "overlaps itself, across": ([b"aa", b"a", b"b"], ("aab",), "a"),
    "overlaps itself, in one": ([b"aaab"], ("aab",), "a"),
    "overlaps itself twice": ([b"aa", b"aa", b"aab"], ("aaab",), "aaa"),
    "line breaks": ([b"a", b"\n", b"\n\nQ"], ("\n\nQ",), "a\n"),
    "a character of three tokens": ([b"a", b"\xe6", b"\xb1", b"\x89"], ("汉",), "a"),
    "half a character beside it": ([b"a", b" \xf0\x9f", b"\xa6\x99x"], ("🦙",), "a "),
    "one of two joined emoji": (["👍".encode(), *(bytes([byte]) for byte in "🏽".encode())], ("🏽",), "👍"),
    "unicode and letters": (["é 汉".encode(), b"st", b"op"], ("汉stop",), "é "),
    "U+FFFD that the model wrote": ([b"a", b"\xef\xbf\xbd", b"st"], ("\ufffds",), "a"),
}


@pytest.mark.parametrize("pieces, stops, right", STOPS.values(), ids=STOPS)
def test_stop_strings(pieces, stops, right):
    """A stop string missed at a boundary, found a token late, cut at the wrong of two places, or left in the text."""
    one, taken, seen = watched(BYTE_LEVEL, ids_of(*pieces, b"st", b"a", b"op"), stops)
    assert one.stopped and taken == len(pieces) and seen[-1] == one.close() == one.text == right


def test_text_is_held_while_a_stop_string_may_begin():
    """The first half of a stop string shown to the reader, or held for good although it did not become one."""
    pieces = [b"a", b"s", b"to", b"a", b"st", b"st", b"\n", b"aa", b"\n", b"\n", b"o"]
    one, _, seen = watched(BYTE_LEVEL, ids_of(*pieces), ("stop", "\n\nQ"))
    held = ["a", "a", "a", "astoa", "astoa", "astoast", "astoastst", "astoastst\naa", "astoastst\naa", "astoastst\naa",
            "astoastst\naa\n\no"]
    assert seen == held and not one.stopped and one.close() == held[-1]
    one, _, seen = watched(BYTE_LEVEL, ids_of(b"a", b"st", b"o"), ("stop",))
    assert seen == ["a", "a", "a"] and one.text == one.close() == "asto", "the end releases it"
    one, _, seen = watched(BYTE_LEVEL, ids_of(b"a", b"a", b"a", b"a", b"b"), ("aab",))
    assert seen == ["", "", "a", "aa", "aa"] and one.stopped


@pytest.mark.parametrize("kind", TOKENIZERS)
@PROPERTY
@given(text=st.text(st.sampled_from("stopabe  🦙👍🏽é汉"), max_size=14), stops=st.lists(st.sampled_from(
    ["stop", "st", "aab", "a a", " ", "🦙", "🏽é", "汉 s", "oo"]), max_size=3))
def test_any_text_is_cut_at_its_first_stop_string(kind, text, stops):
    """A place where the bookkeeping of spaces, characters and stop strings does not add up."""
    if kind == "metaspace":
        text = text.lstrip(" ")  # that tokenizer keeps no leading space
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    one, taken, _ = watched(tokenizer, ids, tuple(stops))
    assert one.close() == cut(decode(tokenizer, ids[:taken]), tuple(stops))
    assert one.stopped == any(stop in decode(tokenizer, ids) for stop in stops)
    assert one.stopped or one.close() == text


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@PROPERTY
@given(ids=st.lists(st.integers(-len(PIECES) - 1, -1) | st.integers(0, 255), max_size=14),
       stops=st.lists(st.sampled_from(["stop", "op", "to", "aab", "\n", "\ufffd", "\ufffds", "汉", "t a", "ne", " "]), max_size=3))
@example(ids=[97, PIECES.index(b" \xf0\x9f") - len(PIECES) - 1], stops=[" "])  # the rest of that character never comes
def test_any_ids_are_cut_at_the_first_stop_string(kind, ids, stops):
    """Random ids, specials and broken characters among them: text taken back, an end unlike one decode, a stop a token late."""
    tokenizer, stops = TOKENIZERS[kind], tuple(stops)
    ids = [number % len(tokenizer) for number in ids]
    one, taken, _ = watched(tokenizer, ids, stops)
    for end in range(taken):  # nothing was overlooked before
        early = decode(tokenizer, ids[:end])
        assert early.endswith("\ufffd") or not any(stop in early for stop in stops)
    assert one.close() == cut(decode(tokenizer, ids[:taken]), stops)


@pytest.mark.long
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="make smollm2")
def test_smollm2():
    """E9 on a real vocabulary of 49,152, at every cut, and with a stop string that no token is."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    test_e9_increments_join_to_one_decode(tokenizer)
    ids = tokenizer.encode(E9, add_special_tokens=False)
    for end in range(len(ids) + 1):
        one, _, seen = watched(tokenizer, ids[:end])
        assert not any("\ufffd" in text for text in seen) and one.close() == decode(tokenizer, ids[:end])
    assert watched(tokenizer, ids, ("汉 do",))[0].close() == "ok 🦙👍🏽 é "
