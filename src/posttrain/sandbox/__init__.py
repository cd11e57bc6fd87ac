"""The cell in which a user's code runs (today rewards), the process in it, and its calls."""
