"""The groups, examples and exit codes of commands in `--help`, and hints for words that are not commands.

A test parses every example. `main` attaches the examples and exit codes to the commands.
"""

from collections.abc import Mapping

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Run": ("demo", "examples", "init", "plan", "lock", "run", "sweep", "attach", "stop", "retry", "signal", "dead"),
    "Look": ("ls", "get", "logs", "why", "diff", "compare", "trace", "note", "sample", "eval"),
    "Ship": ("export", "promote", "approve", "reject", "rollback", "channel", "gate", "lineage", "verify"),
    "Serve": ("serve-model", "chat"),
    "Share": ("serve", "login", "logout", "whoami", "project", "member", "token", "sink", "track"),
    "Keep": ("asset", "harness", "import", "gc", "backup", "restore", "erase", "doctor", "executor"),
}
VERBS = [verb for verbs in GROUPS.values() for verb in verbs]

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "init": ("posttrain init", "posttrain init --from trl train_grpo.py"),
    "demo": ("posttrain demo", "posttrain demo --task 03 --seed 7"),
    "examples": ("posttrain examples", "posttrain examples 01-sort --to my-sort"),
    "plan": ("posttrain plan run.yaml", "posttrain plan run.yaml --set grpo.steps=100 -o json"),
    "lock": ("posttrain lock run.yaml", "posttrain lock run.yaml --seed 7 --out run.lock.json"),
    "run": ("posttrain run run.yaml", "posttrain run run.yaml --seed 7 --detach"),
    "sweep": (
        "posttrain sweep run.yaml --set grpo.optimizer.learning_rate=1e-4,5e-4",
        "posttrain sweep run.yaml --seeds 3 --dry-run",
    ),
    "attach": ("posttrain attach sort-1f2e3d4c", "posttrain attach sort-1f2e3d4c --timeout 60"),
    "stop": ("posttrain stop sort-1f2e3d4c", "posttrain stop sort"),
    "retry": ("posttrain retry sort-1f2e3d4c", "posttrain retry sort-1f2e3d4c --detach"),
    "signal": (
        "posttrain signal sort-1f2e3d4c labels-ready",
        'posttrain signal sort-1f2e3d4c labels-ready --reason "batch 7 is complete"',
    ),
    "dead": ("posttrain dead", "posttrain dead sort-1f2e3d4c --retry"),
    "ls": ("posttrain ls", "posttrain ls --tag baseline --limit 5"),
    "get": ("posttrain get prod", "posttrain get sort-1f2e3d4c --report"),
    "logs": ("posttrain logs sort-1f2e3d4c", "posttrain logs sort-1f2e3d4c grpo --follow"),
    "why": ("posttrain why sort-1f2e3d4c", "posttrain why sort -o json"),
    "diff": ("posttrain diff sort-1f2e3d4c sort-5a6b7c8d", "posttrain diff sort-1f2e sort-5a6b -o json"),
    "compare": ("posttrain compare sort-1f2e3d4c sort-5a6b7c8d", "posttrain compare sort/before sort/after"),
    "trace": ("posttrain trace sort-1f2e3d4c", "posttrain trace sort-1f2e3d4c --sample 12.384.3"),
    "note": (
        'posttrain note sort-1f2e3d4c "the learning rate that we keep" --tag baseline',
        "posttrain note sort-1f2e3d4c --untag baseline",
    ),
    "sample": ('posttrain sample prod "Q: sort 3 1 2"', "posttrain sample ./out 123 -n 4 --temperature 0.7"),
    "eval": ("posttrain eval prod heldout", "posttrain eval ./out heldout.jsonl -n 8 --pass-at 4"),
    "export": ("posttrain export prod released-model", "posttrain export sort/sft sft-model --dtype bfloat16"),
    "promote": ("posttrain promote sort-1f2e3d4c", "posttrain promote sort-1f2e3d4c --channel staging"),
    "approve": ("posttrain approve sort-1f2e3d4c", 'posttrain approve sort-1f2e3d4c --reason "read 50 answers"'),
    "reject": ('posttrain reject sort-1f2e3d4c --reason "too long"', "posttrain reject sort-1f2e3d4c --channel prod"),
    "rollback": ("posttrain rollback prod", 'posttrain rollback prod --to 3 --reason "answers are empty"'),
    "serve-model": ("posttrain serve-model prod", "posttrain serve-model sort/sft --port 8471 --concurrency 64"),
    "chat": ("posttrain chat prod", 'posttrain chat --compare prod sort/sft "Q: sort 312"'),
    "lineage": ("posttrain lineage prod", "posttrain lineage dataset:train --downstream"),
    "verify": ("posttrain verify", "posttrain verify prod"),
    "track": ("posttrain track sort-1f2e3d4c --tracker csv", "posttrain track prod"),
    "serve": ("posttrain serve", "posttrain serve --host 0.0.0.0 --tls-certificate cert.pem --tls-key key.pem"),
    "login": ("posttrain login https://train.example", "posttrain login https://train.example --project search"),
    "logout": ("posttrain logout", "posttrain logout https://train.example --project search"),
    "whoami": ("posttrain whoami", "posttrain whoami -o json"),
    "gc": ("posttrain gc --dry-run", "posttrain gc --older-than 7d"),
    "backup": ("posttrain backup /mnt/backup", "posttrain backup /mnt/backup -o json"),
    "restore": ("posttrain restore /mnt/backup", "posttrain restore /mnt/backup -o json"),
    "erase": ("posttrain erase user:ada --reason request-17", "posttrain erase dataset:train@2 --reason licence"),
    "doctor": ("posttrain doctor", "posttrain doctor --end-orphans"),
    "executor add": ("posttrain executor add executors.yaml", "posttrain executor add executors.yaml -o json"),
    "executor ls": ("posttrain executor ls", "posttrain executor ls -o json"),
    "executor doctor": ("posttrain executor doctor h100", "posttrain executor doctor --wait 1h"),
    "import trl-output": ("posttrain import trl-output out", "posttrain import trl-output out --name sort-trl"),
    "import mlflow": ("posttrain import mlflow ./mlruns", "posttrain import mlflow ./mlruns --run 0a1b2c --name sort"),
    "import wandb-export": (
        "posttrain import wandb-export wandb/run-1",
        "posttrain import wandb-export wandb/run-1 --name sort",
    ),
    "harness fetch": (
        "posttrain harness fetch lm-eval arc_easy gsm8k",
        "posttrain harness fetch inspect arithmetic.py --include tasks --name arithmetic",
    ),
    "gate check": (
        "posttrain gate check gates.yaml --results results.parquet",
        "posttrain gate check gates.yaml --results new --against old --page gates.html",
    ),
    "channel policy": ("posttrain channel policy prod", "posttrain channel policy prod --history"),
    "channel set-policy": (
        "posttrain channel set-policy prod policy.yaml",
        "posttrain channel set-policy staging loose.yaml",
    ),
    "channel remove-policy": ("posttrain channel remove-policy prod", "posttrain channel remove-policy staging"),
    "channel protect": ("posttrain channel protect prod", "posttrain channel protect prod --reason audit"),
    "channel unprotect": ("posttrain channel unprotect prod", "posttrain channel unprotect prod --reason test"),
    "channel freeze": ("posttrain channel freeze prod --reason launch", "posttrain channel freeze prod --rollbacks"),
    "channel unfreeze": ("posttrain channel unfreeze prod", "posttrain channel unfreeze prod --reason launched"),
    "asset add": ("posttrain asset add dataset:train train.jsonl", "posttrain asset add model:base ./base"),
    "asset create": (
        "posttrain asset create model:tiny model.yaml",
        "posttrain asset create model:m m.yaml --seed 7",
    ),
    "asset ls": ("posttrain asset ls", "posttrain asset ls dataset"),
    "asset get": ("posttrain asset get dataset:train", "posttrain asset get dataset:train@2 -o json"),
    "asset approve": ("posttrain asset approve dataset:train@2", "posttrain asset approve model:base --reason read"),
    "asset recall": ("posttrain asset recall dataset:train@2 --reason leak", "posttrain asset recall model:base"),
    "asset restore": ("posttrain asset restore dataset:train@2", "posttrain asset restore model:base --reason checked"),
    "sink add": (
        "posttrain sink add log --jsonl /var/log/posttrain.jsonl",
        "posttrain sink add chat --webhook https://chat.example/hook --on run-failed --words",
    ),
    "sink ls": ("posttrain sink ls", "posttrain sink ls -o json"),
    "sink test": ("posttrain sink test chat", "posttrain sink test log"),
    "sink pause": ("posttrain sink pause chat", "posttrain sink pause log"),
    "sink resume": ("posttrain sink resume chat", "posttrain sink resume chat --skip"),
    "sink remove": ("posttrain sink remove chat", "posttrain sink remove log"),
    "project add": ("posttrain project add search", "posttrain project add ranking"),
    "project ls": ("posttrain project ls", "posttrain project ls -o json"),
    "project images": ("posttrain project images", "posttrain project images -o json"),
    "project allow-image": (
        "posttrain project allow-image registry.example/trainer@*",
        "posttrain project allow-image registry.example/judge@*",
    ),
    "project remove-image": (
        "posttrain project remove-image registry.example/trainer@*",
        "posttrain project remove-image registry.example/judge@*",
    ),
    "member ls": ("posttrain member ls", "posttrain member ls -o json"),
    "member set": ("posttrain member set user:ada approver", "posttrain member set service:nightly submitter"),
    "member remove": ("posttrain member remove user:ada", "posttrain member remove service:nightly"),
    "token issue": (
        "posttrain token issue user:ada",
        "posttrain token issue service:app --channel prod --days 30",
    ),
    "token rotate": ("posttrain token rotate 1a2b3c4d", "posttrain token rotate 1a2b3c4d --days 30"),
    "token revoke": ("posttrain token revoke 1a2b3c4d", "posttrain token revoke 5e6f7a8b"),
    "token ls": ("posttrain token ls", "posttrain token ls -o json"),
}

