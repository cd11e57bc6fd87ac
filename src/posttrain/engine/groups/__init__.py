"""Worker groups: one controller calls methods of workers in one or more processes."""
