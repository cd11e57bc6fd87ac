"""Malformed run files, model folders and rows, through the command line: one line, exit code 2, nothing written."""

from __future__ import annotations

import io
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_world import RUN, World, make_world, write_model


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One workspace for all: nothing here may change it."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("bad"), patch)
        made.prepare()
        yield made


def refused(world: World, *command: str, naming: str = "") -> str:
    """The command ends in one line and exit code 2, and leaves what was there."""
    before = world.json("asset", "ls"), world.json("ls")
    result = world(*command)
    line = str(result.stderr).strip()
    assert result.exit_code == 2, (result.exit_code, line[-500:], result.stdout[-300:])
    assert line.startswith("error: "), line
    assert len(line.splitlines()) == 1, line
    assert "Traceback" not in line + result.stdout
    assert len(line) < 1200, "one line that a person reads"
    line.encode()  # nothing in it that is no text
    assert naming in line, (naming, line)
    assert (world.json("asset", "ls"), world.json("ls")) == before
    return line


# --- run files --------------------------------------------------------------------------------------------------------

BOMB = "settings:\n  a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


def changed(old: str, new: str) -> str:
    assert old in RUN
    return RUN.replace(old, new)


@pytest.mark.parametrize(
    ("text", "naming"),
    [
        pytest.param(changed("owner: ada", r'owner: "\ud800"'), "a lone surrogate", id="lone surrogate"),
        pytest.param(changed("sort\n", "sort\n" + r'"\udc80x": 1' + "\n"), "a lone surrogate", id="surrogate key"),
        pytest.param("name: " + "[" * 3000 + "]" * 3000, "deeper", id="deep list"),
        pytest.param("name: " + "{a: " * 3000 + "}" * 3000, "deeper", id="deep map"),
        pytest.param("name: " + "[" * 70 + "]" * 70, "deeper than 64", id="rather deep list"),
        pytest.param("\n".join(f"{' ' * i}a:" for i in range(2000)), "deeper", id="deep blocks"),
        pytest.param(RUN + "? [a, b]\n: c\n", "a key must be a word", id="list as key"),
        pytest.param(RUN + "? {a: b}\n: c\n", "a key must be a word", id="map as key"),
        pytest.param(RUN + "a: &a [*a]\n", "contain itself", id="alias of itself"),
        pytest.param(RUN + BOMB, "aliases written out", id="aliases of aliases"),
        pytest.param(RUN + "a: !!python/object:os.system x\n", "not YAML", id="tag"),
        pytest.param(RUN + "1: 2\n", "must have words as keys", id="number as key"),
        pytest.param(RUN + "~: 2\n", "", id="null as key"),
        pytest.param(
            changed("steps: 4", "steps: 1e30"), "steps: must be a whole number in digits, got '1e30'", id="1e30 as text"
        ),
        pytest.param(
            changed("steps: 4", "steps: 1.0e+30"),
            "steps: must be a whole number in digits, got 1e+30",
            id="1e30 as number",
        ),
        pytest.param(changed("steps: 4", "steps: " + "9" * 31), "must be at most 1000000000, got", id="31 digits"),
        pytest.param(changed("batch_size: 8", "batch_size: 10000000"), "must be at most 1000000", id="huge batch"),
        pytest.param(changed("max_new_tokens: 8", "max_new_tokens: 999999999"), "at most 100000000", id="huge answer"),
        pytest.param(changed("max_new_tokens: 8", "group_size: 10000000"), "must be at most 1000000", id="huge group"),
        pytest.param(
            changed("max_new_tokens: 8", "reward_timeout: 1e30"), "must be at most 604800", id="huge time-out"
        ),
        pytest.param(changed("batch_size: 8", "runtime: {threads: 1000000}"), "at most 100000", id="huge threads"),
        pytest.param(changed("steps: 4", "steps: " + "9" * 5000), "not YAML", id="5000 digits"),
        pytest.param(changed("steps: 4", "steps: -4"), "stages.sft", id="negative"),
        pytest.param(
            changed("suites: {heldout:", "suites: {held out:").replace("heldout/acc", "held out/acc"),
            "suites.held out",
            id="a suite of two words",
        ),
        pytest.param(
            changed("steps: 4", "steps: 4.5"), "steps: must be a whole number in digits, got 4.5", id="half a step"
        ),
        pytest.param(changed("steps: 4", "steps: true"), "steps must be a number, got true", id="true steps"),
        pytest.param(changed("steps: 4", "steps: .nan"), "stages.sft", id="NaN steps"),
        pytest.param(changed("steps: 4", "steps: .inf"), "stages.sft", id="infinite steps"),
        pytest.param(changed("steps: 4", "steps: [4]"), "stages.sft", id="list of steps"),
        pytest.param(changed("seed: 17", "seed: true"), "seed must be a number, got true", id="true seed"),
        pytest.param(changed("seed: 17", "seed: 1.0e+30"), "seed", id="huge seed"),
        pytest.param(changed("at_least: 0.9", "at_least: yes"), "at_least must be a number, got true", id="yes"),
        pytest.param(changed("margin: 0.04", "margin: .nan"), "margin", id="NaN margin"),
        pytest.param(RUN + "budget: {tokens: 1e400}\n", "budget.tokens", id="infinite budget"),
        pytest.param(RUN + "budget: {tokens: 1e30}\n", "budget.tokens", id="absurd budget"),
        pytest.param(RUN + "budget: {tokens: true}\n", "tokens must be a number", id="true budget"),
        pytest.param(RUN + "budget: {wall_clock: -5}\n", "budget.wall_clock", id="negative time"),
        pytest.param(RUN + "budget: {wall_clock: .nan}\n", "budget.wall_clock", id="NaN time"),
        pytest.param(RUN + f"budget: {{wall_clock: {'9' * 400}h}}\n", "budget.wall_clock", id="endless time"),
        pytest.param(RUN + "budget: {wall_clock: 365000000d}\n", "must be at most 3650d, got 365000000d", id="aeons"),
        pytest.param(RUN + "budget: {wall_clock: 1.0e+15}\n", "must be at most 315360000, got", id="aeons in seconds"),
        pytest.param(RUN + "budget: {attempts: 1e30}\n", "budget.attempts", id="absurd attempts"),
        pytest.param(changed("batch_size: 8", "optimizer: {betas: [true, 0.9]}"), "betas", id="true beta"),
        pytest.param(changed("batch_size: 8", "optimizer: {learning_rate: .nan}"), "learning_rate", id="NaN rate"),
        pytest.param(changed("batch_size: 8", "placement: {policy: {ranks: true}}"), "ranks", id="true ranks"),
        pytest.param(changed("batch_size: 8", "placement: {policy: {gpus: 1e30}}"), "gpus", id="absurd GPUs"),
        pytest.param(changed("dataset:train,", f"dataset:train@{'9' * 5000},"), "data.train", id="absurd version"),
        pytest.param(changed("model:tiny", "./" + "x" * 5000), "model", id="endless path"),
        pytest.param(changed("model:tiny", "~nobody-of-that-name/x"), "model", id="nobody's home"),
        pytest.param(changed("stages:", "stages: null\nstage:"), "", id="no stages"),
        pytest.param("- name: sort\n", "must be a map", id="list as file"),
        pytest.param("", "must be a map", id="nothing"),
        pytest.param("name: \x00", "not YAML", id="NUL"),
        pytest.param("a\n" * 3 + ": : :", "not YAML", id="no YAML"),
    ],
)
def test_a_malformed_run_file(world: World, text: str, naming: str) -> None:
    world.write("bad.yaml", text)
    for verb in ("plan", "run"):
        assert "bad.yaml" in refused(world, verb, "bad.yaml", naming=naming), verb


