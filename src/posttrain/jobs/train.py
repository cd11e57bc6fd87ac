"""`python -m posttrain.jobs.train ATTEMPT_DIR`: runs every kind of training (`bodies.training`)."""

from posttrain.jobs.entry import lazily, main

if __name__ == "__main__":
    main(lazily("posttrain.jobs.bodies.training:body"))
