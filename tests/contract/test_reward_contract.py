"""What every reward function honours, over the worker process and the in-process fake; then what only a process can."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from reward_bench import PATIENCE, Opener as ProcessOpener, call

from posttrain.domain.errors import InputError, JobFailedError
from posttrain.sandbox.port import RewardCall, RewardError, RewardFunction, ScriptedReward, probe_call
from posttrain.sandbox.process import ParallelReward, open_reward

SOURCES = {
    "exact": "def score(completion, answer):\n    return 1.0 if completion == answer else 0.0\n",
    "raises": "def score(completion, answer):\n    return 1 / len(completion.strip('x'))\n",
    "nan": "def score(completion):\n    return float('nan')\n",
    "infinite": "def score(completion):\n    return float('-inf')\n",
    "none": "def score(completion, answer):\n    return None if completion == '?' else 1.0\n",
    "short": "def score(completions, **columns):\n    return [1.0]\n",
}
SCRIPTS: dict[str, Callable[[RewardCall], list[float | None]]] = {
    "exact": lambda c: [float(t == r["answer"]) for t, r in zip(c.completions, c.rows, strict=True)],
    "raises": lambda c: [1 / len(t.strip("x")) for t in c.completions],
    "nan": lambda c: [float("nan") for _ in c.completions],
    "infinite": lambda c: [float("-inf") for _ in c.completions],
    "none": lambda c: [None if t == "?" else 1.0 for t in c.completions],
    "short": lambda c: [1.0],
}
FOREIGN = {
    "row": """
        def score(prompt, completion, answer, **row):
            return float(prompt == 'Q' and completion == answer and row['level'] == 3)
    """,
    "trl": """
        def exact(prompts, completions, **kwargs):
            return [float(c == a) for c, a in zip(completions, kwargs['answer'])]
    """,
    "trl async": """
        async def halves(completions, level, **kwargs):
            return [value / 2 for value in level]
    """,
    "trl chat": """
        def exact(prompts, completions, **kwargs):
            return [float(p[0]['content'] + c[0]['content'] == 'Q12') for p, c in zip(prompts, completions)]
    """,
    "verl": """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return {'score': float(solution_str == ground_truth), 'source': data_source, 'bonus': extra_info['b']}
    """,
    "verl_batch": """
        def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
            each = zip(solution_strs, ground_truths, extra_infos)
            return [{'score': float(s == g), 'bonus': e['b']} for s, g, e in each]
    """,
    "openrlhf": """
        def reward_func(queries, prompts, labels, **kwargs):
            return {'rewards': [float(q == p + label) for q, p, label in zip(queries, prompts, labels)]}
    """,
    "slime": """
        async def custom_rm(args, sample, **kwargs):
            return float(sample.response == sample.label)
    """,
    "areal": """
        def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
            return float(completions == answer) + len(completion_ids)
    """,
    "verifiers": """
        def correct(completion, answer, state, **kwargs):
            return float(state['answer'] == answer)
    """,
    "verifiers chat": """
        def correct(completion, state):
            return float(completion[-1]['content'] == '12')
    """,
}
_SUMS = """
    class Sums:
        def rated(self, completion, answer, info, task):
            exact = float(completion[-1]['content'] == answer and task == 'sums')
            return {'exact': exact, 'level': float(info['level'])}

