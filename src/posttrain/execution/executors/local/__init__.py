"""Jobs as processes of this machine: the executor, supervisors, the first lines of a job, the fork server."""
