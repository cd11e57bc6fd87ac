"""Rewards written with the real verifiers, TRL, math-verify and reasoning-gym score in the cell as at home."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.assets import inspect_reward
from posttrain.data.refs import imported_reward
from posttrain.data.rows import read_rows
from posttrain.domain.rewards import DIALECTS, Signature
from posttrain.sandbox.port import RewardCall
from posttrain.sandbox.process import ProcessReward, open_reward

pytestmark = pytest.mark.ecosystem
OLD_VERIFIERS = Path(sys.prefix) / "verifiers-0.1"  # make ecosystem puts it there, beside 0.4
PATIENCE = 300.0  # seconds; it ends what hangs
CHAT = [{"role": "user", "content": "What is 6 times 7?"}]
Opener = Callable[..., ProcessReward]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Opens a reward from its source as a job does, by what registering it said; all are closed at the end."""
    held: list[ProcessReward] = []

    def _open(source: str, entry: str | None = None) -> ProcessReward:
        path = tmp_path / f"reward{len(held)}.py"
        path.write_text(textwrap.dedent(source))
        meta = inspect_reward(path, entry)
        held.append(open_reward(path, meta["entry"], timeout=PATIENCE, dialect=meta["dialect"]))
        return held[-1]

    yield _open
    for reward in held:
        reward.close()


def call(*completions: str, prompt: Any = None, **columns: Any) -> RewardCall:
    row = {"prompt": CHAT if prompt is None else prompt, **columns}
    ids = [(1,) * len(text) for text in completions]
    count = len(completions)
    text = row["prompt"] if isinstance(row["prompt"], str) else "Q"
    return RewardCall([text] * count, list(completions), [row] * count, [(1, 2)] * count, ids)


def scores(reward: ProcessReward, given: RewardCall) -> list[float | None]:
    return [score.score for score in reward.score(given)]


class TestTRL:
    def test_accuracy_reward_imported(self, opened: Opener) -> None:
        reward = opened("from trl.rewards import accuracy_reward\n", "accuracy_reward")
        given = call(r"So it is \boxed{42}", r"\boxed{41}", solution="42")
        assert reward.dialect == "trl"
        assert scores(reward, given) == [1.0, 0.0]
        assert scores(reward, call("anything", solution="no mathematics whatsoever, is it?"))[0] in (None, 0.0)

    def test_a_factory_s_object_gets_the_token_ids(self, opened: Opener) -> None:
        from trl.rewards import get_cosine_scaled_reward

        source = "from trl.rewards import get_cosine_scaled_reward\nscore = get_cosine_scaled_reward(max_len=40)\n"
        texts = [r"\boxed{42}", r"\boxed{41} or so I think"]
        chats = [[{"role": "assistant", "content": text}] for text in texts]
        ids = [[1] * len(text) for text in texts]
        expected = get_cosine_scaled_reward(max_len=40)(chats, ["42", "42"], ids)
        assert scores(opened(source), call(*texts, solution="42")) == pytest.approx(expected)

    def test_wrapped_by_partial_beside_a_format_reward(self, opened: Opener) -> None:
        source = """
            from functools import partial

            from trl.rewards import reasoning_accuracy_reward, think_format_reward

            def score(completions, solution, **kwargs):
                right = judged(completions, solution)
                return [a + b / 2 for a, b in zip(right, think_format_reward(completions))]

            judged = partial(reasoning_accuracy_reward, reasoning_delimiters=["</think>"])
        """
        given = call(r"<think>\boxed{41}</think>\boxed{42}", r"\boxed{42}", solution="42")
        assert scores(opened(source), given) == [1.5, 0.0]

    def test_every_argument_that_its_trainer_gives_is_given(self) -> None:
        from trl import GRPOTrainer

        source = inspect.getsource(GRPOTrainer._calculate_rewards)
        named = set(re.findall(r'\breward_kwargs\["(\w+)"\]', source))
        named |= set(re.findall(r"reward_func\(\s*(\w+)=\w+, (\w+)=\w+, (\w+)=", source)[0])
        assert {"prompts", "completions", "completion_ids", "log_extra", "log_metric"} <= named, "read it anew"
        assert named - {"environments"} <= set(DIALECTS["trl"].offers), "environments are of agents, which we have not"


class TestMathVerify:
    SOURCE = """
        from math_verify import parse, verify

        def score(completion, answer):
            return float(verify(parse(f"${answer}$"), parse(completion)))
    """

    def test_in_the_cell(self, opened: Opener) -> None:
        given = call(r"It is $\frac{1}{2}$.", "It is 0.6.", prompt="Q", answer="0.5")
        assert scores(opened(self.SOURCE), given) == [1.0, 0.0]


class TestReasoningGym:
    SOURCE = """
        import json

        import reasoning_gym

        def score(completion, row):
            found = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
            return found(answer=completion, entry=row)
    """

    @pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "basic_arithmetic", "countdown"])
    def test_rows_and_reward(self, opened: Opener, tmp_path: Path, task: str) -> None:
        import reasoning_gym

        made = reasoning_gym.create_dataset(task, size=4, seed=7)
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(entry, default=str) + "\n" for entry in made))
        rows = read_rows(file)
        assert [row["prompt"] for row in rows] == [entry["question"] for entry in made]
        texts = [str(entry["answer"]) for entry in made]
        given = RewardCall([row["prompt"] for row in rows], texts, rows, [()] * 4, [()] * 4)
        expected = [made.score_answer(text, entry) for text, entry in zip(texts, made, strict=True)]
        assert scores(opened(self.SOURCE), given) == expected


