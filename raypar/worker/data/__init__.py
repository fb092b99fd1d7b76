"""The samples of a user's data set: their order, read, collated and made microbatches (raypar/NUMERICS.md, rule 1)."""
