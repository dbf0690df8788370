"""Rounds of several all-reduces, each of which needs the averages of the one before."""
