"""Reward for sorting digits."""


def score(completion: str, answer: str) -> float:
    """Guideline: after the last "A: " stand the digits of the question in ascending order, and nothing else."""
    _, marker, given = completion.rpartition("A: ")
    return float(bool(marker) and given == answer)
