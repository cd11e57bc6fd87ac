"""One file per engine that can run a stage. They do not import each other."""
