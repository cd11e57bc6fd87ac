"""Responses that end at a string: the tail of a row against the whole text, decoded anew after every token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from posttrain.app.models import ask
from posttrain.domain.errors import InputError
from posttrain.engine.models.files import character_tokenizer
from posttrain.engine.rollout.decoding import StopStrings
from posttrain.engine.rollout.port import SamplingParams

SIGNS = "aé€😀 <>/\n"


def wrapped(words: Sequence[str], decoder: decoders.Decoder, *, fallback: bool = False) -> PreTrainedTokenizerFast:
    model = models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=fallback)
    inner = Tokenizer(model)
    inner.decoder = decoder
    inner.add_tokens(["<tool call>", "naïve"])  # written as text, whatever the decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def signs_of_bytes() -> dict[int, str]:
    """Byte → its sign, as a byte-level tokenizer says it."""
    from tokenizers import pre_tokenizers

    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(map(chr, [*range(0x80), *range(0x80, 0x800, 0x40), *range(0x80, 0xC0)])) + "\u0fff\uffff\U0001f600"
    text += "".join(map(chr, [*range(0x1000, 0x10000, 0x1000), *range(0x10000, 0x110000, 0x40000)]))
    text = "".join(sign for sign in text if not 0xD800 <= ord(sign) < 0xE000)
    return dict(zip(text.encode(), "".join(piece for piece, _ in splitter.pre_tokenize_str(text)), strict=True))


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Every byte, and pieces that begin and end inside characters."""
    sign = signs_of_bytes()
    generator = random.Random(7)
    pieces = {sign[byte]: None for byte in sorted(sign)}
    for _ in range(200):
        data = "".join(generator.choices(SIGNS, k=3)).encode()
        begin = generator.randrange(len(data) - 1)
        pieces["".join(sign[byte] for byte in data[begin : generator.randrange(begin + 1, len(data) + 1)])] = None
    return wrapped(["</s>", *pieces], decoders.ByteLevel())


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Words with a mark for their space, and bytes for what is no word; the first space is none."""
    words = ["</s>", "▁", "▁a", "a", "é", "ab", "▁the", "<", "/", ">", *(f"<0x{byte:02X}>" for byte in range(256))]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return wrapped(words, decoders.Sequence(steps), fallback=True)


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    return wrapped(["</s>", "##a", "a", "##é", "é", "<", "##>", ">", "word", "##s", ".", "!"], decoders.WordPiece())


@cache
def characters() -> PreTrainedTokenizerFast:
    return character_tokenizer(SIGNS)


TOKENIZERS: list[Callable[[], PreTrainedTokenizerFast]] = [byte_level, byte_fallback, word_pieces, characters]


def text_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def naive(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
    """The number of tokens after which the whole text contains a string for the first time."""
    for end in range(1, len(tokens) + 1):
        if any(one in text_of(tokenizer, tokens[:end]) for one in stop):
            return end
    return None


def by_tail(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
    tail = StopStrings(tokenizer).tail(stop)
    return next((end for end, token in enumerate(tokens, start=1) if tail.ends(token)), None)


def streams(tokenizer: PreTrainedTokenizerFast, draw: st.DrawFn) -> list[int]:
    """Tokens of text that was encoded sign by sign, and tokens of any kind."""
    some = draw(st.booleans())
    most = 300 if draw(st.integers(0, 4)) == 0 else 40
    ids = st.integers(0, len(tokenizer) + 1)  # a model may have more than its tokenizer
    if some:
        few = draw(st.lists(ids, min_size=1, max_size=6))
        ids = st.sampled_from(few)
    return draw(st.lists(ids, min_size=1, max_size=most))


@st.composite
def cases(draw: st.DrawFn) -> tuple[PreTrainedTokenizerFast, list[int], tuple[str, ...]]:
    tokenizer = draw(st.sampled_from(TOKENIZERS))()
    tokens = streams(tokenizer, draw)
    text = text_of(tokenizer, tokens)
    stop = []
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, max(0, len(text) - 1)))
        part = text[begin : begin + draw(st.integers(1, 12))]
        chosen = part if draw(st.booleans()) and part else draw(st.text(SIGNS, min_size=1, max_size=5))
        stop.append(chosen)
    return tokenizer, tokens, tuple(one for one in stop if "\ufffd" not in one) or ("a",)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_a_tail_finds_what_the_whole_text_says(
    case: tuple[PreTrainedTokenizerFast, list[int], tuple[str, ...]],
) -> None:
    tokenizer, tokens, stop = case
    assert by_tail(tokenizer, tokens, stop) == naive(tokenizer, tokens, stop)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_string_deep_in_a_long_response_is_found(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    """Long after the window of the tokenizers that need one has moved on."""
    tokenizer = make()
    generator = random.Random(3)
    known = [token for token in range(len(tokenizer)) if "\ufffd" not in text_of(tokenizer, [token])]
    for _ in range(3):
        tokens = generator.choices(known, k=600)
        text = text_of(tokenizer, tokens)
        stop = (text[len(text) - 40 : len(text) - 20],)
        assert by_tail(tokenizer, tokens, stop) == naive(tokenizer, tokens, stop)


def test_characters_of_several_tokens_are_found_when_their_last_byte_is_there() -> None:
    sign = signs_of_bytes()
    tokenizer = byte_level()
    tokens = [tokenizer.convert_tokens_to_ids(sign[byte]) for byte in "x€😀y".encode()]
    assert by_tail(tokenizer, tokens, ("€",)) == 4
    assert by_tail(tokenizer, tokens, ("😀", "€😀")) == 8
    assert by_tail(tokenizer, tokens[1:], ("😀y",)) == 8
    assert by_tail(tokenizer, tokens[2:], ("€",)) is None  # without its first byte it is none


def test_bytes_without_a_character_for_long_are_read_at_once_when_one_is_whole() -> None:
    """Each sign of a language that a vocabulary does not have is three tokens: the window begins between signs."""
    tokenizer = byte_fallback()
    tokens = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in ("漢字仮名" * 60 + "終").encode()]
    assert by_tail(tokenizer, tokens, ("名終",)) == len(tokens)
    assert by_tail(tokenizer, tokens, ("名名",)) is None


def test_only_the_end_of_a_response_is_decoded_again() -> None:
    """However long it gets."""
    tokenizer, lengths = word_pieces(), []

    class Counting:
        backend_tokenizer = None

        def decode(self, tokens: Sequence[int], **options: bool) -> str:
            lengths.append(len(tokens))
            return text_of(tokenizer, tokens)

    tail = StopStrings(Counting()).tail(("never said", "x"))  # type: ignore[arg-type]
    generator = random.Random(5)
    for _ in range(3000):
        assert not tail.ends(generator.randrange(1, 12))
    assert max(lengths) < 200
    assert sum(lengths) < 3000 * 200


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["a"], r"stop must be a tuple of strings, got \['a'\]"),
        ("a", "stop must be a tuple of strings, got 'a'"),
        ((1,), r"stop must be a tuple of strings, got \(1,\)"),
        (("",), "stop must contain strings of 1 to 256 characters, got 0"),
        (("a" * 257,), "stop must contain strings of 1 to 256 characters, got 257"),
        (("a",) * 17, "stop must be at most 16 strings, got 17"),
        (("\ufffd",), "stop must contain text"),
        (("a\udc80",), "stop must contain text"),
    ],
)
def test_bad_stop_strings_are_refused(stop: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        SamplingParams(max_new_tokens=1, stop=stop)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_one_string_is_not_taken_for_its_letters() -> None:
    with pytest.raises(InputError, match=r"stop must be a list of strings, got the string '</answer>'; write \['</ans"):
        ask(
            cast("Any", "none is opened"), "model:a", ["a"], samples=1, max_new_tokens=None, temperature=0.0, seed=0,
            runtime={}, timeout=None, chat=None, system=None, stop="</answer>",
        )  # fmt: skip
