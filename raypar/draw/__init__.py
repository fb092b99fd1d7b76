"""Pictures of schedules, steps and losses: SVG, text and Chrome traces."""