@pytest.mark.parametrize("data", [b"name: \xff\xfe", "name: sort\n".encode("utf-16"), b"\x7fELF" + bytes(64)])
def test_a_run_file_that_is_no_text(world: World, data: bytes) -> None:
    (world.root / "bad.yaml").write_bytes(data)
    refused(world, "plan", "bad.yaml", naming="bad.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"a": "\\ud800"}',
        '{"manifest": 1e400}',
        "{",
        "null",
        '{"manifest": 1, "seed": true}',
    ],
)
def test_a_malformed_lock(world: World, text: str) -> None:
    world.write("bad.lock.json", text)
    refused(world, "run", "bad.lock.json")


# --- model folders ----------------------------------------------------------------------------------------------------

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 60, "max_position_embeddings": 64}


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def header(value: Any) -> Callable[[Path], object]:
    written = json.dumps(value).encode()
    data = struct.pack("<Q", len(written)) + written + bytes(4)
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def index(value: Any) -> Callable[[Path], object]:
    return text("model.safetensors.index.json", json.dumps(value))


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(text("config.json", "["), id="config: no JSON"),
        pytest.param(text("config.json", "[]"), id="config: a list"),
        pytest.param(text("config.json", "[" * 100_000 + "]" * 100_000), id="config: deep"),
        pytest.param(lambda folder: (folder / "config.json").unlink(), id="config: none"),
        pytest.param(
            lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()), id="config: a folder"
        ),
        pytest.param(config(architectures="Qwen3ForCausalLM"), id="architectures: text"),
        pytest.param(config(architectures=[["x"]]), id="architectures: lists"),
        pytest.param(config(architectures=[]), id="architectures: none"),
        pytest.param(config(text_config=[1]), id="text_config: a list"),
        pytest.param(config(text_config={"vocab_size": -1}), id="text_config: negative"),
        pytest.param(config(vocab_size="many"), id="vocab_size: a word"),
        pytest.param(config(vocab_size=True), id="vocab_size: true"),
        pytest.param(config(vocab_size=float("nan")), id="vocab_size: NaN"),
        pytest.param(config(max_position_embeddings=1e30), id="context: 1e30"),
        pytest.param(config(max_position_embeddings=-5), id="context: negative"),
        pytest.param(config(max_position_embeddings="long"), id="context: a word"),
        pytest.param(config(hidden_size=0), id="hidden_size: 0"),
        pytest.param(config(auto_map={"AutoModel": "x.Y"}), id="code"),
        pytest.param(header([1]), id="header: a list"),
        pytest.param(header({"w": 5}), id="header: a number"),
        pytest.param(header({"w": {"dtype": "F32", "shape": [1]}}), id="header: no offsets"),
        pytest.param(header({"w": {**TENSOR, "data_offsets": [0, "4"]}}), id="header: offsets as text"),
        pytest.param(header({"w": {**TENSOR, "data_offsets": [8, 4]}}), id="header: offsets turned round"),
        pytest.param(header({"w": {**TENSOR, "shape": [-1]}}), id="header: negative shape"),
        pytest.param(header({"w": {**TENSOR, "shape": [True]}}), id="header: true shape"),
        pytest.param(header({"w": {**TENSOR, "shape": "1"}}), id="header: shape as text"),
        pytest.param(header({"w": {**TENSOR, "dtype": 5}}), id="header: dtype a number"),
        pytest.param(header({"": {**TENSOR, "dtype": 5}}), id="header: a name of nothing"),
        pytest.param(header({"w": {**TENSOR, "data_offsets": [0, 400]}}), id="header: cut short"),
        pytest.param(text("model.safetensors", "x"), id="weights: a byte"),
        pytest.param(
            lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}"),
            id="header: huge",
        ),
        pytest.param(
            lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 20_000) + b"[" * 20_000),
            id="header: deep",
        ),
        pytest.param(index({"weight_map": ["a"]}), id="index: a list"),
        pytest.param(index({"weight_map": {"w": 5}}), id="index: a number"),
        pytest.param(index({"weight_map": {"w": ["model.safetensors"]}}), id="index: lists"),
        pytest.param(index({"weight_map": {"w": "../model.safetensors"}}), id="index: outside"),
        pytest.param(index({"weight_map": {"w": "a\0b"}}), id="index: NUL"),
        pytest.param(index({"weight_map": {"w": "\ud800"}}), id="index: surrogate"),
        pytest.param(index([1]), id="index: no map"),
        pytest.param(text("tokenizer_config.json", "[1]"), id="tokenizer: a list"),
        pytest.param(text("tokenizer_config.json", "{" * 50_000), id="tokenizer: deep"),
        pytest.param(lambda folder: (folder / "link").symlink_to("/etc/passwd"), id="a link"),
        pytest.param(lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"), id="a pickle"),
        pytest.param(lambda folder: (Path(bytes(folder) and str(folder)) / "a\\b").write_text("x"), id="a backslash"),
        pytest.param(lambda folder: open(bytes(folder) + b"/\xff.json", "w").close(), id="a name that is no text"),
    ],
)
def test_a_malformed_model_folder(world: World, harm: Callable[[Path], object]) -> None:
    folder = world.root / "bad-model"
    shutil.rmtree(folder, ignore_errors=True)
    write_model(folder, 0.5)
    harm(folder)
    refused(world, "asset", "add", "model:bad", "bad-model")
    if not any(path.is_symlink() for path in folder.iterdir()):
        world.write("bad.yaml", changed("model: model:tiny", "model: ./bad-model"))
        refused(world, "plan", "bad.yaml")


