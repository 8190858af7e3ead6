"""What the documentation claims about speed: a script for each claim."""
