"""VAPO, PF-PPO and GSPO, written with docs/howto/plugin.md alone: an independent copy of Posttrain's own kinds."""
