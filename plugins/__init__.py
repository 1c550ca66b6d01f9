"""What an operator means on each target: its schema, its NumPy reference, its lowering."""
