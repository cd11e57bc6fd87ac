"""The cell in which code of a user runs (rewards today), the process in it, and how it is called."""
