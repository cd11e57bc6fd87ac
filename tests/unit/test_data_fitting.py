"""Tokens counted before a run are the tokens the engine will see; rows that do not fit are named."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from posttrain.data.fit import (
    PlanTokenizer,
    Read,
    check_answers,
    check_demonstrations,
    check_pairs,
    check_prompts,
    check_responses_differ,
    context_length,
    open_tokenizer,
)
from posttrain.data.rows import Row, read_rows
from posttrain.domain import rendering
from posttrain.domain.errors import InputError
from posttrain.domain.rendering import TimeLimitError, time_limit
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.files import (
    character_tokenizer,
    encode_examples,
    encode_preferences,
    encode_prompts,
    load_tokenizer,
)

QUESTION = {"role": "user", "content": "Q: sort 31"}
ANSWER = {"role": "assistant", "content": "A: 13"}
DIALECTS: dict[str, dict[str, Any]] = {
    "trl prompt": {"prompt": [QUESTION]},
    "trl prompt and completion": {"prompt": [QUESTION], "completion": [ANSWER]},
    "trl text": {"text": "Q: sort 31 A: 13"},
    "trl messages": {"messages": [{"role": "system", "content": "sort"}, QUESTION, ANSWER, QUESTION, ANSWER]},
    "plain": {"prompt": "Q: sort 31", "completion": " A: 13"},
    "verifiers": {"prompt": [QUESTION], "answer": "13", "info": {"k": 1}, "task": "sort"},
    "question": {"question": "sort 31", "answer": 13},
    "verl": {"data_source": "made", "prompt": [QUESTION], "reward_model": {"style": "rule", "ground_truth": "13"}},
    "nulls": {"prompt": [{**QUESTION, "name": None}], "completion": "A: 13"},
    "trl labelled completion": {"prompt": [QUESTION], "completion": [ANSWER], "label": False},
    "trl preference": {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": "A: 31"},
    "trl plain preference": {"prompt": "Q: sort 31", "chosen": " A: 13", "rejected": ""},
    "trl implicit preference": {
        "chosen": [QUESTION, ANSWER],
        "rejected": [QUESTION, {"role": "assistant", "content": "A: 31", "thinking": "31"}],
    },
}
# branches on what transformers gives a template: special tokens, reasoning, tojson, loop controls, absent tools
CURIOUS = """
{%- if tools %}{{ tools | tojson }}{% endif %}{{ bos_token }}
{%- for m in messages %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    {%- if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {{- m['role'] }}{{ bos_token }}
    {%- if m['role'] == 'assistant' %}
        {%- generation %}{% if m.reasoning_content %}({{ m.thinking }}){% endif %}{{ m['content'] }}{{ eos_token }}
        {%- endgeneration %}
    {%- else %}{{ {'é<': m['content']} | tojson }}{{ m.name is defined }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}assistant{{ bos_token }}{% endif %}"""


def letters(folder: Path) -> None:
    character_tokenizer(InitModelConfig().characters).save_pretrained(folder)


def pairs(folder: Path) -> None:
    """Byte pairs with a beginning of sequence that only plain text gets, and one template among several."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    corpus = ["user: Q: sort 31 assistant: A: 13 sorted"] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CURIOUS}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": templates}))


