"""Runs that measure something beyond the dual form; each brings the networks it needs."""
