"""`python -m posttrain.jobs.stage ATTEMPT_DIR`: runs a stage, unless its kind names another module."""

from posttrain.domain.jobs import JobResult
from posttrain.domain.kinds import HARNESS, kind_of
from posttrain.jobs.entry import Job, lazily, main


def body(job: Job) -> JobResult:
    """Run the body of the stage's kind: an evaluation, by a harness or not, a new model, or else a training."""
    kind, place = kind_of(job.order.kind), "training:body"
    if kind.measures and kind.algorithm is None:
        place = "harness:body" if HARNESS in job.order.params else "evaluation:body"
    elif kind.from_nothing:
        place = "training:init_model"
    result: JobResult = lazily(f"posttrain.jobs.bodies.{place}")(job)
    return result


if __name__ == "__main__":
    main(body)
