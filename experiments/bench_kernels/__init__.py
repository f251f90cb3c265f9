"""Times of the kernels' operations beside what a user would write instead."""
