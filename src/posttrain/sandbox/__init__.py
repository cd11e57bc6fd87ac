"""The cell in which a user's code (currently rewards) runs, the process in it, and calls to the process."""
