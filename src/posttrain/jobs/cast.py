"""`python -m posttrain.jobs.cast`: writes a model's weights in another floating-point type (`bodies.cast`)."""

from posttrain.jobs.entry import lazily, serve

if __name__ == "__main__":
    serve(lazily("posttrain.jobs.bodies.cast:cast"))
