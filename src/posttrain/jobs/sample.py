"""`python -m posttrain.jobs.sample`: what a model says to some prompts (`bodies.evaluation`)."""

from posttrain.jobs.entry import lazily, serve

if __name__ == "__main__":
    serve(lazily("posttrain.jobs.bodies.evaluation:sample"))
