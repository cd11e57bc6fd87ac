"""`python -m posttrain.jobs.init_model ATTEMPT_DIR`: creates a randomly initialised model (`bodies.training`)."""

from posttrain.jobs.entry import lazily, main

if __name__ == "__main__":
    main(lazily("posttrain.jobs.bodies.training:init_model"))
