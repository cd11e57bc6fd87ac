"""Worker groups: one controller calls methods of workers that live in one process or in many."""
