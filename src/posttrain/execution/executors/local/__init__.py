"""Jobs as processes of this machine: the executor, supervisors, the start of a job, the fork server."""
