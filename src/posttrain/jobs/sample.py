"""`python -m posttrain.jobs.sample`: samples a model's responses to some prompts (`bodies.evaluation`)."""

from posttrain.jobs.entry import lazily, serve

if __name__ == "__main__":
    serve(lazily("posttrain.jobs.bodies.evaluation:sample"))
