"""What only one family of models needs, one file a family."""
