"""From the two graphs to what a target runs: one file a target."""
