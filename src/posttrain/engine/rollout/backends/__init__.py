"""One file per rollout back-end. The files are independent of each other."""
