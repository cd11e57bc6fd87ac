"""THE dataflow: prompts, trajectories, rewards, advantages, update, weights."""
