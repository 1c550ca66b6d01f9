"""What to prune and how well it goes: calibrated tails."""
