"""`python -m posttrain.jobs.serve_model`: the engine of a served model (`bodies.serving`)."""

from posttrain.jobs.entry import converse, lazily

if __name__ == "__main__":
    converse(lazily("posttrain.jobs.bodies.serving:serve"))
