"""What to prune and how well it goes: virtual gates and calibrated tails."""
