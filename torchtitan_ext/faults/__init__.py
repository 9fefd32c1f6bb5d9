"""What a run does when something goes wrong in the middle of it."""
