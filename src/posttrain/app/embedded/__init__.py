"""`Control` in this process, over the workspace of this machine."""
