"""One file per rollout back-end. They do not know each other."""
