"""Score expressions: the language that describes what happens to a score."""
