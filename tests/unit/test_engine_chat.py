"""Rendering rows with a chat template, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st
from test_engine_stopping import TOKENIZERS
from tokenizers import Tokenizer, models, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from posttrain.domain.errors import InputError
from posttrain.domain.rendering import Row
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.files import (
    character_tokenizer,
    decode_response,
    encode_examples,
    encode_preferences,
    encode_prompts,
)

CHARACTERS = InitModelConfig().characters
QUESTION = {"role": "user", "content": "Q: sort 31"}
ANSWER = {"role": "assistant", "content": "A: 13"}
ROW = {"prompt": [QUESTION], "completion": [ANSWER], "answer": "13"}
# drops what an assistant said before the last turn, as templates of reasoning models do
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}"
    "<|im_start|>{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}"
)
THINKING = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def render_prompt(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[int]:
    return list(encode_prompts(tokenizer, [row], name="d", limit=999)[0])


def render_examples(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[tuple[list[int], list[int]]]:
    return [(list(e.prompt), list(e.completion)) for e in encode_examples(tokenizer, [row], name="d", limit=999)]


def render_example(tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[list[int], list[int]]:
    [example] = render_examples(tokenizer, row)
    return example


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(CHARACTERS)


def test_prompt_and_completion_make_the_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, completion = render_example(tokenizer, ROW)
    assert prompt == render_prompt(tokenizer, ROW)
    whole = tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=True, return_dict=False)
    assert prompt + completion == whole
    assert completion[-1] == tokenizer.eos_token_id
    assert decode_response(tokenizer, completion, ended=True) == "A: 13"


def test_text_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, completion = render_example(tokenizer, {"prompt": "ab", "completion": "cd"})
    assert tokenizer.decode(prompt) == "ab"
    assert tokenizer.decode(completion) == "cd" + tokenizer.eos_token
    assert render_prompt(tokenizer, {"prompt": "ab"}) == prompt
    [(first, rest)] = render_examples(tokenizer, {"text": "abc"})
    assert (tokenizer.decode(first), tokenizer.decode(rest)) == ("a", "bc" + tokenizer.eos_token)


def test_conversation_trains_every_assistant_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [QUESTION, ANSWER, {"role": "user", "content": "again"}, {"role": "assistant", "content": "A: 13!"[:5]}]
    turns = render_examples(tokenizer, {"messages": messages})
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert len(turns) == 2
    for prompt, completion in turns:
        assert whole[: len(prompt) + len(completion)] == prompt + completion
    assert render_prompt(tokenizer, {"messages": messages}) == turns[1][0]


def test_what_is_trained_agrees_with_generation_marks(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [QUESTION, ANSWER, QUESTION, ANSWER]
    marked = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    mask = [0] * len(marked["input_ids"])
    for prompt, completion in render_examples(tokenizer, {"messages": messages}):
        end = len(prompt) + len(completion)
        assert marked["input_ids"][:end] == prompt + completion
        mask[len(prompt) : end] = [1] * len(completion)
    assert mask == marked["assistant_masks"]


def test_template_that_rewrites_earlier_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = FORGETFUL
    messages = [QUESTION, ANSWER, QUESTION, ANSWER]
    assert len(render_examples(tokenizer, {"messages": messages})) == 2  # turn by turn it is what the model will see


def test_template_that_breaks_the_prefix_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = THINKING
    with pytest.raises(InputError, match="train row 2: the chat template renders an earlier turn differently"):
        encode_examples(tokenizer, [{"text": "a"}, ROW], name="train", limit=64)


def test_what_follows_the_end_of_sequence_is_not_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_end|>{% endgeneration %}", "<|im_end|>\n{% endgeneration %}"
    )
    assert render_example(tokenizer, ROW)[1][-1] == tokenizer.eos_token_id
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}")
    assert decode_response(tokenizer, render_example(tokenizer, ROW)[1], ended=True) == "A: 13"
    assert render_example(tokenizer, ROW)[1][-1] == tokenizer.eos_token_id


def test_errors_name_data_set_and_row(tokenizer: PreTrainedTokenizerFast) -> None:
    length = len(render_prompt(tokenizer, ROW))
    with pytest.raises(InputError, match=rf"d@1 row 2: prompt must have at most {length} tokens, got {length + 1}"):
        encode_prompts(tokenizer, [ROW, {"prompt": [{**QUESTION, "content": "Q: sort 312"}]}], name="d@1", limit=length)
    with pytest.raises(InputError, match=rf"have at most {length} - 1 \(max_new_tokens\) tokens, got {length}"):
        encode_prompts(tokenizer, [ROW], name="d@1", limit=length, reserve=1)
    with pytest.raises(InputError, match=r"set max_new_tokens to 2 at most, or shorten or drop it"):
        encode_prompts(tokenizer, [ROW], name="d@1", limit=length + 2, reserve=40)
    with pytest.raises(InputError, match=r"d@1 row 1: prompt and completion must have at most 5 tokens, got 21"):
        encode_examples(tokenizer, [ROW], name="d@1", limit=5)
    with pytest.raises(InputError, match=r"d@1 row 1: a demonstration needs completion, messages or text"):
        encode_examples(tokenizer, [{"prompt": "a", "answer": "b"}], name="d@1", limit=99)
    with pytest.raises(InputError, match=r"d@1 row 1 cannot be rendered by the chat template: role must be"):
        encode_prompts(tokenizer, [{"prompt": [{"role": "tool", "content": "x"}]}], name="d@1", limit=99)
    tokenizer.chat_template = None  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"d@1 row 1: a chat row needs a tokenizer with a chat template"):
        encode_prompts(tokenizer, [ROW], name="d@1", limit=99)


def test_examples_remember_their_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}, ROW]
    assert [example.row for example in encode_examples(tokenizer, rows, name="d", limit=99)] == [0, 0, 1]


def test_a_preference_is_two_completions_of_one_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    worse = [{"role": "assistant", "content": "A: 31"}]
    chat = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": worse}
    plain = {"prompt": "ab", "chosen": "cd", "rejected": "d"}
    first, second = encode_preferences(tokenizer, [chat, plain], name="d", limit=99)
    assert (first.row, second.row) == (0, 1)
    assert (list(first.prompt), list(first.chosen)) == render_example(tokenizer, ROW)
    assert (list(first.prompt), list(first.rejected)) == render_example(tokenizer, {**ROW, "completion": worse})
    assert [tokenizer.decode(ids) for ids in (second.prompt, second.chosen, second.rejected)] == [
        "ab",
        "cd" + tokenizer.eos_token,
        "d" + tokenizer.eos_token,
    ]


def test_preferences_that_do_not_fit_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    short = {"prompt": "a", "chosen": "b", "rejected": "c"}
    encode_preferences(tokenizer, [short], name="d@1", limit=3)
    for odd in ({"chosen": "bc"}, {"rejected": "bc"}):
        with pytest.raises(
            InputError, match=r"d@1 row 2: prompt and response must have at most 3 tokens, .* max_length"
        ):
            encode_preferences(tokenizer, [short, {**short, **odd}], name="d@1", limit=3)
    with pytest.raises(InputError, match=r"d@1 row 1: a preference needs prompt, chosen and rejected, got no rejected"):
        encode_preferences(tokenizer, [{"prompt": "a", "chosen": "b"}], name="d@1", limit=99)
    tokenizer.chat_template = THINKING
    with pytest.raises(InputError, match="d@1 row 1: the chat template renders an earlier turn differently"):
        encode_preferences(
            tokenizer, [{"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER]}], name="d@1", limit=99
        )


def one_by_one(tokenizer: PreTrainedTokenizerBase, prompt: Any, answer: Any) -> tuple[list[int], list[int]]:
    """A demonstration as transformers encodes it alone."""
    end = tokenizer.eos_token_id
    if isinstance(prompt, str):
        before, ids = tokenizer.encode(prompt), tokenizer.encode(answer, add_special_tokens=False)
        before = before[:-1] if before and before[-1] == end else before
    else:
        render = partial(tokenizer.apply_chat_template, tokenize=True, return_dict=False)
        before = render(prompt, add_generation_prompt=True)
        ids = render([*prompt, *answer])[len(before) :]
        ids = ids[: len(ids) - ids[::-1].index(end)] if end in ids else ids
    return before, ids if ids and ids[-1] == end else [*ids, end]


def edged() -> PreTrainedTokenizerFast:
    """Pieces, and a beginning and an end that plain text gets and chats write themselves."""
    raw = Tokenizer(models.BPE({piece: at for at, piece in enumerate(["<s>", "</s>", *CHARACTERS])}, []))
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "characters": lambda: character_tokenizer(CHARACTERS),
    "edged": edged,
    "in python": ByT5Tokenizer,
    **{make.__name__: make for make in TOKENIZERS if make.__name__ != "characters"},
}
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class TestBatches:
    """Rows that are encoded together become what each becomes alone, and are refused as each is."""

    def rows(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
        """More than a batch, of every form that the tokenizer takes, some of them twice."""
        rows: list[dict[str, Any]] = []
        for i in range(1050):
            text, said = f"sort {i % 700} </s> the", f"A: {i % 7}" * (i % 3)
            if i % 2 or not tokenizer.chat_template:
                rows.append({"prompt": text, "completion": said, "chosen": said, "rejected": said + "0"})
            else:
                prompt = [{"role": "user", "content": text}]
                answer, worse = ([{"role": "assistant", "content": content}] for content in (said, said + "0"))
                rows.append({"prompt": prompt, "completion": answer, "chosen": answer, "rejected": worse})
        return rows

    @pytest.mark.parametrize("chat", [True, False], ids=["template", "no template"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_many_rows_become_what_each_becomes_alone(self, kind: str, chat: bool) -> None:
        tokenizer = KINDS[kind]()
        tokenizer.chat_template = (tokenizer.chat_template or MARKED) if chat else None  # type: ignore[assignment]
        rows = self.rows(tokenizer)
        alone = [one_by_one(tokenizer, row["prompt"], row["completion"]) for row in rows]
        worse = [one_by_one(tokenizer, row["prompt"], row["rejected"]) for row in rows]
        room: Any = {"name": "d", "limit": 9999}
        assert [list(ids) for ids in encode_prompts(tokenizer, rows, **room)] == [prompt for prompt, _ in alone]
        examples = encode_examples(tokenizer, rows, **room)
        assert (list(examples[0].prompt), list(examples[0].completion)) == alone[0]  # what differs is told in no time
        assert [(list(e.prompt), list(e.completion)) for e in examples] == alone
        assert [e.row for e in examples] == list(range(len(rows)))
        differing = [(row, a, b) for row, a, b in zip(rows, alone, worse, strict=True) if a != b]
        pairs = encode_preferences(tokenizer, [row for row, _, _ in differing], **room)
        assert [(list(p.prompt), list(p.chosen), list(p.rejected)) for p in pairs] == [
            (*chosen, rejected) for _, chosen, (_, rejected) in differing
        ]

    def test_conversations_and_text(self, tokenizer: PreTrainedTokenizerFast) -> None:
        rows = [{"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}, {"text": "abc"}] * 600
        examples = encode_examples(tokenizer, rows, name="d", limit=99)
        first = one_by_one(tokenizer, [QUESTION], [ANSWER])
        second = one_by_one(tokenizer, [QUESTION, ANSWER, QUESTION], [ANSWER])
        text = tokenizer.encode("abc")
        plain = (text[:1], [*text[1:], tokenizer.eos_token_id])
        found = [(list(e.prompt), list(e.completion)) for e in examples]
        assert found[:3] == [first, second, plain]
        assert all(found[at] == found[at % 3] for at in range(len(rows) // 2 * 3))
        assert len(found) == len(rows) // 2 * 3

    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            ({"answer": "b"}, r"d row 1020: a demonstration needs completion, messages or text"),
            ({"prompt": [{"role": "tool", "content": "x"}], "completion": [ANSWER]}, r"d row 1020 cannot be rendered"),
            ({"prompt": "a", "completion": "\ud800"}, r"d row 1020 cannot be rendered"),
            ({"prompt": "a", "completion": "1" * 60}, r"d row 1020: prompt and completion must have at most 50 tokens"),
        ],
        ids=["form", "template", "tokenizer", "length"],
    )
    @pytest.mark.parametrize("later", [{"answer": "b"}, {"prompt": "a", "completion": "\ud800"}], ids=["form", "text"])
    def test_the_first_row_that_is_wrong_is_named(
        self, tokenizer: PreTrainedTokenizerFast, bad: dict[str, Any], words: str, later: dict[str, Any]
    ) -> None:
        rows = [ROW] * 1019 + [bad, ROW, later]
        with pytest.raises(InputError, match=words):
            encode_examples(tokenizer, rows, name="d", limit=50)

    def test_every_row_costs_no_call_of_the_tokenizer(
        self, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[int] = []
        call = type(tokenizer).__call__

        def counted(self: Any, text: Any, **options: Any) -> Any:
            calls.append(len(text))
            return call(self, text, **options)

        monkeypatch.setattr(type(tokenizer), "__call__", counted)
        encode_examples(tokenizer, self.rows(tokenizer), name="d", limit=999)
        assert len(calls) == 4  # two batches, chats and plain text


@given(st.text(alphabet=CHARACTERS, max_size=20), st.booleans())
def test_what_was_written_is_read_back(text: str, ended: bool) -> None:
    tokenizer = character_tokenizer(CHARACTERS)
    tokens = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * ended
    assert decode_response(tokenizer, tokens, ended=ended) == text


def test_special_tokens_inside_a_response_stay_visible(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.encode("13<|user|>9")
    assert decode_response(tokenizer, tokens, ended=False) == "13<|user|>9"
