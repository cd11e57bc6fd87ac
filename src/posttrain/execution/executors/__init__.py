"""One file per place where a job can run. They do not import each other."""
