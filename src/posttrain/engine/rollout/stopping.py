"""Responses that end at a string: what the tokens of a row say, token by token, at a bounded cost.

Text is what the tokenizer decodes of the response alone, special tokens included. A row keeps the tail in which a
string could still end, never its whole text:

- Tokens of a byte-level or plain vocabulary are bytes, whatever stands beside them, so the tail is bytes. A string ends
  in it where it ends in the text: UTF-8 is self-synchronising, and a character that is split between tokens is whole
  once its last byte is there.
- What other decoders say of a token depends on its neighbours (a word's first space, bytes that make a character), so
  the last tokens are decoded again for each new one. Tokens leave that window only where the end of what is decoded
  without them is what it was.

What a tail finds depends on the row's own tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

_SLACK = 16  # characters beside the longest string: more than the end of a text changes by a further token
_WINDOWS = 4  # needed lengths of text at which a window is shortened
_NONE = "\ufffd"  # what is decoded of bytes that are no character
_TOKENS = 16  # needed lengths, in tokens, at which it is shortened whatever they say: nobody's text is so thin


class Tail(Protocol):
    """The end of what one row has said."""

    def ends(self, token: int) -> bool:
        """Append a token; whether the text now contains one of the strings, which it did not before."""


@final
class StopStrings:
    """What tokens say, for rows that end at strings.

    Args:
        tokenizer: that of the policy. Whoever opens an engine has it already, so none fails while a response waits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._pieces = tokenizer, _pieces_of(tokenizer)

    def tail(self, stop: Sequence[str]) -> Tail:
        """That of a row which has said nothing yet."""
        if self._pieces is not None:
            return _Bytes(self._pieces, stop)
        return _Window(self._tokenizer, stop)


@final
class _Bytes:
    """Of tokens that are bytes by themselves."""

    __slots__ = ("_kept", "_pieces", "_stop", "_tail")

    def __init__(self, pieces: _Pieces, stop: Sequence[str]) -> None:
        self._pieces, self._stop = pieces, [one.encode() for one in stop]
        self._kept, self._tail = max(map(len, self._stop)) - 1, b""

    def ends(self, token: int) -> bool:
        """See `Tail.ends`."""
        text = self._tail + self._pieces[token]
        self._tail = text[-self._kept :] if self._kept else b""
        return any(one in text for one in self._stop)


@final
class _Window:
    """Of tokens that mean something among others only."""

    __slots__ = ("_needed", "_skipped", "_stop", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, list(stop)
        self._needed = max(map(len, stop)) + _SLACK
        self._tokens: list[int] = []
        self._skipped = 0  # characters at the beginning of the window that may not be the text's

    def ends(self, token: int) -> bool:
        """See `Tail.ends`."""
        self._tokens.append(token)
        text = self._said(self._tokens)
        found = any(text.find(one, self._skipped) >= 0 for one in self._stop)
        if len(text) - self._skipped > _WINDOWS * self._needed or len(self._tokens) > _TOKENS * self._needed:
            self._shorten(text)
        return found

    def _shorten(self, text: str) -> None:
        """Forget the older half, where a character begins and what follows it is decoded as it was.

        Only where every character of the end is whole: bytes that are none yet are decoded alike wherever one begins.
        """
        half, needed = len(self._tokens) // 2, self._needed
        for begin in range(half, half + 4) if _NONE not in text[-needed:] else ():
            rest = self._said(self._tokens[begin:])
            if len(rest) >= needed and rest[-needed:] == text[-needed:]:
                self._tokens, self._skipped = self._tokens[begin:], len(rest) - needed
                return
        if len(self._tokens) > _TOKENS * needed:
            self._tokens, self._skipped = self._tokens[half:], 0

    def _said(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


@final
class _Pieces(dict[int, bytes]):
    """Token → its bytes, as they are asked for; of an id that the tokenizer does not know, none."""

    def __init__(self, token_of: Callable[[int], str | None], bytes_of: Callable[[str], bytes]) -> None:
        super().__init__()
        self._token_of, self._bytes_of = token_of, bytes_of

    def __missing__(self, token: int) -> bytes:
        word = self._token_of(token)
        found = self[token] = b"" if word is None else self._bytes_of(word)
        return found


def _pieces_of(tokenizer: PreTrainedTokenizerBase) -> _Pieces | None:
    """None: a decoder that does not only join what its tokens stand for."""
    inner: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(inner, "decoder", None)
    if isinstance(decoder, decoders.ByteLevel):
        return _Pieces(inner.id_to_token, _byte_level)
    return _Pieces(inner.id_to_token, str.encode) if isinstance(decoder, decoders.Fuse) else None


def _signs() -> dict[str, int]:
    """Sign → byte, as GPT-2 writes bytes: printable ones as themselves, the others from U+0100 on, in their order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_SIGNS = _signs()


def _byte_level(word: str) -> bytes:
    """An added token with signs of its own is written as text."""
    found = [_SIGNS.get(sign) for sign in word]
    return word.encode() if None in found else bytes(byte for byte in found if byte is not None)
