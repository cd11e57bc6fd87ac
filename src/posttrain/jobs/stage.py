"""`python -m posttrain.jobs.stage ATTEMPT_DIR`: runs a stage of any kind that has no module of its own."""

from posttrain.domain.jobs import JobResult
from posttrain.domain.kinds import HARNESS
from posttrain.jobs.entry import Job, lazily, main


def body(job: Job) -> JobResult:
    """Run the body of the stage's kind: an evaluation, by a harness or not, a new model, or else a training."""
    place = {"evaluate": "evaluation:body", "init_model": "training:init_model"}.get(job.order.kind, "training:body")
    if job.order.kind == "evaluate" and HARNESS in job.order.params:
        place = "harness:body"
    result: JobResult = lazily(f"posttrain.jobs.bodies.{place}")(job)
    return result


if __name__ == "__main__":
    main(body)
