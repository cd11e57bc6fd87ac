"""One file per engine that can run a stage. They do not know each other."""
