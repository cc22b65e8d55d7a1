"""The parts of the order of samples: permutation, blend, schedule, index, sources. Order version 1."""
