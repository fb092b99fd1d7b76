"""What happens next in a run: the run machine, a table of phases and events, with its rules. Pure."""