@pytest.fixture(scope="module", params=[letters, pairs], ids=["letters", "pairs"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PlanTokenizer, PreTrainedTokenizerBase]:
    """One tokenizer as the plan and as the engine reads it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make: Callable[[Path], None] = request.param
    make(folder)
    planned = open_tokenizer(reader(folder))
    assert planned is not None
    return planned, load_tokenizer(folder)


@pytest.fixture
def tiny(tmp_path: Path) -> PlanTokenizer:
    letters(tmp_path)
    tokenizer = open_tokenizer(reader(tmp_path))
    assert tokenizer is not None
    return tokenizer


def reader(folder: Path) -> Read:
    return lambda name: (folder / name).read_bytes() if (folder / name).is_file() else None


def canonical(tmp_path: Path, row: dict[str, Any]) -> Row:
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "row")
    return read_rows(tmp_path / "row")[0]


def assert_same_prompt(planned: PlanTokenizer, engine: PreTrainedTokenizerBase, row: Row) -> None:
    assert list(rendering.prompts(planned, [row], name="d")) == encode_prompts(engine, [row], name="d", limit=999)


def assert_same_examples(planned: PlanTokenizer, engine: PreTrainedTokenizerBase, row: Row) -> None:
    for labelled in (False, True)[: 1 + ("label" in row)]:
        [turns] = rendering.examples(planned, [row], name="d", labelled=labelled)
        examples = encode_examples(engine, [row], name="d", limit=999, labelled=labelled)
        assert turns == [(e.prompt, e.completion) for e in examples]


def assert_same_pair(planned: PlanTokenizer, engine: PreTrainedTokenizerBase, row: Row) -> None:
    [pair] = encode_preferences(engine, [row], name="d", limit=999)
    assert list(rendering.pairs(planned, [row], name="d")) == [(pair.prompt, pair.chosen, pair.rejected)]
    turns = [(pair.prompt, pair.chosen), (pair.prompt, pair.rejected)]
    assert list(rendering.examples(planned, [row], name="d", labelled=True)) == [turns]
    examples = encode_examples(engine, [row], name="d", limit=999, labelled=True)
    assert [(e.prompt, e.completion) for e in examples] == turns
    assert rendering.labels_of(row) == (True, False)


class TestSameTokensAsTheEngine:
    @pytest.mark.parametrize("dialect", DIALECTS)
    def test_every_dialect(
        self, both: tuple[PlanTokenizer, PreTrainedTokenizerBase], dialect: str, tmp_path: Path
    ) -> None:
        planned, engine = both
        row = canonical(tmp_path, DIALECTS[dialect])
        if "text" not in row:
            assert_same_prompt(planned, engine, row)
        if {"completion", "messages", "text"} & row.keys():
            assert_same_examples(planned, engine, row)
        if "chosen" in row:
            assert_same_pair(planned, engine, row)

    @given(
        turns=st.lists(
            st.tuples(st.text(alphabet="QA: sort0123é<\n|>_", max_size=12), st.none() | st.text(max_size=4)),
            min_size=2,
            max_size=5,
        )
    )
    def test_any_conversation(
        self, both: tuple[PlanTokenizer, PreTrainedTokenizerBase], turns: list[tuple[str, str | None]]
    ) -> None:
        planned, engine = both
        roles = ["user", "assistant"] * 3
        messages = [
            {"role": role, "content": text, "thinking": thought}
            for role, (text, thought) in zip(roles, turns, strict=False)
        ]
        row = {"messages": messages}
        assert_same_prompt(planned, engine, row)
        assert_same_examples(planned, engine, row)

    @given(prompt=st.text(max_size=12), completion=st.text(max_size=12))
    def test_any_text(self, both: tuple[PlanTokenizer, PreTrainedTokenizerBase], prompt: str, completion: str) -> None:
        planned, engine = both
        row = {"prompt": prompt, "completion": completion}
        assert_same_examples(planned, engine, row)

    @pytest.mark.parametrize(
        "row",
        [
            {"prompt": [{"role": "tool", "content": "x"}]},
            {"prompt": []},
            {"messages": [ANSWER]},
            {"messages": [QUESTION]},
            {"prompt": "a"},
            {"answer": "a"},
            {"prompt": "a", "chosen": "b"},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": [{"role": "tool", "content": "x"}], "chosen": [ANSWER], "rejected": [ANSWER]},
        ],
        ids=str,
    )
    def test_both_refuse_the_same_rows(
        self, both: tuple[PlanTokenizer, PreTrainedTokenizerBase], row: dict[str, Any]
    ) -> None:
        planned, engine = both

        def refused(check: Callable[[], Any]) -> bool:
            try:
                check()
            except InputError:
                return True
            return False

        room = {"name": "d", "context": None}
        assert refused(lambda: check_prompts([row], planned, reserve=0, **room)) == refused(
            lambda: encode_prompts(engine, [row], name="d", limit=99)
        )
        assert refused(lambda: check_demonstrations([row], planned, longest=None, **room)) == refused(
            lambda: encode_examples(engine, [row], name="d", limit=99)
        )
        assert refused(lambda: check_pairs([row], planned, longest=None, **room)) == refused(
            lambda: encode_preferences(engine, [row], name="d", limit=99)
        )


class TestLimits:
    def test_a_prompt_and_its_response_fill_the_context_exactly(self, tiny: PlanTokenizer) -> None:
        rows = [{"prompt": "1"}, {"prompt": "12345"}]
        check_prompts(rows, tiny, name="d@1", context=8, reserve=3)
        with pytest.raises(
            InputError, match=r"^d@1 row 2: prompt of 5 tokens \+ a response of up to 3 exceeds the context"
        ):
            check_prompts(rows, tiny, name="d@1", context=7, reserve=3)

    def test_demonstrations_are_held_to_the_smaller_limit(self, tiny: PlanTokenizer) -> None:
        rows = [{"prompt": "1", "completion": "2"}, {"prompt": "12", "completion": "21"}]  # with end of sequence: 3, 5
        check_demonstrations(rows, tiny, name="d@1", context=5, longest=None)
        with pytest.raises(InputError, match=r"^d@1 row 2: .* of 5 tokens exceed the context of 4; shorten or drop"):
            check_demonstrations(rows, tiny, name="d@1", context=4, longest=9)
        with pytest.raises(InputError, match=r"^d@1 row 2: .* exceed max_length of 3; .* or raise max_length$"):
            check_demonstrations(rows, tiny, name="d@1", context=9, longest=3)

    def test_pairs_are_held_to_the_limit_by_their_longer_response(self, tiny: PlanTokenizer) -> None:
        rows = [  # with end of sequence: 3 and 5
            {"prompt": "1", "chosen": "2", "rejected": ""},
            {"prompt": "12", "chosen": "2", "rejected": "21"},
        ]
        check_pairs(rows, tiny, name="d@1", context=5, longest=None)
        with pytest.raises(InputError, match=r"^d@1 row 2: .* of 5 tokens exceed the context of 4; shorten or drop"):
            check_pairs(rows, tiny, name="d@1", context=4, longest=9)
        with pytest.raises(InputError, match=r"^d@1 row 2: .* exceed max_length of 3; .* or raise max_length$"):
            check_pairs(rows, tiny, name="d@1", context=9, longest=3)
        with pytest.raises(InputError, match=r"^d@1 row 1: a preference needs .*, got no chosen and no rejected$"):
            check_pairs([{"prompt": "1", "completion": "2"}], tiny, name="d@1", context=9, longest=None)

    def test_pairs_must_differ(self, tiny: PlanTokenizer) -> None:
        rows = [{"prompt": "1", "chosen": "2", "rejected": "3"}, {"prompt": "1", "chosen": "2", "rejected": "2"}]
        for check in (check_responses_differ, partial(check_pairs, tokenizer=tiny, context=9, longest=None)):
            with pytest.raises(InputError, match=r"^d@1 row 2: chosen and rejected must differ, got the same"):
                check(rows, name="d@1")
            check(rows[:1], name="d@1")

    def test_chat_rows_need_a_template(self, tmp_path: Path) -> None:
        letters(tmp_path)
        (tmp_path / "chat_template.jinja").unlink()
        tokenizer = open_tokenizer(reader(tmp_path))
        assert tokenizer is not None
        check_prompts([{"prompt": "1"}], tokenizer, name="d", context=9, reserve=1)
        with pytest.raises(InputError, match="d row 1: a chat row needs a tokenizer with a chat template"):
            check_prompts([{"prompt": [QUESTION]}], tokenizer, name="d", context=99, reserve=1)

    @pytest.mark.parametrize("template", ["{% for %}", "{{ messages[0]['content'].__class__.__mro__ }}", "{{ 1 / 0 }}"])
    def test_a_template_that_cannot_be_rendered(self, tmp_path: Path, template: str) -> None:
        letters(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        tokenizer = open_tokenizer(reader(tmp_path))
        assert tokenizer is not None
        with pytest.raises(InputError, match="d row 1 cannot be rendered by the chat template"):
            check_prompts([{"prompt": [QUESTION]}], tokenizer, name="d", context=99, reserve=1)

    def test_a_template_that_changes_earlier_turns_cannot_tell_prompts_from_completions(self, tmp_path: Path) -> None:
        letters(tmp_path)
        changing = "{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}"
        (tmp_path / "chat_template.jinja").write_text(changing)
        tokenizer = open_tokenizer(reader(tmp_path))
        assert tokenizer is not None
        with pytest.raises(InputError, match="row 1: the chat template renders an earlier turn differently"):
            check_demonstrations([{"messages": [QUESTION, ANSWER]}], tokenizer, name="d", context=99, longest=None)

    def test_a_tokenizer_that_cuts_by_itself_does_not_here(self, tmp_path: Path) -> None:
        letters(tmp_path)
        written = json.loads((tmp_path / "tokenizer.json").read_text())
        written["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        written["padding"] = None
        (tmp_path / "tokenizer.json").write_text(json.dumps(written))
        tokenizer = open_tokenizer(reader(tmp_path))
        assert tokenizer is not None
        with pytest.raises(InputError, match="prompt of 8 tokens"):
            check_prompts([{"prompt": "12345678"}], tokenizer, name="d", context=9, reserve=2)

    @pytest.mark.parametrize(
        ("answer", "got"),
        [
            ({}, "no answer in the columns prompt;"),
            ({"answer": None}, "no answer in the columns prompt;"),
            ({"answer": ["1"]}, 'answer ["1"] (list);'),
            ({"answer": True}, "answer true (bool);"),
            ({"answer": ["é" * 99]}, f'answer ["{"é" * 58}… (list);'),
        ],
    )
    def test_answers(self, answer: dict[str, Any], got: str) -> None:
        with pytest.raises(InputError, match=r"^d row 2 must have an answer as text, got " + re.escape(got)):
            check_answers([{"prompt": "1", "answer": "1"}, {"prompt": "1", **answer}], "d")


def test_what_needs_transformers_is_left_to_the_job(tmp_path: Path) -> None:
    assert open_tokenizer(reader(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text('{"version": "9.0"}')
    assert open_tokenizer(reader(tmp_path)) is None


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 32}, 32),
        ({"text_config": {"n_ctx": 16}}, 16),
        ({}, None),
    ],
)
def test_context_length(tmp_path: Path, config: dict[str, Any], length: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(reader(tmp_path)) == length


LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def _swallow_everything() -> None:
    while True:
        with contextlib.suppress(Exception):
            while True:
                sum(range(100))


class TestForeignTemplates:
    """A template is a program by somebody else."""

    def tokenizers(self, template: str, tmp_path: Path) -> tuple[PlanTokenizer, PreTrainedTokenizerBase]:
        tokenizer = character_tokenizer(InitModelConfig().characters)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        planned = open_tokenizer(lambda name: (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None)
        assert planned is not None
        return planned, load_tokenizer(tmp_path)

    @pytest.mark.slow
    def test_loops_over_ranges_end_in_plan_and_job(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("posttrain.data.fit", "posttrain.engine.models.files"):
            monkeypatch.setattr(f"{module}._RENDER_SECONDS", 0.5)
        planned, real = self.tokenizers(LOOPS, tmp_path)
        rows = [{"prompt": [QUESTION]}]
        with pytest.raises(InputError, match=r"train row 1: the chat template must render a row within 0\.5 s"):
            check_prompts(rows, planned, name="train", context=None, reserve=0)
        with pytest.raises(InputError, match=r"train row 1: the chat template must render a row within 0\.5 s"):
            encode_prompts(real, rows, name="train", limit=100)

    def test_in_a_thread_that_is_not_the_main_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("posttrain.data.fit._RENDER_SECONDS", 0.5)
        planned, _ = self.tokenizers(LOOPS, tmp_path)
        with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="within"):
            pool.submit(planned.render, [QUESTION], generate=True).result()

    def test_slow_ones_end_though_each_row_is_in_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("posttrain.data.fit._MEAN_SECONDS", 1e-6)
        monkeypatch.setattr("posttrain.data.fit._RENDER_SECONDS", 10.0)
        planned, _ = self.tokenizers("{{ messages[0]['content'] }}", tmp_path)
        planned.render([QUESTION], generate=True)
        monkeypatch.setattr(planned, "_spent", 60.0)
        with pytest.raises(InputError, match="must take less than 1e-06 s per row"):
            planned.render([QUESTION], generate=True)

    @pytest.mark.parametrize("huge", ["10 ** (10 ** 10)", "'x' * 10 ** 9", "10 ** 9 * [1]", "10 ** 9999 * 10 ** 25000"])
    def test_huge_products_are_refused(self, tmp_path: Path, huge: str) -> None:
        planned, _ = self.tokenizers("{{ " + huge + " }}", tmp_path)
        with pytest.raises(
            InputError, match=r"train row 1 cannot be rendered .*: creates a value that is too large with \*"
        ):
            check_prompts([{"prompt": [QUESTION]}], planned, name="train", context=None, reserve=0)

    def test_blocks_that_nest_too_deep_for_python(self, tmp_path: Path) -> None:
        planned, real = self.tokenizers("{% for i in [1] %}" * 25 + "x" + "{% endfor %}" * 25, tmp_path)
        with pytest.raises(InputError, match="train row 1 cannot be rendered by the chat template"):
            check_prompts([{"prompt": [QUESTION]}], planned, name="train", context=None, reserve=0)
        with pytest.raises(InputError, match="train row 1 cannot be rendered by the chat template"):
            encode_prompts(real, [{"prompt": [QUESTION]}], name="train", limit=100)

    def test_a_limit_that_code_swallows_comes_again(self) -> None:
        with pytest.raises(TimeLimitError), time_limit(0.2):
            _swallow_everything()

    def test_modest_ones_are_not(self, tmp_path: Path) -> None:
        planned, real = self.tokenizers("{{ 2 ** 3 * 4 }}{{ '1' * 3 }}{{ 2 * '1' }}", tmp_path)
        assert_same_prompt(planned, real, {"prompt": [QUESTION]})


def test_a_limit_that_is_not_reached_leaves_nothing_behind() -> None:
    for _ in range(100):
        with time_limit(1e-9), contextlib.suppress(TimeLimitError):
            pass
    with time_limit(300.0):
        assert sum(range(10**5)) > 0


TRACED = """
import sys
from posttrain.domain.rendering import TimeLimitError, time_limit
with time_limit(300.0):
    pass
for _ in range(3):
    try:
        with time_limit(0.0):
            while True:
                pass
    except TimeLimitError:
        pass
def called():
    return "traced"
seen = []
sys.settrace(lambda frame, event, _: seen.append(event))
called()
sys.settrace(None)
print(seen)
"""


def test_a_process_that_had_a_limit_can_be_traced_by_a_debugger() -> None:
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("['call']\n", "")
