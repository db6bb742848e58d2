"""JAGG Studio: draws, checks, runs and watches training graphs."""
