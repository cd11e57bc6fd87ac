"""The bodies of jobs, imported with all dependencies once their environment is settled (`jobs.entry`)."""
