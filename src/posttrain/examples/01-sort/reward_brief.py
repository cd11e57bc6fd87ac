"""Reward for sorting digits with few words."""

ALLOWANCE = 3  # characters of "A: "
COST = 0.05  # per character beyond what the answer needs


def score(completion: str, answer: str) -> float:
    """Guideline: as the first edition; a right answer loses five points of a hundred for every needless character."""
    _, marker, given = completion.rpartition("A: ")
    if not marker or given != answer:
        return 0.0
    needless = len(completion) - len(answer) - ALLOWANCE
    return max(0.2, 1.0 - COST * needless)