# --- rows and rewards -------------------------------------------------------------------------------------------------


def parquet(columns: dict[str, Any], names: list[str] | None = None) -> bytes:
    sink = io.BytesIO()
    table = pa.table(columns)
    pq.write_table(table.rename_columns(names) if names else table, sink)
    return sink.getvalue()


GOOD = b'{"prompt": "p", "completion": "c"}\n'


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"prompt": "\\ud800", "completion": "c"}\n', id="lone surrogate"),
        pytest.param(GOOD + b'{"prompt": "p", "completion": "c\\udfff"}\n', id="surrogate in a completion"),
        pytest.param(GOOD + b'{"prompt": "p", "\\ud800": 1}\n', id="surrogate as key"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000 + b"\n", id="deep list"),
        pytest.param(b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"\n", id="deep map"),
        pytest.param(b'{"prompt": "p", "answer": ' + b"9" * 5000 + b"}\n", id="5000 digits"),
        pytest.param(b'{"prompt": "p", "answer": NaN}\n', id="NaN"),
        pytest.param(b'{"prompt": "p", "answer": Infinity}\n', id="infinity"),
        pytest.param(b'{"prompt": "p"\n', id="half a line"),
        pytest.param(b"\xff\xfe{}\n", id="no UTF-8"),
        pytest.param(b"5\n", id="a number"),
        pytest.param(b'{"prompt": 5}\n', id="prompt: a number"),
        pytest.param(b'{"prompt": true}\n', id="prompt: true"),
        pytest.param(b'{"prompt": []}\n', id="prompt: no messages"),
        pytest.param(b'{"prompt": [5]}\n', id="messages: numbers"),
        pytest.param(b'{"prompt": [{"role": {}, "content": 1}]}\n', id="role: a map"),
        pytest.param(b'{"messages": "hello"}\n', id="messages: text"),
        pytest.param(b'{"messages": [[]]}\n', id="messages: lists"),
        pytest.param(b'{"prompt": "p", "chosen": [], "rejected": [1]}\n', id="pairs: nothing"),
        pytest.param(b'{"chosen": [1], "rejected": [2]}\n', id="pairs: numbers"),
        pytest.param(b'{"text": ["a"]}\n', id="text: a list"),
        pytest.param(b"\n\n", id="no row"),
        pytest.param(b"PAR1" + bytes(100), id="Parquet: nothing in it"),
        pytest.param(parquet({"prompt": [b"\xff"]}), id="Parquet: bytes"),
        pytest.param(parquet({"prompt": pa.array([b"\xff"]).cast(pa.string(), safe=False)}), id="Parquet: no UTF-8"),
        pytest.param(parquet({"a": ["x"], "b": ["y"]}, ["prompt", "prompt"]), id="Parquet: a column twice"),
        pytest.param(parquet({"prompt": pa.array([], pa.string())}), id="Parquet: no row"),
        pytest.param(parquet({"prompt": ["p"]})[:-20], id="Parquet: cut short"),
    ],
)
def test_malformed_rows(world: World, data: bytes) -> None:
    (world.root / "bad.jsonl").write_bytes(data)
    refused(world, "asset", "add", "dataset:bad", "bad.jsonl", naming="bad.jsonl")
    world.write("bad.yaml", changed("dataset:train,", "./bad.jsonl,"))
    refused(world, "plan", "bad.yaml", naming="bad.yaml")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("def score(c): return " + "(" * 5000 + "1" + ")" * 5000, id="deep brackets"),
        pytest.param("def score(c): return " + "-" * 100_000 + "1", id="deep minus"),
        pytest.param('def score(c):\n    "\\ud800"\n    return 1.0\n', id="surrogate in the docstring"),
        pytest.param("def score(c): return 1.0\0", id="NUL"),
        pytest.param("def score(c) return", id="no Python"),
    ],
)
def test_a_malformed_reward(world: World, source: str) -> None:
    world.write("bad.py", source)
    refused(world, "asset", "add", "reward:bad", "bad.py", naming="bad.py")


