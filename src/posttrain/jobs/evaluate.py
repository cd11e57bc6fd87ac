"""`python -m posttrain.jobs.evaluate ATTEMPT_DIR`: evaluates one model on its suites (`bodies.evaluation`)."""

from posttrain.jobs.entry import lazily, main

if __name__ == "__main__":
    main(lazily("posttrain.jobs.bodies.evaluation:body"))
