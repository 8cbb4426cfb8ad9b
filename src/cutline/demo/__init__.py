"""The demo: a payments pipeline that is killed at random moments and checked against the truth."""
