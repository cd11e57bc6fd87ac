"""Checks in plain transformers, without Posttrain, that the exported model gives the evaluation's greedy answers.

python check_export.py FOLDER ITEMS.parquet
"""

from __future__ import annotations

import sys

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, items = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
rows = [row for row in pq.read_table(items).to_pylist() if row["kind"] == "greedy"]
different = []
for row in rows:
    prompt = tokenizer(row["prompt"], return_tensors="pt", return_token_type_ids=False)  # rows of text, no chat
    with torch.inference_mode():
        made = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(made, skip_special_tokens=True)
    if answer != row["response"]:
        different.append((row["prompt"], row["response"], answer))
if different or not rows:
    sys.exit(f"{len(different)} of {len(rows)} answers differ, e.g. {different[:2]}")
assert not any(name.startswith("posttrain") for name in sys.modules)
print(f"{len(rows)} greedy answers, all equal")
