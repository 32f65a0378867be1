"""Performance model: machines, workloads, and the time of a step as a linear program. Imports no torch."""
