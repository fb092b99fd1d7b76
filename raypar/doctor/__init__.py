"""Whether a machine, and a cluster, are fit for raypar: facts are gathered, and pure functions judge them."""
