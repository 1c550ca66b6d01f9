"""Data that every other part shares: build config, prune plan, io contract, manifest. Imports nothing of ours."""
