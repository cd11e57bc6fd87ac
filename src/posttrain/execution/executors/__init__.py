"""One file per place a job can run. They do not know each other."""
