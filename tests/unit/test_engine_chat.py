"""Rendering rows with a chat template, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from posttrain.domain.errors import InputError
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.chat import (
    decode_response,
    encode_examples,
    encode_preferences,
    encode_prompts,
    render_example,
    render_examples,
    render_prompt,
)
from posttrain.engine.models.initial import character_tokenizer

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
    with pytest.raises(InputError, match=rf"d@1 row 2: prompt must fit {length} tokens, got {length + 1}"):
        encode_prompts(tokenizer, [ROW, {"prompt": [{**QUESTION, "content": "Q: sort 312"}]}], name="d@1", limit=length)
    with pytest.raises(InputError, match=rf"prompt must fit {length} - 1 \(max_new_tokens\) tokens, got {length}"):
        encode_prompts(tokenizer, [ROW], name="d@1", limit=length, reserve=1)
    with pytest.raises(InputError, match=r"d@1 row 1: prompt and completion must fit 5 tokens, got 21"):
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
        with pytest.raises(InputError, match=r"d@1 row 2: prompt and response must fit 3 tokens, got 4; .* max_length"):
            encode_preferences(tokenizer, [short, {**short, **odd}], name="d@1", limit=3)
    with pytest.raises(InputError, match=r"d@1 row 1: a preference needs prompt, chosen and rejected, got no rejected"):
        encode_preferences(tokenizer, [{"prompt": "a", "chosen": "b"}], name="d@1", limit=99)
    tokenizer.chat_template = THINKING
    with pytest.raises(InputError, match="d@1 row 1: the chat template renders an earlier turn differently"):
        encode_preferences(
            tokenizer, [{"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER]}], name="d@1", limit=99
        )


@given(st.text(alphabet=CHARACTERS, max_size=20), st.booleans())
def test_what_was_written_is_read_back(text: str, ended: bool) -> None:
    tokenizer = character_tokenizer(CHARACTERS)
    tokens = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * ended
    assert decode_response(tokenizer, tokens, ended=ended) == text


def test_special_tokens_inside_a_response_stay_visible(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.encode("13<|user|>9")
    assert decode_response(tokenizer, tokens, ended=False) == "13<|user|>9"
