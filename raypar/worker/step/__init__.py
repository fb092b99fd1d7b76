"""One training step of a worker: executing its instructions, and committing the step at its end."""
