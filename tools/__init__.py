"""Programs run by people and imported by nobody."""
