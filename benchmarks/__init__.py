"""What the documentation claims about speed and safety: a script for each claim."""
