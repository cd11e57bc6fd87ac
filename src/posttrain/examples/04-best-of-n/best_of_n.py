"""Best-of-n distillation: sample n answers to each prompt, keep the best one, learn to give it at once.

No critic, no advantages, no ratio: rejection sampling with a judge, then supervised fine-tuning on what was accepted.
A stage runs it with `kind: dataflow` and `recipe: best_of_n:best_of_n`. Source: WebGPT, arXiv 2112.09332; the
distillation: RAFT, arXiv 2304.06767.
"""

from __future__ import annotations

from posttrain.engine.algorithms.aggregation import Totals
from posttrain.engine.algorithms.objectives import SupervisedObjective
from posttrain.engine.batch import Provenance, TokenBatch
from posttrain.engine.recipes.dataflow import Dataflow
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.roles.training import TrainWorker


def best_of_n(flow: Dataflow, step: int, trace: Trace) -> StepReport:
    """prompts → n trajectories each → the judge's favourite, if it is good enough → supervised update."""
    accept = float(flow.settings.get("accept", 1.0))  # the reward a response needs
    with trace.span("rollout"):
        sampled = flow.sample(step)
    rewards = sampled.rewards.nan_to_num(nan=float("-inf"))  # [prompts, n]
    best = rewards.argmax(1)  # the first of equals
    n = flow.config.group_size
    kept = [at * n + int(best[at]) for at in range(len(sampled.prompts)) if rewards[at].amax() >= accept]
    report = {
        "reward/mean": float(sampled.rewards.nanmean()),
        "reward/best": float(rewards.amax(1).mean()),
        "accepted": len(kept) / len(sampled.prompts),
        "response_tokens/mean": sampled.rollouts.tokens / len(sampled.trajectories),
    }
    if not kept:  # nothing to learn from: the weights stay
        return StepReport(sampled.tokens, report)
    documents, ids = [t.document for t in sampled.trajectories], sampled.ids(step)
    made = Provenance(step, "rollout")
    batch = TokenBatch.pack([documents[i] for i in kept], provenance=made, sample_ids=[ids[i] for i in kept])
    with trace.span("update"):
        update = flow.roles.policy.map(TrainWorker.update, batch, SupervisedObjective(Totals.of(batch)), step=step)
    return StepReport(sampled.tokens + sum(batch.lengths), {**report, **update.metrics})
