"""The folder of a harness whose program is a few lines here: what `posttrain harness fetch` makes, without pip.

Its tasks are named after what the program does: `plain` measures three documents, `crash` fails, and so on.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.domain.harnesses import FACTS, PACKAGES, Harness, Task, this_python

DOCUMENTS = 3
_PROGRAM = """
import hashlib, json, os, socket, sys, time, urllib.request

given = dict(zip(sys.argv[1:], sys.argv[2:]))
about = dict(one.split("=", 1) for one in given["--model_args"].split(","))
out, task = given["--output_path"] + "/model", given["--tasks"]
os.makedirs(out)


def ask(prompt, most=8):
    body = json.dumps({"prompt": prompt, "max_tokens": most, "temperature": 0, "model": "model"}).encode()
    key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(about["base_url"], body, key), timeout=600) as answer:
        return json.load(answer)["choices"][0]["text"]


if task == "crash":
    print("Traceback (most recent call last):", file=sys.stderr)
    sys.exit("ValueError: the task has no rows; key " + os.environ["OPENAI_API_KEY"])
if task == "hang":
    ask("Q: 1")
    time.sleep(3600)
if task == "network":
    socket.create_connection(("192.0.2.1", 80), 5)
if task == "elsewhere":
    found = []
    for place in ("/usr/made", about["tokenizer"] + "/made", WORKSPACE + "/made"):
        try:
            open(place, "w")
            found.append(place)
        except OSError:
            pass
    print("WROTE", found, "SAW", os.path.exists(WORKSPACE + "/ledger.db"), sorted(os.environ))
if task == "greedy":
    while True:
        ask("Q: 1", 32)
if task == "plain":
    print("WARNING [models.api_models:577] Context length (90) > max_length (64). Left truncating context.")
if task == "large":
    with open(out + "/large", "wb") as file:
        while True:
            file.write(bytes(1 << 24))
rows = []
for number in range(3):
    prompt = f"Q: {number + 1}"
    text = ask(prompt)
    rows.append({
        "doc_id": number, "doc_hash": hashlib.sha256(prompt.encode()).hexdigest(), "filter": "none", "target": "1",
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": []}}}, "resps": [[text]],
        "filtered_resps": [text], "metrics": ["acc"], "acc": float(number > 0),
    })
name = "other" if task == "foreign" else task
how = {"metric_list": [{"metric": "acc", "aggregation": "mean"}]}
stamp = "2026-01-01T00-00-00.000000"
with open(f"{out}/results_{stamp}.json", "w") as file:
    json.dump({
        "results": {name: {"acc,none": 0.5}}, "configs": {name: how},
        "n-samples": {name: {"effective": len(rows), "original": 3}},
    }, file)
with open(f"{out}/samples_{name}_{stamp}.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
"""
TASKS = (*("plain", "crash", "hang", "network", "elsewhere", "greedy", "large", "foreign"),)


def harness_folder(folder: Path, workspace: Path, tasks: Mapping[str, Sequence[str]] | None = None) -> Path:
    """Write the folder; the program tries to reach the workspace. `tasks` has other tasks and their means."""
    folder.mkdir()
    program = _PROGRAM.replace("WORKSPACE", repr(str(workspace))).encode()
    with tarfile.open(folder / PACKAGES, "w") as archive:
        for name, data in (("lm_eval/__init__.py", b""), ("lm_eval/__main__.py", program)):
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    given, documents = tasks or {name: ["acc"] for name in TASKS}, 500 if tasks else DOCUMENTS
    known = {name: Task("1", documents, dict.fromkeys(metrics, "mean")) for name, metrics in given.items()}
    facts = Harness("lm-eval", "0.4.13", this_python(), {"lm_eval": ("0.4.13", "")}, known)
    (folder / FACTS).write_text(json.dumps(facts.to_json()))
    return folder
