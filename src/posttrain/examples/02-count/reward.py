"""Reward for counting a digit."""


def score(completion: str, answer: str) -> float:
    """Guideline: the text after the last "A: " must be how often the digit occurs, and nothing else."""
    _, marker, given = completion.rpartition("A: ")
    return float(bool(marker) and given == answer)