"""
RUBRICS = {  # how verifiers called its own `score_rollout` over time
    "0.1.0": _SUMS
    + """
        async def score_rollout(self, prompt, completion, answer, state, task=None, **kwargs):
            found = self.rated(completion, answer, kwargs['info'], task)
            return {**found, 'reward': found['exact'] + found['level'] / 2}

    rubric = Sums()
    """,
    "0.1.5": _SUMS
    + """
        async def score_rollout(self, prompt, completion, answer, state, task='default', info=None):
            import types
            found = self.rated(completion, answer, info, task)
            return types.SimpleNamespace(reward=found['exact'] + found['level'] / 2, metrics=found)

    rubric = Sums()
    """,
    "0.1.14": _SUMS
    + """
        async def score_rollout(self, state):
            found = self.rated(state['completion'], state['answer'], state['info'], state['input']['task'])
            state['reward'], state['metrics'] = found['exact'] + found['level'] / 2, found

    class Environment:
        rubric = Sums()

    def load_environment(**options):
        return Environment()

    def another(completion):
        return 0.0

    score = load_environment()
    """,
}
Opener = Callable[[str], RewardFunction]


@pytest.fixture(params=["process", "scripted"])
def open_any(request: pytest.FixtureRequest, opened: ProcessOpener) -> Opener:
    if request.param == "process":
        return lambda name: opened(SOURCES[name])
    return lambda name: ScriptedReward(SCRIPTS[name])


class TestEveryReward:
    def test_scores_in_order_and_again(self, open_any: Opener) -> None:
        reward = open_any("exact")
        for _ in range(2):
            scores = reward.score(call("12", "21", "12"))
            assert [s.score for s in scores] == [1.0, 0.0, 1.0]

    def test_nothing_to_score(self, open_any: Opener) -> None:
        assert open_any("exact").score(call()) == []

    def test_none_is_unscored_not_zero(self, open_any: Opener) -> None:
        assert [s.score for s in open_any("none").score(call("?", "12"))] == [None, 1.0]

    def test_raising_is_an_error_not_a_zero(self, open_any: Opener) -> None:
        with pytest.raises(RewardError, match="ZeroDivisionError"):
            open_any("raises").score(call("12", "x"))

    @pytest.mark.parametrize("kind", ["nan", "infinite"])
    def test_not_finite(self, open_any: Opener, kind: str) -> None:
        with pytest.raises(RewardError, match=r"finite numbers, got (nan|-inf) as score of completion 0 '12'"):
            open_any(kind).score(call("12"))

    def test_wrong_length(self, open_any: Opener) -> None:
        with pytest.raises(RewardError, match=r"one score per completion \(2\), got 1"):
            open_any("short").score(call("12", "21"))

    def test_closed_twice_then_refused(self, open_any: Opener) -> None:
        reward = open_any("exact")
        reward.close()
        reward.close()
        with pytest.raises(InputError, match="closed"):
            reward.score(call("12"))

    def test_errors_are_one_line_and_never_retried(self, open_any: Opener) -> None:
        with pytest.raises(JobFailedError) as caught:
            open_any("raises").score(call("x"))
        assert "\n" not in str(caught.value)
        assert not caught.value.retryable


class TestStatuses:
    """A completion that cannot be scored is left out; the others are scored all the same."""

    RAISES = "def score(completion):\n    return 1 / len(completion.strip('x'))\n"
    RAISES_TOGETHER = "def score(completions, **kw):\n    return [1 / len(c.strip('x')) for c in completions]\n"
    HANGS = "import time\ndef score(completion):\n    if completion == 'hang': time.sleep(600)\n    return 1.0\n"
    HANGS_TOGETHER = (
        "import time\ndef score(completions, **kw):\n    if 'hang' in completions: time.sleep(600)\n"
        "    return [1.0 for _ in completions]\n"
    )
    DIES_TOGETHER = (
        "import os\ndef score(completions, **kw):\n    'die' in completions and os._exit(3)\n"
        "    return [1.0 for _ in completions]\n"
    )
    NAN = "def score(completions, **kw):\n    return [float('nan') if c == 'n' else 1 for c in completions]\n"
    WORD = "def score(completions, **kw):\n    return ['good' if c == 'n' else 1 for c in completions]\n"

    @pytest.fixture(params=["process", "scripted"])
    def raising(self, request: pytest.FixtureRequest, opened: ProcessOpener) -> RewardFunction:
        scripted = ScriptedReward(lambda c: [1 / len(t.strip("x")) for t in c.completions])
        return scripted if request.param == "scripted" else opened(self.RAISES)

    def test_one_that_raises(self, raising: RewardFunction) -> None:
        scores = raising.score(call("a", "x", "bb"), allowed=1)
        assert [s.status for s in scores] == ["ok", "error", "ok"]
        assert [s.score for s in scores] == [1.0, None, 0.5]
        assert "ZeroDivisionError" in scores[1].message
        assert "\n" not in scores[1].message

    def test_one_too_many(self, raising: RewardFunction) -> None:
        with pytest.raises(RewardError, match=r"completion 1 'x'.*; 2 of 4 completions failed, at most 1 may"):
            raising.score(call("a", "x", "bb", "xx"), allowed=1)

    def test_all_of_them_whatever_is_allowed(self, raising: RewardFunction) -> None:
        with pytest.raises(RewardError, match="2 of 2 completions failed"):
            raising.score(call("x", "xx"), allowed=9)

    @pytest.mark.parametrize(
        ("source", "bad", "status"),
        [
            (RAISES_TOGETHER, "x", "error"),
            (DIES_TOGETHER, "die", "error"),
            (HANGS_TOGETHER, "hang", "timeout"),
            (HANGS, "hang", "timeout"),
            (NAN, "n", "error"),
            (WORD, "n", "error"),
        ],
    )
    def test_wherever_it_stands(self, opened: ProcessOpener, source: str, bad: str, status: str) -> None:
        reward = opened(source, timeout=3.0 if status == "timeout" else PATIENCE)
        groups = RewardCall(["P", "P", "Q", "Q"], ["a", bad, "c", "d"], [{"answer": "1"}] * 2 + [{"answer": "2"}] * 2)
        assert [s.status for s in reward.score(groups, allowed=1)] == ["ok", status, "ok", "ok"]

    @pytest.mark.slow
    def test_a_slow_batch_is_no_hanging_completion(self, opened: ProcessOpener) -> None:
        source = """
            import time
            calls = 0
            def score(completion):  # every process of it comes to its third completion too late
                global calls
                calls += 1
                if calls == 3:
                    time.sleep(600)
                return 1.0
        """
        scores = opened(source, timeout=5.0).score(call(*"abcd"))
        assert [s.status for s in scores] == ["ok"] * 4

    def test_a_hang_of_what_a_function_remembers_is_not_put_down_to_a_completion(self, opened: ProcessOpener) -> None:
        source = """
            import time
            calls = 0
            def score(completion):
                global calls
                calls += 1
                if calls == 4:
                    time.sleep(6000)
                return 1.0
        """
        reward = opened(source, timeout=PATIENCE)
        assert [s.status for s in reward.score(call(*"abc"))] == ["ok"] * 3
        reward._timeout = 5.0
        with pytest.raises(RewardError) as caught:
            reward.score(call(*"de"))
        assert "to score completion 0 'd' and was killed; keep no state between completions" in str(caught.value)
        assert "make it faster or raise reward_timeout" in str(caught.value)

    @pytest.mark.slow
    def test_a_hang_at_no_completion_is_looked_for(self, opened: ProcessOpener) -> None:
        """Where the worker says that it is at none, or at one that it was not asked for, each is asked alone."""
        source = """
            import sys, time
            def score(completion):
                if completion == "hang":
                    sys._getframe(2).f_locals["self"].marker[:] = bytes([255]) * 8
                    time.sleep(600)
                return 1.0
        """
        reward = opened(source, timeout=5.0)
        assert [s.status for s in reward.score(call("a", "b", "hang", "c"), allowed=1)] == ["ok", "ok", "timeout", "ok"]

    def test_none_is_no_failure(self, open_any: Opener) -> None:
        assert [s.status for s in open_any("none").score(call("?", "12"))] == ["none", "ok"]

    def test_side_by_side(self, opened: ProcessOpener) -> None:
        reward = ParallelReward([opened(self.RAISES), opened(self.RAISES)])
        wide = RewardCall(list("PQRS"), ["a", "x", "c", "xx"], [{"answer": a} for a in "1234"])
        assert [s.status for s in reward.score(wide, allowed=2)] == ["ok", "error", "ok", "error"]
        with pytest.raises(RewardError, match="completions failed, at most 1 may"):
            reward.score(wide, allowed=1)
        reward.close()

    @pytest.mark.parametrize("processes", [1, 2, 4])
    def test_what_passes_does_not_depend_on_how_many_there_are(self, opened: ProcessOpener, processes: int) -> None:
        wide = RewardCall(list("PQRS"), ["a", "x", "c", "d"], [{"answer": a} for a in "1234"])
        raises = ParallelReward([opened(self.RAISES) for _ in range(processes)])
        scores = raises.score(wide, allowed=3)
        assert [s.status for s in scores] == ["ok", "error", "ok", "ok"]
        assert "completion 1 'x'" in scores[1].message
        raises.close()

    def test_odd_answers_are_the_completion_s_own_fault(self, opened: ProcessOpener) -> None:
        source = """
            class Odd:
                def item(self): raise RuntimeError("no item")
                shape = ()
            WIDE = {str(i): 1 for i in range(99999)}
            ANSWERS = {"mapping": WIDE, "mixed": {1: 1, "a": 2}, "huge": 10**400, "odd": Odd()}
            def score(completion):
                if completion == "interrupt":
                    raise KeyboardInterrupt
                return ANSWERS.get(completion, 1.0)
        """
        names = ["a", "mapping", "mixed", "huge", "odd", "interrupt", "b"]
        scores = opened(source).score(call(*names), allowed=6)
        assert [s.status for s in scores] == ["ok", *["error"] * 5, "ok"]
        assert all(len(s.message) <= 1100 for s in scores)


class TestProtocol:
    """The reward's code can write to its worker's socket: the job believes none of it."""

    FORGES = """
        import gc, json, os, socket, struct
        def channel():
            return next(s for s in gc.get_objects() if isinstance(s, socket.socket) and s.fileno() >= 0)
        def frame(data):
            return struct.pack(">Q", len(data)) + data
        def send(value):
            channel().sendall(frame(json.dumps(value).encode()))
        def score(completion, rows=None):
            {attack}
            return 0.25
    """

    def test_a_fork_does_not_answer_for_it(self, opened: ProcessOpener) -> None:
        source = "import os\ndef score(completion):\n    os.fork()\n    return float(completion)\n"
        reward = opened(source)
        for first in range(5):
            values = [float(first), float(first + 10)]
            assert [s.score for s in reward.score(call(*map(str, values)))] == values

    @pytest.mark.parametrize(
        ("attack", "complaint"),
        [
            (
                "send({'id': 1, 'answers': [{'at': 0, 'score': 1.0, 'components': {}}]})",
                "request 1 while request 2 was open",
            ),
            (
                "send({'id': 3, 'answers': [{'at': 0, 'score': 1.0, 'components': {}}]})",
                "request 3 while request 2 was open",
            ),
            ("send({'id': True, 'answers': [{'at': 0, 'score': 1.0, 'components': {}}]})", "request True"),
            (
                "send({'id': 2, 'answers': [{'at': 7, 'score': 1.0, 'components': {}}]})",
                "a completion that was not requested",
            ),
            ("send({'id': 2, 'answers': [{'at': 0, 'score': 1.0, 'components': {}}]})", "or one completion twice"),
            ("send({'id': 2, 'answers': [{'at': -1, 'score': 1.0, 'components': {}}]})", "expected its number"),
            ("send({'id': 2, 'answers': [{'at': 0.0, 'score': 1.0, 'components': {}}]})", "expected its number"),
            (
                "send({'id': 2, 'answers': [{'at': 0, 'score': True, 'components': {}}]})",
                "a bool where a number is expected",
            ),
            (
                "send({'id': 2, 'answers': [{'at': 0, 'score': 'x', 'components': {}}]})",
                "a str where a number is expected",
            ),
            ("send({'id': 2, 'answers': [{'at': 0, 'score': float('nan'), 'components': {}}]})", "finite number"),
            (
                "send({'id': 2, 'answers': [{'at': 0, 'score': 10**400, 'components': {}}]})",
                "a number outside the range of a float",
            ),
            (
                "send({'id': 2, 'answers': [{'at': 0, 'score': 1.0, 'components': []}]})",
                "components that are not a map",
            ),
            (
                "send({'id': 2, 'answers': [{'at': 0, 'score': 1.0, 'components': {str(i): 0 for i in range(99)}}]})",
                "components",
            ),
            ("send({'id': 2, 'answers': [{'at': 0, 'score': 1.0}]})", "an object of unknown shape"),
            ("send({'id': 2, 'end': True})", "with an end before every completion had an answer"),
            ("send({'id': 2, 'notes': [], 'whole': True})", "with a message that is not an answer"),
            ("send({'id': 2, 'answers': [7]})", "an object of unknown shape"),
            ("send({'id': 2, 'answers': {}})", "an object of unknown shape"),
            ("send({'id': 2, 'fault': 'novel', 'message': ''})", "an object of unknown shape"),
            ("send({'id': 2, 'answers': [{'at': 0, 'error': 7}]})", "a int where text is expected"),
            ("send([1, 2])", "a list, expected a JSON object"),
            ("send(None)", "a NoneType, expected a JSON object"),
            ("channel().sendall(frame(b'[' * 200_000))", "bytes that are not JSON or too large"),
            ("channel().sendall(frame(b'{'))", "bytes that are not JSON or too large"),
            ("channel().sendall(frame(b'\\xff\\xfe'))", "bytes that are not JSON or too large"),
            ("channel().sendall(struct.pack('>Q', 60_000_000))", "message of 60000000 bytes is longer than"),
            ("channel().sendall(struct.pack('>Q', 2**63))", "is longer than"),
        ],
    )
    def test_malformed(self, opened: ProcessOpener, attack: str, complaint: str) -> None:
        reward = opened(textwrap.dedent(self.FORGES).replace("{attack}", attack))
        with pytest.raises(RewardError, match=rf"answered .*{complaint}.*; the reward must not write") as caught:
            reward.score(call("12", "13"))
        assert "\n" not in str(caught.value)
        with pytest.raises(RewardError) as again:  # its worker is not asked any more, and whoever does hears why
            reward.score(call("12"))
        assert str(again.value) == str(caught.value)

    def test_half_a_message_meets_the_deadline(self, opened: ProcessOpener) -> None:
        attack = "channel().sendall(b'\\0\\0'); import time; time.sleep(600)"
        reward = opened(textwrap.dedent(self.FORGES).replace("{attack}", attack), timeout=1.0)
        with pytest.raises(RewardError, match="timeout of 1 s"):
            reward.score(call("12"))

    def test_a_closed_socket_is_an_end(self, opened: ProcessOpener) -> None:
        reward = opened(textwrap.dedent(self.FORGES).replace("{attack}", "channel().shutdown(2)"))
        with pytest.raises(RewardError, match="ended its process"):
            reward.score(call("12"))


class TestUserErrors:
    def test_names_file_line_and_completion(self, opened: ProcessOpener) -> None:
        reward = opened("def helper(t):\n    return t['a']\n\ndef score(completion):\n    return helper(completion)\n")
        with pytest.raises(RewardError, match=r"reward:mine@1: reward\.py:2 raised TypeError: .* completion 0 '12'"):
            reward.score(call("12"))

    def test_wrong_type(self, opened: ProcessOpener) -> None:
        with pytest.raises(RewardError, match=r"reward\.py:1 \(score\) must return a number or None .* got str"):
            opened("def score(completion):\n    return 'good'\n").score(call("12"))

    def test_batched_function_that_returns_no_list(self, opened: ProcessOpener) -> None:
        with pytest.raises(RewardError, match="list of scores, got float"):
            opened("def score(completions, **kwargs):\n    return 1.0\n").score(call("12"))

    def test_unknown_column(self, opened: ProcessOpener) -> None:
        with pytest.raises(InputError, match=r"parameter 'truth' is neither a column.*known: answer, completion"):
            opened("def score(completion, truth):\n    return 1.0\n").score(call("12"))

    @pytest.mark.parametrize(
        ("source", "entry", "error", "match"),
        [
            ("def score(completion:\n", None, InputError, r"reward\.py:1 is not valid Python"),
            ("def score(completion):\n    return 1\n", "scoer", InputError, "no function 'scoer'; it defines score"),
            ("def a(x): ...\ndef b(x): ...\n", None, InputError, "it defines a, b; name the function with --entry a"),
            ("def score(x, y):\n    return 1\n", None, InputError, "no known dialect"),
            ("import nowhere_to_be_found\n", None, RewardError, r"reward\.py:1 raised ModuleNotFoundError"),
        ],
    )
    def test_what_cannot_be_loaded(
        self, opened: ProcessOpener, source: str, entry: str | None, error: type[Exception], match: str
    ) -> None:
        with pytest.raises(error, match=match):
            opened(source, entry)

    def test_missing_source(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"reward source absent\.py does not exist"):
            open_reward(tmp_path / "absent.py", timeout=PATIENCE)
        (tmp_path / "a.py").touch()
        (tmp_path / "b.py").touch()
        with pytest.raises(InputError, match=r"must contain `reward\.py` or a single Python file, got a\.py, b\.py"):
            open_reward(tmp_path, timeout=PATIENCE)

    def test_probe_finds_a_broken_reward_before_step_one(self, opened: ProcessOpener) -> None:
        probe = probe_call(["Q"] * 9, [{"prompt": "Q", "answer": "1"}] * 9, [(5, 6)] * 9)
        assert probe.completions == ["1"] * 4
        with pytest.raises(RewardError, match="KeyError"):
            opened("def score(completion, row):\n    return row['gold']\n").score(probe)

    def test_call_of_unequal_columns(self) -> None:
        with pytest.raises(InputError, match=r"RewardCall\.rows must have one entry per completion \(2\), got 1"):
            RewardCall(["a", "b"], ["c", "d"], [{}])


class TestDialects:
    CHAT = ({"role": "user", "content": "Q"},)

    @pytest.mark.parametrize(
        ("dialect", "expected"),
        [(name, {"trl async": 1.5, "areal": 3.0}.get(name, 1.0)) for name in FOREIGN if "chat" not in name],
    )
    def test_called_as_it_expects(self, opened: ProcessOpener, dialect: str, expected: float) -> None:
        reward = opened(FOREIGN[dialect])
        assert reward.dialect == dialect.split()[0]
        row = {"prompt": "Q", "answer": "12", "level": 3, "data_source": "s", "extra_info": {"b": 2}}
        given = RewardCall(["Q"], ["12"], [row], [[1, 2]], [[3, 4]])
        [score] = reward.score(given)
        assert score.score == expected
        assert score.components == ({"bonus": 2.0} if dialect.startswith("verl") else {})

    def test_trl_and_verifiers_get_messages_for_chat_rows(self, opened: ProcessOpener) -> None:
        chat = call("12", prompt=list(self.CHAT))
        for name in ("trl chat", "verifiers chat"):
            assert opened(FOREIGN[name]).score(chat)[0].score == 1.0

    def test_explicit_dialect_overrides(self, opened: ProcessOpener) -> None:
        source = "def f(completions, **kw):\n    return float(completions == '12')"
        assert opened(source, dialect="areal").score(call("12"))[0].score == 1.0
        with pytest.raises(InputError, match="dialect must be one of"):
            opened(source, dialect="klingon")

    def test_numpy_scores_and_ground_truth_of_verl_rows(self, opened: ProcessOpener) -> None:
        source = (
            "import numpy\ndef f(solution_str, ground_truth):\n    return numpy.float32(solution_str == ground_truth)"
        )
        assert opened(source).score(call("7", reward_model={"ground_truth": "7"}))[0].score == 1.0

    def test_what_verl_returns_beside_the_score_is_not_read(self, opened: ProcessOpener) -> None:
        source = "def compute_score(solution_str, extra_info):\n    return 0.5, extra_info.get('x'), {'why': 'half'}\n"
        assert opened(source).score(call("7"))[0].score == 0.5

    @pytest.mark.parametrize("entry", ["Length", "length", "half", "alias", "square", "awaited"])
    def test_what_is_called_need_not_be_a_function(self, opened: ProcessOpener, entry: str) -> None:
        source = """
            import functools

            class Length:
                def __init__(self, weight=1.0):
                    self.weight = weight

                def __call__(self, completions, **kwargs):
                    return [self.weight * len(text) for text in completions]

            class Awaited:
                async def __call__(self, completions, level):
                    return [float(value) for value in level]

            def weighed(weight, completion, *, power=1):
                return weight * len(completion) ** power

            length, awaited = Length(0.5), Awaited()
            half = functools.partial(weighed, 0.5)
            square = functools.partial(weighed, weight=1, power=2)
            alias = half
        """
        expected = {"Length": 2.0, "length": 1.0, "half": 1.0, "alias": 1.0, "square": 4.0, "awaited": 3.0}[entry]
        assert opened(source, entry).score(call("12", level=3))[0].score == expected

    @pytest.mark.parametrize(
        ("source", "match"),
        [
            ("class R:\n    pass\n", "class R must have __call__ to be a reward"),
            (
                "class R:\n    def __init__(self, w): ...\n    def __call__(self, completion): ...\n",
                "requires w",
            ),
            ("R = 3\n", "must be a function, or a rubric or task of verifiers, got int"),
            (
                "class A:\n    def __init__(self): 1 / 0\n    def __call__(self, completion): ...\nR = A\n",
                "while it was constructed",
            ),
        ],
    )
    def test_objects_that_are_no_reward(self, opened: ProcessOpener, source: str, match: str) -> None:
        with pytest.raises((InputError, RewardError), match=match):
            opened(source, "R")

    @pytest.mark.parametrize("style", RUBRICS)
    def test_a_rubric_scores_itself_and_its_functions_are_components(self, opened: ProcessOpener, style: str) -> None:
        reward = opened(RUBRICS[style])  # `make ecosystem` has the real ones
        assert reward.dialect == "verifiers"
        chat = call("12", prompt=list(self.CHAT), answer="12", info='{"level": 3}', task="sums")
        [score] = reward.score(chat)
        assert (score.score, score.components) == (2.5, {"exact": 1.0, "level": 3.0})

    def test_what_a_rubric_only_logs_is_an_error(self, opened: ProcessOpener) -> None:
        source = """
            import logging

            class Rubric:
                async def score_rollout(self, state):
                    logging.getLogger("verifiers.rubrics.rubric.Rubric").error("Error calling reward function f: 'x'")
                    state["reward"], state["metrics"] = 0.0, {"f": 0.0}

            rubric = Rubric()
        """
        with pytest.raises(RewardError, match="RuntimeError: Error calling reward function f"):
            opened(source).score(call("12"))

    def test_a_parser_is_the_file_s_own_or_takes_texts_as_they_are(self, opened: ProcessOpener) -> None:
        plain = "def f(parser, completion, answer):\n    return float(parser.parse_answer(completion) == answer)\n"
        own = "class P:\n    def parse_answer(self, completion):\n        return '12'\n\nparser = P()\n\n"
        assert opened(plain).score(call("12", prompt=list(self.CHAT), answer="12"))[0].score == 1.0
        assert opened(own + plain).score(call("?", answer="12"))[0].score == 1.0

    def test_entry_names_file_and_function(self, tmp_path: Path) -> None:
        (tmp_path / "rules.py").write_text("from parts import value\n\ndef mine(completion):\n    return value\n")
        (tmp_path / "parts.py").write_text("value = 0.25\n")
        reward = open_reward(tmp_path, "rules.py:mine", timeout=PATIENCE)
        try:
            assert reward.score(call("12"))[0].score == 0.25
        finally:
            reward.close()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["parts.py", "rules.py"]  # no bytecode beside the source

    def test_blob_without_suffix_keeps_its_name_in_errors(self, tmp_path: Path) -> None:
        blob = tmp_path / ("0" * 64)
        blob.write_text(SOURCES["raises"])
        reward = open_reward(blob, "score", timeout=PATIENCE, name="reward:x@1", source="exact.py")
        try:
            with pytest.raises(RewardError, match=r"reward:x@1: exact\.py:2 raised"):
                reward.score(call("x"))
        finally:
            reward.close()
