"""What jobs do: imported once their environment is settled, each with all that it needs (`jobs.entry`)."""
