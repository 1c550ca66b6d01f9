"""What runs the graphs: one file a target."""