OLD = f"""
    import sys
    sys.path.insert(0, {str(OLD_VERIFIERS)!r})
    import verifiers as vf
"""


class TestVerifiers01:
    """`vf.Rubric`, `vf.Parser` and environments, as verifiers 0.1 has them."""

    RUBRIC = (
        OLD
        + """
    parser = vf.XMLParser(["answer"], answer_field="answer")

    def correct(parser, completion, answer, **kwargs):
        return float(parser.parse_answer(completion) == answer)

    async def brief(completion, state, info):
        assert state["answer"] and state["prompt"][0]["role"] == "user"
        return float(len(completion[-1]["content"]) < info["most"])

    rubric = vf.Rubric(funcs=[correct, brief], weights=[1.0, 0.25], parser=parser)
    rubric.add_metric(parser.get_format_reward_func())
    """
    )
    TEXTS = ("<answer>42</answer>", "<answer>41</answer>", "It is 42, and that took me very long to find out")

    def test_a_rubric(self, opened: Opener) -> None:
        reward = opened(self.RUBRIC, "rubric")
        found = reward.score(call(*self.TEXTS, answer="42", info={"most": 30}))
        assert reward.dialect == "verifiers"
        assert [score.score for score in found] == [1.25, 0.25, 0.0]
        assert found[0].components.keys() == {"correct", "brief", "format_reward_func"}
        assert [score.score for score in found] == pytest.approx(self.at_home())

    def at_home(self) -> list[float]:
        """What verifiers itself says, in a process of its own: two libraries have one name."""
        script = f"""
            import asyncio, json
            texts = {list(self.TEXTS)!r}
            for text in texts:
                state = vf.State(prompt={CHAT!r}, completion=[{{"role": "assistant", "content": text}}])
                state.update(answer="42", info={{"most": 30}}, task="default")
                asyncio.run(rubric.score_rollout(state))
                print(json.dumps(state["reward"]))
        """
        source = textwrap.dedent(self.RUBRIC) + textwrap.dedent(script)
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_one_function_of_it_with_the_file_s_parser(self, opened: Opener) -> None:
        assert scores(opened(self.RUBRIC, "correct"), call(*self.TEXTS, answer="42")) == [1.0, 0.0, 0.0]

    def test_an_environment(self, opened: Opener) -> None:
        source = (
            self.RUBRIC
            + """
    def load_environment(**options):
        from datasets import Dataset
        rows = Dataset.from_list([{"question": "What is 6 times 7?", "answer": "42"}])
        return vf.SingleTurnEnv(dataset=rows, rubric=rubric, parser=parser)
    """
        )
        given = call(*self.TEXTS, answer="42", info={"most": 30})
        assert scores(opened(source, "load_environment"), given) == [1.25, 0.25, 0.0]

    def test_a_group_of_rubrics_and_its_own_mathematics(self, opened: Opener) -> None:
        source = (
            OLD
            + """
    def brief(completion):
        return float(len(completion[-1]["content"]) < 20)

    rubric = vf.RubricGroup([vf.MathRubric(), vf.Rubric(funcs=[brief], weights=[0.5])])
    """
        )
        assert scores(opened(source, "rubric"), call(r"\boxed{42}", r"\boxed{41}", answer="42")) == [1.5, 0.5]

    def test_what_it_would_count_as_zero_is_an_error(self, opened: Opener) -> None:
        source = (
            OLD
            + """
    def broken(completion, info):
        return info["gold"]

    rubric = vf.Rubric(funcs=[broken])
    """
        )
        [failed, _] = opened(source, "rubric").score(call("a", "b", answer="42"), allowed=2, places=[0, 1])
        assert failed.status == "error"
        assert "broken" in failed.message
        assert "gold" in failed.message


class TestVerifiers04:
    """`vf.Task` with `@vf.reward` methods, as verifiers 0.4 has them."""

    SOURCE = """
        import verifiers.v1 as vf

        class Sum(vf.TaskData):
            answer: str

        class SumTask(vf.Task[Sum]):
            @vf.reward(weight=1.0)
            async def correct(self, task, trace) -> float:
                assert task.prompt_text == "What is 6 times 7?"
                return float(trace.last_reply == self.data.answer)

            @vf.reward(weight=0.5)
            async def brief(self, trace) -> float:
                return float(len(trace.messages) == 2 and len(trace.last_reply) < 5)

            @vf.metric
            async def length(self, trace) -> float:
                return float(len(trace.last_reply))
    """

    @pytest.mark.parametrize("prompt", [CHAT, "What is 6 times 7?"])
    def test_a_task(self, opened: Opener, prompt: Any) -> None:
        assert importlib.metadata.version("verifiers").startswith("0.4.")
        found = opened(self.SOURCE, "SumTask").score(call("42", "I think 41", prompt=prompt, answer="42"))
        assert [score.score for score in found] == [1.5, 0.0]
        assert found[0].components == {"correct": 1.0, "brief": 1.0, "length": 2.0}


def test_a_package_s_function_without_a_file(tmp_path: Path) -> None:
    found = imported_reward("trl.rewards:accuracy_reward")
    assert (found.distribution, found.version) == ("trl", importlib.metadata.version("trl"))
    assert isinstance(found.signature, Signature), "found in a module that trl imports late"
    assert "solution" in found.signature.required
    assert imported_reward("math_verify:verify").distribution == "math-verify"
    path = tmp_path / "imported_reward.py"
    path.write_bytes(found.source)
    reward = open_reward(path, found.function, timeout=PATIENCE)
    try:
        assert scores(reward, call(r"\boxed{42}", "41", solution="42")) == [1.0, 0.0]
    finally:
        reward.close()
