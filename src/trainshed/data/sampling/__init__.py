"""The parts of the data order: permutation, blend, batch schedule, source index, sample sources. Order version 1."""
