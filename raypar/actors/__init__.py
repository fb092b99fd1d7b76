"""Ray, thin: the driver and the workers as actors, what travels between them, and what Ray knows of the cluster."""
