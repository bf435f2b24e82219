"""The CPU back end: libtrivet_cpu, built beside this file, and sessions on it."""
