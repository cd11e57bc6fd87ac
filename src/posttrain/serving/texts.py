"""Text and tokens of a served model: prompts, responses as they grow, and the names of tokens.

Prompts are encoded as in training and in `posttrain sample` (`domain.rendering`). Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from posttrain.data.fit import PlanTokenizer, open_tokenizer
from posttrain.domain import rendering
from posttrain.domain.errors import InputError

_CHARACTERS = 256  # more than a token of any vocabulary has on average
_ANCHOR = "a"  # a token's text is the text that it adds to this one: some decoders drop a text's first space


class Texts:
    """The tokenizer and the chat template of a model.

    Args:
        folder: the model's files.
        context: maximum tokens of a prompt with its response.

    Raises:
        InputError: the tokenizer cannot be read without transformers.
    """

    def __init__(self, folder: Path, context: int = 1 << 30) -> None:
        self.context = context

        def read(name: str) -> bytes | None:
            return (folder / name).read_bytes() if (folder / name).is_file() else None

        found = open_tokenizer(read)
        if found is None:
            raise InputError(f"{folder}: a served model needs a tokenizer.json that tokenizers reads; save it again")
        self._plan: PlanTokenizer = found
        self._tokenizer: tokenizers.Tokenizer = found.tokenizer

    def refuse_long(self, prompt: str | Sequence[int], field: str) -> None:
        """Refuse a prompt that cannot fit in the context, before it is encoded.

        Raises:
            InputError: it has more token ids than the context, or more characters than as many tokens have at most.
        """
        most = self.context * (_CHARACTERS if isinstance(prompt, str) else 1)
        if len(prompt) > most:
            what = "characters" if isinstance(prompt, str) else "tokens"
            raise InputError(
                f"{field}: the context has {self.context} tokens, got {len(prompt)} {what}; shorten the prompt"
            )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a prompt; with `special`, it begins like a prompt in training."""
        if not special:
            return list(self._plan.encode([text], special=False)[0])
        return list(next(rendering.prompts(self._plan, [{"prompt": text}], name="prompt")))

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, generate: bool) -> list[int]:
        """Return the tokens of a conversation; with `generate`, up to the beginning of the model's response.

        Raises:
            InputError: there is no template, or the template rejects the messages.
        """
        if not self._plan.templated:
            raise InputError("messages: the model has no chat template; use /v1/completions")
        self._plan.begin()
        try:
            text = self._plan.render(messages, generate=generate, tools=tools)
        except rendering.RAISED + self._plan.raised as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"messages: cannot be rendered by the model's chat template: {reason}") from error
        return list(self._plan.encode([text], special=False)[0])

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def until(self, tokens: Sequence[int], stop: Sequence[str], *, skip_special: bool) -> str:
        """Return the text of tokens before the stop string that the last of them completes."""
        whole = self.decode(tokens)
        end = min((at for at in (whole.find(one) for one in stop) if at >= 0), default=len(whole))
        if not skip_special:
            return whole[:end]
        kept = len(tokens)
        while kept and len(before := self.decode(tokens[:kept])) > end:
            kept -= 1
        rest = whole[len(before) if kept else 0 : end]
        return self.decode(tokens[:kept], skip_special=True) + rest

    def name(self, token: int) -> str:
        """Return the text of a token, or `token_id:N` if the text does not identify the token."""
        text = self._piece(token)
        return text if self._named[text] == 1 else f"token_id:{token}"

    def lengths(self, tokens: Sequence[int], *, skip_special: bool = False) -> list[int]:
        """Return the length of the text before each token, in characters."""
        stream, lengths, length = DecodeStream(skip_special_tokens=skip_special), list[int](), 0
        for token in tokens:
            lengths.append(length)
            length += len(stream.step(self._tokenizer, token) or "")
        return lengths

    @cached_property
    def _named(self) -> Counter[str]:
        return Counter(self._piece(token) for token in range(self._tokenizer.get_vocab_size()))

    @cached_property
    def _anchor(self) -> tuple[list[int], int]:
        tokens = self._tokenizer.encode(_ANCHOR, add_special_tokens=False).ids
        return tokens, len(self.decode(tokens))

    def _piece(self, token: int) -> str:
        before, length = self._anchor
        return self.decode([*before, token])[length:]


class Growing:
    """The text of a response that grows, without a part that a stop string could still cut off.

    Args:
        stop: strings that end the response.
        skip_special: whether special tokens are left out.
    """

    def __init__(self, texts: Texts, stop: Sequence[str], *, skip_special: bool) -> None:
        self._texts, self._stop, self._skip = texts, stop, skip_special
        self._held = max(map(len, stop), default=1) - 1
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._text, self._sent = "", 0
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        """The characters so far."""
        return len(self._text)

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens; return the text that they add for certain."""
        self.tokens += tokens
        for token in tokens:
            self._text += self._stream.step(self._texts._tokenizer, token) or ""
        begin, self._sent = self._sent, max(self._sent, len(self._text) - self._held)
        return self._text[begin : self._sent]

    def end(self, tokens: Sequence[int], by: str) -> str:
        """Append the last tokens; return the rest of the text.

        Args:
            by: what ended the response: `end`, `string`, `truncated` or `aborted`.
        """
        self.tokens += tokens
        if by == "string":
            text = self._texts.until(self.tokens, self._stop, skip_special=self._skip)
        else:
            text = self._texts.decode(self.tokens[: -1 if by == "end" else None], skip_special=self._skip)
        return text[self._sent :]
