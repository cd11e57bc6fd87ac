"""Worker groups: one controller calls methods of workers in one process or in many."""