@pytest.mark.parametrize(
    "words",
    [
        ("get", "\udcff"),
        ("plan", "\udcff.yaml"),
        ("plan", "x" * 5000),
        ("plan", "."),
        ("lineage", "\ud800"),
        ("plan", "run.yaml", "--seed", "9" * 40),
        ("asset", "create", "model:x", "model.yaml", "--seed", "-1"),
        ("asset", "add", "dataset:x", "y" * 5000),
        ("asset", "add", "dataset:x", "/proc/self/mem"),
        ("asset", "get", "dataset:train@" + "9" * 5000),
        ("get", "nobody", "--watch", "--timeout", "inf"),
    ],
)
def test_words_that_are_none(world: World, words: tuple[str, ...]) -> None:
    world.write("model.yaml", "hidden_size: 32\n")
    refused(world, *words)


@pytest.mark.parametrize(
    ("words", "naming"),
    [
        (("ls", "--limit", "9" * 30), "--limit: must be at most "),
        (("rollback", "prod", "--from", "x"), "--from: must be a whole number in digits, got 'x'; posttrain"),
        (("plan", "run.yaml", "--seed", "1e30"), "--seed: must be a whole number in digits, got '1e30'"),
        (("sweep", "run.yaml", "--seeds", "0"), "--seeds: must be at least 1, got '0'"),
        (("ls", "-o", "yaml"), "--output: 'yaml' is not one of 'text', 'json'; posttrain ls -h"),
        (("plan",), "missing argument 'RUN.yaml'; posttrain plan -h shows what it takes"),
        (("ls", "--limti", "3"), "no such option: --limti (did you mean --limit?); posttrain ls -h"),
        (("--bogus", "ls"), "no such option: --bogus; posttrain -h"),
        (("lineag",), "no such command 'lineag' (did you mean 'lineage'?); posttrain -h"),
        (("channel", "bogus"), "no such command 'bogus'; posttrain channel -h"),
    ],
)
def test_usage_errors_too(world: World, words: tuple[str, ...], naming: str) -> None:
    assert naming in refused(world, *words)


def test_a_refused_value_shows_no_password(world: World) -> None:
    for words in (("-o",), ("--limit",), ()):
        assert "secret" not in refused(world, "ls", *words, "http://me:secret@host")


def test_a_model_that_this_machine_cannot_hold_is_refused_before_anything_is_allocated(world: World) -> None:
    world.write("model.yaml", "hidden_size: 1000000\n")
    line = refused(world, "asset", "create", "model:huge", "model.yaml")
    assert "model.yaml: a model of hidden_size 1000000, layers 2" in line
    assert "has 6e+12 parameters, 22 TiB in float32, but this machine has " in line
    assert line.endswith("; make the model smaller")
    for written, says in (
        ("hidden_sise: 7", "hidden_sise: unknown key (did you mean 'hidden_size'?)"),
        ("layers: x", "layers: must be a whole number in digits, got 'x'"),
        ("seed: {a: 1}", "seed: "),
    ):
        world.write("model.yaml", written)
        assert f"model.yaml: {says}" in refused(world, "asset", "create", "model:huge", "model.yaml")
    world.write("model.yaml", "hidden_size: 100000000\n")
    refused(world, "asset", "create", "model:huge", "model.yaml", naming="must be at most 10000000, got 100000000")
