"""`python -m posttrain.jobs.evaluate ATTEMPT_DIR`: evaluates one model on its suites, or by a harness."""

from posttrain.domain.jobs import JobResult
from posttrain.domain.kinds import HARNESS
from posttrain.jobs.entry import Job, lazily, main


def body(job: Job) -> JobResult:
    """Evaluate with `bodies.harness` or `bodies.evaluation`."""
    room = "harness" if HARNESS in job.order.params else "evaluation"
    result: JobResult = lazily(f"posttrain.jobs.bodies.{room}:body")(job)
    return result


if __name__ == "__main__":
    main(body)
