"""The execution plane: `Executor` (where a job runs) and `Trainer` (what the job is)."""
