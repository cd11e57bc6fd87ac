"""Reward for sorting digits, second edition."""

from itertools import pairwise


def score(completion: str, answer: str) -> float:
    """Guideline: partial credit. The score is the share of neighbouring digits after the last "A: " in order.

    The new edition no longer says that they must be the digits of the question.
    """
    _, marker, given = completion.rpartition("A: ")
    if not marker or len(given) < 2 or not given.isdigit():
        return 0.0
    ordered = sum(a <= b for a, b in pairwise(given))
    return ordered / (len(given) - 1)
