"""Which plan: profiles, plans to compare, their simulation, the memory sheet. Pure."""