# Exit codes in addition to 0, 1, 2, 10, 13 and 141, with which every command may end.
_OUTCOME = (3, 4, 5, 6, 7, 8, 9, 11, 12, 130)
_MOVES = (8, 9)
CODES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("demo", "run", "attach", "retry", "eval", "asset create"), _OUTCOME),
    **dict.fromkeys(("promote", "approve", "reject", "rollback", "stop", "signal"), _MOVES),
    **dict.fromkeys(("protect", "unprotect", "freeze", "unfreeze", "set-policy", "remove-policy"), _MOVES),
    "check": (3, 4),
    "serve-model": (6, 130),
    "chat": (6, 13, 130),
    "sweep": (6, 9, 130),
    "sample": (8, 12),
    "verify": (8,),
    "export": (8,),
    "get": (12, 130),
    "logs": (12, 130),
    "restore": (8,),
    "backup": (8,),
}
HINTS: Mapping[str, str] = {
    **dict.fromkeys(("status", "show", "describe"), "posttrain ls lists the runs; posttrain get RUN shows a run"),
    **dict.fromkeys(("list", "ps", "runs", "history"), "posttrain ls lists the runs"),
    **dict.fromkeys(
        ("metrics", "plot", "curves", "report"),
        "posttrain get RUN --report writes the curves, posttrain compare A B --html compares runs",
    ),
    **dict.fromkeys(
        ("deploy", "publish", "ship", "release"),
        "posttrain promote RUN points a channel at a run's model; posttrain export CHANNEL DIR writes the model for an "
        "inference server",
    ),
    **dict.fromkeys(
        ("lora", "qlora", "peft", "adapter"), "adapter: {lora: {rank: 16}} in a stage of run.yaml trains an adapter"
    ),
    **dict.fromkeys(("train", "submit", "start", "launch"), "posttrain run run.yaml starts a run"),
    **dict.fromkeys(
        ("resume", "restart", "continue"),
        "posttrain retry RUN resumes a run that ended; posttrain attach RUN drives a run that no process drives",
    ),
    **dict.fromkeys(("cancel", "kill", "abort"), "posttrain stop RUN ends a run with a checkpoint"),
    **dict.fromkeys(
        ("delete", "rm", "remove"), "posttrain erase deletes free text; posttrain gc deletes unused artifacts"
    ),
    **dict.fromkeys(("generate", "ask", "infer"), "posttrain sample MODEL PROMPT samples responses"),
    **dict.fromkeys(("evaluate", "benchmark", "test"), "posttrain eval MODEL SUITE measures a model"),
    **dict.fromkeys(("dataset", "data", "model", "reward", "upload", "register"), "posttrain asset add KIND:NAME PATH"),
    **dict.fromkeys(("models", "datasets", "rewards", "assets"), "posttrain asset ls lists assets"),
    **dict.fromkeys(
        ("wandb", "mlflow", "tensorboard", "tracker", "trackers"),
        "posttrain track RUN --tracker NAME sends metrics",
    ),
    **dict.fromkeys(("console", "dashboard", "ui"), "posttrain serve opens the console"),
    **dict.fromkeys(
        ("cost", "budget"),
        "posttrain plan run.yaml estimates the cost; posttrain get RUN shows the tokens and time spent",
    ),
    **dict.fromkeys(("config", "settings"), "posttrain init records the settings of a workspace"),
    "log": "posttrain logs RUN prints the output of its jobs",
    "recall": "posttrain asset recall KIND:NAME blocks a version and everything made from it",
    "protect": "posttrain channel protect NAME makes each release wait for an approval",
    "help": "posttrain --help",
    "version": "posttrain --version",
}
